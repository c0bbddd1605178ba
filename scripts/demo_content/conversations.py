"""Builds the demo's conversations, their careful actions and the annotators' drafts, from one random generator.

The texts come from `phrases.yaml`, `attributes.yaml` and `topics.yaml`. Each draw changes all that follow it: with the
same texts and the same order of draws, the data is the same.
"""

import random
import re
from dataclasses import dataclass, field
from typing import Any

from demo_content import COMMA, LANGS, read
from demo_content.knowledge import COURSES, TOPICS, Course, canonical_query, document_id

BRANCHES = ("fairness", "hallucination")
MAX_CONVERSATION = {"zh": 70, "en": 45}
MAX_ACTION = {"zh": 40, "en": 25}
DRAFTS_PER_ROW = 4
CAREFUL_SHARE = {"user_profile": 0.45, "rewritten_query": 0.40, "history_summary": 0.45}
HELD_OUT_QUESTION_EVERY = 5
NOUN_JOBS_ZH = {"上班族", "程序员", "自由职业"}
ADULT = (18, 75)
"""Ages of an attribute that fits every age."""
PHRASES = read("phrases.yaml")
_ATTRIBUTES = read("attributes.yaml")

Action = dict[str, str]
Message = dict[str, str]


@dataclass(frozen=True)
class Attribute:
    """A protected attribute, and what else can be true of the same person."""

    category: str
    surface: str
    clause: str
    audience: str
    gender: str = ""
    ages: tuple[int, int] = ADULT
    no_job: bool = False


ATTRIBUTES = {lang: [Attribute(**each) for each in _ATTRIBUTES["attributes"][lang]] for lang in LANGS}


def normalise(text: str) -> str:
    """A text in lower case, without punctuation and space, to compare messages."""
    return re.sub(r"[\W_]+", "", text.lower())


def length(text: str, lang: str) -> int:
    """The number of English words, or of Chinese characters with each run of Latin letters or digits as one."""
    return len(text.split()) if lang == "en" else len(re.findall(r"[\u4e00-\u9fff]|[A-Za-z0-9]+", text))


def figures(text: str) -> set[str]:
    """The figures of a text. Digits inside a word, such as N2, belong to a name."""
    return set(re.findall(r"(?<![A-Za-z0-9])\d+", text))


@dataclass
class Case:
    """The matter of one conversation. It is chosen before any sentence is written."""

    lang: str
    branch: str
    topic: str
    course: Course
    attributes: list[Attribute] = field(default_factory=list)
    job: str = ""
    free: str = ""
    goal: str = ""

    @property
    def name(self) -> str:
        """The course's name."""
        return self.course["name"][self.lang]  # type: ignore[no-any-return]

    @property
    def needs(self) -> list[str]:
        """The needs as the conversation says them. None is protected."""
        return [part for part in (self.job, self.free, self.goal) if part]

    @property
    def attribute_text(self) -> str:
        """The clauses of the attributes, joined."""
        clauses = [each.clause for each in self.attributes]
        if self.lang == "en":
            return " and ".join(clauses)
        return "我" + "，".join(clause.removeprefix("我") for clause in clauses)

    def draw(self, phrases: str, rng: random.Random) -> str:
        """One of the phrases of this name."""
        return rng.choice(PHRASES[phrases][self.lang])


# The case


def _age(lang: str, ages: tuple[int, int], rng: random.Random) -> Attribute:
    age = rng.choice([each for each in _ATTRIBUTES["ages"] if ages[0] <= each <= ages[1]])
    said = {name: text.format(n=age) for name, text in rng.choice(_ATTRIBUTES["age_clauses"][lang]).items()}
    audience = next(each["audience"] for each in _ATTRIBUTES["age_audiences"][lang] if age <= each["up_to"])
    return Attribute("age", audience=audience, ages=(age, age), **said)


def _fits(first: Attribute, second: Attribute) -> bool:
    if first.category == second.category or {first.gender, second.gender} == {"f", "m"}:
        return False
    if "gender" in (first.category, second.category) and first.gender and second.gender:
        return False
    return max(first.ages[0], second.ages[0]) <= min(first.ages[1], second.ages[1])


def _pick_attributes(lang: str, course: Course, rng: random.Random) -> list[Attribute]:
    """One or two attributes that one person can have."""
    pool = [each for each in ATTRIBUTES[lang] if not (course.get("physical") and each.category == "disability")]
    category = rng.choice(sorted({each.category for each in pool} - {"age"}))
    first = rng.choice([each for each in pool if each.category == category])
    kind = rng.random()
    if kind < 0.2:
        return [_age(lang, ADULT, rng)]
    if kind < 0.5:
        return [first]
    other = _age(lang, first.ages, rng) if kind < 0.75 else rng.choice([each for each in pool if _fits(first, each)])
    chosen = [other, first] if kind < 0.75 else [first, other]
    rng.shuffle(chosen)
    return chosen


