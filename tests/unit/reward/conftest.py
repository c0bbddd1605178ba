"""A reward chain over services in memory, in virtual time."""

import asyncio
import time

import pytest
from support.in_memory import Network, Services, score_batch
from support.loopback import build_reward, row


@pytest.fixture
def network(monkeypatch):
    return Network(monkeypatch)


@pytest.fixture
def services(network):
    return Services(network)


@pytest.fixture
def score(services):
    """Score completions in their own event loop and return the result: `score([text], rows=..., **settings)`."""

    def run(completions, rows=None, indices=None, **settings):
        reward = build_reward(services.url, rows or [row()], **settings)
        return score_batch(reward, completions, indices)

    return run


@pytest.fixture
def spans_in_virtual_time(monkeypatch):
    """Spans and stage durations also use the loop's clock instead of `time.perf_counter`."""
    monkeypatch.setattr(time, "perf_counter", lambda: asyncio.get_running_loop().time())
