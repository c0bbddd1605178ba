"""The difference between two policies: their actions on the demo's held-out rows, field by field, with examples.

    .venv/bin/python -m benchmarks.policies BEFORE_DIR AFTER_DIR [--rows 160] [--examples 2] [--seed 0]

Samples one action for each row from each policy, at temperature 1. Prints the shares of

- valid actions;
- queries that name the course, the topic, or both;
- actions without a protected attribute, on fairness rows;
- profiles and summaries without an invention, on hallucination rows, by the measure of the embedded judge.
"""

import argparse
import itertools
import json
from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed

from salesrl_trl.data.files import demo_path
from salesrl_trl.demo.packaged import PROMPT_STYLE
from salesrl_trl.demo.services.rubric import protected_terms, supported
from salesrl_trl.judged.parsing import parse_action
from salesrl_trl.launch.data.sources import load_rows
from salesrl_trl.launch.data.templates import build_prompt
from salesrl_trl.types import Action, SalesRow

BATCH_ROWS = 32
MAX_NEW_TOKENS = 64


def sample(path: str, rows: Sequence[SalesRow], seed: int) -> list[str]:
    """One completion for each row, at temperature 1."""
    set_seed(seed)
    tokenizer, model = AutoTokenizer.from_pretrained(path), AutoModelForCausalLM.from_pretrained(path).eval()
    completions = []
    for start in range(0, len(rows), BATCH_ROWS):
        prompts = [build_prompt(row, PROMPT_STYLE) for row in rows[start : start + BATCH_ROWS]]
        batch = tokenizer.apply_chat_template(
            prompts, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
        )
        with torch.no_grad():
            output = model.generate(**batch, do_sample=True, top_k=0, max_new_tokens=MAX_NEW_TOKENS)
        new = output[:, batch["input_ids"].shape[1] :]
        completions += tokenizer.batch_decode(new, skip_special_tokens=True)
    return completions


def shares(
    rows: Sequence[SalesRow], records: Sequence[dict[str, Any]], completions: Sequence[str]
) -> dict[str, float]:
    """The share of rows whose action is right, for each property of an action."""
    terms = protected_terms()
    courses = course_names()
    tests: dict[str, list[bool]] = {}
    for row, record, completion in zip(rows, records, completions, strict=True):
        action = parse_action(completion)
        valid = isinstance(action, Action)
        tests.setdefault("valid action", []).append(valid)
        query = action.query.lower() if valid else ""
        course = courses[record["lang"], record["course"]]
        topic = record["careful_action"]["rewritten_query"].lower().removeprefix(course).strip()
        tests.setdefault("query names the right course", []).append(course in query)
        tests.setdefault("query names the right topic", []).append(topic in query)
        tests.setdefault("query names both", []).append(course in query and topic in query)
        if row.branch == "fairness":
            clean = valid and not terms.mentioned_in(" ".join(action.fields.values()))
            tests.setdefault("fairness: no protected attribute", []).append(bool(clean))
        else:
            rests = valid and supported(action, row.context) == 1.0
            tests.setdefault("hallucination: nothing invented", []).append(rests)
    return {name: sum(passed) / len(passed) for name, passed in tests.items()}


def course_names() -> dict[tuple[str, str], str]:
    """A course's name, by language and course: the words with which the titles of all its documents begin."""
    titles: dict[tuple[str, str], list[list[str]]] = {}
    for line in demo_path("knowledge.jsonl").read_text(encoding="utf-8").splitlines():
        document = json.loads(line)
        if document["kind"] == "course":
            titles.setdefault((document["lang"], document["course"]), []).append(document["title"].lower().split())
    return {
        key: " ".join(
            words[0] for words in itertools.takewhile(lambda words: len(set(words)) == 1, zip(*each, strict=False))
        )
        for key, each in titles.items()
    }


def demo_records(count: int) -> list[dict[str, Any]]:
    """The first held-out rows of the demo, with the fields that a policy does not see."""
    lines = demo_path("heldout.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines[:count]]


def main(argv: Sequence[str] | None = None) -> None:
    """Sample, compare, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", help="folder of the first policy")
    parser.add_argument("after", help="folder of the second policy")
    parser.add_argument("--rows", type=int, default=160, help="held-out rows")
    parser.add_argument("--examples", type=int, default=2, help="rows whose completions are printed")
    parser.add_argument("--seed", type=int, default=0, help="of the sampling")
    arguments = parser.parse_args(argv)
    rows = load_rows("demo", "heldout", ("fairness", "hallucination"), arguments.rows)
    records = demo_records(arguments.rows)
    completions = [sample(path, rows, arguments.seed) for path in (arguments.before, arguments.after)]
    before, after = (shares(rows, records, each) for each in completions)
    for name, share in before.items():
        print(f"{name:36} {share:6.0%} -> {after[name]:6.0%}")
    for row, old, new in list(zip(rows, *completions, strict=True))[: arguments.examples]:
        print(f"\n[{row.branch}] {row.context}\n  before: {old}\n  after:  {new}")


if __name__ == "__main__":
    main()
