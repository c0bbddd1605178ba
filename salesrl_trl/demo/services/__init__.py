"""What a newcomer runs in place of the real RAG service and judge, over real HTTP on loopback."""
