"""What a scored rollout becomes for the record."""

from types import SimpleNamespace

import pytest
from accelerate import PartialState

from salesrl_trl.data.branches import Branches
from salesrl_trl.rollout.rollout_scoring import batch_of
from salesrl_trl.types import Reward

GROUP, EACH = 4, 6
"""Completions of a prompt, and of a rank: the second prompt's lie on two ranks."""


@pytest.mark.parametrize(("rank", "groups"), [(0, [0, 0, 0, 0, 1, 1]), (1, [1, 1, 2, 2, 2, 2])])
def test_a_group_has_one_number_on_all_ranks(rank, groups, monkeypatch):
    monkeypatch.setattr(PartialState(), "process_index", rank)
    rewards = SimpleNamespace(stages=[SimpleNamespace(completion_record=None)] * EACH, number=3)
    result = SimpleNamespace(rewards=[Reward.scored(0.5)] * EACH, report=SimpleNamespace(calls=()))
    rollout = SimpleNamespace(
        inputs=[{"prompt": "p"}] * EACH, completions=["c"] * EACH, rewards=rewards, result=result, sampled=None,
        group=GROUP, is_trained_on=True, mode="train", step=4,
    )  # fmt: skip
    found = batch_of(rollout, None, 5, Branches(("only",), "branch"))
    assert [entry.prompt_group for entry in found.entries] == groups
    assert (found.step, found.number, found.staleness) == (6, 3, 1)
