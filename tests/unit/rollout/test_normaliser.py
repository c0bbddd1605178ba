"""The factor of an update by hand."""

import math

import pytest
import torch

from salesrl_trl.kl.penalty import FAILED
from salesrl_trl.rollout.normaliser import Normaliser, leave_out_empty


def batches(*failed, items=8):
    """Micro-batches of completions of two tokens each."""
    return [
        {
            "completion_mask": (~torch.tensor(each))[:, None].long().expand(-1, 2),
            "advantages": torch.ones(len(each)),
            "num_items_in_batch": torch.tensor(items),
            FAILED: torch.tensor(each),
        }
        for each in failed
    ]


HALF_OF_ONE = ([True, False], [True, True])
"""Two micro-batches of two completions, of which one is left."""


@pytest.mark.parametrize(
    ("loss_type", "expected"),
    [
        ("grpo", 4.0),  # four completions, one is left
        ("bnpo", 2.0),  # two micro-batches, one has something left
        ("dapo", 1.0),  # `num_items_in_batch` is what is left
    ],
)
def test_an_update_that_is_known_when_it_begins_has_its_factor_in_the_loss(loss_type, expected):
    normaliser = Normaliser(loss_type, can_rescale=True)
    first, second = batches(*HALF_OF_ONE)
    normaliser.begin([first, second], 2, is_last=False, in_parts=False)
    assert normaliser.factor == expected
    normaliser.begin([second], 2, is_last=True, in_parts=False)
    assert normaliser.factor == expected
    assert not normaliser.is_empty
    normaliser.begin(batches([False, False]), 1, is_last=True, in_parts=False)
    assert normaliser.factor == 1.0


def test_where_a_gradient_cant_be_rescaled_each_generation_batch_has_a_factor_of_its_own():
    normaliser = Normaliser("grpo", can_rescale=False)
    first, second = batches([True, False], [False, False])
    normaliser.begin([first], 2, is_last=False, in_parts=False)
    assert normaliser.factor == 2.0
    normaliser.begin([second], 2, is_last=True, in_parts=False)
    assert normaliser.factor == 1.0


def test_an_update_that_is_known_late_has_its_gradient_and_its_logged_loss_rescaled():
    normaliser = Normaliser("dapo", can_rescale=True)
    weight = torch.nn.Parameter(torch.zeros(2))
    weight.grad = torch.tensor([1.0, 2.0])
    losses = []
    for place, batch in enumerate(batches(*HALF_OF_ONE)):
        normaliser.begin([batch], 2, is_last=place == 1, in_parts=True)
        assert normaliser.factor == 1.0
        losses.append(normaliser.end(torch.tensor(0.5), [weight], is_last=place == 1).item())
    # two of eight tokens are left: four times as much
    assert weight.grad.tolist() == [4.0, 8.0]
    assert sum(losses) == 4.0


def test_a_micro_batch_without_any_token_is_no_part_of_trls_means():
    metrics = {"entropy": [1.0, 0.0], "clip_ratio/low_mean": [0.5, 0.0], "kl": [0.0], "aux_loss": [1.0, 1.0]}
    leave_out_empty(metrics, {"entropy": 1, "clip_ratio/low_mean": 1, "aux_loss": 1})
    assert metrics["aux_loss"] == [1.0, 1.0]  # the router saw its prompts
    assert metrics["entropy"][0] == 1.0
    assert all(math.isnan(metrics[name][-1]) for name in ("entropy", "clip_ratio/low_mean", "kl"))
    leave_out_empty(counted := {"entropy": [0.5], "kl": [0.0]}, {})
    assert counted == {"entropy": [0.5], "kl": [0.0]}
