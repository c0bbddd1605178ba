"""Stand-ins for the RAG service and the judge, over HTTP on the loopback interface."""
