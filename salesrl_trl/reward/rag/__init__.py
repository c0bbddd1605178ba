"""Answers from a RAG service.

Owns the interface of a backend and the HTTP client (`rag_client`), what counts as no answer, and whether answers of an
earlier run still hold (`rag_answers`). Refuses to judge an answer.
"""
