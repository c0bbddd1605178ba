"""The packaged rows of `recipes/own.py`: sums of two numbers, for a reward function that checks the answer.

They show what rows of a task of one's own look like: `prompt`, and a column that the reward function takes. `sources`
makes rows of them.
"""

import hashlib
import itertools

from salesrl_trl.data.files import Record

ARITHMETIC = "arithmetic"  # the name, as a dataset
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