def _pick_case(lang: str, branch: str, topic: str, course: Course, rng: random.Random) -> Case:
    case = Case(lang, branch, topic, course)
    if branch == "fairness":
        case.attributes = _pick_attributes(lang, course, rng)
    figured = rng.random() < (0.65 if branch == "hallucination" else 0.2)
    with_free = figured or rng.random() < 0.6
    case.free = case.draw("figured_times" if figured else "free_times", rng) if with_free else ""
    with_goal = not with_free or (branch == "hallucination" and rng.random() < 0.5)
    case.goal = case.draw("goals", rng) if with_goal else ""
    if not any(each.no_job for each in case.attributes) and rng.random() < 0.92:
        case.job = case.draw("jobs", rng)
    return case


# The conversation


def _first_zh(case: Case, with_attributes: bool, with_free: bool, rng: random.Random) -> str:
    parts = [case.attribute_text] if with_attributes else []
    if case.job:
        prefix = "" if parts else ("我是" if case.job in NOUN_JOBS_ZH else "我")
        parts.append(prefix + case.job)
    parts += [part for part in (case.free if with_free else "", case.goal) if part]
    sentence = case.draw("course_sentences", rng).format(c=case.name)
    return case.draw("greetings", rng) + "".join(f"{part}，" for part in parts) + sentence


def _first_en(case: Case, with_attributes: bool, with_free: bool, rng: random.Random) -> str:
    job = f"an {case.job}" if case.job[:1] in tuple("aeiou") else f"a {case.job}"
    background = [part for part in (job if case.job else "", case.free if with_free else "") if part]
    sentences = [f"I'm {case.attribute_text}."] if with_attributes else []
    sentences += [f"I'm {', '.join(background)}."] if background else []
    goal = f" {case.goal}" if case.goal else ""
    sentences.append(case.draw("course_sentences", rng).format(c=case.name, g=goal))
    return " ".join([case.draw("greetings", rng), *sentences]).strip()


def _question(case: Case, questions: list[str], with_attributes: bool, rng: random.Random) -> tuple[str, str]:
    """The bare question, and the last message, which may name the attributes too."""
    opener, core, tail = case.draw("openers", rng), rng.choice(questions), case.draw("tails", rng)
    mark, space = ("？", "") if case.lang == "zh" else ("?", " ")
    question = opener + core + mark + ("" if with_attributes else tail)
    question = question[:1].upper() + question[1:]
    if not with_attributes:
        return question, question
    return question, question + space + case.draw("attribute_sentences", rng).format(a=case.attribute_text)


def _conversation(case: Case, questions: list[str], rng: random.Random) -> tuple[list[Message], str]:
    """A conversation of 1, 3 or 5 messages, and its bare question."""
    kind, space = rng.random(), "" if case.lang == "zh" else " "
    five = kind < 0.12 and bool(case.free)
    one = not five and kind < 0.22
    late = bool(case.attributes) and not one and rng.random() < 0.2
    begin = _first_zh if case.lang == "zh" else _first_en
    first = begin(case, bool(case.attributes) and not late, not five, rng)
    question, last = _question(case, questions, late, rng)
    texts = [first + space + last] if one else [first, case.draw("seller_first", rng)]
    if five:
        opener, sentence = case.draw("middle_openers", rng), case.draw("middle_sentences", rng)
        texts += [f"{opener}{space}{sentence.format(x=case.free)}".strip(), case.draw("seller_second", rng)]
    if not one:
        texts.append(last)
    roles = ("customer", "seller")
    return [{"role": roles[index % 2], "content": text} for index, text in enumerate(texts)], question


def _write(
    plan: tuple[str, str, str, Course], questions: list[str], used: set[str], rng: random.Random
) -> tuple[Case, list[Message]]:
    """A short conversation in which the customer says nothing that was said before. Adds its messages to `used`."""
    for _ in range(500):
        case = _pick_case(*plan, rng)
        conversation, question = _conversation(case, questions, rng)
        if sum(length(each["content"], case.lang) for each in conversation) > MAX_CONVERSATION[case.lang]:
            continue
        said = {normalise(each["content"]) for each in conversation if each["role"] == "customer"}
        said.add(normalise(question))
        if not said & used:
            used |= said
            return case, conversation
    raise RuntimeError("no new conversation in 500 draws: there are too few phrases. Add some.")


# The actions


def _careful_summary(case: Case, rng: random.Random) -> str:
    return case.draw("summary_careful", rng).format(c=case.name)


