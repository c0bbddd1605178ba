"""The evaluations of held-out rows, in lines and in a file."""

import json
import logging
import math
from types import SimpleNamespace

import pytest
from transformers import TrainerControl, TrainerState

from salesrl_trl.evaluation.held_out import HeldOut, changes_by_row, standard_error


@pytest.fixture
def evaluate(tmp_path):
    """Evaluations of two rows with two completions each: a step, the mean reward, the rewards of the completions."""
    drained = []
    callback = HeldOut(("fairness",), tmp_path, drained.pop, num_generations=2)

    def evaluated(step, reward, rewards=(math.nan,) * 4, persistent=False):
        state = TrainerState(global_step=step, is_world_process_zero=True)
        state.max_steps = 20
        figures = {"eval_reward": reward, "eval_reward/fairness": reward, "eval_outcome/invalid_action": 0.25}
        state.log_history = [figures]
        drained.append(rewards)
        args = SimpleNamespace(dataloader_persistent_workers=persistent)
        callback.on_evaluate(args, state, TrainerControl())

    return evaluated


def test_the_first_evaluation_is_set_beside_the_last(evaluate, caplog, tmp_path):
    with caplog.at_level(logging.INFO, logger="salesrl_trl"):
        evaluate(0, 0.25, (0.0, 0.0, 0.5, 0.5))
        evaluate(10, 0.5)
        evaluate(20, 0.75, (0.4, 0.6, 1.0, math.nan))
    assert caplog.text.count("held-out before (step 0)") == 1  # once the last step is done
    # 0.75 - 0.25; both rows gained 0.5, so that there is no doubt of it
    assert "held-out mean reward changed by +0.500 ± 0.000 (standard error, row by row)" in caplog.text
    written = json.loads((tmp_path / "held_out.json").read_text())
    assert written[2] == {"step": 20, "reward": 0.75, "fairness": 0.75, "valid_actions": 0.75}


def test_an_evaluation_without_a_score_claims_no_change(evaluate, caplog):
    with caplog.at_level(logging.INFO, logger="salesrl_trl"):
        evaluate(0, 0.25)
        evaluate(20, None)
    assert "changed" not in caplog.text


def test_rows_that_services_left_without_a_score_are_not_compared(evaluate, caplog):
    with caplog.at_level(logging.INFO, logger="salesrl_trl"):
        evaluate(0, 0.25, (0.25, 0.25, 0.5, 0.5))
        evaluate(20, 0.5, (0.5, 0.5, math.nan, math.nan))
    assert "[HeldOut@20] reward=0.50 fairness=0.50 valid_actions=0.75; 2 of 4 completions were scored" in caplog.text
    changed = "held-out mean reward changed by +0.250, over the 1 of 2 rows that were scored both times"
    assert caplog.messages[-1] == changed  # of one row there is no standard error


def test_services_that_were_down_are_no_change_of_the_policy(evaluate, caplog):
    with caplog.at_level(logging.INFO, logger="salesrl_trl"):
        evaluate(0, 0.25, (math.nan, math.nan, 0.5, 0.5))
        evaluate(20, -0.25, (0.5, -0.25, math.nan, math.nan))
    assert caplog.messages[-1] == "held-out: none of 2 rows was scored both times, so that no change is known"


def test_rows_in_another_order_are_not_compared(evaluate, caplog):
    """Workers that stay keep TRL's sampler, which shuffles anew for each evaluation."""
    with caplog.at_level(logging.INFO, logger="salesrl_trl"):
        evaluate(0, 0.25, (0.0, 0.0, 0.5, 0.5), persistent=True)
        evaluate(20, 0.75, (1.0, 1.0, 0.5, 0.5), persistent=True)
    assert caplog.messages[-1] == "held-out mean reward changed by +0.500"


def test_the_standard_error_is_that_of_the_rows_changes():
    changes = changes_by_row([0.0, 0.5, 0.2, math.nan], [0.1, 0.8, 0.7, 1.0])
    assert changes == pytest.approx([0.1, 0.3, 0.5])  # standard deviation 0.2
    assert standard_error(changes) == pytest.approx(0.2 / math.sqrt(3))
