"""The callers of four ranks that share a budget: python tests/faults/callers.py, with settings on stdin.

Each rank is a process. Its callers ask until the budget is spent. Then a line says how many answers they got, and by
which error they ended. All ranks are children of one process, which has imported the package for them. It says their
process ids before, and writes an empty line when all have ended.
"""

import asyncio
import json
import os
import sys
from collections import Counter
from pathlib import Path

import stamina
from salesrl_trl.reward.service.meter import Budget
from support.loopback import row

from salesrl_trl.errors import BudgetSpent, ServiceError
from salesrl_trl.reward.judge.provider import JudgeProvider, Material, ProviderClient
from salesrl_trl.reward.service.budget import Limit, Price, Terms
from salesrl_trl.reward.service.deadline import deadline
from salesrl_trl.reward.service.http import HttpClient
from salesrl_trl.reward.service.transport import Transport
from salesrl_trl.types import Action, Answer

RANKS = 4
SLOTS = 8
"""Of each service."""
PROMPT_USD, COMPLETION_USD = 2.0, 10.0
"""US dollars of a million tokens."""
CALL_USD = (100 * PROMPT_USD + 20 * COMPLETION_USD) / 1e6
"""The cost of a verdict of the fault server."""
SERVICES = ("rag_8b", "judge")


def material():
    action = Action(fields={"user_profile": "a nurse", "rewritten_query": "price", "history_summary": "none"})
    return Material(
        "fairness", "Judge.", row(), action, Answer(text="It costs 5980 yuan.", passages=(), took_ms=1.0), None
    )


async def main(url, path, kind, most):
    budget = Budget(Terms(path=Path(path), limits=(Limit(name=f"max_{kind}", kind=kind, most=most),)))
    price = Price(prompt_token=PROMPT_USD / 1e6, completion_token=COMPLETION_USD / 1e6)
    rag, judge = (
        Transport(
            name,
            max_concurrency=SLOTS,
            initial_concurrency=SLOTS,
            attempt_timeout_s=0.2,
            max_attempts=3,
            hedge_fraction=0.5,
            outage_patience_s=30.0,
            meter=budget.meter(name, price if name == "judge" else Price()),
        )
        for name in SERVICES
    )
    http = HttpClient("rag_8b", url)
    provider = ProviderClient(JudgeProvider(name="judge", base_url=f"{url}/v1", model="m", transport=judge))
    got = Counter()

    async def ask(call):
        while True:
            try:
                with deadline(30.0):
                    await call()
                got["answers"] += 1
            except BudgetSpent:
                got["spent"] += 1
                return
            except ServiceError:
                got["failed"] += 1

    def rag_8b():
        return rag.call(lambda: http.post("/v1/rag/8b", {"context": "hi"}))

    def verdict():
        return provider.ask(material(), candidate_first=True, patient=True)

    asked = [verdict] if kind == "usd" else [verdict, rag_8b]
    await asyncio.gather(*(ask(each) for each in asked for _ in range(2 * SLOTS)))
    await http.aclose()
    await provider.http.aclose()
    await budget.aclose()
    hedges = sum(each.drain_traffic()["hedges"] for each in (rag, judge))
    os.write(1, f"{json.dumps({**got, 'hedges': hedges})}\n".encode())  # at once: the ranks share the pipe


if __name__ == "__main__":
    stamina.instrumentation.set_on_retry_hooks([])  # which write a line each
    for settings in map(json.loads, sys.stdin):
        ranks = []
        for _ in range(RANKS):
            if not (rank := os.fork()):
                asyncio.run(main(**settings))
                os._exit(0)
            ranks.append(rank)
        os.write(1, f"{json.dumps(ranks)}\n".encode())
        for rank in ranks:
            os.waitpid(rank, 0)
        os.write(1, b"\n")
