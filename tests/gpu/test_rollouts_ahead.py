"""Slow rewards on a GPU: the debug recipe with rollouts ahead and chains in their process, and the order of arms."""

import pytest
from gpu.launched import debug_recipe, figures_of
from support.runs import check_times, scalars

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(900)]


def test_the_debug_recipe_runs_ahead_with_its_chains_in_a_process_of_their_own(tmp_path):
    debug_recipe(
        tmp_path, max_steps=12, max_eval_rows=16, rollout_lookahead=2, reward_process="true",
        per_device_train_batch_size=24, gradient_accumulation_steps=2, vllm_importance_sampling_mode="token_truncate",
    )  # fmt: skip
    check_times(tmp_path, 12)
    logged = scalars(tmp_path)
    assert logged["train/rollout/staleness"] == [0, 1, *[2] * 10]
    assert logged["train/sampling/sampling_logp_difference/mean"][0] < 0.02
    assert logged["train/reward"][-1] > 0


def test_streaming_is_faster_than_stock_and_lookahead_faster_than_streaming(tmp_path):
    arms = ("--arms", "stock", "exact", "lookahead_2", "floor", "--steps", "2", "--latency", "2", "1")
    told = figures_of("pipeline", tmp_path, *arms)
    seconds = {arm: each["step_s_mean"] for arm, each in told["arms"].items()}
    assert told["floor_s"] < seconds["lookahead_2"] * 1.1
    assert seconds["lookahead_2"] < seconds["exact"] < seconds["stock"]
    assert all(each["reward_failures"] == 0 for each in told["arms"].values())
