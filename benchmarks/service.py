"""Rewards for benches: one that costs nothing, and one that asks a slow service, which is here too.

    python -m benchmarks.service    # serves, and prints its port on stdout

Owns the times that its answers take. Imports no torch: the service is a process of its own, and a reward may run in
another one (`reward_process`), which imports this module by its name.
"""

import asyncio
import itertools
import json
import math
import random
import subprocess
import sys
import urllib.request
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from aiohttp import web

from salesrl_trl.ground.fencing import read_nonce
from salesrl_trl.reward.batch import Sample
from salesrl_trl.reward.scorer import RewardNames, Scorer
from salesrl_trl.reward.stage_times import StageTimes
from salesrl_trl.service.http import HttpClient
from salesrl_trl.service.transport import Transport
from salesrl_trl.telemetry.completion_record import CompletionRecord, noted_in
from salesrl_trl.types import Reward

ROOT = Path(__file__).parents[1]
BRANCHES = ("fairness", "hallucination")
GENERATIONS = 8
"""Completions of a prompt."""
CALLS = ("rag", "judge")
"""The two calls of a reward, one after the other."""
SPREAD = 0.25
"""Standard deviation of a latency's logarithm: the slowest of 64 sums takes about 1.5 times the mean one."""
ANSWER = {
    "answer": "An answer of some length. " * 20,
    "passages": [{"id": f"d{n}", "text": "A passage of the knowledge base. " * 12, "score": 0.5} for n in range(3)],
    "took_ms": 1.0,
}
VERDICT = {"candidate": 0.75, "reference": 0.5, "reason": "It names the price and the delay."}
USAGE = {"prompt_tokens": 700, "completion_tokens": 30, "total_tokens": 730}


def latency_s(row: int, sample: int, call: str, median_s: float) -> float:
    """Log-normal, 0 where the median is. The same for the same prompt, sample and call in every arm."""
    return median_s * math.exp(random.Random(f"{row} {sample} /{call}").gauss(0.0, SPREAD))


class Service:
    """The answers, as late as `/medians` was told last.

    - `/rag` and `/judge` answer `SlowReward`. They tell the samples of a prompt apart by their order.
    - The other paths are those of the real services, for the real chain.
    """

    def __init__(self) -> None:
        self._medians_s = dict.fromkeys(CALLS, 0.0)
        self._asked: Counter[int] = Counter()
        self._numbers = itertools.count()

    def routes(self) -> list[web.RouteDef]:
        """All paths."""
        handlers = {
            "/medians": self._set_medians, "/rag": self._slow, "/judge": self._slow, "/v1/rag/8b": self._rag,
            "/v1/rag/32b": self._rag, "/v1/chat/completions": self._judge,
        }  # fmt: skip
        return [web.post(path, handler) for path, handler in handlers.items()]

    async def _set_medians(self, request: web.Request) -> web.Response:
        self._medians_s.update(await request.json())
        return web.json_response(self._medians_s)

    async def _slow(self, request: web.Request) -> web.Response:
        body, call = await request.json(), request.path.removeprefix("/")
        row, sample = body["row"], body.get("sample")
        if sample is None:
            sample = self._asked[row] % GENERATIONS
            self._asked[row] += 1
        await self._take_time(row, sample, call)
        score = random.Random(f"{row} {sample} score").random()
        return web.json_response({"sample": sample, "score": score, "text": ANSWER["answer"]})

    async def _rag(self, request: web.Request) -> web.Response:
        await self._take_time(next(self._numbers), 0, "rag")
        return web.json_response(ANSWER)

    async def _judge(self, request: web.Request) -> web.Response:
        body = await request.json()
        await self._take_time(next(self._numbers), 0, "judge")
        signed = {"nonce": read_nonce(body["messages"][-1]["content"]), **VERDICT}
        message = {"role": "assistant", "content": json.dumps(signed)}
        choice = {"index": 0, "finish_reason": "stop", "message": message}
        completion = {"id": "c1", "object": "chat.completion", "created": 1, "model": "j", "usage": USAGE}
        return web.json_response({**completion, "choices": [choice]})

    async def _take_time(self, row: int, sample: int, call: str) -> None:
        await asyncio.sleep(latency_s(row, sample, call, self._medians_s[call]))


async def serve() -> None:
    """Serve without end. Prints the port on stdout."""
    app = web.Application()
    app.add_routes(Service().routes())
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, backlog=1024).start()
    print(runner.addresses[0][1], flush=True)
    await asyncio.Event().wait()


@contextmanager
def service() -> Iterator[str]:
    """The address of a service in a process of its own, which ends with the block."""
    command = [sys.executable, "-m", "benchmarks.service"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.terminate()


def set_medians(url: str, medians_s: Sequence[float]) -> None:
    """Let the service take these median seconds for its two calls from now on."""
    body = json.dumps(dict(zip(CALLS, medians_s, strict=True))).encode()
    request = urllib.request.Request(f"{url}/medians", body, {"Content-Type": "application/json"})
    urllib.request.urlopen(request, timeout=30).close()


class InstantReward(Scorer):
    """The part of `SalesReward` that the trainer uses: a number by row and completion, from no service."""

    __name__ = "instant"

    def __init__(self) -> None:
        super().__init__(deadline_s=60.0)

    @property
    def names(self) -> RewardNames:
        return RewardNames(functions={self.own_name: self.own_name}, columns=frozenset({"row"}))

    async def score(self, sample: Sample, stages: StageTimes) -> Reward:
        return Reward.scored((sample.row["row"] * 37 + len(sample.text)) % 100 / 100)


class SlowReward(InstantReward):
    """Two calls one after the other, for each completion. `records`: it notes them for the record of a run."""

    __name__ = "slow"

    def __init__(self, url: str, records: bool = False) -> None:
        super().__init__()
        self._records = records
        limits = {"max_concurrency": 1024, "initial_concurrency": 1024, "attempt_timeout_s": 60.0}
        self._transports = {name: Transport(name, max_attempts=2, hedge_fraction=0.0, **limits) for name in CALLS}
        self._clients = {name: HttpClient(name, url) for name in CALLS}

    async def score(self, sample: Sample, stages: StageTimes) -> Reward:
        stages.completion_record = CompletionRecord() if self._records else None
        with noted_in(stages.completion_record):
            return await self._scored(sample, stages)

    async def _scored(self, sample: Sample, stages: StageTimes) -> Reward:
        body = {"row": sample.row["row"], "text": sample.text}
        found = await stages.timed(self._ask("rag", body), "rag_8b")
        body |= {"sample": found["sample"], "answer": found["text"]}
        verdict = await stages.timed(self._ask("judge", body), "judge")
        return Reward.scored(verdict["score"])

    async def _ask(self, name: str, body: dict[str, Any]) -> dict[str, Any]:
        content = await self._transports[name].call(lambda: self._clients[name].post(f"/{name}", dict(body)))
        return json.loads(content)  # type: ignore[no-any-return]

    async def aclose(self) -> None:
        """Close the connections of the running loop."""
        for client in self._clients.values():
            await client.aclose()


if __name__ == "__main__":
    asyncio.run(serve())
