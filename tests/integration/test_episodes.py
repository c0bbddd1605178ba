"""Agents of a user's own that talk with the policy in training: one of the `openai` client alone, unchanged. And
conversations on real vLLM, of agents and with tools: training goes on while others are out."""

import json
import sys
import time
from itertools import chain
from pathlib import Path

import pytest
import torch
from support.forked import done_on_vllm
from support.keyed import make_calling_policy
from support.scripted import Gradients, settings, steps_of, trained_by

STEPS, MOST_CALLS, TURNS = 4, 2, 3
TOOLS = [{"type": "function", "function": {
    "name": "add", "description": "Adds three.", "parameters": {
        "type": "object", "properties": {"number": {"type": "integer"}}, "required": ["number"]}}}]  # fmt: skip
CALL = ["<tool_call>", *'\n{"name": "add", "arguments": {"number": 3}}\n', "</tool_call>"]


class Down(Exception):
    """As a client raises it."""

    status_code = 503


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
            raise Down
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


@pytest.mark.parametrize("loss_type", ["dapo", "grpo"])
def test_every_sequence_of_an_episode_trains_with_its_advantage(tmp_path, monkeypatch, loss_type):
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from salesrl_trl import SalesGRPOConfig, SalesGRPOTrainer, per_episode

    policy = make_calling_policy(tmp_path / "policy", hidden_size=64)
    tokenizer, sampled = AutoTokenizer.from_pretrained(policy), []
    numbers = [1.0, 0.0, 0.25, 1.0] * 2

    @per_episode
    async def rewriter(client, row):
        """A question with a follow-up, and its summary with a history of its own, except in every other episode."""
        ask, number = client.chat.completions.create, numbers.pop()
        said = (await ask(model="policy", messages=row["prompt"])).choices[0].message.content
        more = [{"role": "assistant", "content": said}, {"role": "user", "content": "Sure?"}]
        await ask(model="policy", messages=[*row["prompt"], *more])
        if number != 0.25:
            await ask(model="policy", messages=[{"role": "user", "content": f"Sum up the talk of {said}."}])
        return number

    args = SalesGRPOConfig(**settings(
        tmp_path / "run", beta=0.0, max_steps=2, per_device_train_batch_size=2, gradient_accumulation_steps=2,
        num_generations=4, max_completion_length=512, learning_rate=1e-12, loss_type=loss_type, rollout_lookahead=1,
        max_grad_norm=1e9, scale_rewards="none",
    ))  # fmt: skip
    rows = [{"prompt": [{"role": "user", "content": f"What is {place}?"}]} for place in range(2)]
    trainer = SalesGRPOTrainer(str(policy), [rewriter], args, Dataset.from_list(rows))
    found, batches, score = Gradients(trainer).found, [], trainer._generate_and_score_completions
    monkeypatch.setattr(
        trainer, "_generate_and_score_completions", lambda inputs: batches.append(score(inputs)) or batches[-1]
    )

    def generate(input_ids, **kwargs):
        own = [
            torch.tensor([*tokenizer(f"Done {len(sampled) + place}!")["input_ids"], tokenizer.eos_token_id])
            for place in range(len(input_ids))
        ]
        sampled.extend((before, turn.tolist()) for before, turn in zip(input_ids.tolist(), own, strict=True))
        padded = torch.nn.utils.rnn.pad_sequence(own, batch_first=True, padding_value=tokenizer.pad_token_id)
        return torch.cat([input_ids, padded], dim=1)

    monkeypatch.setattr(trainer.model, "generate", generate)
    trainer.train()
    trainer.finish()
    # 1. each sampled turn trains once, with its episode's advantage
    trained = []
    for batch in batches:
        columns = (batch[name] for name in ("completion_ids", "tool_mask", "completion_mask", "advantages"))
        for ids, mask, kept, advantage in zip(*columns, strict=True):
            own = [int(token) for token, one in zip(ids, mask * kept, strict=True) if one]
            trained.append((own, float(advantage)))
    assert sorted(token for own, _ in trained for token in own) == sorted(t for _, turn in sampled for t in turn)
    assert all(line["episodes/untrained"] == 0.0 < line["episodes/rewritten"] for line in steps_of(trainer))
    # 2. by hand: each sequence alone through the policy, the sum over its turns' tokens of advantage times log-prob
    model = AutoModelForCausalLM.from_pretrained(policy)
    padding = tokenizer.pad_token_id
    turns = [([t for t in before if t != padding], own) for before, own in sampled]
    assert len(found) == len(batches) == 2
    for first, gradient in zip((0, 4), found, strict=True):
        model.zero_grad()
        episodes = trained[first : first + 4]
        every = sum(len(own) for own, _ in episodes)
        loss = 0.0
        for own, advantage in episodes:
            text, weight = tokenizer.decode(own), 1 / every if loss_type == "dapo" else 1 / len(own) / len(episodes)
            for before, turn in turns:
                if tokenizer.decode(turn) in text:
                    logits = model(input_ids=torch.tensor([before + turn])).logits[0].log_softmax(-1)
                    logps = logits[len(before) - 1 : -1].gather(1, torch.tensor(turn)[:, None])
                    loss = loss - advantage * weight * logps.sum()
        loss.backward()
        expected = torch.cat([each.grad.flatten() for each in model.parameters() if each.grad is not None])
        assert expected.abs().max() > 1e-3
        torch.testing.assert_close(gradient, expected, rtol=1e-3, atol=1e-5)


