"""What trains is what was sampled, and what TRL's own loop makes of the same turns, for the chat templates of several
families, whatever tools return."""

import copy
import itertools
import os
import random
import shutil
from pathlib import Path

import pytest
import trl
import trl.trainer.grpo_trainer as upstream
from datasets import Dataset
from support.scripted import settings
from transformers import AutoTokenizer
from trl import GRPOTrainer

from salesrl_trl import SalesGRPOConfig, SalesGRPOTrainer
from salesrl_trl.agents import chat_turns, tool_turns
from salesrl_trl.agents.tools import ConversationNotes, ToolCalls
from salesrl_trl.generation.turns import Turn

TURNS = int(os.environ.get("TURNS", "100"))
"""Of each template. 10,000 were tried: benchmarks/log/2026-11-26-generation-and-tools.md."""
IN_ONE = 4  # turns of a conversation
FAMILIES = ("qwen2_5", "qwen3", "llama3_1", "gemma4", "gptoss")
MARKS = (
    "<|im_end|>", "<|im_start|>assistant", "<tool_call>", "</tool_response>", "<|eot_id|>", "<|python_tag|>",
    "<end_of_turn>", "<turn|>", "<|call|>", "<|return|>", "<think>", '"', "'", "\\n", "\n", "{{", "}}", "价格",
    "😀", " ", "<|channel|>final<|message|>", "%}", "é", "\u200b", "price",
)  # fmt: skip


def said(draw):
    return "".join(draw.choices(MARKS, k=draw.randrange(12)))


@pytest.fixture
def build(tiny, tmp_path, monkeypatch):
    """A trainer of a family's template, in which `parse` reads turns and `look` is the tool."""

    def built(family, look, parse, **own):
        policy = tmp_path / "policy"
        shutil.copytree(tiny, policy)
        template = Path(trl.__file__).parent / "chat_templates" / f"{family}.jinja"
        (policy / "chat_template.jinja").write_text(template.read_text("utf-8"), "utf-8")
        monkeypatch.setattr(upstream, "parse_response", parse)
        monkeypatch.setattr(chat_turns, "parse_response", parse)
        rows = Dataset.from_list([{"prompt": [{"role": "user", "content": "What is it?"}]}] * 4)
        args = SalesGRPOConfig(**settings(tmp_path / "run", beta=0.0, max_steps=1, **own))
        rewards = [lambda completions, **_: [0.0] * len(completions)]
        trainer = SalesGRPOTrainer(str(policy), rewards, args, rows, tools=[look])
        trainers.append(trainer)
        return trainer, len(AutoTokenizer.from_pretrained(policy))

    trainers = []
    yield built
    for trainer in trainers:
        trainer.finish()


class Case:
    """One conversation, drawn by a seed: the same turns, calls and results each time that it is gone through."""

    def __init__(self, seed, vocabulary):
        self._draw, self._vocabulary = random.Random(seed), vocabulary
        self.asked, self.turns = [], []

    def look(self, word: str) -> str:
        """Looks a word up.

        Args:
            word: The word.

        Returns:
            What was found.
        """
        draw = random.Random(f"{word} {len(self.asked)}")  # calls of a turn are made at once
        if draw.random() < 0.2:
            raise ValueError(said(draw))
        return said(draw)

    def parse(self, tokenizer, ids, prefix=None, tools=None):
        message = {"role": "assistant", "content": said(self._draw)}  # what the template makes of it is never read
        if len(self.asked) < IN_ONE - 1:
            function = {"name": "look", "arguments": {"word": said(self._draw)}}
            calls = [{"type": "function", "function": function}] * self._draw.choice((1, 2))
            if self._draw.random() < 0.2:
                calls.insert(self._draw.randrange(len(calls) + 1), {"type": "strange", "name": "look"})
            message["tool_calls"] = calls
        return message

    def turn(self):
        """Any ids: broken text, marks of the template, an end in the middle."""
        ids = [self._draw.randrange(self._vocabulary) for _ in range(self._draw.randrange(1, 12))]
        self.turns.append(Turn(ids, [-self._draw.random() for _ in ids]))
        return self.turns[-1]

    def ask(self, ids):
        self.asked.append(ids)
        return self.turn()


def by_trl(trainer, prompt, prompt_ids, case):
    """TRL's own loop for one conversation, with our tools in place of its own."""
    other = copy.copy(trainer)

    def single_turn(ids, *_, **__):
        turn = case.ask(ids[0])
        return [list(turn.ids)], [list(turn.logprobs)]

    first = case.turn()
    calls, notes = ToolCalls(["look"]), ConversationNotes()

    async def look(**arguments):
        return await calls.call(trainer.tools[0], notes, arguments)

    other._generate_single_turn, other.async_loop = single_turn, trainer._hooks.tools_loop
    other._sync_tool_dicts, other._async_tool_dicts = [{}], [{"look": look}]
    message = case.parse(None, first.ids)
    return GRPOTrainer._tool_call_loop(
        other, [prompt], [prompt_ids], [list(first.ids)], [[message]], [list(first.logprobs)], None, {}
    )


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_conversation_is_what_was_sampled_and_what_trls_loop_makes_of_it(build, family):
    cases = []

    def look(word: str) -> str:
        return cases[-1].look(word)

    look.__doc__ = Case.look.__doc__
    trainer, size = build(
        family, look, lambda *arguments, **named: cases[-1].parse(*arguments, **named), max_completion_length=900
    )
    draw = random.Random(family)
    for number in range(TURNS // IN_ONE):
        room = draw.choice((900, 900, draw.randrange(20, 300)))  # some conversations end where there is none
        trainer.model.config.max_position_embeddings = draw.choice((100_000, 100_000, draw.randrange(40, 400)))
        trainer.max_completion_length = room
        trainer.__dict__.pop("_turn_access", None)
        one = tool_turns.ToolTurns(trainer._hooks, trainer._hooks.agents.foreign)
        prompt = [{"role": "user", "content": said(draw)}]
        prompt_ids = trainer._tokenize_prompts([prompt])[0][0]
        cases.append(case := Case(f"{family} {number}", size))
        talked = one.talk(0, prompt_ids, case.turn(), case.ask, ToolCalls(["look"]))
        made = talked.sequence
        # 1. the policy's tokens and their log-probs are its turns, cut where there is no room
        own = [token for token, mine in zip(made.ids, made.mask, strict=True) if mine]
        sampled = [*itertools.chain.from_iterable(turn.ids for turn in case.turns)]
        assert own == sampled[: len(own)]
        assert len(own) == len(sampled) or len(made.ids) == room
        kept = [logp for logp, mine in zip(made.logprobs, made.mask, strict=True) if mine]
        assert kept == [*itertools.chain.from_iterable(turn.logprobs for turn in case.turns)][: len(own)]
        # 2. each turn was sampled behind what is trained before it
        whole = prompt_ids + made.ids
        assert all(whole[: len(ids)] == ids for ids in case.asked)
        # 3. TRL's own loop makes the same of the same turns, calls and results
        cases.append(again := Case(f"{family} {number}", size))
        theirs = by_trl(trainer, prompt, prompt_ids, again)
        assert again.asked == case.asked
        [mask], [completion], [ids], [logprobs], count, failures, _ = theirs
        assert (made.ids, made.mask, made.logprobs) == (ids, mask, logprobs)
        assert (talked.calls, talked.failures) == (count, failures)
        assert made.messages == completion
