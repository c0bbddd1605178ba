"""The run that `benchmarks.crashes` cuts off, and the service that scores it, each in processes of their own.

The run is the debug recipe's, with the packaged policy, transformers generating, and a service of this module whose
verdicts depend on the answer. It writes down the prompts of each micro-batch.
"""

import asyncio
import collections
import contextlib
import hashlib
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
SETTINGS = {
    "use_cpu": True, "use_vllm": False, "per_device_train_batch_size": 8, "num_generations": 4,
    "max_train_rows": 90, "max_steps": 60, "save_strategy": "steps", "save_steps": 3, "save_total_limit": 3,
    "max_completion_length": 48, "eval_steps": 7, "eval_strategy": "steps", "max_eval_rows": 4,
    "num_generations_eval": 1, "held_out_eval": False, "quick_eval_steps": 5, "quick_eval_rows": 4,
    "report_to": "none", "seed": 7, "reward_deadline_s": 30,
}  # fmt: skip
RESUMABLE = 75
TRAINED = "trained.rank{}.jsonl"


def _run(argv: Sequence[str]) -> None:
    from salesrl_trl.launch.process import begin_run

    begin_run()
    import salesrl_trl.trainer
    from salesrl_trl.launch import train

    class Recorded(salesrl_trl.trainer.SalesGRPOTrainer):
        """Writes down what it trains on."""

        def _compute_loss(self, model: Any, inputs: Any) -> Any:
            if self.model.training:
                padded = zip(inputs["prompt_ids"], inputs["prompt_mask"], strict=True)
                rows = sorted(ids[mask.bool()].tolist() for ids, mask in padded)  # TRL shuffles a batch
                prompts = hashlib.sha256(repr(rows).encode()).hexdigest()[:12]
                with Path(self.args.output_dir, TRAINED.format(self.args.process_index)).open("a") as file:
                    file.write(json.dumps({"done": self.state.global_step, "prompts": prompts}) + "\n")
            return super()._compute_loss(model, inputs)

    salesrl_trl.trainer.SalesGRPOTrainer = Recorded  # type: ignore[misc]
    given = [part for name, value in SETTINGS.items() for part in (f"--{name}", str(value).lower())]
    train.main(ROOT / "recipes/debug.yaml", [*given, *argv])


def _serve(port: int) -> None:
    """RAG and judge by one port. `/ledger` returns each call's path, its key, when it came and was answered."""
    from aiohttp import web

    from salesrl_trl.ground.fencing import read_nonce

    calls: list[tuple[str, str, float, float]] = []

    def digest(body: bytes) -> str:
        return hashlib.sha256(re.sub(rb"[0-9a-f]{16}", b"", body)).hexdigest()  # without the nonce of a request

    async def answer(request: web.Request) -> web.Response:
        body, came = await request.read(), time.time()
        await asyncio.sleep(0.05)
        if "chat" in request.path:
            message = json.loads(body)["messages"][-1]["content"]
            score = int(digest(message.encode())[:4], 16) / 0xFFFF
            verdict = {"nonce": read_nonce(message), "candidate": score, "reference": 0.5, "reason": "by its digest"}
            choice = {"index": 0, "finish_reason": "stop",
                      "message": {"role": "assistant", "content": json.dumps(verdict)}}  # fmt: skip
            given: Any = {"id": "c", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]}
        else:
            passages = [{"id": "d1", "text": "A passage.", "score": 0.5}]
            given = {"answer": f"An answer: {digest(body)}", "passages": passages, "took_ms": 1.0}
        response = web.json_response(given)
        with contextlib.suppress(ConnectionResetError):  # of a process that was killed: not counted as sent
            await response.prepare(request)
            await response.write_eof()
            calls.append((request.path, digest(body), came, time.time()))
        return response

    async def told(request: web.Request) -> web.Response:
        return web.json_response(calls)

    async def well(request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "m"}]})

    app = web.Application(client_max_size=2**26)
    app.add_routes([web.get("/ledger", told), web.get("/healthz", well), web.get("/v1/models", well)])
    app.add_routes([web.post(path, answer) for path in ("/v1/rag/8b", "/v1/rag/32b", "/v1/chat/completions")])
    web.run_app(app, host="127.0.0.1", port=port, print=lambda *_: None)


