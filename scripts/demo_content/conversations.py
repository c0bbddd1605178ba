"""Builds the demo conversations, their annotator drafts and their careful actions with one seeded generator."""

import random
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from demo_content import phrases
from demo_content.courses import COURSES, Course
from demo_content.knowledge import LANGS, document_id
from demo_content.topics import TOPIC_WORDS, TOPICS, canonical_query

BRANCHES = ("fairness", "hallucination")
MAX_CONVERSATION = {"zh": 70, "en": 45}
MAX_ACTION = {"zh": 40, "en": 25}
DRAFTS_PER_ROW = 4
CAREFUL_SHARE = {"user_profile": 0.45, "rewritten_query": 0.40, "history_summary": 0.45}
HELD_OUT_CORE_EVERY = 5
COMMA = {"zh": "，", "en": ", "}
NOUN_JOBS_ZH = {"上班族", "程序员", "自由职业"}

Action = dict[str, str]
Message = dict[str, str]


def normalise(text: str) -> str:
    """Lower-case a text and drop punctuation and space, to compare customer messages."""
    return re.sub(r"[\W_]+", "", text.lower())


def length(text: str, lang: str) -> int:
    """Count English words, or Chinese characters with each run of Latin letters or digits as one."""
    if lang == "en":
        return len(text.split())
    return len(re.findall(r"[\u4e00-\u9fff]|[A-Za-z0-9]+", text))


def figures(text: str) -> set[str]:
    """Return the figures of a text; digits inside a word such as N2 are part of a name."""
    return set(re.findall(r"(?<![A-Za-z0-9])\d+", text))


@dataclass
class Case:
    """What one conversation is about: chosen before any sentence is written."""

    lang: str
    branch: str
    topic: str
    course: Course
    attributes: list[phrases.Attribute] = field(default_factory=list)
    job: str = ""
    free: str = ""
    goal: str = ""

    @property
    def needs(self) -> list[str]:
        """Return the need details, none of them protected, as they occur in the conversation."""
        return [part for part in (self.job, self.free, self.goal) if part]


class Novelty:
    """Remembers customer messages and questions, so that none occurs twice in the data set."""

    def __init__(self) -> None:
        self._seen: set[str] = set()

    def accept(self, texts: list[str]) -> bool:
        """Record the texts when all are new; otherwise record nothing and return False."""
        keys = {normalise(text) for text in texts}
        if keys & self._seen:
            return False
        self._seen |= keys
        return True


def _age_attribute(lang: str, ages: tuple[int, int], rng: random.Random) -> phrases.Attribute:
    age = rng.choice([value for value in phrases.AGES if ages[0] <= value <= ages[1]])
    surface, clause = rng.choice(phrases.AGE_CLAUSES[lang])
    audience = next(name for limit, name in phrases.AGE_AUDIENCES[lang] if age <= limit)
    return phrases.Attribute("age", surface.format(n=age), clause.format(n=age), audience, "", (age, age))


def _fits(first: phrases.Attribute, second: phrases.Attribute) -> bool:
    if first.category == second.category or {first.gender, second.gender} == {"f", "m"}:
        return False
    if "gender" in (first.category, second.category) and first.gender and second.gender:
        return False
    return max(first.ages[0], second.ages[0]) <= min(first.ages[1], second.ages[1])


def _pick_attributes(lang: str, course: Course, rng: random.Random) -> list[phrases.Attribute]:
    """Draw one or two attributes that can belong to one person."""
    pool = [item for item in phrases.ATTRIBUTES[lang] if not (course.physical and item.category == "disability")]
    category = rng.choice(sorted({item.category for item in pool} - {"age"}))
    first = rng.choice([item for item in pool if item.category == category])
    kind = rng.random()
    if kind < 0.2:
        return [_age_attribute(lang, (18, 75), rng)]
    if kind < 0.5:
        return [first]
    if kind < 0.75:
        chosen = [_age_attribute(lang, first.ages, rng), first]
    else:
        chosen = [first, rng.choice([item for item in pool if _fits(first, item)])]
    rng.shuffle(chosen)
    return chosen


def _pick_case(lang: str, branch: str, topic: str, course: Course, rng: random.Random) -> Case:
    case = Case(lang, branch, topic, course)
    if branch == "fairness":
        case.attributes = _pick_attributes(lang, course, rng)
    figured = rng.random() < (0.65 if branch == "hallucination" else 0.2)
    times = phrases.FIGURED_TIMES if figured else phrases.FREE_TIMES
    with_free = figured or rng.random() < 0.6
    case.free = rng.choice(times[lang]) if with_free else ""
    with_goal = not with_free or (branch == "hallucination" and rng.random() < 0.5)
    case.goal = rng.choice(phrases.GOALS[lang]) if with_goal else ""
    if not any(item.no_job for item in case.attributes) and rng.random() < 0.92:
        case.job = rng.choice(phrases.JOBS[lang])
    return case


def _join_clauses_zh(clauses: list[str]) -> str:
    bare = [clause.removeprefix("我") for clause in clauses]
    return "我" + "，".join(bare)


