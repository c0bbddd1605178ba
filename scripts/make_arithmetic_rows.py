#!/usr/bin/env python3
"""Writes the built-in rows of `recipes/own.py`: sums of two numbers, for a reward function that checks the answer.

    .venv/bin/python scripts/make_arithmetic_rows.py [--out FOLDER]

They are the dataset `arithmetic`, and show what rows of a task of one's own look like: `prompt`, and a column that the
reward function takes.
"""

import argparse
import hashlib
import itertools
import json
from pathlib import Path

from salesrl_trl.data.files import ARITHMETIC, FILES, Record, demo_path
from salesrl_trl.ground.shutdown import end_tidily

LARGEST = 49  # of a number that is added
HELD_OUT = 20  # one pair in so many


def arithmetic_records(split: str) -> list[Record]:
    """The records of `train` or `heldout`: a question, and its answer as a text. A pair is in one of them."""
    numbers = range(LARGEST + 1)
    return [
        {"id": f"{a}+{b}", "prompt": [{"role": "user", "content": f"What is {a} + {b}?"}], "answer": str(a + b)}
        for a, b in itertools.product(numbers, numbers)
        if (hashlib.sha256(f"{a}+{b}".encode()).digest()[0] % HELD_OUT == 0) == (split == "heldout")
    ]


def main() -> None:
    """Write the dataset, a file for each split."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=demo_path(ARITHMETIC), help="folder to write to")
    out: Path = parser.parse_args().out
    out.mkdir(exist_ok=True)
    for split, file in FILES.items():
        lines = [json.dumps(record) + "\n" for record in arithmetic_records(split)]
        (out / file).write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    end_tidily()
    main()
