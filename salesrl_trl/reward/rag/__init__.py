"""Answers from a RAG service.

- `rag_client`: the interface of a backend, and the HTTP client.
- `rag_answers`: what counts as no answer, and whether answers of an earlier run still hold.

Refuses to judge an answer. The reward chain calls it.
"""
