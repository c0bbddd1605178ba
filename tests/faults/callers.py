"""A rank that spends a budget: its callers ask until it is spent. Then a line says how many answers they got, and by
which error they ended."""

import asyncio
import json
import sys
from collections import Counter
from pathlib import Path

from salesrl_trl.errors import BudgetSpent, ServiceError
from salesrl_trl.judged.budget import CALLS, Budget, Limit
from salesrl_trl.service.event_loop import deadline
from salesrl_trl.service.http import HttpClient
from salesrl_trl.service.transport import Transport

RANKS = 2
SLOTS = 16
"""Of each service."""
SERVICES = {"rag_8b": "/v1/rag/8b", "judge": "/v1/chat/completions"}


async def main(url, path, most):
    budget = Budget(Path(path), [Limit(name="max_calls", kind=CALLS, most=most)], RANKS)
    http, got, transports = HttpClient("rag_8b", url), Counter(), {}
    for name in SERVICES:
        transports[name] = Transport(
            name,
            max_concurrency=SLOTS,
            initial_concurrency=SLOTS,
            attempt_timeout_s=0.2,
            max_attempts=3,
            hedge_fraction=0.5,
            outage_patience_s=30.0,
            quota=budget.quota(name),
        )

    async def ask(name):
        while True:
            try:
                with deadline(30.0):
                    await transports[name].call(lambda: http.post(SERVICES[name], {"context": "hi"}))
                got["answers"] += 1
            except BudgetSpent:
                got["spent"] += 1
                return
            except ServiceError:
                got["failed"] += 1

    await asyncio.gather(*(ask(name) for name in SERVICES for _ in range(2 * SLOTS)))
    await http.aclose()
    budget.settle()
    print(json.dumps({**got, "hedges": sum(each.drain_traffic()["hedges"] for each in transports.values())}))


if __name__ == "__main__":
    asyncio.run(main(**json.loads(sys.argv[1])))
