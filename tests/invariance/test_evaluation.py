"""Evaluations between the steps of a run, and after one that was interrupted."""

import pytest
from support.keyed import build_keyed, check_same_course
from transformers import TrainerCallback

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


class Interrupts(TrainerCallback):
    def __init__(self, error):
        self.error = error

    def on_substep_end(self, *_, **__):
        raise self.error


@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError])
def test_an_evaluation_after_an_interrupted_step_is_like_one_before_it(tiny, services_url, tmp_path, error):
    """Accelerate keeps for the process, and so for a later trainer, that the step's gradient wasn't complete."""
    halves = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    trainer = build_keyed(tiny, services_url, tmp_path, **SETTINGS, **{**EVALUATING, "held_out_eval": False}, **halves)
    try:
        before = trainer.evaluate()
        trainer.add_callback(Interrupts(error))
        with pytest.raises(error):
            trainer.train()
        assert not trainer.accelerator.sync_gradients
        after = trainer.evaluate()
    finally:
        trainer.finish()
        trainer.accelerator.gradient_state._set_sync_gradients(True)
    for name in ("reward", *kl_names(DEFAULT_BRANCHES)):
        assert after[f"eval_{name}"] == pytest.approx(before[f"eval_{name}"], abs=1e-6), name
