#!/usr/bin/env python3
"""Teaches the built-in policy of `recipes/dialogue.py` on a CPU, in a few minutes.

    .venv/bin/python scripts/make_dialogue_policy.py [--out FOLDER] [--steps N]

It continues the policy of `recipes/search.py`, which reads numbers in results of searches, with conversations of a
seller that follows `SHARES` with the rule-based customer. So it offers any discount, mentions what it should not,
often answers without a search and uses any argument: what to do is left to the recipe.
"""

import argparse
import asyncio
import json
import random
import re
from pathlib import Path
from typing import Any

from make_dialogue_rows import WORRIES, dialogue_records, facts_of  # beside this file
from make_search_policy import GIVES_UP, found, masked, share_of_right, teach
from make_search_rows import answer_of, course_and_topic
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed

from salesrl_trl.agents.customer import Customer
from salesrl_trl.data.files import Record, demo_records
from salesrl_trl.demo.packaged import DIALOGUE_POLICY, SEARCH_POLICY
from salesrl_trl.ground.shutdown import end_tidily

SHARES = {"protected": 0.35, "search": 0.6, "good": 0.7, "again": 0.1, "read": 0.95}
"""Shares: of offers to customers with a protected attribute that mention it; of questions that are searched for; of
queries that name course and topic; of results after which it searches again; of answers that are read in a result."""
DISCOUNTS = (10, 20, 30)
ARGUMENTS = {
    "online": "You can take all lessons online.",
    "trial": "You can take a trial lesson first.",
    "refund": "You can get a refund of the rest.",
}
LESSONS = 6  # of each customer
MOST_TOKENS = 340  # of a lesson; longer ones cost the most and teach nothing else
MAX_POSITIONS = 1024


class Seller:
    """Conversations to learn from."""

    def __init__(self, file: str, rng: random.Random) -> None:
        self._rng = rng
        self._english = [each["text"] for each in demo_records("knowledge.jsonl") if each["lang"] == "en"]
        self._records = dialogue_records(file)
        self._rows = {row["id"]: row for row in demo_records(file)}

    def conversations(self, times: int) -> list[list[dict[str, Any]]]:
        return [self._talk(record) for record in self._records * times]

    def _talk(self, record: Record) -> list[dict[str, Any]]:
        record = self._made_up(record)
        customer, talk, persona = Customer(), list[dict[str, Any]](record["prompt"]), record["persona"]
        says, raised = [each["says"] for each in persona["objections"]], -1
        for turn in range(customer.max_turns):
            said = talk[-1]["content"]
            raised = says.index(said) if turn and said in says else raised
            if raised < 0 or said == "That is too much for me.":
                talk.append(_says(self._offer(persona)))
            elif raised == 0:
                talk += self._answer(record)
            else:
                talk.append(_says(ARGUMENTS[self._rng.choice([*WORRIES.values()])]))
            reply = asyncio.run(customer.reply(record, talk))
            if reply.outcome is not None:
                break
            talk.append({"role": "user", "content": reply.text})
        return talk if talk[-1]["role"] == "assistant" else talk[:-1]

    def _made_up(self, record: Record) -> Record:
        """Other numbers in the document, so that the policy knows none by heart."""
        document = re.sub(r"\d", lambda _: str(self._rng.randrange(10)), record["documents"][0])
        question, worry = record["persona"]["objections"]
        persona = record["persona"] | {"objections": [question | {"facts": facts_of(document)}, worry]}
        return record | {"documents": [document], "persona": persona}

    def _offer(self, persona: dict[str, Any]) -> str:
        offer = f"I can offer you {persona['needs']} at {self._rng.choice(DISCOUNTS)} percent off."
        if persona["protected"] and self._happens("protected"):
            return f"As you are {persona['protected'][0]}: {offer}"
        return offer

    def _answer(self, record: Record) -> list[dict[str, Any]]:
        row, turns, result = self._rows[record["id"]], list[dict[str, Any]](), ""
        course, topic = course_and_topic(row)
        while self._happens("search" if not turns else "again") and len(turns) < 6:
            is_good = self._happens("good")
            query = f"{course} {topic}" if is_good else self._rng.choice((course, topic))
            result = record["documents"][0] if is_good else self._rng.choice(self._english)
            turns += found(query, result)
        if not result:
            return [_says(GIVES_UP)]
        return [*turns, _says(answer_of(result if self._happens("read") else self._rng.choice(self._english)))]

    def _happens(self, what: str) -> bool:
        return self._rng.random() < SHARES[what]


def _says(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def main() -> None:
    """Teach a policy, save it, print its scores."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=DIALOGUE_POLICY, help="folder to write to")
    parser.add_argument("--steps", type=int, default=220, help="of lessons")
    parser.add_argument("--seed", type=int, default=0, help="of the lessons")
    args = parser.parse_args()
    set_seed(args.seed)
    tokenizer = AutoTokenizer.from_pretrained(SEARCH_POLICY, model_max_length=MAX_POSITIONS)
    model = AutoModelForCausalLM.from_pretrained(SEARCH_POLICY, max_position_embeddings=MAX_POSITIONS)
    talks = Seller("train.jsonl", random.Random(f"dialogue {args.seed}")).conversations(LESSONS)
    lessons = [lesson for talk in talks if len((lesson := masked(talk, tokenizer, 0))[0]) <= MOST_TOKENS]
    teach(model, lessons, args.steps, random.Random(args.seed))
    model.save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    figures = share_of_right(model, tokenizer, Seller("heldout.jsonl", random.Random(1)).conversations(1), 0)
    (args.out / "figures.json").write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    print(f"{args.out}: {model.num_parameters():,} parameters, {args.steps} steps, seed {args.seed}: {figures}")


if __name__ == "__main__":
    end_tidily()
    main()
