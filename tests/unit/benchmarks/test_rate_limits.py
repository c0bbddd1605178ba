"""What services that turn calls away cost, in time and in requests: the figures of benchmarks/log."""

import pytest

from benchmarks import rate_limits
from benchmarks.rate_limits import ENFORCED, RANDOM, by_semaphore, by_transport, measured

SEEDS = 4
EARLIER = {"8 at once": (139, 134), "60 requests a minute": (1249, 701), "10,000 tokens a minute": (1551, 1142)}
"""Requests of a first and of a warm round at 5b1d9cb5, where each 429 lowered the limit and kept its slot."""


@pytest.mark.parametrize("name", [name for name in RANDOM if not name.startswith("0%")])
def test_429s_of_a_quota_that_others_use_cost_hardly_more_than_the_calls_that_come_back(name):
    _, semaphore = measured(RANDOM[name], by_semaphore, SEEDS)
    _, warm = measured(RANDOM[name], by_transport, SEEDS)
    assert warm.seconds <= 1.2 * semaphore.seconds


@pytest.mark.parametrize("name", ENFORCED)
def test_a_limit_that_a_service_enforces_brings_no_storm_of_requests(name):
    for cost, earlier in zip(measured(ENFORCED[name], by_transport, SEEDS), EARLIER[name], strict=True):
        assert cost.requests <= 1.1 * earlier


def test_the_table_has_a_row_for_each_service(capsys, monkeypatch):
    monkeypatch.setattr(rate_limits, "CALLS", 8)
    rate_limits.main(["--seeds", "1"])
    rows = [line.split(" | ")[0].removeprefix("| ") for line in capsys.readouterr().out.splitlines()[2:]]
    assert rows == [*RANDOM, *ENFORCED]