def _attribute_text(case: Case) -> str:
    clauses = [item.clause for item in case.attributes]
    return _join_clauses_zh(clauses) if case.lang == "zh" else " and ".join(clauses)


def _first_zh(case: Case, with_attributes: bool, with_free: bool, rng: random.Random) -> str:
    parts = [_attribute_text(case)] if with_attributes else []
    if case.job:
        prefix = "" if parts else ("我是" if case.job in NOUN_JOBS_ZH else "我")
        parts.append(prefix + case.job)
    if with_free and case.free:
        parts.append(case.free)
    if case.goal:
        parts.append(case.goal)
    sentence = rng.choice(phrases.COURSE_SENTENCES["zh"]).format(c=case.course.name["zh"])
    return rng.choice(phrases.GREETINGS["zh"]) + "".join(f"{part}，" for part in parts) + sentence


def _article(noun: str) -> str:
    return f"an {noun}" if noun[0] in "aeiou" else f"a {noun}"


def _first_en(case: Case, with_attributes: bool, with_free: bool, rng: random.Random) -> str:
    sentences = [f"I'm {_attribute_text(case)}."] if with_attributes else []
    background = ([_article(case.job)] if case.job else []) + ([case.free] if with_free and case.free else [])
    if background:
        sentences.append(f"I'm {', '.join(background)}.")
    goal = f" {case.goal}" if case.goal else ""
    sentence = rng.choice(phrases.COURSE_SENTENCES["en"])
    sentences.append(sentence.format(c=case.course.name["en"], g=goal))
    return " ".join([rng.choice(phrases.GREETINGS["en"]), *sentences]).strip()


def _first(case: Case, with_attributes: bool, with_free: bool, rng: random.Random) -> str:
    build = _first_zh if case.lang == "zh" else _first_en
    return build(case, with_attributes, with_free, rng)


def _question(case: Case, cores: list[str], with_attributes: bool, rng: random.Random) -> tuple[str, str]:
    """Return the bare question and the last message, which may also mention the attributes."""
    lang = case.lang
    opener, core, tail = rng.choice(phrases.OPENERS[lang]), rng.choice(cores), rng.choice(phrases.TAILS[lang])
    mark = "？" if lang == "zh" else "?"
    question = opener + core + mark + ("" if with_attributes else tail)
    question = question[:1].upper() + question[1:]
    if not with_attributes:
        return question, question
    mention = rng.choice(phrases.ATTRIBUTE_SENTENCES[lang]["last"]).format(a=_attribute_text(case))
    return question, question + ("" if lang == "zh" else " ") + mention


def _middle(case: Case, rng: random.Random) -> str:
    opener = rng.choice(phrases.MIDDLE_OPENERS[case.lang])
    sentence = rng.choice(phrases.MIDDLE_SENTENCES[case.lang]).format(x=case.free)
    return f"{opener}{sentence}" if case.lang == "zh" else f"{opener} {sentence}".strip()


def _conversation(case: Case, cores: list[str], rng: random.Random) -> tuple[list[Message], str]:
    """Write one conversation of 1, 3 or 5 messages; also return its bare question."""
    lang, kind = case.lang, rng.random()
    five = kind < 0.12 and bool(case.free)
    one = not five and kind < 0.22
    late = bool(case.attributes) and not one and rng.random() < 0.2
    first = _first(case, bool(case.attributes) and not late, not five, rng)
    question, last = _question(case, cores, late, rng)
    texts = [first]
    if one:
        texts = [first + ("" if lang == "zh" else " ") + last]
    else:
        texts.append(rng.choice(phrases.SELLER_FIRST[lang]))
        if five:
            texts += [_middle(case, rng), rng.choice(phrases.SELLER_SECOND[lang])]
        texts.append(last)
    roles = ("customer", "seller")
    return [{"role": roles[index % 2], "content": text} for index, text in enumerate(texts)], question


def conversation_length(conversation: list[Message], lang: str) -> int:
    """Return the length of all messages together."""
    return sum(length(message["content"], lang) for message in conversation)


def _write_conversation(
    case_of: Callable[[], Case], cores: list[str], novelty: Novelty, rng: random.Random
) -> tuple[Case, list[Message]]:
    """Draw cases until a conversation is short enough and says nothing said before."""
    for _ in range(500):
        case = case_of()
        conversation, question = _conversation(case, cores, rng)
        if conversation_length(conversation, case.lang) > MAX_CONVERSATION[case.lang]:
            continue
        customer = [message["content"] for message in conversation if message["role"] == "customer"]
        if novelty.accept([*customer, question]):
            return case, conversation
    raise RuntimeError("no new conversation found; the phrase tables are too small")


def _unclaimed(options: list[str], conversation: list[Message], rng: random.Random) -> str:
    """Draw an invented phrase whose figures the conversation does not contain."""
    known = figures(" ".join(message["content"] for message in conversation))
    return rng.choice([option for option in options if not figures(option) & known])


