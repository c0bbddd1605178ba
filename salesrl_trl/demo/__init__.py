"""Stand-ins for a user's own RAG services and judge (`services`), and for a user's model (`packaged`).

Owns nothing that a run on a user's own services and model needs.
"""
