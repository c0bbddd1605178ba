"""Mock RAG services, judge and models for demos and tests; not used in runs with a user's own."""
