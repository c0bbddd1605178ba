"""Four ranks spend one budget against a service in chaos. The service counts for itself."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from faults.callers import CALL_USD, SERVICES, SLOTS

from salesrl_trl.reward.service.spent_file import read_account

CALLERS = Path(__file__).with_name("callers.py")
RANKS = 4


@pytest.fixture
def ranks(tmp_path):
    started = []

    def start(**settings):
        arguments = json.dumps({"path": str(tmp_path / "budget.sqlite"), **settings})
        paths = os.pathsep.join((str(CALLERS.parents[1]), str(CALLERS.parents[2])))
        for _ in range(RANKS):
            started.append(
                subprocess.Popen(
                    [sys.executable, str(CALLERS), arguments],
                    stdout=subprocess.PIPE,
                    env={**os.environ, "PYTHONPATH": paths},
                    text=True,
                )
            )
        for each in started:
            assert each.stdout.readline() == "begun\n"
        return started

    yield start
    for each in started:
        each.kill()
        each.wait()
        each.stdout.close()


def test_four_ranks_in_chaos_make_no_call_more_than_the_limit_also_when_one_is_killed(fault, ranks, tmp_path):
    server, most = fault("chaos"), 1200
    processes = ranks(url=server.url, kind="calls", most=most)
    while server.stats["requests"] < most / 3:
        assert all(each.poll() is None for each in processes)
        time.sleep(0.02)
    processes[0].kill()
    ends = [json.loads(each.stdout.readline()) for each in processes[1:]]
    requests = server.stats["requests"]
    assert sum(each["hedges"] for each in ends) > 0
    assert all(each["failed"] and each["spent"] == 2 * SLOTS * len(SERVICES) for each in ends)
    # the ranks that ended gave back what they held; the one that was killed leaves at most its part of it
    assert most * 0.9 <= requests <= most
    account = read_account(tmp_path / "budget.sqlite")
    assert account.refused == {"max_calls": most}
    assert account.total().calls <= most


def test_four_ranks_in_chaos_spend_no_more_than_one_verdict_for_each_slot_above_the_limit(fault, ranks, tmp_path):
    server, most = fault("chaos"), 500
    for each in ranks(url=server.url, kind="usd", most=most * CALL_USD):
        assert json.loads(each.stdout.readline())["spent"] == 2 * SLOTS
    worked = server.stats["requests"] - server.stats["refused"]  # what a provider bills
    assert most * 0.8 <= worked <= most + RANKS * SLOTS
    assert read_account(tmp_path / "budget.sqlite").total().usd >= most * CALL_USD
