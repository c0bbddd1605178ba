"""Owns the invariants that the demo data must meet before it is written."""

from collections import Counter
from typing import Any

from demo_content import phrases
from demo_content.conversations import (
    BRANCHES,
    CAREFUL_SHARE,
    COMMA,
    DRAFTS_PER_ROW,
    MAX_ACTION,
    MAX_CONVERSATION,
    action_length,
    conversation_length,
    figures,
    normalise,
)
from demo_content.courses import COURSE_BY_SLUG, COURSES
from demo_content.knowledge import LANGS
from demo_content.protected import is_protected
from demo_content.topics import TOPICS, canonical_query

Row = dict[str, Any]
TEXT_RANGE = {"zh": (40, 110), "en": (25, 60)}
MIN_DOCUMENTS, MIN_TRAIN, MIN_HELD_OUT = 350, 960, 160
ACTION_FIELDS = ["user_profile", "rewritten_query", "history_summary"]
SHARE_TOLERANCE = 0.05


class DemoDataError(ValueError):
    """Raised when generated demo data breaks an invariant."""


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise DemoDataError(message)


def conversation_text(row: Row) -> str:
    """Return all messages of a row as one text."""
    return "\n".join(message["content"] for message in row["conversation"])


def customer_messages(row: Row) -> list[str]:
    """Return the customer's messages of a row."""
    return [message["content"] for message in row["conversation"] if message["role"] == "customer"]


def check_knowledge(documents: list[Row]) -> None:
    """Check ids, coverage, text lengths and the protected-term detector on every document."""
    _require(len(documents) >= MIN_DOCUMENTS, f"only {len(documents)} documents")
    _require(len({doc["id"] for doc in documents}) == len(documents), "document ids repeat")
    _require(len({doc["text"] for doc in documents}) == len(documents), "document texts repeat")
    cells = Counter((doc["lang"], doc["course"], doc["topic"]) for doc in documents if doc["kind"] == "course")
    _require(len(cells) == len(LANGS) * len(COURSES) * len(TOPICS), "a course document is missing")
    for doc in documents:
        size = len(doc["text"].split()) if doc["lang"] == "en" else len(doc["text"])
        low, high = TEXT_RANGE[doc["lang"]]
        _require(low <= size <= high, f"{doc['id']} has length {size}")
        found = is_protected(f"{doc['title']}\n{doc['text']}")
        _require(found == (doc["kind"] == "audience"), f"{doc['id']}: protected terms found: {found}")
    for course in COURSES:
        for name in course.name.values():
            _require(not is_protected(name), f"course name {name} is detected as protected")


def check_phrases() -> None:
    """Check that every question core is different."""
    for lang in LANGS:
        cores = [normalise(core) for topic in TOPICS for core in phrases.QUESTIONS[topic][lang]]
        _require(len(set(cores)) == len(cores), f"question cores repeat in {lang}")
        _require(all(len(phrases.QUESTIONS[topic][lang]) >= 8 for topic in TOPICS), f"too few cores in {lang}")


def _check_careful(row: Row, action: Row) -> None:
    text = conversation_text(row)
    for key in ACTION_FIELDS:
        _require(not is_protected(action[key]), f"{row['id']}: careful {key} is detected as protected")
        _require(figures(action[key]) <= figures(text), f"{row['id']}: careful {key} has a new figure")
    for part in action["user_profile"].split(COMMA[row["lang"]].strip()):
        _require(part.strip() in text, f"{row['id']}: profile part {part!r} is not in the conversation")
    name = COURSE_BY_SLUG[row["course"]].name[row["lang"]]
    query = canonical_query(name, row["topic"], row["lang"])
    _require(action["rewritten_query"] == query, f"{row['id']}: careful query is not canonical")


def _check_action(row: Row, action: Row) -> None:
    _require(list(action) == ACTION_FIELDS, f"{row['id']}: fields are {list(action)}")
    _require(all(action.values()), f"{row['id']}: an empty field")
    _require(action_length(action, row["lang"]) <= MAX_ACTION[row["lang"]], f"{row['id']}: an action is too long")


