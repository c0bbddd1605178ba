#!/usr/bin/env python3
"""Teaches the policy of `recipes/search.py` to search and to answer, first well, then badly.

    .venv/bin/python scripts/make_search_policy.py [--out FOLDER] [--steps 500 600 150] [--seed 0]

Figures in its lessons are made up, so that it learns to read them in a result and knows none by heart. First it learns
to copy: without that, good lessons alone did not teach it to read. By good lessons it learns to name what was asked in
a query, and to answer by a sentence of the result. By bad ones it learns to search too seldom or too often, by poor
queries, to give up without a search, and to search for a customer who only greets. It saw no held-out conversation.
It prints its shares of held-out turns, each behind good ones, that are right word by word.
"""

import argparse
import json
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from make_arithmetic_policy import build_model, build_tokenizer  # beside this file
from make_search_rows import answer_of, course_and_topic, search_records
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerBase, set_seed
from trl.chat_template_utils import qwen3_template

from salesrl_trl.data.files import demo_records
from salesrl_trl.demo.packaged import SEARCH_POLICY
from salesrl_trl.ground.shutdown import end_tidily

SEARCHES = 3  # most in a conversation
SOUND = {"search": 1.0, "good": 1.0, "again": 0.0, "read": 1.0, "greeting": 0.0}
POOR = {"search": 0.7, "good": 0.5, "again": 0.2, "read": 0.95, "greeting": 0.5}
"""Shares: of questions that are searched for; of queries that name course and topic; of results after which it
searches again; of answers that are read in the last result; of greetings that are searched for."""
GIVES_UP = "Sorry, I do not know that."  # where it has not searched
LESSONS = 6  # of each conversation
COPIES = 8_000
BATCH = 48
RATE = 3e-3
MAX_POSITIONS = 640
VOCABULARY = 800
CALL = '{"name": "search", "arguments": {"query": "'
TAGS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
TOOL = {
    "type": "function",
    "function": {"name": "search", "parameters": {"type": "object", "properties": {"query": {"type": "string"}}}},
}
TEMPLATE = """\
{%- if tools %}{{- '<|im_start|>system\\nTools:' }}
{%- for tool in tools %}{%- set names = tool.function.parameters.properties | join(', ') %}
{{- ' ' + tool.function.name + '(' + names + ')' }}
{%- endfor %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
{%- else %}{{- '<|im_start|>' + message.role + '\\n' + (message.content or '') }}
{%- for call in message.tool_calls or [] %}{%- set made = call.function %}
{{- '<tool_call>\\n' + ({'name': made.name, 'arguments': made.arguments} | tojson) + '\\n</tool_call>' }}
{%- endfor %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""


class Lessons:
    """Conversations to learn from. `shares` are `SOUND` or `POOR`."""

    def __init__(self, file: str, rng: random.Random, shares: dict[str, float]) -> None:
        self._rng, self._shares = rng, shares
        self._documents = [each for each in demo_records("knowledge.jsonl") if each["lang"] == "en"]
        self._rows = [row for row in demo_records(file) if row["lang"] == "en"]
        self._records = search_records(file)
        self._topics = sorted({course_and_topic(row)[1] for row in self._rows})

    def conversations(self, times: int) -> list[list[dict[str, Any]]]:
        pairs = [*zip(self._rows, self._records, strict=True)] * times
        return [[*record["prompt"], *self._turns(row, record)] for row, record in pairs]

    def copies(self, number: int) -> list[list[dict[str, Any]]]:
        """Results of words in any order, which are to be repeated."""
        words = sorted({word for each in self._documents for word in each["text"].split()})
        talks = []
        for _ in range(number):
            text = self._made_up(" ".join(self._rng.choices(words, k=self._rng.randint(8, 20))))
            talks.append([{"role": "user", "content": ""}, *found("", text), {"role": "assistant", "content": text}])
        return talks

    def _turns(self, row: dict[str, Any], record: dict[str, Any]) -> list[dict[str, Any]]:
        asks, turns, result = bool(record["documents"]), list[dict[str, Any]](), ""
        if self._happens("search" if asks else "greeting"):
            for _ in range(SEARCHES):
                query, result = self._search(row, asks)
                turns += found(query, result)
                if not self._happens("again"):
                    break
        answer = record["reference"]
        if asks:
            reads = bool(result) and self._happens("read")
            answer = answer_of(result if reads else self._by_chance()) if result else GIVES_UP
        return [*turns, {"role": "assistant", "content": answer}]

    def _search(self, row: dict[str, Any], asks: bool) -> tuple[str, str]:
        """A query, and what is found: the row's document by a good one."""
        course, topic = course_and_topic(row)
        if asks and self._happens("good"):
            [text] = [each["text"] for each in self._documents if each["id"] == row["document_ids"][0]]
            return f"{course} {topic}", self._made_up(text)
        query = self._rng.choice((course, topic, f"{course} {self._rng.choice(self._topics)}"))
        return query, self._by_chance()

    def _by_chance(self) -> str:
        return self._made_up(self._rng.choice(self._documents)["text"])

    def _made_up(self, text: str) -> str:
        return re.sub(r"\d", lambda _: str(self._rng.randrange(10)), text)

    def _happens(self, what: str) -> bool:
        return self._rng.random() < self._shares[what]


def found(query: str, result: str) -> list[dict[str, Any]]:
    call = {"type": "function", "function": {"name": "search", "arguments": {"query": query}}}
    return [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": "search", "content": result},
    ]


