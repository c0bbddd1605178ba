"""Settings that cannot work are refused with what was got, what was expected and what to do."""

import pytest

from salesrl_trl.config import DataConfig, RewardConfig, SalesGRPOConfig, WarmStartConfig
from salesrl_trl.errors import ConfigError


def training(**kwargs):
    defaults = {"output_dir": "unused", "use_cpu": True, "bf16": False, "num_generations": 4}
    return SalesGRPOConfig(**{**defaults, "per_device_train_batch_size": 8, **kwargs})


def test_the_defaults_work():
    config = training()
    assert config.generation_batch_size == 8
    assert config.branches == ["fairness", "hallucination"]
    assert config.eval_on_start


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"num_generations": 3}, r"holds 8 completions \(8 per device x 1 processes x 1 steps\), which .* 3 does not"),
        ({"num_generations": 1}, "`num_generations` is 1. Expected at least 2"),
        ({"branches": []}, "Expected at least one name"),
        ({"branches": ["a", "a"]}, "each once"),
        ({"min_valid_reward_fraction": 1.5}, "Expected 0 to 1"),
        ({"max_skipped_generations": 0}, "Expected more than 0"),
        ({"max_sampling_logp_difference": 0.0}, "Expected more than 0"),
        ({"vllm_engine_kwargs": "{"}, "is not JSON"),
        ({"vllm_engine_kwargs": "[1]"}, "Expected a JSON object"),
    ],
)
def test_a_training_setting_that_cannot_work_is_refused(kwargs, message):
    with pytest.raises(ConfigError, match=message):
        training(**kwargs)


def test_groups_are_checked_over_all_processes(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="holds 12 completions"):
        training(per_device_train_batch_size=3, gradient_accumulation_steps=2, num_generations=8)


@pytest.mark.parametrize(
    ("config", "kwargs", "message"),
    [
        (DataConfig, {"prompt_style": "long"}, "Expected one of: instruct, compact"),
        (DataConfig, {"max_train_rows": 0}, "Expected at least 1"),
        (DataConfig, {"max_eval_rows": -1}, "Expected at least 1"),
        (RewardConfig, {"rag_score_threshold": 2.0}, "Expected 0 to 1"),
        (RewardConfig, {"rag_top_k": 0}, "Expected 1 to 50"),
        (RewardConfig, {"invalid_action_reward": 1.0}, "at most 0.5"),
        (RewardConfig, {"reward_deadline_s": 0.0}, "`reward_deadline_s` is 0.0. Expected more than 0"),
        (RewardConfig, {"rag_timeout_s": 0.0}, "`rag_timeout_s`"),
        (RewardConfig, {"judge_timeout_s": -1.0}, "`judge_timeout_s`"),
        (RewardConfig, {"max_attempts": 0}, "`max_attempts`"),
        (RewardConfig, {"rag_max_concurrency": 0}, "`rag_max_concurrency`"),
        (RewardConfig, {"judge_max_concurrency": 0}, "`judge_max_concurrency`"),
        (RewardConfig, {"rag_base_url": "rag.internal:8801"}, "starts with http:// or https://"),
        (RewardConfig, {"judge_base_url": "localhost"}, "starts with http:// or https://"),
        (WarmStartConfig, {"warm_start_steps": 0}, "Expected more than 0"),
    ],
)
def test_a_setting_that_cannot_work_is_refused(config, kwargs, message):
    with pytest.raises(ConfigError, match=message):
        config(**kwargs)
