"""A reward model next to a reward function. TRL runs the model; `reward_weights` sets how much each counts."""

import os

from datasets import Dataset

from salesrl_trl import SalesGRPOConfig, SalesGRPOTrainer, per_completion

MODEL = os.environ.get("MODEL", "Qwen/Qwen2.5-0.5B-Instruct")
REWARD_MODEL = os.environ.get("REWARD_MODEL", "Skywork/Skywork-Reward-V2-Qwen3-0.6B")


@per_completion
def short_enough(completion, most):
    """1 if the completion has at most `most` characters, else 0. Unscored without a limit."""
    return None if most is None else float(len(completion[0]["content"]) <= most)


rows = [
    {"prompt": [{"role": "user", "content": f"Tell me about the number {n}."}], "most": 60 if n % 2 else None}
    for n in range(64)
]
config = SalesGRPOConfig(
    output_dir="runs/reward_model",
    max_steps=2,
    max_completion_length=32,
    reward_weights=[1.0, 0.5],  # in the order of the rewards
)
trainer = SalesGRPOTrainer(MODEL, [REWARD_MODEL, short_enough], config, train_dataset=Dataset.from_list(rows))
trainer.train()
trainer.finish()
