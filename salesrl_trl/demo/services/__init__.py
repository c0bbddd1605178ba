"""Stand-ins for the RAG service and the judge. The trainer imports `launcher` alone: the rest brings llvmlite."""
