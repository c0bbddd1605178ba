"""A rank that spends a budget: python tests/faults/callers.py SETTINGS, which are JSON.

Its callers ask until the budget is spent. Then a line says how many answers they got, and by which error they ended.
"""

import asyncio
import json
import sys
from collections import Counter
from pathlib import Path

from support.loopback import row

from salesrl_trl.errors import BudgetSpent, ServiceError
from salesrl_trl.judged.budget import FREE, Budget, Limit, Price
from salesrl_trl.judged.provider import JudgeProvider, Material, ProviderClient
from salesrl_trl.service.event_loop import deadline
from salesrl_trl.service.http import HttpClient
from salesrl_trl.service.transport import Transport
from salesrl_trl.types import Action, Answer

RANKS = 2
SLOTS = 16
"""Of each service."""
PRICE = Price(prompt_token=2e-6, completion_token=1e-5)
CALL_USD = PRICE.of(100, 20)
"""The cost of a verdict of the fault server."""
SERVICES = ("rag_8b", "judge")


def material():
    action = Action(fields={"user_profile": "a nurse", "rewritten_query": "price", "history_summary": "none"})
    return Material(
        "fairness", "Judge.", row(), [(action, Answer(text="It costs 5980 yuan.", passages=(), took_ms=1.0))], None
    )


async def main(url, path, kind, most):
    budget = Budget(Path(path), [Limit(name=f"max_{kind}", kind=kind, most=most)], RANKS)
    rag, judge = (
        Transport(
            name,
            max_concurrency=SLOTS,
            initial_concurrency=SLOTS,
            attempt_timeout_s=0.2,
            max_attempts=3,
            hedge_fraction=0.5,
            outage_patience_s=30.0,
            quota=budget.quota(name, PRICE if name == "judge" else FREE),
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
        return provider.ask(material(), order=(0,), patient=True)

    asked = [verdict] if kind == "usd" else [verdict, rag_8b]
    await asyncio.gather(*(ask(each) for each in asked for _ in range(2 * SLOTS)))
    await http.aclose()
    await provider.http.aclose()
    budget.settle()
    print(json.dumps({**got, "hedges": sum(each.drain_traffic()["hedges"] for each in (rag, judge))}))


if __name__ == "__main__":
    asyncio.run(main(**json.loads(sys.argv[1])))