@contextlib.contextmanager
def services(port: int) -> Iterator[str]:
    """The address of the service, in a process of its own."""
    process = subprocess.Popen([sys.executable, "-m", "benchmarks.crash_runs", "serve", str(port)])
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(100):
            try:
                urllib.request.urlopen(f"{url}/healthz").read()
                break
            except OSError:
                time.sleep(0.2)
        yield url
    finally:
        process.terminate()
        process.wait()


class Runs:
    """Starts of one run, in one folder."""

    def __init__(self, folder: Path, url: str, processes: int = 1, **settings: object) -> None:
        self.folder = folder.resolve()
        self.processes = processes
        answers = {"rag_base_url": url, "judge_base_url": f"{url}/v1", "judge_model": "m"}
        self._cache = self.folder.parent / f"{folder.name}.cache"
        self._settings = {**answers, "output_dir": self.folder, **settings}
        self._number = itertools.count()
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(self._cache, ignore_errors=True)

    def start(self, **settings: object) -> subprocess.Popen[bytes]:
        """Start it, or go on with it, in a session of its own."""
        given = {**self._settings, "resume_from_checkpoint": "auto", **settings}
        several = ["--multi_gpu", "--num_processes", str(self.processes)] if self.processes > 1 else []
        launch = [sys.executable, "-m", "accelerate.commands.launch", "--config_file",
                  "accelerate_configs/debug.yaml", *several, "-m", "benchmarks.crash_runs"]  # fmt: skip
        direct = [sys.executable, "-m", "benchmarks.crash_runs"]
        command = [*(launch if self.processes > 1 else direct), "run"]
        command += [part for name, value in given.items() for part in (f"--{name}", str(value).lower()
                    if isinstance(value, bool) else str(value))]  # fmt: skip
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "SALESRL_CACHE_DIR": str(self._cache)}
        self.log = self.folder.parent / f"{self.folder.name}.{next(self._number)}.log"
        with self.log.open("wb") as log:
            return subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)

    def finish(self) -> None:
        """Let it go on until it has finished."""
        while (code := self.start().wait()) == RESUMABLE:
            pass
        if code:
            raise SystemExit(f"exit code {code}; the end of {self.log}:\n{self.log.read_text()[-3000:]}")

    def trained(self) -> list[dict[int, list[str]]]:
        """For each rank: by the steps before it, the prompts of each micro-batch, in the order of training."""
        ranks = []
        for rank in range(self.processes):
            path = self.folder / TRAINED.format(rank)
            by_step: dict[int, list[str]] = collections.defaultdict(list)
            for line in path.read_text().splitlines() if path.exists() else ():
                try:
                    read = json.loads(line)
                except ValueError:  # the kill came while it was written
                    continue
                by_step[read["done"]].append(read["prompts"])
            ranks.append(dict(by_step))
        return ranks

    def weights(self) -> str:
        """A digest of the policy at the end."""
        return hashlib.sha256((self.folder / "model.safetensors").read_bytes()).hexdigest()[:16]

    def processes_left(self) -> list[int]:
        """Process ids of this run, on this machine."""
        command = ["pgrep", "-f", f"benchmarks.crash_runs run .*{self.folder} "]
        found = subprocess.run(command, capture_output=True, text=True, check=False).stdout
        return [int(each) for each in found.split() if int(each) != os.getpid()]


def wait_until_gone(runs: Runs, seconds: float = 60) -> None:
    """Wait for the end of all processes of a run. Longer than `seconds` is an error."""
    began = time.monotonic()
    while runs.processes_left():
        if time.monotonic() - began > seconds:
            raise SystemExit(f"processes left after {seconds} s: {runs.processes_left()}")
        time.sleep(0.1)


if __name__ == "__main__":
    what, *given = sys.argv[1:]
    if what == "run":
        _run(given)
    else:
        _serve(int(given[0]))
