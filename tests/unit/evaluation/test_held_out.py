"""The evaluations of held-out rows, in lines and in a file."""

import json
import logging

from transformers import TrainerControl, TrainerState

from salesrl_trl.evaluation.held_out import HeldOut


def evaluated(callback, step, reward):
    state = TrainerState(global_step=step, is_world_process_zero=True)
    state.max_steps = 20
    state.log_history = [{"eval_reward": reward, "eval_reward/fairness": reward, "eval_outcome/invalid_action": 0.25}]
    callback.on_evaluate(None, state, TrainerControl())


def test_the_first_evaluation_is_set_beside_the_last(caplog, tmp_path):
    callback = HeldOut(("fairness",), tmp_path)
    with caplog.at_level(logging.INFO, logger="salesrl_trl"):
        for step, reward in ((0, 0.25), (10, 0.5), (20, 0.75)):
            evaluated(callback, step, reward)
    assert caplog.text.count("held-out before (step 0)") == 1  # once the last step is done
    assert "held-out mean reward changed by +0.500" in caplog.text  # 0.75 - 0.25
    written = json.loads((tmp_path / "held_out.json").read_text())
    assert written[2] == {"step": 20, "reward": 0.75, "fairness": 0.75, "valid_actions": 0.75}


def test_an_evaluation_without_a_score_claims_no_change(caplog, tmp_path):
    callback = HeldOut(("fairness",), tmp_path)
    with caplog.at_level(logging.INFO, logger="salesrl_trl"):
        evaluated(callback, 0, 0.25)
        evaluated(callback, 20, None)
    assert "changed" not in caplog.text
