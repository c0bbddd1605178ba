"""A reward function that runs the completion as a Python program and compares its output with the row's `output`."""

import asyncio
import contextlib
import os
import signal
import sys
import tempfile
from asyncio.subprocess import DEVNULL, create_subprocess_exec
from pathlib import Path

from datasets import Dataset

from salesrl_trl import SalesGRPOConfig, SalesGRPOTrainer, Transport, per_completion

MODEL = os.environ.get("MODEL", "Qwen/Qwen2.5-Coder-0.5B-Instruct")
# Limits of the child process: CPU seconds, bytes of memory, bytes per file. The code can't raise them, but it can use
# the network and the disk. If completions could do harm, run the code in a container.
LIMITED = """import resource as r
for of, most in ((r.RLIMIT_CPU, 2), (r.RLIMIT_AS, 2**30), (r.RLIMIT_FSIZE, 2**20)): r.setrlimit(of, (most, most))
exec(open("code.py", encoding="utf-8").read())"""
few = Transport("code", max_concurrency=os.cpu_count() or 1, attempt_timeout_s=60.0, max_attempts=1, hedge_fraction=0)


@per_completion(transport=few)  # at most one child process per core
async def runs(completion, output):
    """1 for the right output; 0 for any other, an error or more than 3 s. The child gets no environment variables."""
    with tempfile.TemporaryDirectory() as folder, open(Path(folder, "printed"), "wb") as printed:
        Path(folder, "code.py").write_text(completion[0]["content"], "utf-8")
        options = {"stdin": DEVNULL, "stdout": printed, "stderr": DEVNULL, "start_new_session": True, "cwd": folder}
        child = await create_subprocess_exec(sys.executable, "-I", "-c", LIMITED, env={}, **options)
        try:
            failed = await asyncio.wait_for(child.wait(), 3.0)
        except TimeoutError:
            return 0.0
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)  # the child and its own children
            await child.wait()
        return float(not failed and Path(folder, "printed").read_text("utf-8", "replace").strip() == output)


asked = "Write a Python program that prints {} * 7. Answer with the code alone."
rows = [{"prompt": [{"role": "user", "content": asked.format(n)}], "output": str(7 * n)} for n in range(64)]
config = SalesGRPOConfig("runs/code", max_steps=2, max_completion_length=32)
trainer = SalesGRPOTrainer(MODEL, runs, config, train_dataset=Dataset.from_list(rows))
trainer.train()
trainer.finish()