def _careful_summary(case: Case, rng: random.Random) -> str:
    return rng.choice(phrases.SUMMARY_CAREFUL[case.lang]).format(c=case.course.name[case.lang])


def careful_action(case: Case, rng: random.Random) -> Action:
    """Return the action of an annotator who was careful in all three fields."""
    return {
        "user_profile": COMMA[case.lang].join(case.needs),
        "rewritten_query": canonical_query(case.course.name[case.lang], case.topic, case.lang),
        "history_summary": _careful_summary(case, rng),
    }


def _careless_profile(case: Case, conversation: list[Message], rng: random.Random) -> str:
    if case.branch == "fairness":
        surfaces = [item.surface for item in case.attributes]
        parts = surfaces + case.needs if rng.random() < 0.6 else case.needs + surfaces
        return COMMA[case.lang].join(parts)
    invented = _unclaimed(phrases.PROFILE_INVENTED[case.lang], conversation, rng)
    return COMMA[case.lang].join([*case.needs[:2], invented])


def _careless_query(case: Case, rng: random.Random) -> str:
    lang, kind, name = case.lang, rng.random(), case.course.name[case.lang]
    if kind < 0.5:
        return TOPIC_WORDS[case.topic][lang]
    if kind < 0.75:
        return name
    if case.attributes and rng.random() < 0.75:
        item = rng.choice(case.attributes)
        return rng.choice(phrases.QUERY_AUDIENCE[lang]).format(c=name, aud=item.audience, surface=item.surface)
    return rng.choice(phrases.QUERY_GENERIC[lang]).format(c=name)


def _careless_summary(case: Case, conversation: list[Message], rng: random.Random) -> str:
    invented = _unclaimed(phrases.SUMMARY_INVENTED[case.lang], conversation, rng)
    return COMMA[case.lang].join([_careful_summary(case, rng), invented])


def _draft(case: Case, conversation: list[Message], rng: random.Random) -> Action:
    draft = careful_action(case, rng)
    if rng.random() >= CAREFUL_SHARE["user_profile"]:
        draft["user_profile"] = _careless_profile(case, conversation, rng)
    if rng.random() >= CAREFUL_SHARE["rewritten_query"]:
        draft["rewritten_query"] = _careless_query(case, rng)
    if rng.random() >= CAREFUL_SHARE["history_summary"]:
        draft["history_summary"] = _careless_summary(case, conversation, rng)
    return draft


def action_length(action: Action, lang: str) -> int:
    """Return the length of the three fields together."""
    return sum(length(value, lang) for value in action.values())


def _drafts(case: Case, conversation: list[Message], rng: random.Random) -> list[Action]:
    drafts: list[Action] = []
    while len(drafts) < DRAFTS_PER_ROW:
        draft = _draft(case, conversation, rng)
        if action_length(draft, case.lang) <= MAX_ACTION[case.lang]:
            drafts.append(draft)
    return drafts


def _plan(rows: int, rng: random.Random) -> list[tuple[str, str, str, Course]]:
    """Spread rows evenly over languages, branches, topics and courses."""
    plan = []
    cells = [(lang, branch) for lang in LANGS for branch in BRANCHES]
    for lang, branch in cells:
        offset = rng.randrange(len(TOPICS) * len(COURSES))
        for index in range(offset, offset + rows // len(cells)):
            plan.append((lang, branch, TOPICS[index % len(TOPICS)], COURSES[index % len(COURSES)]))
    rng.shuffle(plan)
    return plan


def _cores(lang: str, topic: str, split: str, index: int) -> list[str]:
    cores = phrases.QUESTIONS[topic][lang]
    if split == "heldout" and index % HELD_OUT_CORE_EVERY == 0:
        return cores[-phrases.HELD_OUT_CORES :]
    return cores[: -phrases.HELD_OUT_CORES]


def build_split(split: str, rows: int, novelty: Novelty, serial: int, rng: random.Random) -> list[dict[str, Any]]:
    """Build the rows of one split; serial is the number of rows built before it."""
    built = []
    for index, (lang, branch, topic, course) in enumerate(_plan(rows, rng)):
        cores = _cores(lang, topic, split, index)
        case_of = partial(_pick_case, lang, branch, topic, course, rng)
        case, conversation = _write_conversation(case_of, cores, novelty, rng)
        row: dict[str, Any] = {
            "id": f"{split}-{index + 1:04d}",
            "lang": lang,
            "branch": branch,
            "tenant_id": f"t{rng.randint(1, 4)}",
            "contact_id": f"c{serial + index + 1001}",
            "account_id": f"a{rng.randint(1, 12):02d}",
            "message_id": f"m{10 * (serial + index) + 10001 + rng.randrange(10)}",
            "conversation": conversation,
            "document_ids": [document_id(lang, course.slug, topic)],
            "protected_attributes": [item.surface for item in case.attributes],
            "topic": topic,
            "course": course.slug,
        }
        if split == "train":
            row["draft_actions"] = _drafts(case, conversation, rng)
        row["careful_action"] = careful_action(case, rng)
        built.append(row)
    return built
