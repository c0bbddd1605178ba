"""Builds the bilingual knowledge base from `courses.yaml`, `topics.yaml` and `company.yaml`."""

import random
from collections.abc import Sequence
from typing import Any

from demo_content import LANGS, read

Course = dict[str, Any]
FACT_SEED = 20240611
_WORLD = read("courses.yaml")
COURSES: list[Course] = _WORLD["courses"]
TOPICS: dict[str, dict[str, Any]] = read("topics.yaml")
LIST_MARK = {"zh": "、", "en": ", "}
SENTENCE_MARK = {"zh": "", "en": " "}


def document_id(lang: str, course: Course, topic: str) -> str:
    """The id of a course's document."""
    return f"{lang}-{course['slug']}-{topic}"


def canonical_query(lang: str, course: Course, topic: str) -> str:
    """The one good search query for a course and a topic."""
    return f"{course['name'][lang]} {TOPICS[topic]['word'][lang]}"


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _options(figure: dict[str, int] | list[Any]) -> Sequence[Any]:
    return figure if isinstance(figure, list) else range(figure["first"], figure["last"] + 1, figure.get("step", 1))


def _date(month: int, rng: random.Random) -> dict[str, str]:
    day, name = rng.randint(1, 28), {lang: _WORLD["months"][lang][month - 1] for lang in LANGS}
    return {"zh": f"{name['zh']}{day}日", "en": f"{day} {name['en']}"}


def _facts(course: Course, lang: str) -> dict[str, Any]:
    """The value of every slot of a document. The figures are the same in both languages."""
    rng = random.Random(f"{FACT_SEED}:{course['slug']}")
    price = course["price"]
    facts = {name: rng.choice(_options(figure)) for name, figure in _WORLD["figures"].items()}
    facts |= {
        "price": price,
        "unit": round(price / facts["hours"]),
        "time": f"{facts['first_hour']}:{facts['first_minute']}",
        "rating": f"{facts['rating_tenths'] / 10:.1f}",
        "monthly": -(-price // facts["parts"]),
        "down": round(price * facts["down_share"]),
        "phone": f"400-82{facts['phone_end']}",
        "online_other": 100 - facts["online_percent"],
    }
    start = rng.randint(3, 11)
    months = {"start": start, "early_date": start - 1, "due_date": start, "exam_date": min(start + 3, 12)}
    facts |= {name: _date(month, rng)[lang] for name, month in months.items()}
    first, second = sorted(rng.sample(range(7), 2))
    days = {"day1": first, "day2": second, "trial_day": rng.randrange(7)}
    facts |= {name: _WORLD["weekdays"][lang][day] for name, day in days.items()}
    facts["manager"] = rng.choice(_WORLD["managers"])[lang]
    return facts | {name: course[name][lang] for name in ("name", "teacher", "tool", "role", "piece")}


def _course_document(lang: str, index: int, topic: str) -> dict[str, Any]:
    course, documents = COURSES[index], TOPICS[topic]["documents"]
    sentences = documents[(index + list(TOPICS).index(topic)) % len(documents)][lang]
    facts = _facts(course, lang)
    return {
        "id": document_id(lang, course, topic),
        "lang": lang,
        "course": course["slug"],
        "topic": topic,
        "kind": "course",
        "title": _capital(canonical_query(lang, course, topic)),
        "text": SENTENCE_MARK[lang].join(_capital(sentence.format(**facts)) for sentence in sentences),
    }


def _company_documents(lang: str) -> list[dict[str, Any]]:
    company, documents = read("company.yaml"), []
    tails = company["audience_tail"][lang]
    for kind in ("general", "audience"):
        for index, entry in enumerate(company[kind]):
            sentences = entry[lang]["text"]
            if kind == "audience":
                courses = LIST_MARK[lang].join(course["name"][lang] for course in COURSES[index % 2 :: 2])
                sentences = [*sentences, tails[index // 2 % len(tails)].format(courses=courses)]
            documents.append({
                "id": f"{lang}-{kind}-{entry['slug']}",
                "lang": lang,
                "course": None,
                "topic": entry["topic"],
                "kind": kind,
                "title": entry[lang]["title"],
                "text": SENTENCE_MARK[lang].join(sentences),
            })  # fmt: skip
    return documents


def build_knowledge() -> list[dict[str, Any]]:
    """All documents, in a fixed order."""
    documents = [
        _course_document(lang, index, topic) for lang in LANGS for index in range(len(COURSES)) for topic in TOPICS
    ]
    for lang in LANGS:
        documents += _company_documents(lang)
    return documents
