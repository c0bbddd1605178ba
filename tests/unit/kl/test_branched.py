"""The KL of all branches without a trainer: steps of micro-batches, moves and their log lines, save and load."""

import logging
import math

import pytest
import torch
from accelerate import PartialState

from benchmarks.kl_laws import FactorLaw
from salesrl_trl.kl.branched import BranchedKL, WindowSettings
from salesrl_trl.kl.law import NOTICE, KLTarget
from salesrl_trl.kl.penalty import PenaltySettings
from salesrl_trl.names import KL_STATE_FILE

TARGETS = {"fairness": KLTarget(beta=0.1, low=0.02, high=0.06), "hallucination": KLTarget(beta=0.3)}
LAW = FactorLaw(recentre=0.0, trend_windows=0.0)
WINDOWS = WindowSettings(update_steps=2)
SETTINGS = PenaltySettings(estimator="k2", bias_correction=False)


@pytest.fixture(autouse=True)
def one_process():
    PartialState()  # what `accelerate.logging` asks for the rank
    return None


def branched(law=LAW, targets=TARGETS):
    return BranchedKL(targets, law, WINDOWS, SETTINGS)


def micro_batch(log_ratio, branch_ids):
    """Two tokens of each completion, whose log-prob is this far above the reference's: their k1."""
    tokens = torch.ones(len(branch_ids), 2)
    return {
        "branch_ids": torch.tensor(branch_ids),
        "completion_mask": tokens.long(),
        "ref_per_token_logps": tokens * (-log_ratio - 1.0),
    }


def loss_of(kl, inputs):
    """As TRL's `_compute_loss` uses the penalty."""
    penalty = kl.penalty(inputs)
    penalty.record_logps(torch.full(inputs["completion_mask"].shape, -1.0))
    loss = (penalty * torch.zeros(inputs["completion_mask"].shape)).sum()
    kl.add(penalty, "train")
    return loss.item()


def step(kl, number, *log_ratios):
    for log_ratio in log_ratios:
        loss_of(kl, micro_batch(log_ratio, [0, 1, 1]))
    kl.end_step(kl.drain_sums("train").tolist(), number, is_logged=True)


def test_a_steps_sums_are_those_of_its_micro_batches_by_branch():
    kl = branched()
    losses = [loss_of(kl, micro_batch(log_ratio, ids)) for log_ratio, ids in ((0.2, [0, 0, 1]), (0.4, [1]))]
    # k2 of a token: 0.2^2 / 2 = 0.02, then 0.08. Coefficients 0.1 and 0.3
    assert losses == pytest.approx([0.02 * (4 * 0.1 + 2 * 0.3), 0.08 * 2 * 0.3])
    first, second = kl.drain_sums("train").tolist()  # k1, penalty, clamped, tokens, weight
    assert first == pytest.approx([0.8, 0.08, 0, 4, 4])
    assert second == pytest.approx([0.4 + 0.8, 0.04 + 0.16, 0, 4, 4])


def test_sums_are_of_one_step_only():
    kl = branched()
    loss_of(kl, micro_batch(0.2, [0]))
    kl.drain_sums("train")
    with pytest.raises(RuntimeError, match="called before `add`"):
        kl.drain_sums("train")
    loss_of(kl, micro_batch(0.2, [0]))
    kl.forget_sums()  # a run that was interrupted inside a step
    loss_of(kl, micro_batch(0.4, [0]))
    assert kl.drain_sums("train")[0, 1].item() == pytest.approx(0.16)


def test_a_window_outside_the_band_moves_the_next_steps_coefficient_and_its_line_says_so(caplog):
    caplog.set_level(logging.INFO)
    kl = branched()
    step(kl, 7, 0.5, 0.5)
    assert (kl.control.betas, caplog.messages) == ([0.1, 0.3], [])
    step(kl, 8, 0.5)
    assert kl.control.betas == pytest.approx([0.115, 0.3])  # the second branch has no band
    assert caplog.messages == ["[BranchedKL@8] fairness: KL 0.5000 outside [0.02, 0.06], beta 0.1 -> 0.115"]
    assert loss_of(kl, micro_batch(0.5, [0])) == pytest.approx(0.115 * 0.125 * 2)


class Creeping:
    def move(self, window, state):
        return window.beta * (1.05 if window.kl < 0.04 else 1.2), {}


def test_small_changes_are_logged_only_outside_the_band(caplog):
    caplog.set_level(logging.INFO)
    kl = branched(Creeping())
    for number, value in enumerate((0.03, 0.03, 0.05, 0.05, 0.01, 0.01)):  # windows of two steps
        step(kl, number, value)
    assert kl.control.betas[0] == pytest.approx(0.1 * 1.05 * 1.2 * 1.05)
    assert [line.split(", beta")[0] for line in caplog.messages] == [
        "[BranchedKL@3] fairness: KL 0.0500 in [0.02, 0.06]",
        "[BranchedKL@5] fairness: KL 0.0100 outside [0.02, 0.06]",
    ]


def test_a_kl_that_is_not_finite_is_warned_of_and_moves_nothing(caplog):
    kl = branched()
    for number in (1, 2):
        step(kl, number, math.nan)
    assert kl.control.betas == [0.1, 0.3]
    assert [(record.levelname, record.getMessage()[:44]) for record in caplog.records[:2]] == [
        ("WARNING", "[BranchedKL@1] fairness: the KL is nan, its "),
        ("WARNING", "[BranchedKL@1] hallucination: the KL is nan,"),
    ]


class Noticing:
    def move(self, window, state):
        return window.beta, {NOTICE: "too far" if window.kl > 0.1 else ""}


def test_a_notice_of_the_law_is_logged_once_by_one_rank_and_again_when_it_comes_back(tmp_path, caplog):
    caplog.set_level(logging.WARNING)
    kl, other, resumed = branched(Noticing()), branched(Noticing()), branched(Noticing())
    for number, high in enumerate((0, 0, 1, 1, 1, 1, 0, 0, 1, 1)):  # windows of two steps
        totals = [[500.0 if high else 100.0, 0.0, 0.0, 2e3, 2e3]] * 2
        other.end_step(totals, number, is_logged=False)
        kl.end_step(totals, number, is_logged=True)
        if number == 3:
            kl.save(tmp_path)
    assert caplog.messages == [f"[BranchedKL@{number}] fairness: too far" for number in (3, 9)]
    resumed.load(tmp_path)
    for number in (4, 5):
        resumed.end_step(totals, number, is_logged=True)
    assert len(caplog.messages) == 2  # it was said before the checkpoint
    other.end_step([[math.nan, 0.0, 0.0, 2.0, 2.0]] * 2, 10, is_logged=False)
    assert len(caplog.messages) == 2


def test_a_checkpoint_without_a_state_starts_as_configured_with_a_warning(tmp_path, caplog):
    kl = branched()
    kl.load(tmp_path)
    assert kl.control.betas == [0.1, 0.3]
    assert f"{tmp_path} lacks {KL_STATE_FILE}: the KL coefficients start as configured" in caplog.text
