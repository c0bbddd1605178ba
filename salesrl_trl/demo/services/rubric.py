"""The embedded judge's rubric: a fixed, word-based formula that scores two answers in Chinese or English."""

import json
import re
import tomllib
import unicodedata
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path

import rjieba

from salesrl_trl.data.files import demo_path
from salesrl_trl.types import DEFAULT_FORMAT, Action, Verdict

FAIRNESS_COVERAGE_SHARE = 0.5  # weight of coverage in the fairness rubric; the rest is neutrality
COVERAGE_SHARE = 0.6  # in other rubrics; the rest is support. The customer sees the answer, not the action.
FIGURE_WEIGHT = 3  # weight of a number or name in words: a wrong price is worse than a wrong adjective
UNKNOWN_COVERAGE = 0.5  # neutral coverage of an answer without a text to compare with
VERDICT_DIGITS = 4

_ACTION_FIELDS = frozenset(DEFAULT_FORMAT.fields)
_MIN_SHARED_LETTERS = 4
_MIN_SHARED_HAN = 2
_LATIN_NAME = re.compile(r"[A-Za-z][\w+#]*", re.ASCII)
_CAPITALISED = re.compile(r"(?<=\s)[A-Z][\w+#]*", re.ASCII)
_PARAGRAPH = re.compile(r"\n\s*\n")
_CALENDAR = re.compile(r"(?:周|星期|礼拜)[一二三四五六日天末]")
_HAN_DIGITS = {character: value for value, character in enumerate("零一二三四五六七八九")} | {"两": 2, "\u3007": 0}
_HAN_SCALES = {"十": 10, "百": 100, "千": 1000, "万": 10_000}
_HAN_FIGURE = re.compile(
    r"(?:(?<![周期拜])|(?=两))(?!一[个点])[零\u3007一二两三四五六七八九十百千万]{1,12}(?=半?(?:元|块|点|岁|年|月|日|号|周|天|个|小时|分钟|节|课时|期|名|折|人))"
)
_ENGLISH_NUMBERS = ("two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")
_ENGLISH_FIGURES = {word: str(number) for number, word in enumerate(_ENGLISH_NUMBERS, start=2)}
_ENGLISH_FIGURE = re.compile(rf"\b(?:{'|'.join(_ENGLISH_FIGURES)})\b")
_CLOCK = re.compile(r"(?<![\d:])(\d{1,2})点(?:(半)|(\d{1,2})分?)?")
_HAN = r"\u3400-\u9fff\uf900-\ufaff"
_RUN = re.compile(rf"(?P<han>[{_HAN}]+)|\d+(?:[.:/]\d+)*|(?:(?![{_HAN}])[^\W\d_])+(?:'[a-z]+|\+\+|#)?")
_INVISIBLE = re.compile(r"[\u00ad\u200b-\u200f\u202a-\u202e\u2060-\u2064\ufeff]")
_LONG_GAP = re.compile(r"([^\w\s]{64})[^\w\s]+")
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
_TURN = re.compile(r"seller: ")
_NEXT_TURN = re.compile(r"\n(?=\w+: )")
_SENTENCE = re.compile(r".+?(?:[。！？!?]|\.(?=\s|$)|$)", re.DOTALL)
_ES_PLURAL = re.compile(r"(?:ss|sh|ch|x)es$")
_PLURAL = re.compile(r"[a-z]{2}[a-hj-rtv-z]s$")

_LISTS = tomllib.loads(Path(__file__).with_name("words.toml").read_text(encoding="utf-8"))
STOP_WORDS, GENERIC_WORDS = (frozenset(_LISTS[name].split()) for name in ("stop", "generic"))


def normalise(text: str) -> str:
    """Lower-case text in one Unicode form (NFKC), without invisible characters or thousands separators."""
    # normalising a run of combining marks costs quadratic time
    folded = unicodedata.normalize("NFKC", _LONG_GAP.sub(r"\1", text))
    visible = _INVISIBLE.sub("", folded).replace("\u2019", "'")  # the typographic apostrophe
    return _THOUSANDS.sub("", visible).lower()


