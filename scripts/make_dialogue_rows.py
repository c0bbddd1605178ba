#!/usr/bin/env python3
"""Writes the built-in rows of `recipes/dialogue.py`: the demo's customers in English, with a persona each.

    .venv/bin/python scripts/make_dialogue_rows.py [--out FOLDER]

They are the dataset `demo_dialogue`. A customer names a course and a budget, then raises two objections: a question
that a document of the demo's catalogue answers, and a worry that one of the seller's arguments answers.
"""

import random
import re

from make_search_rows import answer_of, course_and_topic, write  # beside this file

from salesrl_trl.data.files import DEMO_DIALOGUE, Record, demo_records
from salesrl_trl.ground.shutdown import end_tidily

BUDGETS = {
    "I have to watch my money.": (0.72, 0.79),
    "The price should be fair.": (0.82, 0.89),
    "The price is not the point.": (0.92, 0.99),
}
"""What a customer says of the budget, and the highest acceptable share of the list price."""
WORRIES = {
    "I fear that I have no time.": "online",
    "I fear that I will not like it.": "trial",
    "I fear that I must stop early.": "refund",
}
"""What a customer fears, and the word by which an argument answers it."""
MOODS = {"friendly": "", "hurried": "I am in a hurry."}


def dialogue_records(file: str) -> list[Record]:
    """The records of one of the demo's files: those that ask something after their first message."""
    rng = random.Random(f"dialogue {file}")
    documents = {document["id"]: document["text"] for document in demo_records("knowledge.jsonl")}
    rows = [row for row in demo_records(file) if row["lang"] == "en" and len(row["conversation"]) > 1]
    records = [_record(row, documents, rng) for row in rows]
    return [record for record in records if record["persona"]["objections"][0]["facts"]]


def facts_of(document: str) -> list[str]:
    """The figures of a document's answer, without those of one digit, which a guess would hit."""
    return [each for each in re.findall(r"\d[\d.:-]*\d", answer_of(document)) if each.strip(".:-")]


def _record(row: Record, documents: dict[str, str], rng: random.Random) -> Record:
    course, _ = course_and_topic(row)
    price = re.search(r"(\d+) yuan", documents[f"en-{row['course']}-price"])
    assert price is not None
    list_price, budget, worry = float(price[1]), rng.choice([*BUDGETS]), rng.choice([*WORRIES])
    mood, [document] = rng.choice([*MOODS]), row["document_ids"]
    said = [row["conversation"][0]["content"], budget, MOODS[mood]]
    return {
        "id": row["id"],
        "branch": row["branch"],
        "prompt": [{"role": "user", "content": " ".join(filter(None, said))}],
        "documents": [documents[document]],
        "persona": {
            "needs": course, "budget": budget, "mood": mood, "list_price": list_price,
            "reservation": round(list_price * rng.uniform(*BUDGETS[budget])),
            "protected": row["protected_attributes"],
            "objections": [
                {"says": row["conversation"][-1]["content"], "facts": facts_of(documents[document])},
                {"says": worry, "facts": [WORRIES[worry]]},
            ],
        },
    }  # fmt: skip


if __name__ == "__main__":
    end_tidily()
    write(__doc__, DEMO_DIALOGUE, dialogue_records)