def test_an_agents_mistake_is_its_episodes_failure_and_what_it_leaves_open_holds_up_nothing(tmp_path):
    import asyncio
    import threading

    from datasets import Dataset

    from salesrl_trl import SalesGRPOConfig, SalesGRPOTrainer, per_episode

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
            asyncio.get_running_loop().run_in_executor(None, time.sleep, 60)
        return float(len(said))

    rows = [{"prompt": [{"role": "user", "content": f"What is {place}?"}], "number": place} for place in range(4)]
    args = SalesGRPOConfig(**settings(
        tmp_path / "run", beta=0.0, max_steps=4, per_device_train_batch_size=2, max_completion_length=16,
        min_valid_reward_fraction=0.0,
    ))  # fmt: skip
    policy = make_calling_policy(tmp_path / "policy", hidden_size=64)
    trainer = SalesGRPOTrainer(str(policy), [agent], args, Dataset.from_list(rows))
    trained, reasons, _ = trained_by(trainer)
    trainer.train()
    began = time.monotonic()
    trainer.finish()
    assert time.monotonic() - began < 15
    # 4 steps with one row each, of which two have failed; two completions a row
    assert reasons == {"agent_http_400": 2, "agent_no_room": 2}
    assert len(trained) == 4
    assert not any(thread.name == "conversation" for thread in threading.enumerate())


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


