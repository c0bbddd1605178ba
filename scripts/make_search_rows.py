#!/usr/bin/env python3
"""Writes the built-in rows of `recipes/search.py`: questions of the demo's customers in English, and greetings.

    .venv/bin/python scripts/make_search_rows.py [--out FOLDER]

They are the dataset `demo_search`. A question needs its document of the demo's catalogue. A greeting needs none. The
policy answers itself, and may search before (`agents.tools.Search`).
"""

import argparse
import json
import re
from collections.abc import Callable
from pathlib import Path

from salesrl_trl.data.files import DEMO_SEARCH, FILES, Record, demo_path, demo_records
from salesrl_trl.ground.shutdown import end_tidily

TOPIC_WORDS = {"job": "job help", "trial": "trial lesson"}  # in queries. Other topics are one word, their name
GREETINGS = 3  # every so many-th row that can be one is a greeting: its first message, which asks nothing yet


def search_records(file: str) -> list[Record]:
    """The records of one of the demo's files: messages, the answer that is known to be good (`reference`), and the
    text of the document that has it, if the customer asked something."""
    texts = {document["id"]: document["text"] for document in demo_records("knowledge.jsonl")}
    rows = [row for row in demo_records(file) if row["lang"] == "en"]
    return [_greeting(row) if _greets(place, row) else _question(row, texts) for place, row in enumerate(rows)]


def course_and_topic(row: Record) -> tuple[str, str]:
    """What a good query names."""
    query: str = row["careful_action"]["rewritten_query"]
    topic: str = row["topic"]
    topic = TOPIC_WORDS.get(topic, topic)
    return query.removesuffix(topic).strip(), topic


def answer_of(document: str) -> str:
    """The first sentence of a document with a number in it, or its first one."""
    sentences = re.split(r"(?<=[.?!]) ", document)
    return next((sentence for sentence in sentences if re.search(r"\d", sentence)), sentences[0])


def greeting_of(course: str) -> str:
    """What is answered to a customer who has named a course and asked nothing yet."""
    return f"Welcome! What would you like to know about {course}?"


def _greets(place: int, row: Record) -> bool:
    return place % GREETINGS == 0 and len(row["conversation"]) > 1


def _greeting(row: Record) -> Record:
    course, _ = course_and_topic(row)
    return _record(row, row["conversation"][:1], greeting_of(course), [])


def _question(row: Record, texts: dict[str, str]) -> Record:
    [document] = row["document_ids"]
    return _record(row, row["conversation"], answer_of(texts[document]), [texts[document]])


def _record(row: Record, turns: list[dict[str, str]], reference: str, documents: list[str]) -> Record:
    roles = {"customer": "user", "seller": "assistant"}
    prompt = [{"role": roles[turn["role"]], "content": turn["content"]} for turn in turns]
    good = " ".join(course_and_topic(row)) if documents else ""
    return {"id": row["id"], "prompt": prompt, "reference": reference, "documents": documents, "query": good}


def write(description: str | None, dataset: str, records_of: Callable[[str], list[Record]]) -> None:
    """Write a dataset, a file for each split, to the folder named on the command line."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=demo_path(dataset), help="folder to write to")
    out: Path = parser.parse_args().out
    out.mkdir(exist_ok=True)
    for file in FILES.values():
        lines = [json.dumps(record, ensure_ascii=False) + "\n" for record in records_of(file)]
        (out / file).write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    end_tidily()
    write(__doc__, DEMO_SEARCH, search_records)
