"""Answers from a RAG service, or from a local vector store behind the same interface.

Owns both clients, what counts as no answer (`checks`), and whether answers of an earlier run still hold (`kept`).
Refuses to judge an answer.
"""