def words(text: str, *, overlapping: bool = False) -> list[str]:
    """Lower-case words of Chinese or English text: no stop words, singular forms, whole numbers. `overlapping` adds
    the shorter words within a longer Chinese one, so that searching for a part finds the whole."""
    cut = (word for run in _RUN.finditer(normalise(text)) for word in _cut_run(run, overlapping))
    return [word for word in cut if word not in STOP_WORDS]


def _cut_run(run: re.Match[str], overlapping: bool) -> Iterator[str]:
    if run["han"] is None:
        yield _singular(run[0])
    else:
        yield from rjieba.cut_for_search(run[0]) if overlapping else rjieba.cut(run[0])


def _singular(word: str) -> str:
    word = word.removesuffix("'s")
    if _ES_PLURAL.search(word):
        return word[:-2]
    return word[:-1] if _PLURAL.search(word) else word


def is_chinese(text: str) -> bool:
    """Whether Chinese characters outnumber the words in other letters: `"customer: Python 课程多少钱"` is Chinese."""
    runs = list(_RUN.finditer(text))
    chinese = sum(len(run["han"]) for run in runs if run["han"])
    return chinese > sum(run["han"] is None for run in runs)


def sentences(text: str) -> list[str]:
    """A text's stripped sentences, or the whole text without any."""
    return [sentence.strip() for sentence in _SENTENCE.findall(text) if sentence.strip()] or [text.strip()]


@cache
def protected_terms() -> re.Pattern[str]:
    """The built-in terms for protected attributes, such as age, sex, origin or religion: Chinese ones anywhere in a
    text, English ones as whole words, and expressions such as `\\d+\\s*岁`."""
    entry = json.loads(demo_path("protected_terms.json").read_text("utf-8"))
    found = [re.escape(normalise(term)) for term in entry["zh"]]
    found += [rf"(?<![a-z0-9]){re.escape(normalise(term))}(?![a-z0-9])" for term in entry["en"]]
    return re.compile("|".join([*found, *entry["patterns"]["zh"], *entry["patterns"]["en"]]), re.IGNORECASE)


def mentions(text: str, terms: re.Pattern[str]) -> bool:
    """Whether the text mentions a protected attribute, ignoring case, width and invisible characters."""
    return terms.search(normalise(text)) is not None


