"""Four ranks spend one budget against a service in chaos. The service counts for itself."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from faults.callers import CALL_USD, RANKS, SERVICES, SLOTS
from salesrl_trl.reward.service.spent_file import read_account

CALLERS = Path(__file__).with_name("callers.py")


@pytest.fixture(scope="module")
def parent():
    paths = os.pathsep.join((str(CALLERS.parents[1]), str(CALLERS.parents[2])))
    environment = {**os.environ, "PYTHONPATH": paths}
    command, pipes = [sys.executable, str(CALLERS)], {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, **pipes, env=environment, text=True, start_new_session=True) as process:
        yield process
        os.killpg(process.pid, signal.SIGKILL)


@pytest.fixture
def ranks(tmp_path, parent):
    """Start the ranks. Returns their process ids, and the lines in which they say how they ended."""

    def start(**settings):
        print(json.dumps({"path": str(tmp_path / "budget.sqlite"), **settings}), file=parent.stdin, flush=True)
        return json.loads(parent.stdout.readline()), map(json.loads, iter(parent.stdout.readline, "\n"))

    return start


def test_four_ranks_in_chaos_make_no_call_more_than_the_limit_also_when_one_is_killed(fault, ranks, tmp_path):
    server, most = fault("chaos"), 900
    pids, lines = ranks(url=server.url, kind="calls", most=most)
    while server.stats["requests"] < most / 3:
        time.sleep(0.01)
    os.kill(pids[0], signal.SIGKILL)
    ends = [*lines]
    requests = server.stats["requests"]
    print(f"max_calls {most}: {requests} requests by the service's count; {ends}")
    assert len(ends) == RANKS - 1
    assert sum(each["hedges"] for each in ends) > 0
    assert all(each["failed"] and each["spent"] == 2 * SLOTS * len(SERVICES) for each in ends)
    # the ranks that ended gave back what they held; the one that was killed leaves at most its part of it
    assert most * 0.9 <= requests <= most
    account = read_account(tmp_path / "budget.sqlite")
    assert account.refused == {"max_calls": most}
    assert account.total().calls <= most


def test_four_ranks_in_chaos_spend_no_more_than_one_verdict_for_each_slot_above_the_limit(fault, ranks, tmp_path):
    server, most = fault("chaos"), 300
    _, lines = ranks(url=server.url, kind="usd", most=most * CALL_USD)
    ends = [*lines]
    worked = server.stats["requests"] - server.stats["refused"]  # what a provider bills
    spent = read_account(tmp_path / "budget.sqlite").total().usd
    limit = most * CALL_USD
    print(f"max_usd {limit:g}, {most} verdicts: {worked} by the service's count; {spent:.4f} USD spent; {ends}")
    assert [each["spent"] for each in ends] == [2 * SLOTS] * RANKS
    assert most * 0.8 <= worked <= most + RANKS * SLOTS
    assert spent >= limit
