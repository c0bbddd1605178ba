"""Builds the bilingual knowledge base from the content tables."""

from typing import Any

from demo_content.company import AUDIENCE, AUDIENCE_TAIL, GENERAL
from demo_content.courses import COURSES, Course, facts
from demo_content.topics import PATTERNS, TOPIC_WORDS, TOPICS

LANGS = ("zh", "en")
LIST_MARK = {"zh": "、", "en": ", "}
SENTENCE_MARK = {"zh": "", "en": " "}


def document_id(lang: str, course: str, topic: str) -> str:
    """Return the id of a course document."""
    return f"{lang}-{course}-{topic}"


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _join(sentences: list[str], lang: str) -> str:
    return SENTENCE_MARK[lang].join(sentences)


def _course_document(course: Course, index: int, topic: str, lang: str) -> dict[str, Any]:
    patterns = PATTERNS[topic][lang]
    pattern = patterns[(index + TOPICS.index(topic)) % len(patterns)]
    values = facts(course, lang)
    return {
        "id": document_id(lang, course.slug, topic),
        "lang": lang,
        "course": course.slug,
        "topic": topic,
        "kind": "course",
        "title": _capital(f"{course.name[lang]} {TOPIC_WORDS[topic][lang]}"),
        "text": _join([_capital(sentence.format(**values)) for sentence in pattern], lang),
    }


def _course_list(offset: int, lang: str) -> str:
    """Name every second course, starting at the offset."""
    return LIST_MARK[lang].join(course.name[lang] for course in COURSES[offset % 2 :: 2])


def _company_documents(lang: str) -> list[dict[str, Any]]:
    documents = []
    for kind, entries in (("general", GENERAL), ("audience", AUDIENCE)):
        for index, (slug, topic, content) in enumerate(entries):
            title, sentences = content[lang]
            if kind == "audience":
                tails = AUDIENCE_TAIL[lang]
                tail = tails[(index // 2) % len(tails)].format(courses=_course_list(index, lang))
                sentences = [*sentences, tail]
            documents.append(
                {
                    "id": f"{lang}-{kind}-{slug}",
                    "lang": lang,
                    "course": None,
                    "topic": topic,
                    "kind": kind,
                    "title": title,
                    "text": _join(sentences, lang),
                }
            )
    return documents


def build_knowledge() -> list[dict[str, Any]]:
    """Return all documents in a fixed order."""
    documents = [
        _course_document(course, index, topic, lang)
        for lang in LANGS
        for index, course in enumerate(COURSES)
        for topic in TOPICS
    ]
    for lang in LANGS:
        documents.extend(_company_documents(lang))
    return documents
