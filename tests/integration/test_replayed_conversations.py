"""Conversations on real vLLM, recorded in rounds and replayed: the same weights, whenever tools answer."""

import json
import sys
from pathlib import Path

import pytest
from support.forked import done_on_vllm
from support.keyed import make_calling_policy
from support.scripted import settings, steps_of

from salesrl_trl.config import SalesGRPOConfig
from salesrl_trl.errors import ConfigError

TURNS = 3


@pytest.mark.slow
def test_a_replay_of_conversations_recorded_in_rounds_ends_with_the_same_weights(tmp_path):
    done_on_vllm(__file__, make_calling_policy(tmp_path / "policy", hidden_size=64), tmp_path)
    told = json.loads((tmp_path / "told.json").read_text())
    first, again = told["runs"]
    assert first["weights"] == again["weights"] != told["before"]
    assert first["lines"] == again["lines"]
    assert [(calls, ok) for calls, ok, _ in first["lines"]] == [(8 * (TURNS - 1), 1.0)] * 3
    assert [run["calls"] for run in told["runs"]] == [3 * 8 * (TURNS - 1), 0]  # a replay calls no tool


def test_rounds_beside_a_lookahead_are_rejected(tmp_path):
    with pytest.raises(ConfigError, match=r"`record.rounds` needs `rollout_lookahead: 0`"):
        SalesGRPOConfig(**settings(tmp_path, record={"rounds": True}, rollout_lookahead=1))


def main(policy, out):
    import hashlib
    import random
    import time

    import torch
    import trl.generation.vllm_generation as upstream_vllm
    import trl.trainer.grpo_trainer as upstream
    from datasets import Dataset

    from salesrl_trl import SalesGRPOTrainer, per_completion, tool
    from salesrl_trl.agents import chat_turns
    from salesrl_trl.record.replay import ReplayReward
    from salesrl_trl.reward.functions import reward_of

    waits, calls, runs = random.SystemRandom(), [], []

    @tool(deadline_s=60)
    def look(word: str) -> str:
        """Looks a word up.

        Args:
            word: The word.
        """
        time.sleep(waits.random() / 10)
        calls.append(word)
        return f"{word} {len(word)}"

    def parse(tokenizer, ids, prefix=None, tools=None):
        text, done = tokenizer.decode(ids, skip_special_tokens=True), tokenizer.decode(prefix).count("<tool_response>")
        message = {"role": "assistant", "content": text}
        if done < TURNS - 1:
            message["tool_calls"] = [{"type": "function", "function": {"name": "look", "arguments": {"word": text}}}]
        return message

    @per_completion
    async def spread(completion):
        return float(len(set(completion[-1]["content"])))

    def digest(model):
        values = (each.detach().numpy().tobytes() for each in model.state_dict().values())
        return hashlib.sha256(b"".join(values)).hexdigest()

    upstream.parse_response = chat_turns.parse_response = parse
    for name in ("first", "again"):
        args = SalesGRPOConfig(**settings(
            out / name, beta=0.0, max_steps=3, per_device_train_batch_size=8, num_generations=4, learning_rate=1e-2,
            use_vllm=True, vllm_mode="colocate", vllm_gpu_memory_utilization=0.2, vllm_max_model_length=1024,
            max_completion_length=400, generation_kwargs={"max_tokens": 8},
            record={"rounds": True} if name == "first" else None,
        ))  # fmt: skip
        reward = spread if name == "first" else ReplayReward(reward_of(spread), out / "first", "fail")
        rows = Dataset.from_list([{"prompt": [{"role": "user", "content": f"What is {at}?"}]} for at in range(8)])
        trainer = SalesGRPOTrainer(str(policy), reward, args, rows, tools=[look])
        upstream_vllm.LLM = lambda *_, _engine=trainer.vllm_generation.llm, **__: _engine
        before = digest(trainer.model)
        torch.manual_seed(0)
        trainer.train()
        trainer.finish()
        lines = [(line["tools/look/calls"], line["outcome/ok"], line["loss"]) for line in steps_of(trainer)]
        runs.append({"weights": digest(trainer.model), "lines": lines, "calls": len(calls)})
        calls.clear()
    (out / "told.json").write_text(json.dumps({"runs": runs, "before": before}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