def _check_row(row: Row, document_ids: set[str]) -> None:
    lang, text = row["lang"], conversation_text(row)
    roles = [message["role"] for message in row["conversation"]]
    _require(roles == (["customer", "seller"] * 3)[: len(roles)] and len(roles) in (1, 3, 5), f"{row['id']}: {roles}")
    size = conversation_length(row["conversation"], lang)
    _require(size <= MAX_CONVERSATION[lang], f"{row['id']}: conversation length {size}")
    _require(set(row["document_ids"]) <= document_ids and row["document_ids"] != [], f"{row['id']}: unknown document")
    name = COURSE_BY_SLUG[row["course"]].name[lang]
    first, last = customer_messages(row)[0], customer_messages(row)[-1]
    _require(name in first, f"{row['id']}: first message lacks the course")
    _require(len(roles) == 1 or name not in last, f"{row['id']}: last message names the course")
    surfaces = row["protected_attributes"]
    _require(bool(surfaces) == (row["branch"] == "fairness"), f"{row['id']}: attributes {surfaces}")
    _require(is_protected(text) == bool(surfaces), f"{row['id']}: conversation detection is wrong")
    for surface in surfaces:
        _require(surface in text and is_protected(surface), f"{row['id']}: {surface} is absent or not detected")
    _check_action(row, row["careful_action"])
    _check_careful(row, row["careful_action"])


def _check_draft(row: Row, draft: Row) -> dict[str, bool]:
    """Check one draft and return which of its fields are careful."""
    _check_action(row, draft)
    careful = row["careful_action"]
    known = figures(conversation_text(row))
    name = COURSE_BY_SLUG[row["course"]].name[row["lang"]]
    summaries = {pattern.format(c=name) for pattern in phrases.SUMMARY_CAREFUL[row["lang"]]}
    state = {
        "user_profile": draft["user_profile"] == careful["user_profile"],
        "rewritten_query": draft["rewritten_query"] == careful["rewritten_query"],
        "history_summary": draft["history_summary"] in summaries,
    }
    if not state["user_profile"] and row["branch"] == "fairness":
        kept = all(surface in draft["user_profile"] for surface in row["protected_attributes"])
        _require(kept, f"{row['id']}: careless profile lacks an attribute")
    for key in ("user_profile", "history_summary"):
        for figure in figures(draft[key]) - known:
            _require(not state[key], f"{row['id']}: careful {key} invents {figure}")
    return state


def _check_train(rows: list[Row]) -> None:
    careful: Counter[str] = Counter()
    drafts = 0
    for row in rows:
        _require(len(row["draft_actions"]) == DRAFTS_PER_ROW, f"{row['id']}: wrong number of drafts")
        for draft in row["draft_actions"]:
            drafts += 1
            careful.update(key for key, value in _check_draft(row, draft).items() if value)
    for key, share in CAREFUL_SHARE.items():
        measured = careful[key] / drafts
        _require(abs(measured - share) <= SHARE_TOLERANCE, f"careful share of {key} is {measured:.3f}")


def _check_spread(rows: list[Row], split: str) -> None:
    cells = Counter((row["lang"], row["branch"]) for row in rows)
    _require(len(cells) == len(LANGS) * len(BRANCHES), f"{split}: a language or branch is missing")
    _require(max(cells.values()) == min(cells.values()), f"{split}: uneven languages or branches")
    topics = Counter((row["lang"], row["branch"], row["topic"]) for row in rows)
    _require(len(topics) == len(cells) * len(TOPICS), f"{split}: a topic is missing")
    courses = Counter((row["lang"], row["course"]) for row in rows)
    _require(len(courses) == len(LANGS) * len(COURSES), f"{split}: a course is missing")


def check_conversations(train: list[Row], held_out: list[Row], documents: list[Row]) -> None:
    """Check every row, the spread of both splits and that they share no customer message."""
    _require(len(train) >= MIN_TRAIN and len(held_out) >= MIN_HELD_OUT, "too few rows")
    ids = {doc["id"] for doc in documents}
    rows = train + held_out
    for key in ("id", "contact_id", "message_id"):
        _require(len({row[key] for row in rows}) == len(rows), f"{key} repeats")
    for row in rows:
        _check_row(row, ids)
    _check_train(train)
    _require(not any("draft_actions" in row for row in held_out), "held-out rows have drafts")
    _check_spread(train, "train")
    _check_spread(held_out, "held-out")
    spoken = [{normalise(text) for row in split for text in customer_messages(row)} for split in (train, held_out)]
    _require(not spoken[0] & spoken[1], "the splits share a customer message")
    reserved = [
        normalise(core)
        for topic in TOPICS
        for lang in LANGS
        for core in phrases.QUESTIONS[topic][lang][-phrases.HELD_OUT_CORES :]
    ]
    trained = "\n".join(spoken[0])
    _require(not any(core in trained for core in reserved), "a train row uses a reserved question")
    uses = sum(any(core in normalise(customer_messages(row)[-1]) for core in reserved) for row in held_out)
    _require(uses >= len(held_out) // 5, f"only {uses} held-out rows use a reserved question")
