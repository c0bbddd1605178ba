"""The reward chain: parse, ask both RAG endpoints, judge, score."""
