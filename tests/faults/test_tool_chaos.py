"""Conversations whose tools fail in many ways, against a ledger."""

import asyncio
import random
import re
from collections import Counter

import pytest
from datasets import Dataset
from support.keyed import make_calling_policy
from support.scripted import settings

from salesrl_trl.agents.tools import tool
from salesrl_trl.config import SalesGRPOConfig
from salesrl_trl.errors import ServiceUnavailable
from salesrl_trl.reward.functions import per_completion
from salesrl_trl.trainer import SalesGRPOTrainer

AT_ONCE, MANY = 100, 300


class HTTPError(Exception):
    def __init__(self, status):
        super().__init__("key=secret")
        self.status = status


LEFT_OUT = {
    "http_503": (lambda: HTTPError(503), "tool_{}_http_503"),
    "broken": (lambda: ConnectionError("key=secret"), "tool_{}_unavailable"),
    "down": (lambda: ServiceUnavailable("down", "index_down"), "index_down"),
}
"""Failures of services, and the reasons by which their conversations are left out. `tests/unit/agents` has others."""
TOLD = {"key": (lambda: KeyError("no such place"), "no such place"), "exit": (SystemExit, "SystemExit")}
"""Errors of the policy, and what it is told of them."""


def answer(way, number):
    if way in LEFT_OUT or way in TOLD:
        raise (LEFT_OUT | TOLD)[way][0]()
    return f"found {number}"


async def search(way: str, number: str) -> str:
    """Searches.

    Args:
        way: How it ends.
        number: Which one.

    Returns:
        What was found.
    """
    return answer(way, number)


def look(way: str, number: str) -> str:
    return answer(way, number)


async def asks(way: str, number: str) -> str:
    return answer(way, number)


async def hangs(way: str, number: str) -> str:
    await asyncio.sleep(60)


for function in (look, asks, hangs):
    function.__doc__ = search.__doc__
TOOLS = [search, look, tool(on_failure="tell")(asks), tool(deadline_s=0.05)(hangs)]


def planned(place):
    """The turns of a conversation, each the calls that it makes: tool, how it ends, number, and whether the arguments
    are right."""
    chance = random.Random(place)
    turns = []
    for turn in range(chance.randint(0, 3)):
        calls = []
        for number in range(chance.randint(1, 2)):
            name = chance.choices(["search", "look", "asks", "hangs", "nothing"], [6, 6, 3, 0.3, 1])[0]
            ways = ["ok", *LEFT_OUT, *TOLD]
            way = chance.choices(ways, [20, *([1] * (len(ways) - 1))])[0]
            calls.append((name, way, f"{place}-{turn}-{number}", chance.random() > 0.05))
        turns.append(calls)
    return turns


def outcome(call):
    """What becomes of a call: `found`, `told` or `failed`, with the text in the next prompt, or the reason."""
    name, way, number, is_right = call
    if name == "nothing":
        return "told", "Tool nothing not found."
    if not is_right:
        return "told", "unexpected keyword argument"
    if name == "hangs":
        return "failed", "tool_hangs_timeout"
    if way in TOLD:
        return "told", TOLD[way][1]
    if way == "ok":
        return "found", f"found {number}"
    code = LEFT_OUT[way][1].format(name)
    return ("told" if name == "asks" else "failed"), code


class Ledger:
    """What every conversation is to meet, and the engine that asks for it."""

    def __init__(self, tokenizer):
        self._tokenizer = tokenizer
        self.asked = Counter()  # turns that the engine was asked for, by place
        self.scored = {}  # the last message of each conversation that a verdict was asked for

    def generate(self, ids):
        texts = self._tokenizer.batch_decode(ids)
        made = [self._next(text) for text in texts]
        return [[*self._tokenizer(each)["input_ids"], self._tokenizer.eos_token_id] for each in made], None

    def _next(self, prompt):
        """The next turn of the conversation with this prompt, which has what its calls ended with and no more."""
        place = int(re.search(r"Conversation (\d+)\.", prompt)[1])
        turns, turn = planned(place), self.asked[place]
        self.asked[place] += 1
        before = [outcome(call) for calls in turns[:turn] for call in calls]
        assert all(kind != "failed" for kind, _ in before), (place, turn)
        results = re.findall(r"<tool_response>\n(.*?)\n</tool_response>", prompt, re.DOTALL)
        assert len(results) == len(before)
        # TRL has results of async tools in order, and ours are all async
        for (kind, told), result in zip(before, results, strict=True):
            assert result == told if kind == "found" else told in result and "error" in result, (place, told, result)
        assert "secret" not in prompt
        if turn == len(turns):
            return f"Answer {place}."
        calls = [
            f'{{"name": "{name}", "arguments": {{"way": "{way}", "{"number" if is_right else "wrong"}": "{number}"}}}}'
            for name, way, number, is_right in turns[turn]
        ]
        return "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls)


