"""vLLM's own server with a small model."""

import contextlib
import sys

from benchmarks.vllm_server import vllm_server
from salesrl_trl.ground.process import patched
from support.forked import python


@contextlib.contextmanager
def serve(model, log, *options, **environment):
    """`benchmarks.vllm_server.vllm_server` with the options of a small model on a CPU."""
    small = ("--enforce-eager", "--dtype", "float32", "--max-num-seqs", "16", *options)
    # the last: on a CPU the engine's process then has no worker process below it, which imports all of vLLM once more
    own = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    own["TORCHDYNAMO_DISABLE"] = "1"  # compiling its sampling takes longer than these tests
    with contextlib.ExitStack() as until_the_end:
        with patched(sys, "executable", python()):
            url = until_the_end.enter_context(vllm_server(model, log, *small, **own | environment))
        yield url
