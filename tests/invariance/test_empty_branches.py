"""Steps in which a branch has no rows, and steps that are skipped."""

import math

import pytest
from support.keyed import UNSCORABLE, betas_of
from support.loopback import action

from salesrl_trl.names import SKIPPED_UPDATE, beta_of, kl_of
from salesrl_trl.types import DEFAULT_BRANCHES
from salesrl_trl.update.ledger import kl_names

# A band that only a policy equal to the reference is below, and a law of factors alone: each step with rows is a
# window of its own, lowers a coefficient while the KL is 0, which it is at the first step, and raises it ever after.
BAND = {"low": 1e-6, "high": 1e-5}
EVERY_STEP = {
    "branch_kl": {"fairness": {"beta": 0.1, **BAND}, "hallucination": {"beta": 0.2, **BAND}},
    "kl_update_steps": 1,
    "kl_law": "benchmarks.kl_laws.FactorLaw",
    "kl_law_settings": {"recentre": 0.0, "trend_windows": 0.0},
}
RAISED, LOWERED, UNMOVED = 1.15, 0.85, 1.0
F, H = DEFAULT_BRANCHES


def factors(course, branch):
    """By what each step multiplied the coefficient that it had itself."""
    after = [state[branch]["beta"] for state in course["after"].values()]
    return [b / a for a, b in zip(betas_of(course, branch), after, strict=True)]


def check_nothing_was_measured(entry, branch):
    assert entry[f"{kl_of(branch)}_tokens"] == 0
    assert [entry[f"{kl_of(branch)}{kind}"] for kind in ("", "_penalty", "_in_band", "_clamped")] == [None] * 4


@pytest.fixture(scope="module")
def one_branch_at_a_time(train):
    # two prompts a step
    rows = (F, F, H, H, F, H, F, F, F, F, H, H)
    return train(branches=rows, shuffle_dataset=False, max_steps=6, **EVERY_STEP)


def test_every_step_has_the_same_keys_whichever_branch_is_empty(one_branch_at_a_time):
    keys = [set(entry) for entry in one_branch_at_a_time["steps"]]
    assert set(kl_names(DEFAULT_BRANCHES)) <= keys[0]
    assert keys == [keys[0]] * 6


def test_a_branch_without_rows_has_no_kl_and_no_tokens_in_that_step(one_branch_at_a_time):
    for entry, (fairness, hallucination) in zip(
        one_branch_at_a_time["steps"], [(1, 0), (0, 1), (1, 1), (1, 0), (1, 0), (0, 1)], strict=True
    ):
        for branch, there in ((F, fairness), (H, hallucination)):
            if there:
                assert entry[f"{kl_of(branch)}_tokens"] > 0
                assert entry[f"{kl_of(branch)}_penalty"] >= 0  # k3
            else:
                check_nothing_was_measured(entry, branch)


def test_a_coefficient_moves_only_in_steps_in_which_its_branch_has_rows(one_branch_at_a_time):
    for branch in DEFAULT_BRANCHES:
        kls = [entry[kl_of(branch)] for entry in one_branch_at_a_time["steps"]]
        assert all(kl is None or not BAND["low"] <= kl <= BAND["high"] for kl in kls)
        # an estimate of few tokens may be below 0
        expected = [UNMOVED if kl is None else RAISED if kl > 0 else LOWERED for kl in kls]
        assert factors(one_branch_at_a_time, branch) == pytest.approx(expected)
        assert {UNMOVED, RAISED, LOWERED} == set(expected)


def test_a_skipped_batch_moves_no_coefficient_and_logs_the_same_keys(train):
    def text_of(prompt, step, place):
        """The third and the fifth step can't be scored; `step` counts from 0."""
        return action(query=f"{UNSCORABLE if step in (2, 4) else 'price'} {step} {'more ' * place}")

    course = train(text_of=text_of, branches=(F, H) * 6, shuffle_dataset=False, max_steps=6, **EVERY_STEP)
    assert [entry[SKIPPED_UPDATE] for entry in course["steps"]] == [0, 0, 1, 0, 1, 0]
    assert [set(entry) for entry in course["steps"]] == [set(course["steps"][0])] * 6
    for branch in DEFAULT_BRANCHES:
        expected = [LOWERED, RAISED, UNMOVED, RAISED, UNMOVED, RAISED]
        assert factors(course, branch) == pytest.approx(expected)
        for entry in (course["steps"][2], course["steps"][4]):
            check_nothing_was_measured(entry, branch)
            assert (entry["loss"], entry["judge/position_gap"]) == (0, None)
            assert not any(isinstance(value, float) and math.isnan(value) for value in entry.values())
        # the next step has the coefficient that the skipped one had
        assert course["steps"][3][beta_of(branch)] == course["steps"][2][beta_of(branch)]
