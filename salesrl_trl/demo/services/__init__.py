"""Stand-ins for the RAG service and the judge, over HTTP on the loopback interface.

The trainer's process imports `launcher` alone: vLLM on a CPU fails at a library that the services bring.
"""
