"""The line of an epoch."""

import logging
from collections import Counter

from transformers import TrainerControl, TrainerState

from salesrl_trl.telemetry.epoch_lines import EpochLine


def test_an_epochs_totals_are_those_of_its_log_lines_and_start_over(caplog):
    failed, control = Counter(), TrainerControl()
    callback = EpochLine(("fairness", "tone"), lambda: failed)
    state = TrainerState(global_step=4, num_input_tokens_seen=1_000_000, is_world_process_zero=True)
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
    assert caplog.messages == [
        "[Epoch 1.00] steps 5-8 | reward fairness=0.20 tone=n/a | 2.00 M tokens | 1:20, generation 75%, "
        "reward_wait 25% | failures judge_timeout=3",
        "[Epoch 1.50] steps 9-9 | reward fairness=n/a tone=n/a | 0.50 M tokens | 0:20, generation 75%, "
        "reward_wait 25% | failures none",
    ]
