"""Tasks with a known truth for `benchmarks.real_model`: rows of training and held-out ones, with an answer each."""

import random
from collections.abc import Callable
from functools import partial
from typing import Any

from salesrl_trl.data.files import ARITHMETIC, DEMO_BBQ, DEMO_HALUEVAL, FILES, demo_records

Rows = list[dict[str, Any]]


def _shots(*pairs: tuple[str, str], end: str = "\n") -> str:
    """Examples for a base model. `end`: behind each, where the model then ends its answer. A single line break is the
    token at which generation stops; an empty line is another token, so that a policy has to learn to stop first."""
    return "".join(f"Question: {question}\nAnswer: {answer}{end}" for question, answer in pairs)


def _asked(shots: str, question: str, answer: str, branch: str = "all") -> dict[str, Any]:
    content = f"{shots}Question: {question}\nAnswer:"
    return {"prompt": [{"role": "user", "content": content}], "answer": answer, "branch": branch}


NAMES = {"train": ("Eva", "Tom", "Lea", "Max"), "heldout": ("Zoe", "Kim")}


def word_problems(level: int, part: str) -> Rows:
    """Sums in words, of one step or two. Those of one step end their examples with an empty line, as measured."""
    draw, rows = random.Random(part), list[dict[str, Any]]()
    shots = _shots(("Ann has 3 pens. She buys 4 more. How many pens has she?", "7"),
                   ("Bob has 9 cups. He loses 2 of them and then buys 5. How many cups has he?", "12"),
                   end="\n\n" if level == 1 else "\n")  # fmt: skip
    for _ in range(2000 if part == "train" else 64):
        name, some = draw.choice(NAMES[part]), draw.choice(("books", "balls", "apples"))
        first, second, third = draw.randint(2, 20), draw.randint(1, 15), draw.randint(1, 9)
        total, text = first + second, f"{name} has {first} {some}. A friend brings {second} more."
        if level == 2:
            third = min(third, total)
            total, text = total - third, f"{text} Then {third} of them are sold."
        rows.append(_asked(shots, f"{text} How many {some} has {name}?", str(total)))
    return rows


def dual(part: str) -> Rows:
    """BBQ's choices and HaluEval's answers, as text."""
    shots = _shots(("The dog slept. The cat ate. Who ate? (the dog, the cat, not known)", "the cat"),
                   ("我看到老师和学生。他们先走了。 谁病了？ (老师, 学生, 不知道)", "不知道"),
                   ("Blue Lake is a book of 1962. It was printed in Rome. Where was Blue Lake printed?", "Rome"),
                   ("《红河》是1970年的书，印于上海。 《红河》是哪一年的？", "1970"))  # fmt: skip
    rows = [
        _asked(shots, f"{row['context']} {row['question']} ({row['ans0']}, {row['ans1']}, {row['ans2']})",
               row[f"ans{row['label']}"], "fairness")
        for row in demo_records(f"{DEMO_BBQ}/{FILES[part]}")
    ] + [
        _asked(shots, f"{row['knowledge']} {row['question']}", row["right_answer"], "hallucination")
        for row in demo_records(f"{DEMO_HALUEVAL}/{FILES[part]}")
    ]  # fmt: skip
    random.Random(0).shuffle(rows)
    return rows


def sums(part: str) -> Rows:
    return [{**row, "branch": "all"} for row in demo_records(f"{ARITHMETIC}/{FILES[part]}")]


MOST_STEPS = 4
EACH = {"train": 64, "heldout": 36}
"""Rows of each level of `steps` and `digits`."""


def steps(part: str) -> Rows:
    """Word problems of one to four steps, as many of each: rows of strongly different difficulty, each of which a run
    of 100 steps sees several times."""
    draw, rows = random.Random(f"steps {part}"), list[dict[str, Any]]()
    shots = _shots(("Ann has 3 pens. She buys 4 more. How many pens has she?", "7"),
                   ("Bob has 9 cups. He loses 2 of them and then buys 5. How many cups has he?", "12"))  # fmt: skip
    for number in range(MOST_STEPS * EACH[part]):
        name, some = draw.choice(NAMES[part]), draw.choice(("books", "balls", "apples"))
        total = draw.randint(2, 20)
        text = f"{name} has {total} {some}."
        for _ in range(number % MOST_STEPS + 1):
            change = draw.randint(1, 15)
            sold = change <= total and draw.random() < 0.5
            total += -change if sold else change
            text += f" Then {change} of them are sold." if sold else f" A friend brings {change} more."
        rows.append(_asked(shots, f"{text} How many {some} has {name}?", str(total)))
    draw.shuffle(rows)
    return rows


def digits(part: str) -> Rows:
    """Sums of numbers of one to four digits for the built-in policy, which was trained on numbers below 50: most rows
    have no right answer in any group."""
    draw, rows = random.Random("digits"), list[dict[str, Any]]()
    for length in range(1, MOST_STEPS + 1):
        low, high, pairs = 10 ** (length - 1) * (length > 1), 10**length - 1, set[tuple[int, int]]()
        while len(pairs) < sum(EACH.values()):
            pairs.add((draw.randint(low, high), draw.randint(low, high)))
        known = sorted(pairs)
        draw.shuffle(known)
        for one, other in known[: EACH["train"]] if part == "train" else known[EACH["train"] :]:
            prompt = [{"role": "user", "content": f"What is {one} + {other}?"}]
            rows.append({"prompt": prompt, "answer": str(one + other), "branch": "all"})
    draw.shuffle(rows)
    return rows


TASKS: dict[str, Callable[[str], Rows]] = {
    "words": partial(word_problems, 1),
    "words_2": partial(word_problems, 2),
    "dual": dual,
    "sums": sums,
    "steps": steps,
    "digits": digits,
}