@pytest.fixture(scope="module")
def on_vllm(tmp_path_factory):
    """What a run of each kind told. Both are of one process, around one engine."""
    out = tmp_path_factory.mktemp("vllm")
    done_on_vllm(__file__, make_calling_policy(out / "policy", hidden_size=64), out)
    return json.loads((out / "told.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "turns", "reasons"),
    [
        ("episodes", STEPS * 4 * TURNS, {"episode_http_503": 2}),
        ("tools", STEPS * 4 * TURNS - 1, {"tool_look_http_503": 1}),  # a tool fails in its second turn
        ("environments", STEPS * 4 * TURNS - 1, {"tool_look_http_503": 1}),  # with each reward of its own environment
    ],
)
def test_a_run_on_vllm_trains_while_others_are_out_on_exactly_what_was_sampled(on_vllm, kind, turns, reasons):
    told = on_vllm[kind]
    # 1. an episode, or a tool's call, began in one step and ended in a later one
    assert any(ended > began for began, ended in told["spans"]), told["spans"]
    # 2. what trains is what vLLM sampled, turn by turn, with the log-probs of the weights that sampled it
    wholes = whole_episodes(told["sampled"], None)
    assert len(told["sampled"]) == turns
    assert len(told["trained"]) == STEPS * 4 - sum(reasons.values())
    for ids in told["trained"]:
        assert ids in wholes
        wholes.remove(ids)
    assert max(told["differences"]) < 0.02
    # 3. the failed ones are left out by their reason, the others have their numbers
    assert told["reasons"] == reasons
    if kind != "episodes":
        assert all(line["tools/look/calls"] > 0 for line in told["lines"])
        assert sum(line["tools/look/failures"] for line in told["lines"]) == 1


def main(policy, out):
    import trl.generation.vllm_generation as upstream_vllm
    from datasets import Dataset

    from salesrl_trl import SalesGRPOConfig, SalesGRPOTrainer
    from salesrl_trl.generation import engine_loop

    sampled, told, built, turn_of = [], {}, [], engine_loop.turn_of

    def step():
        return built[-1].state.global_step

    def turn(output, labels):
        made = turn_of(output, labels)
        sampled.append((list(output.prompt_token_ids), made.ids))
        return made

    engine_loop.turn_of = turn
    for name, run in KINDS.items():
        args = SalesGRPOConfig(**settings(
            out / name, beta=0.0, max_steps=STEPS, per_device_train_batch_size=4, num_generations=2,
            use_vllm=True, vllm_mode="colocate", vllm_gpu_memory_utilization=0.2, vllm_max_model_length=1024,
            max_completion_length=400, rollout_lookahead=2, generation_kwargs={"max_tokens": 8},
        ))  # fmt: skip
        rows = [{"prompt": [{"role": "user", "content": f"What is {at}?"}], "number": at} for at in range(8)]
        spans, reward, own = run(step)
        trainer = SalesGRPOTrainer(str(policy), [reward], args, Dataset.from_list(rows), **own)
        built.append(trainer)
        upstream_vllm.LLM = lambda *_, _engine=trainer.vllm_generation.llm, **__: _engine
        trained, reasons, differences = trained_by(trainer)
        torch.manual_seed(0)
        trainer.train()
        trainer.finish()
        lines = [line for line in trainer.state.log_history if "tools/look/calls" in line]
        told[name] = {
            "spans": spans, "sampled": sampled[:], "trained": trained, "differences": differences, "reasons": reasons,
            "lines": [{tag: value for tag, value in line.items() if tag.startswith("tools/")} for line in lines],
        }  # fmt: skip
        sampled.clear()
    (out / "told.json").write_text(json.dumps(told))


def with_episodes(step):
    """The steps in which each episode began and ended, once there are some; the reward; the trainer's arguments."""
    import asyncio

    from salesrl_trl import per_episode

    spans, down = [], []

    @per_episode
    async def episode(client, row):
        began, messages = step(), row["prompt"]
        for turn in range(TURNS):
            answer = await client.chat.completions.create(model="policy", messages=messages)
            said = {"role": "assistant", "content": answer.choices[0].message.content}
            messages = [*messages, said, {"role": "user", "content": f'And then? "找到" <|im_end|> {turn}'}]
            end = asyncio.get_running_loop().time() + (3 if began else 0)  # those of later batches outlast a step
            while step() == began and asyncio.get_running_loop().time() < end:
                await asyncio.sleep(0.01)
        spans.append((began, step()))
        if row["number"] == 0 and len(down) < 2:
            down.append(True)
            raise Down
        return float(len(messages[-2]["content"]))

    return spans, episode, {}


def with_tools(step):
    """The same of each call of a tool."""
    import trl.trainer.grpo_trainer as upstream

    from salesrl_trl import per_completion, tool
    from salesrl_trl.agents import chat_turns

    spans, down = [], []

    @tool(deadline_s=60)
    def look(word: str) -> str:
        """Looks a word up.

        Args:
            word: The word.

        Returns:
            What was found.
        """
        began = step()
        if word == "down" and len(down) == 1:
            down.append(True)
            raise Down
        end = time.monotonic() + (3 if began else 0)
        while step() == began and time.monotonic() < end:
            time.sleep(0.01)
        spans.append((began, step()))
        return '<tool_call>"找到" 😀</tool_call><|im_end|>'  # marks of the template itself

    def parse(tokenizer, ids, prefix=None, tools=None):
        text, done = tokenizer.decode(ids, skip_special_tokens=True), tokenizer.decode(prefix).count("<tool_response>")
        message = {"role": "assistant", "content": text}
        if done < TURNS - 1:
            is_down = done == 1 and not down
            if is_down:
                down.append(False)
            function = {"name": "look", "arguments": {"word": "down" if is_down else "up"}}
            message["tool_calls"] = [{"type": "function", "function": function}]
        return message

    @per_completion
    async def length(completion):
        return float(len(completion))

    upstream.parse_response = chat_turns.parse_response = parse
    return spans, length, {"tools": [look]}


def with_environments(step):
    """The same of each call of an environment's tool. A reward fails unless it sees its own environment."""
    from salesrl_trl import per_completion, tool

    spans, _, own = with_tools(step)
    [look] = own["tools"]

    class Room:
        def reset(self, number, **row):
            self.number, self.calls = number, 0
            return f" Room {number}."

        @tool(deadline_s=60)
        def look(self, word: str) -> str:
            """Looks a word up.

            Args:
                word: The word.
            """
            self.calls += 1
            found = look(word)
            return f"{self.number} {self.calls} {found}"

    @per_completion
    async def length(prompt, completion, number, environments):
        told = [message["content"] for message in completion if message["role"] == "tool"]
        assert [text.split()[:2] for text in told] == [[str(number), str(call)] for call in range(1, TURNS)]
        assert (environments.number, environments.calls) == (number, TURNS - 1)
        assert prompt[-1]["content"] == f"What is {number}? Room {number}."
        return float(len(completion))

    return spans, length, {"environment_factory": Room}


KINDS = {"episodes": with_episodes, "tools": with_tools, "environments": with_environments}


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