def run(folder, many):
    policy = make_calling_policy(folder / "policy", max_position_embeddings=8192)

    @per_completion
    async def verdict(completion):
        text = completion[-1]["content"]
        place = int(re.fullmatch(r"Answer (\d+)\.", text)[1])
        assert place not in ledger.scored
        ledger.scored[place] = text
        return place / many

    class Scripted(SalesGRPOTrainer):
        def _generate_single_turn(self, ids, images, fields, group, *args, **kwargs):
            return self._made.tokens(ids, group) if self._made.tokens is not None else ledger.generate(ids)

    args = SalesGRPOConfig(**settings(folder / "run", max_completion_length=4096, record=True))
    rows = [{"prompt": [{"role": "user", "content": f"Conversation {place}."}]} for place in range(many)]
    trainer = Scripted(str(policy), [verdict], args, Dataset.from_list(rows), tools=TOOLS)
    ledger, pipeline = Ledger(trainer.processing_class), trainer.components.pipeline
    counts, calls, totals = Counter(), Counter(), Counter()
    for first in range(0, many, AT_ONCE):
        places = range(first, min(first + AT_ONCE, many))
        rollout = pipeline.evaluate([rows[place] for place in places], 0, group=1)
        result = trainer.components.reward_loop.result(rollout.rewards, rollout.sampled.completions)
        for name, values in rollout.sampled.metrics.items():
            totals[name] += sum(values)
        for place, reward, noted in zip(places, result.rewards, rollout.sampled.calls, strict=True):
            turns = planned(place)
            failing = [[told for kind, told in map(outcome, calls) if kind == "failed"] for calls in turns]
            ended = next((turn for turn, codes in enumerate(failing) if codes), None)
            # 1. a conversation whose tool failed is missing by that reason, has no verdict, and asked for no more
            if ended is not None:
                assert reward.value is None and reward.reason in failing[ended], (place, reward)
                assert place not in ledger.scored and ledger.asked[place] == ended + 1
            # 2. every other has its own number, by its own verdict
            else:
                assert reward.value == pytest.approx(place / many), (place, reward)
                assert ledger.scored[place] == f"Answer {place}." and ledger.asked[place] == len(turns) + 1
            counts["scored" if ended is None else reward.reason] += 1
            # 3. every call is noted with its turn and how it ended
            made = turns if ended is None else turns[: ended + 1]
            wanted = Counter()
            for turn, of_turn in enumerate(made, start=1):
                for call in (call for call in of_turn if call[0] != "nothing"):
                    kind, told = outcome(call)
                    is_service = kind == "failed" or (kind == "told" and told.startswith(("tool_asks", "index_")))
                    wanted[f"tool_{call[0]}", f"turn {turn}", told if is_service else kind] += 1
                    calls[call[0], "failures" if is_service else "errors" if kind == "told" else "found"] += 1
            seen = Counter()
            for call in noted:
                failed = "found" if not call.failure else call.failure if call.answer is None else "told"
                seen[call.service, call.path, failed] += 1
            assert seen == wanted, place
    # 4. none is lost, and counts are those of the ledger
    assert counts.total() == many
    for name in ("search", "look", "asks", "hangs"):
        for kind in ("failures", "errors"):
            assert totals[f"tools/{name}/{kind}"] == calls[name, kind]
    trainer.finish()
    return counts


@pytest.mark.timeout(120)
def test_conversations_whose_tools_fail_are_left_out_by_their_reason_and_no_other_is_touched(tmp_path):
    counts = run(tmp_path, MANY)
    assert len(counts) == 7
    assert counts["scored"] > MANY / 4
