"""Two ranks spend one budget against a service in chaos. The service counts for itself.

As a program it is a rank, whose callers ask until the budget is spent. Then a line says how many answers they got, and
by which error they ended.
"""

import asyncio
import json
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from support.forked import Program

from salesrl_trl.errors import BudgetSpent, ServiceError
from salesrl_trl.judged.budget import CALLS, Budget, Limit, read_account
from salesrl_trl.service.event_loop import deadline
from salesrl_trl.service.http import HttpClient
from salesrl_trl.service.transport import Transport

RANKS = 2
SLOTS = 16
"""Of each service."""
SERVICES = {"rag_8b": "/v1/rag/8b", "judge": "/v1/chat/completions"}


@pytest.fixture
def start(tmp_path):
    """Start a rank. Its process is killed at the end of the test."""
    started = []

    def start(**settings):
        command = [__file__, json.dumps({"path": str(tmp_path / "budget.json"), **settings})]
        started.append(Program(command, stdout=subprocess.PIPE, text=True))
        return started[-1]

    yield start
    for rank in started:
        rank.kill()
        rank.wait()
        rank.stdout.close()


def end_of(rank):
    return json.loads(rank.communicate()[0])


def test_there_is_no_call_more_than_the_limit_also_when_a_rank_is_killed_and_starts_again(fault, start, tmp_path):
    server, most = fault("chaos"), 900
    settings = {"url": server.url, "most": most}
    killed, other = start(**settings), start(**settings)
    while server.stats["requests"] < most / 3:
        time.sleep(0.01)
    killed.kill()
    ends = [end_of(start(**settings)), end_of(other)]
    requests = server.stats["requests"]
    print(f"max_calls {most}: {requests} requests by the service's count; {ends}")
    assert all(end["spent"] == 2 * SLOTS * len(SERVICES) for end in ends)
    # the rank that was killed leaves at most a block taken, the others what they gave back after the end
    assert most * 0.9 <= requests <= most
    account = read_account(tmp_path / "budget.json")
    assert account.refused == {"max_calls": most}
    assert account.total().calls <= most


async def main(url, path, most):
    budget = Budget(Path(path), [Limit(name="max_calls", kind=CALLS, most=most)], RANKS)
    http, got = HttpClient("rag_8b", url), Counter()
    limits = {"max_concurrency": SLOTS, "initial_concurrency": SLOTS, "attempt_timeout_s": 0.2, "max_attempts": 3}
    limits |= {"hedge_fraction": 0.5, "outage_patience_s": 30.0}
    transports = {name: Transport(name, **limits, quota=budget.quota(name)) for name in SERVICES}

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
