"""The rows of `recipes/search.py`, against the service and the judge that score them."""

import re

import pytest

from salesrl_trl.data.files import demo_path, demo_records, load_documents
from salesrl_trl.demo.services.rubric import judge_sections
from salesrl_trl.demo.services.services_app import KnowledgeIndex
from scripts.make_search_rows import course_and_topic

TERMS = re.compile("(?!)")
FILES = ("train.jsonl", "heldout.jsonl")


@pytest.fixture(scope="module")
def index():
    return KnowledgeIndex(load_documents(demo_path("knowledge.jsonl")))


@pytest.mark.parametrize("file", FILES)
def test_a_query_of_course_and_topic_finds_the_document_and_one_of_less_mostly_does_not(file, index):
    asked = [record for record in demo_records(f"demo_search/{file}") if record["documents"]]
    rows = {row["id"]: row for row in demo_records(file)}

    def share(query):
        found = [index.search(query(*course_and_topic(rows[record["id"]])), 1, 0.0)[0].text for record in asked]
        return sum([text] == record["documents"] for text, record in zip(found, asked, strict=True)) / len(asked)

    assert share("{} {}".format) == 1
    assert share(lambda course, _: course) < 0.3
    assert share(lambda _, topic: topic) < 0.3


@pytest.mark.parametrize("file", FILES)
def test_the_reference_has_a_full_score_and_one_with_another_figure_has_not(file):
    for record in demo_records(f"demo_search/{file}"):
        sections = {
            "branch": "all",
            "documents": "\n\n".join(record["documents"]),
            "reference_answer": record["reference"],
            "conversation": "\n".join(turn["content"] for turn in record["prompt"]),
        }
        scores = [
            judge_sections({**sections, "candidate_answer": answer}, TERMS).candidate
            for answer in (record["reference"], record["reference"].translate(str.maketrans("123456789", "234567891")))
        ]
        assert scores[0] == 1
        assert scores[1] < 0.95 or not record["documents"], record["reference"]


def test_a_greeting_asks_nothing_and_no_row_is_in_both_files():
    train, held_out = (demo_records(f"demo_search/{file}") for file in FILES)
    greetings = [record for record in (*train, *held_out) if not record["documents"]]
    assert 0.2 < len(greetings) / len(train + held_out) < 0.4
    assert not any("?" in record["prompt"][-1]["content"] for record in greetings)
    texts = [{str(record["prompt"]) for record in records} for records in (train, held_out)]
    assert not texts[0] & texts[1]
