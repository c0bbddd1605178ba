"""The push of weights into a real vLLM on a CPU: what it samples from is what is in training, at each step.

As a program: python tests/integration/test_weight_push.py KIND OUT
"""

import json
import sys
from pathlib import Path

import pytest
from support.forked import done_on_vllm
from support.keyed import make_tiny_policy
from support.scripted import settings

STEPS = 3
LORA = {"r": 4, "lora_alpha": 32, "target_modules": "all-linear"}
CASES = {
    "llama": ({}, LORA),
    "gemma3_text": ({"head_dim": 32}, None),  # multiplies its embedding, which the head does not see
}
"""By kind: its shape, and its adapter."""


@pytest.mark.slow
@pytest.mark.parametrize("kind", CASES)
def test_a_tied_head_is_set_by_each_push(tmp_path, kind):
    done = done_on_vllm(__file__, kind, tmp_path)
    steps = json.loads((tmp_path / "told.json").read_text())
    assert len(steps) == STEPS
    # A head of the weights before is off by nats at this learning rate, float32 in another order by 1e-5.
    assert max(step["sampling/sampling_logp_difference/mean"] for step in steps) < 0.01
    assert min(step["grad_norm"] for step in steps) > 0.0
    assert "Failed to load weights" not in done.stderr + done.stdout


def main(kind, out):
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM

    from salesrl_trl import SalesGRPOConfig, SalesGRPOTrainer, per_completion

    shape, lora = CASES[kind]
    policy = make_tiny_policy(out / "policy", kind, hidden_size=64, tie_word_embeddings=True, **shape)

    @per_completion
    async def length(completion):
        return float(len(completion[-1]["content"]) % 7)

    args = SalesGRPOConfig(**settings(
        out / "run", beta=0.0, max_steps=STEPS, per_device_train_batch_size=8, num_generations=4, use_vllm=True,
        vllm_mode="colocate", vllm_gpu_memory_utilization=0.2, vllm_max_model_length=256, learning_rate=0.05,
        max_completion_length=16, logging_steps=1, max_sampling_logp_difference=100.0,
    ))  # fmt: skip
    rows = [{"prompt": [{"role": "user", "content": f"What is {place}?"}]} for place in range(16)]
    model = AutoModelForCausalLM.from_pretrained(policy)
    adapter = LoraConfig(**lora) if lora else None
    trainer = SalesGRPOTrainer(model, [length], args, Dataset.from_list(rows), peft_config=adapter)
    trainer.train()
    (out / "told.json").write_text(json.dumps([entry for entry in trainer.state.log_history if "reward" in entry]))
    trainer.finish()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
