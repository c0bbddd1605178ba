"""Agents of a user's own that talk with the policy in training: one of the `openai` client alone, unchanged."""

import json
import sys
from itertools import chain
from pathlib import Path

import pytest
import torch
from support.forked import done_on_vllm
from support.keyed import make_calling_policy
from support.scripted import settings, steps_of, trained_by

STEPS, MOST_CALLS = 6, 2
TOOLS = [{"type": "function", "function": {
    "name": "add", "description": "Adds three.", "parameters": {
        "type": "object", "properties": {"number": {"type": "integer"}}, "required": ["number"]}}}]  # fmt: skip
CALL = ["<tool_call>", *'\n{"name": "add", "arguments": {"number": 3}}\n', "</tool_call>"]


async def agent(client, messages):
    """An agent as one has it, which knows nothing of training: its last words, and how often it called the tool."""
    calls = 0
    while True:
        answer = await client.chat.completions.create(model="gpt-4o", messages=messages, tools=TOOLS)
        message = answer.choices[0].message
        messages = [*messages, message.model_dump(exclude_none=True)]
        if not message.tool_calls or calls == MOST_CALLS:
            return message.content, calls
        for call in message.tool_calls:
            calls += 1
            result = str(json.loads(call.function.arguments)["number"] + 3) + ' "找到" <|im_end|>'
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


def test_an_agent_of_the_openai_client_trains_on_exactly_what_was_sampled(tmp_path, monkeypatch):
    import httpx
    import openai
    from datasets import Dataset
    from transformers import AutoTokenizer

    from salesrl_trl import Reward, SalesGRPOConfig, SalesGRPOTrainer, per_episode

    policy = make_calling_policy(tmp_path / "policy", hidden_size=64)
    tokenizer = AutoTokenizer.from_pretrained(policy)
    sampled, rows_seen, down = [], [], []

    @per_episode
    async def episode(client, row):
        rows_seen.append(row["kind"])
        text, calls = await agent(client, row["prompt"])
        if row["kind"] == "down" and not down:
            down.append(True)
            response = httpx.Response(503, request=httpx.Request("POST", "http://judge"))
            raise openai.InternalServerError("", response=response, body=None)
        return Reward.scored(float(calls) + len(text) / 100, calls=float(calls))

    rows = [
        {"prompt": [{"role": "user", "content": f"What is {place} and 3?"}], "kind": "sums" if place else "down"}
        for place in range(4)
    ]
    args = SalesGRPOConfig(**settings(
        tmp_path / "run", beta=0.0, max_steps=STEPS, per_device_train_batch_size=4, num_generations=2,
        max_completion_length=512,
    ))  # fmt: skip
    trainer = SalesGRPOTrainer(str(policy), [episode], args, Dataset.from_list(rows))
    trained, reasons, _ = trained_by(trainer)

    def generate(input_ids, **kwargs):
        """Calls the tool now and then, in tokens to which the text is not encoded: one for each character."""
        turns = []
        for ids in input_ids.tolist():
            done = tokenizer.decode(ids).count("<tool_response>")
            pieces = CALL if (len(sampled) + len(turns)) % 3 and done < MOST_CALLS else [*f"Done {len(sampled)}!"]
            own = chain.from_iterable(tokenizer(piece)["input_ids"] for piece in pieces)
            turns.append(torch.tensor([*own, tokenizer.eos_token_id]))
        sampled.extend((before, own.tolist()) for before, own in zip(input_ids.tolist(), turns, strict=True))
        padded = torch.nn.utils.rnn.pad_sequence(turns, batch_first=True, padding_value=tokenizer.pad_token_id)
        return torch.cat([input_ids, padded], dim=1)

    monkeypatch.setattr(trainer.model, "generate", generate)
    trainer.train()
    trainer.finish()
    lines = steps_of(trainer)
    # 1. what trains is what was sampled, turn by turn; the agent's own words and its tool's are not in it
    wholes = whole_episodes(sampled, tokenizer.pad_token_id)
    assert len(trained) == STEPS * 4 - 1
    assert len(set(map(len, trained))) > 2
    for ids in trained:
        assert ids in wholes
        wholes.remove(ids)
    # 2. the episode whose service failed is left out by its reason, and its group's baseline is of the others
    assert (reasons, len(wholes)) == ({"episode_http_503": 1}, 1)
    # 3. figures: the calls of the policy, and the parts of a reward
    assert sum(line["episodes/calls"] for line in lines) == len(sampled)
    assert all(line["episodes/rewritten"] == line["episodes/untrained"] == 0.0 for line in lines)
    assert any(line["rewards/episode/calls"] > 0 and line["loss"] != 0.0 for line in lines)
    assert set(rows_seen) == {"down", "sums"}


def trainer_of(policy, folder, episode, **given):
    from datasets import Dataset

    from salesrl_trl import SalesGRPOConfig, SalesGRPOTrainer

    rows = [{"prompt": [{"role": "user", "content": f"What is {place}?"}], "number": place} for place in range(4)]
    most = {
        "max_steps": 4,
        "per_device_train_batch_size": 2,
        "max_completion_length": 16,
        "min_valid_reward_fraction": 0.0,
        **given,
    }
    args = SalesGRPOConfig(**settings(folder, beta=0.0, **most))
    return SalesGRPOTrainer(str(policy), [episode], args, Dataset.from_list(rows))