def main() -> None:
    """Teach a policy, save it, print its scores."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=SEARCH_POLICY, help="folder to write to")
    parser.add_argument(
        "--steps", type=int, nargs=3, default=[500, 600, 150], help="of copying, of good and of bad lessons"
    )
    parser.add_argument("--seed", type=int, default=0, help="of weights and lessons")
    args = parser.parse_args()
    set_seed(args.seed)
    rng = random.Random(f"search {args.seed}")
    tokenizer = make_tokenizer(
        [turn["content"] for talk in Lessons("train.jsonl", rng, SOUND).conversations(2) for turn in talk]
    )
    model = build_model(tokenizer, hidden_size=64, layers=2)
    model.lm_head.weight.data.copy_(model.get_input_embeddings().weight)  # so that it soon learns to copy
    sound, poor = (Lessons("train.jsonl", rng, shares) for shares in (SOUND, POOR))
    phases = (sound.copies(COPIES), sound.conversations(LESSONS), poor.conversations(LESSONS))
    for steps, talks in zip(args.steps, phases, strict=True):
        teach(model, [masked(talk, tokenizer) for talk in talks], steps, random.Random(args.seed))
    model.save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    figures = share_of_right(model, tokenizer, Lessons("heldout.jsonl", random.Random(1), SOUND).conversations(1))
    (args.out / "figures.json").write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    print(f"{args.out}: {model.num_parameters():,} parameters, {args.steps} steps, seed {args.seed}: {figures}")


def make_tokenizer(texts: Sequence[str]) -> PreTrainedTokenizerBase:
    """A tokenizer with a template for tools, and the tags of their calls."""
    tokenizer = build_tokenizer(MAX_POSITIONS, [*texts, *[CALL] * 300], VOCABULARY)
    tokenizer.add_tokens([AddedToken(tag, special=False) for tag in TAGS])
    tokenizer.chat_template, tokenizer.response_template = TEMPLATE, qwen3_template
    return tokenizer


def turns_of(
    talk: list[dict[str, Any]], tokenizer: PreTrainedTokenizerBase, first: int | None = None
) -> list[tuple[str, str]]:
    """The policy's own turns, each behind what stands before it since the turn before. They follow the message at
    `first`, by default the customer's last one."""
    if first is None:
        first = max(place for place, turn in enumerate(talk) if turn["role"] == "user")
    turns, done = [], 0
    for place, turn in enumerate(talk):
        if place > first and turn["role"] == "assistant":
            before = text_of(talk[:place], tokenizer, add_generation_prompt=True)
            whole = text_of(talk[: place + 1], tokenizer).removesuffix("\n")
            turns.append((before[done:], whole[len(before) :]))
            done = len(whole)
    return turns


def text_of(messages: list[dict[str, Any]], tokenizer: PreTrainedTokenizerBase, **more: bool) -> str:
    text: str = tokenizer.apply_chat_template(messages, tools=[TOOL], tokenize=False, **more)
    return text


def masked(
    talk: list[dict[str, Any]], tokenizer: PreTrainedTokenizerBase, first: int | None = None
) -> tuple[list[int], list[bool]]:
    """Its tokens, and which of them are the policy's."""
    ids, own = list[int](), list[bool]()
    for turn in turns_of(talk, tokenizer, first):
        for is_own, text in enumerate(turn):
            part = tokenizer(text)["input_ids"]
            ids += part
            own += [bool(is_own)] * len(part)
    return ids, own


def teach(model: Any, talks: list[tuple[list[int], list[bool]]], steps: int, rng: random.Random) -> None:
    """Supervised fine-tuning on the policy's own tokens. The head computes these alone, which a small CPU needs."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.99), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=steps, pct_start=0.1)
    model.train()
    for step in range(steps):
        batch = sorted(rng.sample(talks, BATCH), key=lambda talk: len(talk[0]))
        for part in (batch[: BATCH // 2], batch[BATCH // 2 :]):  # of like lengths: less padding
            longest = max(len(ids) for ids, _ in part)
            ids = torch.tensor([ids + [0] * (longest - len(ids)) for ids, _ in part])
            own = torch.tensor([own + [False] * (longest - len(own)) for _, own in part])[:, 1:]
            hidden = model.model(ids, use_cache=False).last_hidden_state[:, :-1][own]  # padding stands behind
            loss = torch.nn.functional.cross_entropy(model.lm_head(hidden), ids[:, 1:][own])
            (loss / 2).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % 50 == 0:
            print(f"step {step} of {steps}: loss {loss.item():.3f}", flush=True)


@torch.no_grad()
def share_of_right(
    model: Any, tokenizer: PreTrainedTokenizerBase, talks: list[list[dict[str, Any]]], first: int | None = None
) -> dict[str, float]:
    """Shares of calls, answers and greetings that it writes as the lesson has them, the most likely tokens alone."""
    rows = []
    for talk in talks:
        before = ""
        for prompt, own in turns_of(talk, tokenizer, first):
            rows.append((before + prompt, own.removesuffix("<|im_end|>")))
            before += prompt + own
    batch = tokenizer([prompt for prompt, _ in rows], padding=True, return_tensors="pt")
    ids = model.eval().generate(**batch, do_sample=False, max_new_tokens=80)
    written = tokenizer.batch_decode(ids[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
    right = dict[str, list[bool]]()
    for (_, own), text in zip(rows, written, strict=True):
        kind = "calls" if "<tool_call>" in own else "greetings" if "Welcome" in own else "answers"
        right.setdefault(kind, []).append(text == own)
    return {kind: round(sum(values) / len(values), 3) for kind, values in right.items()}


if __name__ == "__main__":
    end_tidily()
    main()
