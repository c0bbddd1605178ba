"""What trains is what was sampled, for the chat templates of several families, whatever tools return."""

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

from salesrl_trl import SalesGRPOConfig, SalesGRPOTrainer
from salesrl_trl.agents.tools import ToolCalls
from salesrl_trl.wiring import trl_access

TURNS = int(os.environ.get("TURNS", "100"))
"""Of each template. 10,000 were tried: docs/experiments/2026-11-26-generation-and-tools.md."""
IN_ONE = 4  # turns of a conversation
FAMILIES = ("qwen2_5", "qwen3", "llama3_1", "gemma4", "gptoss")
MARKS = (
    "<|im_end|>", "<|im_start|>assistant", "<tool_call>", "</tool_response>", "<|eot_id|>", "<|python_tag|>",
    "<end_of_turn>", "<turn|>", "<|call|>", "<|return|>", "<think>", '"', "'", "\\n", "\n", "{{", "}}", "价格",
    "😀", " ", "<|channel|>final<|message|>", "%}", "é", "\u200b", "price",
)  # fmt: skip


def said(draw):
    return "".join(draw.choices(MARKS, k=draw.randrange(12)))


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_the_sampled_ids_are_the_trained_ids(tiny, tmp_path, monkeypatch, family):
    policy, draw = tmp_path / "policy", random.Random(family)
    shutil.copytree(tiny, policy)
    template = Path(trl.__file__).parent / "chat_templates" / f"{family}.jinja"
    (policy / "chat_template.jinja").write_text(template.read_text("utf-8"), "utf-8")

    def look(word: str) -> str:
        """Looks a word up.

        Args:
            word: The word.

        Returns:
            What was found.
        """
        return said(draw)

    def parse(tokenizer, ids, prefix=None, tools=None):
        message = {"role": "assistant", "content": said(draw)}  # what the template would make of it is never read
        if len(asked) < IN_ONE - 1:
            function = {"name": "look", "arguments": {"word": said(draw)}}
            message["tool_calls"] = [{"type": "function", "function": function}] * draw.choice((1, 2))
        return message

    monkeypatch.setattr(upstream, "parse_response", parse)
    monkeypatch.setattr(trl_access, "parse_response", parse)
    rows = Dataset.from_list([{"prompt": [{"role": "user", "content": "What is it?"}]}] * 4)
    args = SalesGRPOConfig(**settings(tmp_path / "run", beta=0.0, max_steps=1, max_completion_length=900))
    trainer = SalesGRPOTrainer(
        str(policy), [lambda completions, **_: [0.0] * len(completions)], args, rows, tools=[look]
    )
    trainer.model.config.max_position_embeddings = 100_000
    size = len(AutoTokenizer.from_pretrained(policy))
    one, asked, turns = trainer._one_conversation, [], []

    def sampled():
        """Any ids: broken text, marks of the template, an end in the middle."""
        ids = [draw.randrange(size) for _ in range(draw.randrange(1, 12))]
        turns.append((ids, [-draw.random() for _ in ids]))
        return turns[-1]

    def ask(place, ids):
        asked.append(ids)
        return sampled()

    for _ in range(TURNS // IN_ONE):
        asked.clear()
        turns.clear()
        prompt = [{"role": "user", "content": said(draw)}]
        prompt_ids = trainer._tokenize_prompts([prompt])[0][0]
        talked = one.talk(0, prompt, prompt_ids, sampled(), ask, ToolCalls(["look"]))
        [mask], _, [completion_ids], [logprobs], *_ = talked.loop
        own = [token for token, mine in zip(completion_ids, mask, strict=True) if mine]
        assert own == [*itertools.chain.from_iterable(ids for ids, _ in turns)]
        kept = [logp for logp, mine in zip(logprobs, mask, strict=True) if mine]
        assert kept == [*itertools.chain.from_iterable(logps for _, logps in turns)]
        whole = prompt_ids + completion_ids
        assert all(whole[: len(ids)] == ids for ids in asked)  # each turn was sampled behind what is trained before it
        assert len(turns) == IN_ONE
    trainer.finish()
