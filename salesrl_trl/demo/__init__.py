"""Stand-ins for a user's own RAG services, judge and model: a run on a user's own needs nothing of it."""
