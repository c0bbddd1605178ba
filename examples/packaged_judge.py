"""The built-in judge as a reward function, next to one of your own. `judge.py` calls a model directly instead."""

import os

from datasets import Dataset

from salesrl_trl import SalesGRPOConfig, SalesGRPOTrainer, judge_reward, per_completion

MODEL = os.environ.get("MODEL", "Qwen/Qwen2.5-0.5B-Instruct")
OUTPUT = "runs/packaged_judge"

judge = judge_reward(
    judge_providers={
        "base_url": os.environ.get("JUDGE_BASE_URL", "https://api.openai.com/v1"),
        "model": "gpt-4.1-mini",
        "api_key_env": "JUDGE_API_KEY",
    },
    max_calls=10_000, output_dir=OUTPUT,
)  # fmt: skip


@per_completion
def brief(completion):
    return float(len(completion[0]["content"]) < 200)


rows = [
    {
        "prompt": [{"role": "user", "content": f"What is {a} plus 5?"}],
        "reference": str(a + 5),  # a known good answer
        "criteria": [{"text": "gives the right number"}, {"text": "is polite", "weight": 0.2, "name": "polite"}],
    }
    for a in range(64)
]
config = SalesGRPOConfig(
    OUTPUT, max_steps=2, max_completion_length=32, rollout_lookahead=1, reward_weights=[1.0, 0.2], report_to="none"
)
trainer = SalesGRPOTrainer(MODEL, [judge, brief], config, Dataset.from_list(rows))
trainer.train()
trainer.finish()
