"""vLLM's own server with a small model."""

from bench_server import vllm_server


def serve(model, log, *options, **environment):
    """While active, it answers at the address that this yields, as `scripts/bench_server.py` has it."""
    small = ("--enforce-eager", "--dtype", "float32", "--max-num-seqs", "16", *options)
    return vllm_server(model, log, *small, **{"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", **environment})
