"""Owns the invariants of the packaged demo data, read as plain JSON, and that its generator reproduces it."""

import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from salesrl_trl.demo.services.rubric import load_terms

ROOT = Path(__file__).resolve().parents[3]
DEMO = ROOT / "salesrl_trl" / "data" / "demo"
GENERATOR = ROOT / "scripts" / "make_demo_data.py"
TOPICS = ROOT / "scripts" / "demo_content" / "topics.yaml"
FILES = ["drafts.jsonl", "heldout.jsonl", "knowledge.jsonl", "protected_terms.json", "train.jsonl"]
LANGS = {"zh", "en"}
BRANCHES = {"fairness", "hallucination"}
FIELDS = ["user_profile", "rewritten_query", "history_summary"]
SEPARATOR = {"zh": "，", "en": ", "}

Row = dict[str, Any]


def read_lines(name: str) -> list[Row]:
    return [json.loads(line) for line in (DEMO / name).read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def documents() -> list[Row]:
    return read_lines("knowledge.jsonl")


@pytest.fixture(scope="module")
def train() -> list[Row]:
    return read_lines("train.jsonl")


@pytest.fixture(scope="module")
def held_out() -> list[Row]:
    return read_lines("heldout.jsonl")


@pytest.fixture(scope="module")
def rows(train: list[Row], held_out: list[Row]) -> list[Row]:
    return train + held_out


@pytest.fixture(scope="module")
def drafts() -> list[Row]:
    return read_lines("drafts.jsonl")


@pytest.fixture(scope="module")
def detect() -> Callable[[str], bool]:
    return load_terms(DEMO / "protected_terms.json").mentioned_in


def normalise(text: str) -> str:
    return re.sub(r"[\W_]+", "", text.lower())


def said(row: Row) -> str:
    return "\n".join(message["content"] for message in row["conversation"])


def customer(row: Row) -> list[str]:
    return [message["content"] for message in row["conversation"] if message["role"] == "customer"]


def length(text: str, lang: str) -> int:
    """English words, or Chinese characters with a run of Latin letters or digits as one."""
    return len(text.split()) if lang == "en" else len(re.findall(r"[\u4e00-\u9fff]|[A-Za-z0-9]+", text))


def figures(text: str) -> set[str]:
    return set(re.findall(r"(?<![A-Za-z0-9])\d+", text))


def test_generator_reproduces_the_packaged_files(tmp_path: Path) -> None:
    subprocess.run([sys.executable, str(GENERATOR), "--out", str(tmp_path)], check=True, capture_output=True)
    made = sorted(path.name for path in tmp_path.iterdir())
    assert made == [name for name in FILES if name != "protected_terms.json"]  # written by hand
    for name in made:
        assert (tmp_path / name).read_bytes() == (DEMO / name).read_bytes(), name


def test_documents_cover_every_course_and_topic(documents: list[Row]) -> None:
    assert len(documents) >= 350
    assert len({doc["id"] for doc in documents}) == len(documents)
    assert len({doc["text"] for doc in documents}) == len(documents)
    cells = Counter((doc["lang"], doc["course"], doc["topic"]) for doc in documents if doc["kind"] == "course")
    assert len(cells) == sum(cells.values()) == 2 * 12 * 13
    kinds = Counter((doc["lang"], doc["kind"]) for doc in documents)
    for lang in LANGS:
        assert kinds[lang, "general"] == 12
        assert kinds[lang, "audience"] >= 12


def test_course_documents_state_the_same_figures_in_both_languages(documents: list[Row]) -> None:
    by_id = {doc["id"]: doc for doc in documents}
    for doc in documents:
        if doc["lang"] == "zh" and doc["kind"] == "course":
            other = by_id["en" + doc["id"][2:]]
            # Months and the numbers that English spells out are figures in Chinese only.
            dates = set(re.findall(r"(\d+)月", doc["text"]))
            assert figures(other["text"]) - {"100"} <= figures(doc["text"]), doc["id"]
            assert figures(doc["text"]) - dates - {"100"} <= figures(other["text"]), doc["id"]


def test_only_audience_documents_name_protected_attributes(
    documents: list[Row], detect: Callable[[str], bool]
) -> None:
    for doc in documents:
        assert detect(f"{doc['title']}\n{doc['text']}") == (doc["kind"] == "audience"), doc["id"]


def test_splits_are_large_enough_and_have_unique_ids(train: list[Row], held_out: list[Row], rows: list[Row]) -> None:
    assert len(train) >= 960
    assert len(held_out) >= 160
    for key in ("id", "contact_id", "message_id"):
        assert len({row[key] for row in rows}) == len(rows), key


@pytest.mark.parametrize("split", ["train", "held_out"])
def test_splits_are_balanced(split: str, request: pytest.FixtureRequest) -> None:
    chosen: list[Row] = request.getfixturevalue(split)
    cells = Counter((row["lang"], row["branch"]) for row in chosen)
    assert set(cells.values()) == {len(chosen) // 4}
    assert len({(row["lang"], row["branch"], row["topic"]) for row in chosen}) == 4 * 13
    assert len({(row["lang"], row["course"]) for row in chosen}) == 2 * 12


def test_rows_have_the_expected_shape(rows: list[Row], documents: list[Row]) -> None:
    by_id = {doc["id"]: doc for doc in documents}
    for row in rows:
        assert row["lang"] in LANGS and row["branch"] in BRANCHES
        roles = [message["role"] for message in row["conversation"]]
        assert len(roles) in (1, 3, 5)
        assert roles == ["customer" if index % 2 == 0 else "seller" for index in range(len(roles))]
        assert length(said(row), row["lang"]) <= {"zh": 70, "en": 45}[row["lang"]], row["id"]
        assert row["document_ids"]
        for id_ in row["document_ids"]:
            assert by_id[id_]["course"] == row["course"] and by_id[id_]["topic"] == row["topic"]
            assert by_id[id_]["lang"] == row["lang"]


def test_only_the_first_message_names_the_course(rows: list[Row]) -> None:
    for row in rows:
        name = course_name(row)
        assert name in customer(row)[0], row["id"]
        assert not any(name in message["content"] for message in row["conversation"][1:]), row["id"]


def test_protected_attributes_are_said_and_detected(rows: list[Row], detect: Callable[[str], bool]) -> None:
    for row in rows:
        surfaces = row["protected_attributes"]
        assert bool(surfaces) == (row["branch"] == "fairness"), row["id"]
        assert detect(said(row)) == bool(surfaces), row["id"]
        for surface in surfaces:
            assert surface in "\n".join(customer(row)), row["id"]
            assert detect(surface), surface


def test_splits_share_no_customer_message(train: list[Row], held_out: list[Row]) -> None:
    spoken = [{normalise(text) for row in split for text in customer(row)} for split in (train, held_out)]
    assert not spoken[0] & spoken[1]


def test_held_out_questions_include_some_that_training_never_uses(train: list[Row], held_out: list[Row]) -> None:
    topics = yaml.safe_load(TOPICS.read_text(encoding="utf-8")).values()
    usual, reserved = (
        [normalise(question) for topic in topics for questions in topic[kind].values() for question in questions]
        for kind in ("questions", "held_out_questions")
    )
    assert len(reserved) == 13 * 2 * 2
    assert len({*usual, *reserved}) == len(usual) + len(reserved)
    trained = "\n".join(normalise(text) for row in train for text in customer(row))
    assert not any(core in trained for core in reserved)
    uses = sum(any(core in normalise(customer(row)[-1]) for core in reserved) for row in held_out)
    assert uses >= len(held_out) // 5


def course_name(row: Row) -> str:
    """The name of a row's course, from its canonical query."""
    query: str = row["careful_action"]["rewritten_query"]
    if row["lang"] == "en" and row["topic"] in ("trial", "job"):
        return query.rsplit(" ", 2)[0]
    return query.rsplit(" ", 1)[0]


def test_careful_actions_hold_only_what_was_said(rows: list[Row], detect: Callable[[str], bool]) -> None:
    for row in rows:
        action, lang = row["careful_action"], row["lang"]
        assert list(action) == FIELDS and all(action.values())
        assert not any(detect(value) for value in action.values()), row["id"]
        assert not figures(" ".join(action.values())) - figures(said(row)), row["id"]
        for part in action["user_profile"].split(SEPARATOR[lang]):
            assert part in said(row), row["id"]
        assert course_name(row) in action["history_summary"]
        query = action["rewritten_query"]
        assert len(query.split()) <= 6 if lang == "en" else len(query) <= 14
        assert sum(length(value, lang) for value in action.values()) <= {"zh": 40, "en": 25}[lang]


def test_course_names_and_titles_agree(documents: list[Row], rows: list[Row]) -> None:
    titles = {doc["id"]: doc["title"].lower() for doc in documents}
    for row in rows:
        assert titles[row["document_ids"][0]] == row["careful_action"]["rewritten_query"].lower()


def test_drafts_are_of_mixed_care(train: list[Row], drafts: list[Row], detect: Callable[[str], bool]) -> None:
    careful: Counter[str] = Counter()
    for row, draft in zip(train, drafts, strict=True):
        best, known = row["careful_action"], figures(said(row))
        for action in draft["draft_actions"]:
            careful["rewritten_query"] += action["rewritten_query"] == best["rewritten_query"]
            careful["history_summary"] += SEPARATOR[row["lang"]] not in action["history_summary"]
            if action["user_profile"] == best["user_profile"]:
                careful["user_profile"] += 1
            elif row["branch"] == "fairness":
                assert all(surface in action["user_profile"] for surface in row["protected_attributes"]), row["id"]
                assert detect(action["user_profile"])
            else:
                assert not detect(action["user_profile"])
                invented = action["user_profile"].split(SEPARATOR[row["lang"]])[-1]
                assert invented not in said(row)
            if SEPARATOR[row["lang"]] not in action["history_summary"]:
                assert figures(action["history_summary"]) <= known
    total = 4 * len(train)
    for field, share in {"user_profile": 0.45, "rewritten_query": 0.40, "history_summary": 0.45}.items():
        assert careful[field] / total == pytest.approx(share, abs=0.05), field
