"""The push of weights into a real vLLM on a CPU: what it samples from is what is in training, at each step.

`REAL_MODEL=FOLDER` tries a language model too, and keeps it there (`benchmarks.real_model_files`): Gemma 3 270M, with
a vocabulary of 262,144 tokens.

As a program: python tests/integration/test_weight_push.py KIND OUT
"""

import json
import sys
from pathlib import Path

import pytest
from support.forked import done_on_vllm
from support.keyed import make_tiny_policy
from support.real import real_model
from support.scripted import settings

STEPS = 3
LORA = {"r": 4, "lora_alpha": 32, "target_modules": "all-linear"}
CASES = {
    "llama": ({}, LORA),
    "gemma3_text": ({"head_dim": 32}, None),  # multiplies its embedding, which the head does not see
}
"""By kind: its shape, and its adapter."""
REAL = "real"
SHOTS = "3 + 4 = 7\n2 + 6 = 8\n"
SUMS = [(7, 8), (5, 4), (6, 9), (3, 9), (8, 4), (2, 5)] * 3


def trained(kind, out, **limits):
    """The log lines of its steps."""
    done = done_on_vllm(__file__, kind, out, **limits)
    assert "Failed to load weights" not in done.stderr + done.stdout
    steps = json.loads((out / "told.json").read_text())
    assert len(steps) == STEPS
    return steps


@pytest.mark.slow
@pytest.mark.parametrize("kind", CASES)
def test_a_tied_head_is_set_by_each_push(tmp_path, kind):
    steps = trained(kind, tmp_path)
    # A head of the weights before is off by nats at this learning rate, float32 in another order by 1e-5.
    assert max(step["sampling/sampling_logp_difference/mean"] for step in steps) < 0.01
    assert min(step["grad_norm"] for step in steps) > 0.0


@pytest.mark.slow
@pytest.mark.real_model
@pytest.mark.timeout(3000)
def test_a_real_model_learns_by_what_vllm_samples_from_its_own_weights(tmp_path):
    real_model()
    steps = trained(REAL, tmp_path, timeout=2400)
    print([{name: step[name] for name in ("reward", "sampling/sampling_logp_difference/mean")} for step in steps])
    assert max(step["sampling/sampling_logp_difference/mean"] for step in steps) < 0.05
    assert steps[0]["reward"] > 0.25  # it can add: letters in place of its tokens would give 0
    assert max(step["grad_norm"] for step in steps) > 0.0


def main(kind, out):
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM

    from salesrl_trl import SalesGRPOConfig, SalesGRPOTrainer, per_completion

    @per_completion
    async def length(completion):
        return float(len(completion[-1]["content"]) % 7)

    @per_completion
    async def right(completion, answer):
        return float(completion[-1]["content"].strip() == answer)

    given, reward, lora = {"learning_rate": 0.05, "max_completion_length": 16}, length, None
    if kind == REAL:
        given, reward = {"learning_rate": 1e-5, "max_completion_length": 6}, right
        policy = real_model()
    else:
        shape, lora = CASES[kind]
        policy = make_tiny_policy(out / "policy", kind, hidden_size=64, tie_word_embeddings=True, **shape)
    args = SalesGRPOConfig(**settings(
        out / "run", beta=0.0, max_steps=STEPS, per_device_train_batch_size=8, num_generations=4, use_vllm=True,
        vllm_mode="colocate", vllm_gpu_memory_utilization=0.2, vllm_max_model_length=256, logging_steps=1,
        max_sampling_logp_difference=100.0, **given,
    ))  # fmt: skip
    rows = [
        {"prompt": [{"role": "user", "content": f"{SHOTS}{one} + {two} ="}], "answer": str(one + two)}
        for one, two in SUMS
    ]
    model = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32)
    adapter = LoraConfig(**lora) if lora else None
    trainer = SalesGRPOTrainer(model, [reward], args, Dataset.from_list(rows), peft_config=adapter)
    trainer.train()
    (out / "told.json").write_text(json.dumps([entry for entry in trainer.state.log_history if "reward" in entry]))
    trainer.finish()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
