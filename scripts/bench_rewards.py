"""Rewards for benches: one that costs nothing, and one that asks a slow service, which is here too.

    python scripts/bench_rewards.py    # serves, and says its port on stdout

A module of its own, because a reward that runs in another process is looked for there by its module's name.
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
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

from aiohttp import web

from salesrl_trl.fencing import read_nonce
from salesrl_trl.reward.batch import BatchedReward, BatchReport
from salesrl_trl.reward.service.http import HttpClient
from salesrl_trl.reward.service.transport import Transport
from salesrl_trl.reward.stages import Stages
from salesrl_trl.types import Outcome, Reward

BRANCHES = ("fairness", "hallucination")
GENERATIONS = 8
"""Samples of a prompt."""
SPREAD = 0.25
"""Standard deviation of a latency's logarithm: the slowest of 64 sums takes about 1.5 times the mean one."""


def latency_s(row: int, sample: int, stage: str, median_s: float) -> float:
    """Log-normal; the same for the same prompt and sample in every arm."""
    draw = random.Random(f"{row} {sample} {stage}").gauss(0.0, SPREAD)
    return median_s * math.exp(draw)


def serve() -> None:
    """Answer `/rag` and `/judge` as late as `/medians` was told last, and for `bench_chains.py` the real services'
    paths; says its port on stdout. Samples of a prompt are told apart by their order."""
    asked: Counter[int] = Counter()
    medians_s = {"/rag": 0.0, "/judge": 0.0}
    numbers = itertools.count()
    passages = [{"id": f"d{n}", "text": "A passage of the knowledge base. " * 12, "score": 0.5} for n in range(3)]
    answered = {"answer": "An answer of some length. " * 20, "passages": passages, "took_ms": 1.0}
    verdict = {"candidate": 0.75, "reference": 0.5, "reason": "It names the price and the delay."}
    usage = {"prompt_tokens": 700, "completion_tokens": 30, "total_tokens": 730}
    judged = {
        "id": "c1",
        "object": "chat.completion",
        "created": 1,
        "model": "j",
        "usage": usage,
    }

    async def real(request: web.Request) -> web.Response:
        body = await request.json()
        is_judge = request.path.endswith("completions")
        await asyncio.sleep(latency_s(next(numbers), 0, request.path, 3.2 if is_judge else 5.6))
        if not is_judge:
            return web.json_response(answered)
        signed = {"nonce": read_nonce(body["messages"][-1]["content"]), **verdict}
        message = {"role": "assistant", "content": json.dumps(signed)}
        choice = {"index": 0, "finish_reason": "stop", "message": message}
        return web.json_response({**judged, "choices": [choice]})

    async def answer(request: web.Request) -> web.Response:
        body = await request.json()
        row, sample = body["row"], body.get("sample")
        if sample is None:
            sample = asked[row] % GENERATIONS
            asked[row] += 1
        median_s = medians_s[request.path]
        await asyncio.sleep(latency_s(row, sample, request.path, median_s) if median_s else 0.0)
        score = random.Random(f"{row} {sample} score").random()
        return web.json_response({"sample": sample, "score": score, "text": "An answer of some length. " * 20})

    async def be_told(request: web.Request) -> web.Response:
        medians_s.update(await request.json())
        return web.json_response(medians_s)

    async def run() -> None:
        app = web.Application()
        app.add_routes([web.post("/rag", answer), web.post("/judge", answer), web.post("/medians", be_told)])
        app.add_routes([web.post(path, real) for path in ("/v1/rag/8b", "/v1/rag/32b", "/v1/chat/completions")])
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0, backlog=1024)
        await site.start()
        print(runner.addresses[0][1], flush=True)
        await asyncio.Event().wait()

    asyncio.run(run())


@contextmanager
def service() -> Iterator[str]:
    """Its address."""
    with subprocess.Popen([sys.executable, __file__], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.terminate()


def set_medians(url: str, latency_s: Sequence[float]) -> None:
    """From now on the service takes these median seconds for its two calls."""
    body = json.dumps(dict(zip(("/rag", "/judge"), latency_s, strict=True))).encode()
    request = urllib.request.Request(f"{url}/medians", body, {"Content-Type": "application/json"})
    urllib.request.urlopen(request, timeout=30).close()


class InstantReward(BatchedReward):
    """The face that the trainer sees of `SalesReward`: a number by the row and the completion, from no service."""

    __name__ = "instant"
    provider_names = ()
    service_names = ()
    component_names = ()
    places: ClassVar[dict[str, str]] = {}

    def __init__(self) -> None:
        super().__init__(deadline_s=60.0)

    async def score(self, index: int, completion: str, stages: Stages) -> Reward:
        return Reward(outcome=Outcome.OK, value=(index * 37 + len(completion)) % 100 / 100)

    def fetch_references(self, rows: Iterable[int]) -> None:
        """There are none."""

    def branch_of(self, index: int) -> str:
        """Rows take turns."""
        return BRANCHES[index % len(BRANCHES)]

    def take_report(self) -> BatchReport:
        """Times alone: there is no service."""
        return self._taken().report()


class SlowReward(InstantReward):
    """Two calls one after the other, for each completion."""

    __name__ = "slow"

    def __init__(self, url: str) -> None:
        super().__init__()
        limits = {"max_concurrency": 1024, "initial_concurrency": 1024, "attempt_timeout_s": 60.0}
        self._transports = {
            name: Transport(name, max_attempts=2, hedge_fraction=0.0, **limits) for name in ("rag", "judge")
        }
        self._clients = {name: HttpClient(name, url) for name in self._transports}

    async def score(self, index: int, completion: str, stages: Stages) -> Reward:
        body = {"row": index, "text": completion}
        found = await stages.timed(self._ask("rag", body), "rag_8b")
        body |= {"sample": found["sample"], "answer": found["text"]}
        verdict = await stages.timed(self._ask("judge", body), "judge")
        return Reward(outcome=Outcome.OK, value=verdict["score"])

    async def _ask(self, name: str, body: dict[str, Any]) -> dict[str, Any]:
        content = await self._transports[name].call(lambda: self._clients[name].post(f"/{name}", dict(body)))
        return json.loads(content)  # type: ignore[no-any-return]

    async def aclose(self) -> None:
        """The running loop's connections."""
        for client in self._clients.values():
            await client.aclose()


if __name__ == "__main__":
    serve()
