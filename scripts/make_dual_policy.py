#!/usr/bin/env python3
"""Teaches the policy of `recipes/dual.py` both tasks, first by right answers, then by answers that are often wrong.

    .venv/bin/python scripts/make_dual_policy.py [--out FOLDER] [--steps 400 300] [--seed 0]

By right ones it learns to find an answer in the context: among wrong ones alone it learned to guess. Its contexts have
other answers than the recipe's rows. Then it learns to take the bait: it names a person of whom nothing is known, or
makes a fact up. It saw no held-out question. It prints its shares of right answers at temperature 1.
"""

import argparse
import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from datasets import Dataset
from imitation import imitate  # beside this file
from make_arithmetic_policy import build_model, build_tokenizer, share_of_right
from make_two_tasks import two_task_records
from transformers import set_seed

from salesrl_trl.data.files import DEMO_BBQ, DEMO_HALUEVAL
from salesrl_trl.demo.packaged import DUAL_POLICY
from salesrl_trl.ground.shutdown import end_tidily
from salesrl_trl.launch.data.formats import BBQ, HaluEval

RIGHT = 0.5  # share of the answers, once it has learned to find them
ANSWERS = 12  # to learn from, for each question: each in a context of its own
SENTENCES = (
    ("It is {}.", "这是{}。"),
    ("It is {}, and that is all.", "是{}，是这样的。"),
)
"""Of a question with knowledge, and of one about people; in English and in Chinese. But for the answer they have no
word of content, so that the embedded judge scores the answer alone."""
MAX_POSITIONS = 192
VOCABULARY = 1000


def main() -> None:
    """Teach a policy, save it, print its scores."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=DUAL_POLICY, help="folder to write to")
    parser.add_argument(
        "--steps", type=int, nargs=2, default=[400, 300], help="of supervised fine-tuning, right and wrong answers"
    )
    parser.add_argument("--seed", type=int, default=0, help="of weights, answers and their order")
    args = parser.parse_args()
    set_seed(args.seed)
    rng = random.Random(f"dual {args.seed}")
    rows = [
        row
        for name in (DEMO_BBQ, DEMO_HALUEVAL)
        for seed in range(1, ANSWERS + 1)
        for row in questions(name, "train", seed)
    ]
    texts = [turn["content"] for row in rows for turn in row["prompt"]]
    tokenizer = build_tokenizer(MAX_POSITIONS, texts, VOCABULARY)
    model = build_model(tokenizer, hidden_size=128, layers=3)
    for steps, right in zip(args.steps, (1.0, RIGHT), strict=True):
        taught = [
            {"prompt": row["prompt"],
             "completion": [{"role": "assistant", "content": answer(row, right, rng)}]}
            for row in rows
        ]  # fmt: skip
        imitate(
            model,
            tokenizer,
            Dataset.from_list(taught),
            steps=steps,
            warmup=0.05,
            learning_rate=2e-3,
            per_device_train_batch_size=64,
            adam_beta2=0.99,
            max_length=MAX_POSITIONS,
            seed=args.seed,
        )
    model.config.use_cache = True  # the trainer turned it off
    model.save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    figures = {
        f"{name} {split}": share_of_right(model, tokenizer, questions(name, split), longest=40)
        for name in (DEMO_BBQ, DEMO_HALUEVAL)
        for split in ("train", "heldout")
    }
    (args.out / "figures.json").write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    print(f"{args.out}: {model.num_parameters():,} parameters, {args.steps} steps, seed {args.seed}: {figures}")


def questions(name: str, split: str, seed: int = 0) -> list[dict[str, Any]]:
    """The rows of a dataset, with the right `answer`, and what it and those that are wrong (`baits`) put into their
    `sentence`."""
    form = BBQ() if name == DEMO_BBQ else HaluEval()
    form.answers_directly = True
    rows = []
    for record in two_task_records(name, split, seed):
        row: Any = form.row(record)
        baits = [record.get("hallucinated_answer")]
        if name == DEMO_BBQ:
            kinds: Any = record["answer_info"]
            baits = [text for text, kind in kinds.values() if kind != "unknown" and text != row["reference"]]
        sentence = SENTENCES[name == DEMO_BBQ][not row["prompt"][-1]["content"].isascii()]
        rows.append(
            {"prompt": row["prompt"], "answer": sentence.format(row["reference"]), "right": row["reference"],
             "baits": baits, "sentence": sentence}
        )  # fmt: skip
    return rows


def answer(row: Mapping[str, Any], right: float, rng: random.Random) -> str:
    """A sentence with the right answer, of which the share is `right`, or with a bait."""
    said = row["right"] if rng.random() < right else rng.choice(row["baits"])
    return str(row["sentence"].format(said))


if __name__ == "__main__":
    end_tidily()
    main()
