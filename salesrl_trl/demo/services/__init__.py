"""Stand-ins for the RAG service and the judge, over HTTP on the loopback interface.

Owns both services, the server that runs them (`demo_server`, `__main__`) and the launcher that starts and stops it
(`launcher`). The trainer's process imports `launcher` alone: vLLM on a CPU fails at a library that the services bring.
"""
