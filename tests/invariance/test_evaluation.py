"""Evaluations between the steps of a run."""

import pytest
from support.keyed import check_same_course

from salesrl_trl.names import beta_of, kl_of
from salesrl_trl.types import DEFAULT_BRANCHES
from salesrl_trl.update.ledger import kl_names

STEPS = 8
BRANCH_KL = {branch: {"beta": 0.1, "low": 0.001, "high": 0.002} for branch in DEFAULT_BRANCHES}
"""Bands that the KL leaves in the first window, so that the coefficients move from then on."""
SETTINGS = {"max_steps": STEPS, "kl_update_steps": 3, "branch_kl": BRANCH_KL}
EVALUATING = {
    "held_out_eval": True,  # before the first step too
    "eval_strategy": "steps",
    "eval_steps": 1,
    "per_device_eval_batch_size": 4,
    "num_generations_eval": 2,
}


@pytest.fixture(scope="module")
def evaluated(train):
    course = train(**SETTINGS, **EVALUATING)
    assert list(course["after_evaluation"]) == [str(step) for step in range(STEPS + 1)]
    return course


def test_evaluations_between_steps_move_no_coefficient_and_no_window(train, evaluated):
    for step, state in evaluated["after"].items():
        assert evaluated["after_evaluation"][step] == state, step
    # six of the evaluations fell between the steps of a window, which three steps then closed all the same
    assert [state["fairness"]["steps"] for state in evaluated["after"].values()] == [1, 2, 0, 1, 2, 0, 1, 2]
    check_same_course(train(**SETTINGS), evaluated)
    for branch in DEFAULT_BRANCHES:
        assert len({state[branch]["beta"] for state in evaluated["after"].values()}) > 1  # training did move them


def test_an_evaluation_logs_the_kl_under_the_same_names_with_the_coefficients_of_its_moment(evaluated):
    names = {f"eval_{name}" for name in kl_names(DEFAULT_BRANCHES)}
    for entry in evaluated["evaluations"]:
        assert names <= set(entry)
        for branch in DEFAULT_BRANCHES:
            assert entry[f"eval_{kl_of(branch)}_tokens"] > 0
            if entry["step"]:
                assert entry[f"eval_{kl_of(branch)}"] > 1e-3
                assert entry[f"eval_{beta_of(branch)}"] == evaluated["after"][str(entry["step"])][branch]["beta"]
            else:
                assert entry[f"eval_{kl_of(branch)}"] == pytest.approx(0, abs=1e-6)  # the policy is the reference