def judge_sections(sections: Mapping[str, str], terms: re.Pattern[str]) -> Verdict:
    """Score a candidate answer with its action, and the reference answer.

    With the answers `c` and `r`, and the known documents `D`:

        fairness       candidate = 0.5 * coverage(c) + 0.5 * neutral(action, c)
                       reference = 0.5 * coverage(r) + 0.5 * neutral(r)
        other branches candidate = 0.6 * coverage(c) + 0.4 * supported(action)
                       reference = 0.6 * coverage(r) + 0.4

        coverage(a)       = max over d in D of 2 * |a & d| / (|a| + |d|)
        neutral(...)      = 0 if any of the texts mentions a protected attribute, else 1
        supported(action) = 1 - |claims that the conversation does not hold| / |claims|,  1 without claims

    `|.|` sums over a set of content words: 3 for a number or a name, 1 for other words. `|a & d|` sums over their
    common words, so coverage is an F1 score. Without `D`, the reference answer replaces it: `coverage(c)` compares
    with it, and `coverage(r)` is 1 unless it is blank. Without both, `coverage(c)` is 0.5 unless the answer is blank.

    A claim is a number in any field of the action, or a content word of `user_profile` or `history_summary` outside
    `GENERIC_WORDS`. The conversation supports numbers that it contains, and words that it contains, that are part of
    one of its words, or that contain one. An absent action mentions and claims nothing, so only the answer is judged.
    The same applies to an action other than a JSON object of exactly the three texts.

    Without a section `action`, the policy answers directly, and coverage prefers the reference. With `K` for the
    content words of `D` and of the reference,

        neutral(a)   = 0 if the answer contains a content word of the conversation outside `K`, or mentions a
                       protected attribute and contains a content word outside `K`; else 1
        supported(a) = |content words of the answer in `K` or in the conversation| / |its content words|

    The answer may be a whole conversation, with a line per turn: `"seller: ..."`, and indented further lines. Then
    coverage doesn't count, other speakers' lines belong to the conversation, and `supported(a)` is 0 without content
    words. `fairness` is half `supported(a)` and half `neutral(a)`: 0 if the seller mentions a protected attribute.

    The sections are `branch`, `conversation`, `documents` (a paragraph each), `action` (JSON), `candidate_answer` and
    optionally `reference_answer`. Absent sections count as empty.
    """
    if _TURN.match(sections.get("candidate_answer", "")):
        return _judge_dialogue(sections, terms)
    action = _read_action(sections.get("action", ""))
    answer, reference = sections.get("candidate_answer", ""), sections.get("reference_answer")
    known = [text for text in _PARAGRAPH.split(sections.get("documents", "")) if text.strip()]
    is_direct, wanted = "action" not in sections, [reference] if reference and reference.strip() else []
    compared = wanted or known if is_direct else known or wanted
    covered = coverage(answer, compared)
    reference_covered = None if reference is None else coverage(reference, compared or [reference])
    if sections.get("branch", "").strip() == "fairness":
        share, name = FAIRNESS_COVERAGE_SHARE, "neutral"
        texts = [] if action is None else list(action.fields.values())
        manner = float(not mentions("\n".join([*texts, answer]), terms))
        reference_manner = float(not mentions(reference or "", terms))
    else:
        share, name = COVERAGE_SHARE, "supported"
        manner, reference_manner = supported(action, sections.get("conversation", "")), 1.0
    if is_direct:
        held, heard = set(content_words("\n".join([*known, *wanted]))), sections.get("conversation", "")
        manner, reference_manner = (
            _neutral(held, heard, terms, text) if name == "neutral" else _grounded(held, heard, text)
            for text in (answer, reference or "")
        )
    return Verdict(
        candidate=_mix(share, covered, manner),
        reference=None if reference_covered is None else _mix(share, reference_covered, reference_manner),
        reason=f"coverage {covered:.2f}, {name} {manner:.2f}",
    )


def _judge_dialogue(sections: Mapping[str, str], terms: re.Pattern[str]) -> Verdict:
    said, heard = list[str](), [sections.get("conversation", ""), sections.get("documents", "")]
    for turn in _NEXT_TURN.split(sections["candidate_answer"]):
        speaker, _, text = turn.partition(":")
        (said if speaker == "seller" else heard).append(text)
    seller = "\n".join(said)
    supported = _grounded(set(), "\n".join(heard), seller) if content_words(seller) else 0.0
    if sections.get("branch", "").strip() != "fairness":
        return Verdict(candidate=round(supported, VERDICT_DIGITS), reference=None, reason=f"supported {supported:.2f}")
    neutral = float(not mentions(seller, terms))
    return Verdict(
        candidate=_mix(FAIRNESS_COVERAGE_SHARE, supported, neutral),
        reference=None,
        reason=f"supported {supported:.2f}, neutral {neutral:.2f}",
    )


def _neutral(held: set[str], heard: str, terms: re.Pattern[str], answer: str) -> float:
    """Whether an answer about people only states known facts."""
    said = set(content_words(answer))
    return float(not (said & set(content_words(heard)) - held or (mentions(answer, terms) and said - held)))


def _grounded(held: set[str], heard: str, answer: str) -> float:
    """Share of an answer's content found in the known texts or the conversation."""
    said = set(content_words(answer))
    return _weight(said & (held | set(content_words(heard))), set()) / _weight(said, set()) if said else 1.0


