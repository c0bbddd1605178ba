"""A minimal GRPO script: a dataset, two reward functions, a trainer.

`trl_before.py` uses TRL alone, `trl_after.py` is the same script with this package.
"""

import os

import torch
from datasets import Dataset
from salesrl_trl import SalesGRPOConfig as GRPOConfig, SalesGRPOTrainer as GRPOTrainer

MODEL = os.environ.get("MODEL", "Qwen/Qwen2.5-0.5B-Instruct")  # a hub id or a folder

sums = [(a, b) for a in range(2, 10) for b in range(2, 10)]
questions = [[{"role": "user", "content": f"What is {a} plus {b}?"}] for a, b in sums]
dataset = Dataset.from_dict({"prompt": questions, "answer": [str(a + b) for a, b in sums]})


def correct(completions, answer, **kwargs):
    """1 if the completion contains the answer. Imagine a service here that needs seconds."""
    texts = [completion[0]["content"] for completion in completions]
    return [float(right in text) for text, right in zip(texts, answer, strict=True)]


def brief(completions, **kwargs):
    """The shorter, the better."""
    return [1 / (1 + len(completion[0]["content"])) for completion in completions]


config = GRPOConfig(
    output_dir="runs/sums",
    max_steps=4,
    rollout_lookahead=1,  # while a step trains, the rewards of the next one arrive
    max_completion_length=32,
    use_cpu=not torch.cuda.is_available(),
)
trainer = GRPOTrainer(MODEL, reward_funcs=[correct, brief], args=config, train_dataset=dataset)
trainer.train()
