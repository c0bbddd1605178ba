"""The line of an epoch."""

import logging
from collections import Counter

import pytest
from transformers import TrainerControl, TrainerState

from salesrl_trl.names import Phase
from salesrl_trl.telemetry.step_lines import EpochLine


@pytest.mark.parametrize("is_main", [True, False])
def test_an_epochs_totals_are_those_of_its_log_lines_and_start_over(caplog, is_main):
    failed, control, entries = Counter(), TrainerControl(), []
    callback = EpochLine(("fairness", "tone"), lambda: failed, entries.append)
    state = TrainerState(global_step=4, num_input_tokens_seen=1_000_000, is_world_process_zero=is_main)
    callback.on_train_begin(None, state, control)
    lines = [  # step, epoch, fairness, tokens so far, timeouts
        (5, 0.2, 0.5, 2e6, 1),
        (8, 1.0, 0.1, 3e6, 2),
        (9, 1.5, None, 3.5e6, 0),
    ]
    with caplog.at_level(logging.INFO, logger="salesrl_trl"):
        for state.global_step, state.epoch, reward, tokens, timeouts in lines:
            failed.clear()
            failed.update({"judge_timeout": timeouts} if timeouts else {})
            logs = {"reward": 0.5, "reward/fairness": reward, "reward/tone": None, "num_tokens": tokens,
                    "time/step_s": 20.0, "time/generation_s": 15.0, "time/reward_wait_s": 5.0}  # fmt: skip
            callback.on_log(None, state, control, logs=logs)
            callback.on_log(None, state, control, logs={"failures/reason/judge_timeout": 1})  # an entry of its own
            if state.epoch >= 1:
                callback.on_epoch_end(None, state, control)
    # every rank logs the same: 4 steps, then 1; 2 M tokens, then 0.5; 0.5 in one step and 0.1 in three are 0.2
    totals = [entry for entry in entries if "epoch_totals/steps" in entry]
    seconds = {f"epoch_totals/time/{phase}_s": 0.0 for phase in Phase}
    assert totals[0] == seconds | {
        "epoch_totals/steps": 4, "epoch_totals/tokens": 2e6, "epoch_totals/failures": 3,
        "epoch_totals/reward/fairness": pytest.approx(0.2), "epoch_totals/reward/tone": None,
        "epoch_totals/time/step_s": 80, "epoch_totals/time/generation_s": 60, "epoch_totals/time/reward_wait_s": 20,
    }  # fmt: skip
    assert totals[1].keys() == totals[0].keys()
    assert totals[1]["epoch_totals/steps"] == 1
    assert [entry for entry in entries if entry not in totals] == [
        {"epoch_totals/failures/reason/judge_timeout": 3}  # in the first epoch alone
    ]
    assert (
        caplog.messages
        == [
            "[Epoch 1.00] steps 5-8 | reward fairness=0.20 tone=n/a | 2.00 M tokens | 1:20, generation 75%, "
            "reward_wait 25% | failures judge_timeout=3",
            "[Epoch 1.50] steps 9-9 | reward fairness=n/a tone=n/a | 0.50 M tokens | 0:20, generation 75%, "
            "reward_wait 25% | failures none",
        ][: 2 * is_main]
    )