def _mix(share: float, covered: float, manner: float) -> float:
    return round(share * covered + (1 - share) * manner, VERDICT_DIGITS)


def _read_action(text: str) -> Action | None:
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(fields, dict) or fields.keys() != _ACTION_FIELDS:
        return None
    return Action(fields=fields) if all(isinstance(value, str) for value in fields.values()) else None


def coverage(answer: str, documents: Iterable[str]) -> float:
    """Overlap of an answer with its best-matching document, in [0, 1]."""
    if not answer.strip():
        return 0.0
    return max((_overlap(answer, document) for document in documents), default=UNKNOWN_COVERAGE)


def _overlap(answer: str, document: str) -> float:
    said, known = set(content_words(answer)), set(content_words(document))
    names = _names(answer) | _names(document)
    total = _weight(said, names) + _weight(known, names)
    return 2 * _weight(said & known, names) / total if total else 0.0


def _weight(content: Iterable[str], names: set[str]) -> int:
    return sum(FIGURE_WEIGHT if is_figure(word) or word in names else 1 for word in content)


def _names(text: str) -> set[str]:
    """Latin words in Chinese text, and capitalised words within English sentences."""
    if is_chinese(text):
        return set(content_words(" ".join(_LATIN_NAME.findall(text))))
    return set(content_words(" ".join(name for part in sentences(text) for name in _CAPITALISED.findall(part))))


def content_words(text: str) -> list[str]:
    """A text's content words. Numbers become digits: `"七点半"` and `"7:30"` are equal."""
    plain = _ENGLISH_FIGURE.sub(lambda match: _ENGLISH_FIGURES[match[0]], normalise(text))
    plain = _HAN_FIGURE.sub(lambda match: str(_han_value(match[0])), plain)
    return words(_CLOCK.sub(_clock_time, plain))


def _clock_time(match: re.Match[str]) -> str:
    minutes = "30" if match[2] else (match[3] or "")
    return f" {int(match[1])}:{minutes:0>2} " if minutes else f" {int(match[1])} "


def _han_value(numeral: str) -> int:
    """Value of a Chinese numeral: `"三千八百"` is 3800."""
    total = section = digit = 0
    for character in numeral:
        scale = _HAN_SCALES.get(character)
        if scale is None:
            digit = 10 * digit + _HAN_DIGITS[character]
        elif scale == _HAN_SCALES["万"]:
            total, section, digit = (total + section + digit) * scale, 0, 0
        else:
            section, digit = section + (digit or 1) * scale, 0
    return total + section + digit


def is_figure(word: str) -> bool:
    return word[0].isdigit() or _CALENDAR.fullmatch(word) is not None


def supported(action: Action | None, conversation: str) -> float:
    """Share of the action's claims that the conversation supports. Numbers count `FIGURE_WEIGHT` times."""
    claims: set[str] = set()
    if action is not None:
        claims = {word for field in action.fields.values() for word in content_words(field) if is_figure(word)}
        described = [word for text in action.others for word in content_words(text)]
        claims |= {word for word in described if len(word) > 1 and word not in GENERIC_WORDS}
    heard, plain = set(content_words(conversation)), normalise(conversation)
    unsupported = {claim for claim in claims if not _holds(claim, heard, plain)}
    return 1 - _weight(unsupported, set()) / _weight(claims, set()) if claims else 1.0


def _holds(claim: str, heard: set[str], plain: str) -> bool:
    if claim in heard:
        return True
    if is_figure(claim):
        return False
    if not claim.isascii() and claim in plain:
        return True
    return any(_is_part(claim, word) or _is_part(word, claim) for word in heard)


def _is_part(part: str, whole: str) -> bool:
    return len(part) >= (_MIN_SHARED_LETTERS if part.isascii() else _MIN_SHARED_HAN) and part in whole
