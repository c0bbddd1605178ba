"""Invariants of the packaged demo data and of the rows of `recipes/search.py`, and that generators reproduce them."""

import functools
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from salesrl_trl.data.files import demo_path, demo_records, load_documents
from salesrl_trl.demo.services.rubric import mentions, protected_terms
from salesrl_trl.demo.services.services_app import KnowledgeIndex
from scripts.make_search_rows import course_and_topic

ROOT = Path(__file__).resolve().parents[3]
DEMO = ROOT / "salesrl_trl" / "demo" / "rows"
GENERATOR = ROOT / "scripts" / "make_demo_data.py"
FILES = ["drafts.jsonl", "heldout.jsonl", "knowledge.jsonl", "protected_terms.json", "train.jsonl"]


def read_lines(name):
    return [json.loads(line) for line in (DEMO / name).read_text(encoding="utf-8").splitlines()]


DOCUMENTS, TRAIN, HELD_OUT = map(read_lines, ("knowledge.jsonl", "train.jsonl", "heldout.jsonl"))
ROWS = TRAIN + HELD_OUT
detect = functools.partial(mentions, terms=protected_terms())


def normalise(text):
    return re.sub(r"[\W_]+", "", text.lower())


def said(row):
    return "\n".join(message["content"] for message in row["conversation"])


def customer(row):
    return [message["content"] for message in row["conversation"] if message["role"] == "customer"]


def test_generator_reproduces_the_packaged_files(tmp_path):
    subprocess.run([sys.executable, str(GENERATOR), "--out", str(tmp_path)], check=True, capture_output=True)
    made = sorted(path.name for path in tmp_path.iterdir())
    assert made == [name for name in FILES if name != "protected_terms.json"]  # written by hand
    for name in made:
        assert (tmp_path / name).read_bytes() == (DEMO / name).read_bytes(), name


def test_the_rows_of_other_recipes_are_those_of_their_generators(tmp_path):
    subprocess.run([sys.executable, GENERATOR.with_name("make_two_tasks.py"), "--out", tmp_path], check=True)
    for script, name in (
        ("make_search_rows.py", "demo_search"), ("make_arithmetic_rows.py", "arithmetic"),
        ("make_dialogue_rows.py", "demo_dialogue"),
    ):  # fmt: skip
        subprocess.run([sys.executable, GENERATOR.with_name(script), "--out", tmp_path / name], check=True)
    for name in ("demo_bbq", "demo_halueval", "demo_search", "demo_dialogue", "arithmetic"):
        for file in ("train.jsonl", "heldout.jsonl"):
            assert (tmp_path / name / file).read_bytes() == (DEMO / name / file).read_bytes()


def test_only_audience_documents_name_protected_attributes():
    for doc in DOCUMENTS:
        assert detect(f"{doc['title']}\n{doc['text']}") == (doc["kind"] == "audience"), doc["id"]


def test_protected_attributes_are_said_and_detected():
    for row in ROWS:
        surfaces = row["protected_attributes"]
        assert bool(surfaces) == (row["branch"] == "fairness"), row["id"]
        assert detect(said(row)) == bool(surfaces), row["id"]
        for surface in surfaces:
            assert surface in "\n".join(customer(row)), row["id"]
            assert detect(surface), surface


def test_splits_share_no_customer_message():
    spoken = [{normalise(text) for row in split for text in customer(row)} for split in (TRAIN, HELD_OUT)]
    assert not spoken[0] & spoken[1]


SPLITS = ("train.jsonl", "heldout.jsonl")


@pytest.fixture(scope="module")
def index():
    return KnowledgeIndex(load_documents(demo_path("knowledge.jsonl")))


@pytest.mark.parametrize("file", SPLITS)
def test_a_query_of_course_and_topic_finds_the_document_and_one_of_less_mostly_does_not(file, index):
    asked = [record for record in demo_records(f"demo_search/{file}") if record["documents"]]
    rows = {row["id"]: row for row in demo_records(file)}

    def share(query):
        found = [index.search(query(*course_and_topic(rows[record["id"]])), 1, 0.0)[0].text for record in asked]
        return sum([text] == record["documents"] for text, record in zip(found, asked, strict=True)) / len(asked)

    assert share("{} {}".format) == 1
    assert share(lambda course, _: course) < 0.3
    assert share(lambda _, topic: topic) < 0.3
