"""A run's settings for services on loopback."""

import pytest

from salesrl_trl.config import RewardConfig
from salesrl_trl.reward.desk import RewardDesk
from salesrl_trl.reward.remote import RemoteReward


@pytest.fixture
def settings(services, tmp_path):
    """Settings of a reward, whose RAG service is on loopback."""

    def make(**given):
        return RewardConfig(
            **{"rag_base_url": services.url, "reference_cache": str(tmp_path / "references.sqlite"), **given}
        )

    return make


@pytest.fixture(params=["here", "in a process of its own"])
def result_of(request, monkeypatch):
    """Score completions of the first row, by the reward itself and by one in a process of its own."""
    monkeypatch.delenv("PYTHONPATH", raising=False)  # the child learns from its parent where modules are

    def score(reward, completions):
        desk = RewardDesk(reward if request.param == "here" else RemoteReward(reward))
        try:
            return desk.result(desk.begin([0] * len(completions)), completions)
        finally:
            desk.close()

    return score
