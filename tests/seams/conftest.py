"""A run's settings for services on loopback."""

from functools import partial

import pytest

from salesrl_trl.launch.reward_config import RewardConfig
from salesrl_trl.reward.remote import RemoteReward
from salesrl_trl.reward.reward_loop import RewardLoop


@pytest.fixture
def settings(services, tmp_path, monkeypatch):
    """Settings of a reward with its RAG service on loopback."""

    monkeypatch.setenv("SALESRL_CACHE_DIR", str(tmp_path))

    def make(**given):
        return RewardConfig(**{"rag_base_url": services.url, **given})

    return make


@pytest.fixture
def result_of(monkeypatch):
    """Score completions of the first row, or of `rows`, with the reward itself or what `place` makes of it."""
    monkeypatch.delenv("PYTHONPATH", raising=False)  # the child gets the module path from its parent

    def score(reward, completions, rows=None, group=1, place=lambda reward: reward):
        loop = RewardLoop(place(reward))
        try:
            batch = loop.begin([{"row": 0}] * len(completions) if rows is None else rows, group)
            loop.post(batch.start_all, completions)
            return loop.result(batch, completions)
        finally:
            loop.close()

    return score


@pytest.fixture(params=["here", "in a process of its own"])
def anywhere(request, result_of):
    """The same, in this process and in a separate one."""
    return result_of if request.param == "here" else partial(result_of, place=RemoteReward)
