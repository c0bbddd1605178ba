"""Two ranks spend one budget against a service in chaos. The service counts for itself."""

import json
import os
import subprocess
import time
from pathlib import Path

import pytest
from faults.callers import SERVICES, SLOTS
from support.forked import COLD_PYTHON

from salesrl_trl.judged.budget import read_account

CALLERS = Path(__file__).with_name("callers.py")


@pytest.fixture
def start(tmp_path):
    """Start a rank. Its process is killed at the end of the test."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (CALLERS.parents[1], CALLERS.parents[2])))}
    started = []

    def start(**settings):
        command = [COLD_PYTHON, str(CALLERS), json.dumps({"path": str(tmp_path / "budget.json"), **settings})]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True))
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
