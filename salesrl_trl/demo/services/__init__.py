"""Mock RAG service and judge. The trainer only imports `launcher`, because the rest loads llvmlite."""