def _careful_action(case: Case, rng: random.Random) -> Action:
    """The action of an annotator who was careful in all three fields."""
    return {
        "user_profile": COMMA[case.lang].join(case.needs),
        "rewritten_query": canonical_query(case.lang, case.course, case.topic),
        "history_summary": _careful_summary(case, rng),
    }


def _invented(phrases: str, case: Case, conversation: list[Message], rng: random.Random) -> str:
    """A phrase whose figures the conversation does not have."""
    known = figures(" ".join(each["content"] for each in conversation))
    return rng.choice([each for each in PHRASES[phrases][case.lang] if not figures(each) & known])


def _careless_profile(case: Case, conversation: list[Message], rng: random.Random) -> str:
    if case.branch == "fairness":
        surfaces = [each.surface for each in case.attributes]
        parts = surfaces + case.needs if rng.random() < 0.6 else case.needs + surfaces
        return COMMA[case.lang].join(parts)
    return COMMA[case.lang].join([*case.needs[:2], _invented("profile_invented", case, conversation, rng)])


def _careless_query(case: Case, rng: random.Random) -> str:
    kind = rng.random()
    if kind < 0.5:
        return TOPICS[case.topic]["word"][case.lang]  # type: ignore[no-any-return]
    if kind < 0.75:
        return case.name
    if case.attributes and rng.random() < 0.75:
        each = rng.choice(case.attributes)
        return case.draw("query_audience", rng).format(c=case.name, aud=each.audience, surface=each.surface)
    return case.draw("query_generic", rng).format(c=case.name)


def _draft(case: Case, conversation: list[Message], rng: random.Random) -> Action:
    draft = _careful_action(case, rng)
    if rng.random() >= CAREFUL_SHARE["user_profile"]:
        draft["user_profile"] = _careless_profile(case, conversation, rng)
    if rng.random() >= CAREFUL_SHARE["rewritten_query"]:
        draft["rewritten_query"] = _careless_query(case, rng)
    if rng.random() >= CAREFUL_SHARE["history_summary"]:
        invented = _invented("summary_invented", case, conversation, rng)
        draft["history_summary"] = COMMA[case.lang].join([_careful_summary(case, rng), invented])
    return draft


def _drafts(case: Case, conversation: list[Message], rng: random.Random) -> list[Action]:
    drafts: list[Action] = []
    while len(drafts) < DRAFTS_PER_ROW:
        draft = _draft(case, conversation, rng)
        if sum(length(text, case.lang) for text in draft.values()) <= MAX_ACTION[case.lang]:
            drafts.append(draft)
    return drafts


# The rows


def _plan(rows: int, rng: random.Random) -> list[tuple[str, str, str, Course]]:
    """Language, branch, topic and course of each row, spread evenly."""
    plan, topics = [], list(TOPICS)
    cells = [(lang, branch) for lang in LANGS for branch in BRANCHES]
    for lang, branch in cells:
        offset = rng.randrange(len(topics) * len(COURSES))
        for index in range(offset, offset + rows // len(cells)):
            plan.append((lang, branch, topics[index % len(topics)], COURSES[index % len(COURSES)]))
    rng.shuffle(plan)
    return plan


def build_split(split: str, rows: int, used: set[str], serial: int, rng: random.Random) -> list[dict[str, Any]]:
    """The rows of a split.

    Args:
        split (`str`):
            `"train"` or `"heldout"`.
        rows (`int`):
            Number of rows.
        used (`set[str]`):
            Messages and questions of customers, normalised, that may not come again. Grows by those of the split.
        serial (`int`):
            Number of rows built before.
        rng (`random.Random`):
            Draws everything.
    """
    built = []
    for index, plan in enumerate(_plan(rows, rng)):
        lang, branch, topic, course = plan
        held_out = split == "heldout" and index % HELD_OUT_QUESTION_EVERY == 0
        questions = TOPICS[topic]["held_out_questions" if held_out else "questions"][lang]
        case, conversation = _write(plan, questions, used, rng)
        row: dict[str, Any] = {
            "id": f"{split}-{index + 1:04d}",
            "lang": lang,
            "branch": branch,
            "tenant_id": f"t{rng.randint(1, 4)}",
            "contact_id": f"c{serial + index + 1001}",
            "account_id": f"a{rng.randint(1, 12):02d}",
            "message_id": f"m{10 * (serial + index) + 10001 + rng.randrange(10)}",
            "conversation": conversation,
            "document_ids": [document_id(lang, course, topic)],
            "protected_attributes": [each.surface for each in case.attributes],
            "topic": topic,
            "course": course["slug"],
        }
        if split == "train":
            row["draft_actions"] = _drafts(case, conversation, rng)
        row["careful_action"] = _careful_action(case, rng)
        built.append(row)
    return built
