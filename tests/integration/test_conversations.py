"""Conversations with tools on real vLLM: training goes on while tools are out, and what trains is what was sampled."""

import json
import sys
import time
from itertools import chain
from pathlib import Path

import pytest
import torch
from support.forked import done_on_vllm
from support.keyed import make_calling_policy
from support.scripted import settings, trained_by

STEPS, TURNS = 4, 3


@pytest.mark.slow
def test_a_run_trains_while_tools_are_out_on_exactly_what_vllm_sampled(tmp_path):
    policy = make_calling_policy(tmp_path / "policy", hidden_size=64)
    done_on_vllm(__file__, policy, tmp_path)
    told = json.loads((tmp_path / "told.json").read_text())
    # 1. a tool was called in one step and answered in a later one
    assert any(ended > began for began, ended in told["calls"]), told["calls"]
    # 2. the policy's tokens of each completion are its turns as vLLM gave them, one after another
    sampled = [[*chain.from_iterable(turns)] for turns in told["sampled"].values()]
    assert len(told["trained"]) == STEPS * 4 - 1  # without the one whose tool failed in its second turn
    assert sorted(map(len, told["sampled"].values()))[:2] == [TURNS - 1, TURNS]
    for ids in told["trained"]:
        assert ids in sampled
    # 3. their log-probs are those of the weights that sampled them
    assert max(told["differences"]) < 0.02
    # 4. the failed conversation is left out by its reason, the others have their numbers
    assert told["reasons"] == {"tool_look_http_503": 1}
    assert all(line["tools/look/calls"] > 0 for line in told["lines"])
    assert sum(line["tools/look/failures"] for line in told["lines"]) == 1


def main(policy, out):
    import trl.trainer.grpo_trainer as upstream
    from datasets import Dataset

    from salesrl_trl import SalesGRPOConfig, SalesGRPOTrainer, per_completion, tool
    from salesrl_trl.agents import tool_turns
    from salesrl_trl.generation import engine_loop

    calls, sampled, held = [], {}, []

    class HTTPError(Exception):
        status_code = 503

    @tool(deadline_s=60)
    def look(word: str) -> str:
        """Looks a word up.

        Args:
            word: The word.

        Returns:
            What was found.
        """
        began = trainer.state.global_step
        if word == "down" and not held:
            held.append(True)
            raise HTTPError
        end = time.monotonic() + (3 if began else 0)  # those of later batches wait until a step has ended
        while trainer.state.global_step == began and time.monotonic() < end:
            time.sleep(0.01)
        calls.append((began, trainer.state.global_step))
        return '<tool_call>"找到" 😀</tool_call><|im_end|>'  # marks of the template itself

    def parse(tokenizer, ids, prefix=None, tools=None):
        text, done = tokenizer.decode(ids, skip_special_tokens=True), tokenizer.decode(prefix).count("<tool_response>")
        message = {"role": "assistant", "content": text}
        if done < TURNS - 1:
            word = "down" if not reasons and done == 1 else "up"
            function = {"name": "look", "arguments": {"word": word}}
            message["tool_calls"] = [{"type": "function", "function": function}]
        return message

    @per_completion
    async def length(completion):
        return float(len(completion))

    upstream.parse_response = tool_turns.parse_response = parse
    args = SalesGRPOConfig(**settings(
        out / "run", beta=0.0, max_steps=STEPS, per_device_train_batch_size=4, num_generations=2, use_vllm=True,
        vllm_mode="colocate", vllm_gpu_memory_utilization=0.2, vllm_max_model_length=1024, max_completion_length=400,
        rollout_lookahead=2, generation_kwargs={"max_tokens": 8}, report_to="none",
    ))  # fmt: skip
    rows = Dataset.from_list([{"prompt": [{"role": "user", "content": f"What is {place}?"}]} for place in range(16)])
    turn_of = engine_loop._turn_of

    def turn(output):
        made = turn_of(output)
        prompt = list(output.prompt_token_ids)
        for key, turns in list(sampled.items()):
            mine = json.loads(key)
            if prompt[: len(mine)] == mine and _ends(prompt, turns):
                turns.append(made[0])
                return made
        sampled[json.dumps([*prompt, *made[0]])] = [made[0]]
        return made

    engine_loop._turn_of = turn

    trainer = SalesGRPOTrainer(str(policy), [length], args, rows, tools=[look])
    trained, reasons, differences = trained_by(trainer)
    torch.manual_seed(0)
    trainer.train()
    trainer.finish()
    lines = [line for line in trainer.state.log_history if "tools/look/calls" in line]
    told = {
        "calls": calls, "sampled": sampled, "trained": trained, "differences": differences, "reasons": reasons,
        "lines": [{name: value for name, value in line.items() if name.startswith("tools/")} for line in lines],
    }  # fmt: skip
    (out / "told.json").write_text(json.dumps(told))


def _ends(prompt, turns):
    """Whether a prompt has this conversation's last turn in it."""
    last = turns[-1]
    return any(prompt[start : start + len(last)] == last for start in range(len(prompt) - len(last) + 1))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
