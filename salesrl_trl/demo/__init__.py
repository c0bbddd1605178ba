"""Stand-ins for what a user brings: the RAG services and the judge (`services`), and a small policy (`policy`).

Owns nothing that a run on a user's own services and model needs.
"""