def test_an_agents_mistake_is_its_episodes_failure_and_what_it_leaves_open_holds_up_nothing(tmp_path):
    import asyncio
    import socket
    import threading
    import time
    from urllib.parse import urlsplit

    from salesrl_trl import per_episode

    opened = []

    def left_open(client, body):
        address = urlsplit(str(client.base_url))
        opened.append(socket.create_connection((address.hostname, address.port)))
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {client.api_key}\r\n"
        opened[-1].sendall(f"{head}Content-Length: 200\r\n\r\n{body:{200 if body else 0}}".encode())

    @per_episode
    async def agent(client, row):
        ask = client.chat.completions.create
        said = (await ask(model="policy", messages=row["prompt"])).choices[0].message.content
        if row["number"] == 0:
            await ask(model="policy", messages=row["prompt"], extra_body={"tools": [1]})
        if row["number"] == 1:  # the first turn has used up the tokens
            more = [{"role": "assistant", "content": said}, {"role": "user", "content": "Sure?" * 20}]
            await ask(model="policy", messages=[*row["prompt"], *more])
        if row["number"] == 2:
            left_open(client, json.dumps({"messages": row["prompt"]}))
            left_open(client, "")
            asyncio.get_running_loop().run_in_executor(None, time.sleep, 60)
        return float(len(said))

    trainer = trainer_of(make_calling_policy(tmp_path / "policy", hidden_size=64), tmp_path / "run", agent)
    trained, reasons, _ = trained_by(trainer)
    trainer.train()
    began = time.monotonic()
    trainer.finish()
    assert time.monotonic() - began < 15
    # 4 steps with one row each, of which two have failed; two completions a row
    assert reasons == {"agent_http_400": 2, "agent_no_room": 2}
    assert len(trained) == 4
    assert not any(thread.name == "conversation" for thread in threading.enumerate())
    for each in opened:
        each.close()


def whole_episodes(sampled, padding):
    """The policy's tokens of each episode, from the prompts and tokens of its turns in the order of the turns."""
    episodes = []
    for before, own in sampled:
        before = before[next(place for place, token in enumerate(before) if token != padding) :]
        known = [each for each in episodes if before[: len(each[0])] == each[0]]
        if known:
            last = max(known, key=lambda each: len(each[0]))
            last[0], last[1] = [*before, *own], [*last[1], *own]
        else:
            episodes.append([[*before, *own], own])
    return [own for _, own in episodes]


@pytest.mark.slow
def test_episodes_on_vllm_train_while_others_are_out(tmp_path):
    policy = make_calling_policy(tmp_path / "policy", hidden_size=64)
    done_on_vllm(__file__, policy, tmp_path)
    told = json.loads((tmp_path / "told.json").read_text())
    # 1. an episode began in one step and ended in a later one
    assert any(ended > began for began, ended in told["episodes"]), told["episodes"]
    # 2. what trains is what vLLM sampled, with the log-probs of the weights that sampled it
    wholes = whole_episodes(told["sampled"], None)
    assert len(told["trained"]) == STEPS * 4 - told["reasons"].get("episode_http_503", 0)
    for ids in told["trained"]:
        assert ids in wholes
    assert max(told["differences"]) < 0.02
    # 3. the failed ones are left out by their reason
    assert told["reasons"] == {"episode_http_503": 2}


def main(policy, out):
    import asyncio

    import httpx
    import openai
    from datasets import Dataset

    from salesrl_trl import SalesGRPOConfig, SalesGRPOTrainer, per_episode
    from salesrl_trl.generation import engine_loop

    sampled, episodes, down = [], [], []

    @per_episode
    async def episode(client, row):
        began, messages = trainer.state.global_step, row["prompt"]
        for turn in range(3):
            answer = await client.chat.completions.create(model="policy", messages=messages)
            said = {"role": "assistant", "content": answer.choices[0].message.content}
            messages = [*messages, said, {"role": "user", "content": f'And then? "找到" <|im_end|> {turn}'}]
            end = asyncio.get_running_loop().time() + (3 if began else 0)  # those of later batches outlast a step
            while trainer.state.global_step == began and asyncio.get_running_loop().time() < end:
                await asyncio.sleep(0.01)
        episodes.append((began, trainer.state.global_step))
        if row["kind"] == "down" and len(down) < 2:
            down.append(True)
            response = httpx.Response(503, request=httpx.Request("POST", "http://judge"))
            raise openai.InternalServerError("", response=response, body=None)
        return float(len(messages[-2]["content"]))

    args = SalesGRPOConfig(**settings(
        out / "run", beta=0.0, max_steps=STEPS, per_device_train_batch_size=4, num_generations=2, use_vllm=True,
        vllm_mode="colocate", vllm_gpu_memory_utilization=0.2, vllm_max_model_length=1024, max_completion_length=400,
        rollout_lookahead=2, generation_kwargs={"max_tokens": 16}, report_to="none",
    ))  # fmt: skip
    rows = [
        {"prompt": [{"role": "user", "content": f"What is {place}?"}], "kind": "sums" if place % 8 else "down"}
        for place in range(16)
    ]
    turn_of = engine_loop._turn_of

    def turn(output):
        made = turn_of(output)
        sampled.append((list(output.prompt_token_ids), made[0]))
        return made

    engine_loop._turn_of = turn
    trainer = SalesGRPOTrainer(str(policy), [episode], args, Dataset.from_list(rows))
    trained, reasons, differences = trained_by(trainer)
    torch.manual_seed(0)
    trainer.train()
    trainer.finish()
    told = {
        "episodes": episodes, "sampled": sampled, "trained": trained, "differences": differences, "reasons": reasons,
        "lines": [line for line in trainer.state.log_history if "episodes/calls" in line],
    }  # fmt: skip
    (out / "told.json").write_text(json.dumps(told, default=str))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
