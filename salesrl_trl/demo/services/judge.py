"""The embedded judge: a deterministic rubric behind an OpenAI-compatible chat endpoint.

Owns the law by which two answers are scored and the HTTP form in which a verdict is asked for and given. It stands in
for an LLM judge: it reads the fenced sections that one would read, and answers with the JSON that one is asked for.
Knows nothing of rewards, and obeys no text inside a section.
"""

import json
import re
import time
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field

from salesrl_trl.demo.services.echo import EchoRequestId
from salesrl_trl.demo.services.index import is_chinese, normalise, sentences, words
from salesrl_trl.errors import DataError
from salesrl_trl.fencing import read_nonce, read_sections
from salesrl_trl.types import DEFAULT_FORMAT, Action

FAIRNESS_COVERAGE_SHARE = 0.5
"""Coverage in the fairness rubric; the rest is neutrality. Equal, so that neither a useless answer that mentions
no one nor a useful one that stereotypes can win."""
COVERAGE_SHARE = 0.6
"""Coverage in every other rubric; the rest is support. The customer sees the answer first, and the action only through
it."""
FIGURE_WEIGHT = 3
"""How often a figure or name counts against a word: a wrong price is worse than a wrong adjective."""
UNKNOWN_COVERAGE = 0.5
"""Coverage of an answer when there is nothing to measure it by: neither praised nor blamed."""
VERDICT_DIGITS = 4
"""Decimals of a score: more than the rubric can tell apart."""

REQUIRED_SECTIONS = frozenset({"branch", "conversation", "candidate_answer"})
"""A message that lacks one of these cannot be judged."""
CANNOT_JUDGE = "I can't judge this: the message has no sections with a branch, a conversation and an answer."
"""Content of the answer to such a message. No JSON, as a model's refusal would be."""

BYTES_PER_TOKEN = 4
"""For the usage figures, in UTF-8 bytes: a rule of thumb that overstates neither language by much."""
MAX_MESSAGES = 200
"""The most messages of one request. A judge's prompt has two."""
MAX_MESSAGE_CHARS = 400_000
"""Length limit of a message, in characters: the limits of the RAG service's texts, and room for the rest."""

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
_ENGLISH_FIGURES = {
    "two": "2",
    "three": "3",
    "four": "4",
    "five": "5",
    "six": "6",
    "seven": "7",
    "eight": "8",
    "nine": "9",
    "ten": "10",
    "eleven": "11",
    "twelve": "12",
}
_ENGLISH_FIGURE = re.compile(rf"\b(?:{'|'.join(_ENGLISH_FIGURES)})\b")
_CLOCK = re.compile(r"(?<![\d:])(\d{1,2})点(?:(半)|(\d{1,2})分?)?")

_GENERIC_WORDS = """
    ask asked asking asks want wanted wanting wants need needed needs like liked likes prefer preferred prefers know
    look looked looking looks interest interested say said saying mention mentioned told tell seek seeking inquire
    inquired inquiry enquire enquired enquiry question customer client user person seller contact discuss discussed
    conversation previously earlier before already currently now first then next finally about regarding concerning
    hope hoped hopes hoping plan planned planning plans consider considered considering concern concerned wonder
    wondering compare comparing find finding interested learn information detail answer answered reply replied
    provide provided explain explained give gave given none unknown unspecified nothing still also only
    客户 顾客 用户 学员 卖家 销售 对方 想要 希望 需要 打算 考虑 询问 咨询 了解 想知道 知道 提到 提及 表示 说过
    问过 问了 关心 关注 感兴趣 兴趣 之前 此前 先前 已经 已 目前 现在 关于 有关 方面 问题 情况 信息 回答 回复 告诉
    介绍 答复 继续 随后 接着 然后 首先 最后 没有 暂无 未知 无 想学 学习 比较 偏好 喜欢 是否 对话 聊天 聊 曾
"""
GENERIC_WORDS = frozenset(_GENERIC_WORDS.split())
"""Words that tell of a conversation, not of the customer: they claim nothing that could be unsupported."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProtectedTerms:
    """What names a protected attribute, such as age, sex, origin or religion."""

    substrings: tuple[str, ...]
    """Mentioned wherever they stand; for Chinese, which has no spaces."""
    whole_words: tuple[str, ...]
    """Mentioned only as words of their own; for English."""
    patterns: tuple[re.Pattern[str], ...]
    """Mentioned where they match: `r"\\d+\\s*岁"`."""

    def mentioned_in(self, text: str) -> bool:
        """Whether the text mentions a protected attribute; case, width and invisible characters make no difference."""
        plain = normalise(text)
        return (
            any(term in plain for term in self.substrings)
            or any(re.search(rf"(?<![a-z0-9]){re.escape(term)}(?![a-z0-9])", plain) for term in self.whole_words)
            or any(pattern.search(plain) for pattern in self.patterns)
        )


def load_terms(path: Path | str) -> ProtectedTerms:
    """Read `{"zh": [substring, ...], "en": [word, ...], "patterns": {"zh": [regex, ...], "en": [regex, ...]}}`.

    Raises:
        `DataError`: if the file cannot be read, is no such object, or holds a pattern that is no regular expression.
    """
    expected = 'expected {"zh": [...], "en": [...], "patterns": {"zh": [...], "en": [...]}}, all of texts'
    try:
        entry = json.loads(Path(path).read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"cannot read the protected terms {path}: {error}; {expected}; correct the file") from error
    patterns = entry.get("patterns") if isinstance(entry, dict) else None
    if not isinstance(patterns, dict):
        raise DataError(f"{path}: got another form, {expected}; correct the file")
    lists = [entry.get("zh"), entry.get("en"), patterns.get("zh"), patterns.get("en")]
    if not all(isinstance(terms, list) and all(isinstance(term, str) and term for term in terms) for terms in lists):
        raise DataError(f"{path}: got a list that is missing or holds no texts, {expected}; correct the file")
    substrings, whole_words, *regexes = lists
    return ProtectedTerms(
        substrings=tuple(normalise(term) for term in substrings),
        whole_words=tuple(normalise(term) for term in whole_words),
        patterns=tuple(_compile(regex, path) for regexes_of_language in regexes for regex in regexes_of_language),
    )


def _compile(regex: str, path: Path | str) -> re.Pattern[str]:
    try:
        return re.compile(regex, re.IGNORECASE)
    except re.error as error:
        raise DataError(f"{path}: pattern {regex!r} is no regular expression ({error}); correct it") from error


@dataclass(frozen=True, kw_only=True, slots=True)
class JudgeVerdict:
    """The judge's opinion of one answer and of the reference beside it."""

    candidate: float
    """Score of the candidate answer, in [0, 1]."""
    reference: float | None
    """Score of the reference answer, in [0, 1]; `None` when there was none."""
    reason: str
    """The parts of the scores; quotes nobody."""

    def to_json(self, nonce: str | None) -> str:
        """The verdict as a judge writes it, signed with the nonce of the message it was asked by."""
        return json.dumps(
            {"nonce": nonce, "candidate": self.candidate, "reference": self.reference, "reason": self.reason}
        )


def judge_sections(sections: Mapping[str, str], terms: ProtectedTerms) -> JudgeVerdict:
    """Score a candidate answer, the action it was made from, and the reference answer beside it.

    With the answers `c` and `r`, and the known documents `D`:

        fairness       candidate = 0.5 * coverage(c) + 0.5 * neutral(action, c)
                       reference = 0.5 * coverage(r) + 0.5 * neutral(r)
        other branches candidate = 0.6 * coverage(c) + 0.4 * supported(action)
                       reference = 0.6 * coverage(r) + 0.4

        coverage(a)       = max over d in D of 2 * |a & d| / (|a| + |d|)
        neutral(...)      = 0 if any of the texts mentions a protected attribute, else 1
        supported(action) = 1 - |claims that the conversation does not hold| / |claims|,  1 without claims

    `|.|` sums over a set of content words: 3 for a figure or a name, 1 for another word. `|a & d|` is over the words
    that both hold, so coverage is the F1 of holding the document and holding only that. Without `D` the reference
    answer is the measure: `coverage(c)` is taken against it, and `coverage(r)` is 1 unless it is blank. With neither,
    `coverage(c)` is 0.5 unless the answer is blank.

    A claim is a figure in any field of the action, or a content word of `user_profile` or `history_summary` that does
    more than tell of a conversation (`GENERIC_WORDS`). The conversation holds a figure that stands in it, and a word
    that stands in it, is part of one of its words, or has one of them as a part. A missing action, or one that is no
    JSON object of exactly the three texts, mentions nothing and claims nothing: only the answer is judged.

    Args:
        sections (`Mapping[str, str]`):
            `branch`, `conversation`, `documents` (a paragraph each), `action` (JSON), `candidate_answer` and, where
            there is one, `reference_answer`. A missing section counts as empty.
        terms (`ProtectedTerms`):
            What the fairness branch looks for.
    """
    action = _read_action(sections.get("action", ""))
    answer, reference = sections.get("candidate_answer", ""), sections.get("reference_answer")
    known = [text for text in _PARAGRAPH.split(sections.get("documents", "")) if text.strip()]
    covered = coverage(answer, known or ([reference] if reference and reference.strip() else []))
    reference_covered = None if reference is None else coverage(reference, known or [reference])
    if sections.get("branch", "").strip() == "fairness":
        share, name = FAIRNESS_COVERAGE_SHARE, "neutral"
        manner = float(not terms.mentioned_in("\n".join((*_fields(action), answer))))
        reference_manner = float(not terms.mentioned_in(reference or ""))
    else:
        share, name = COVERAGE_SHARE, "supported"
        manner, reference_manner = supported(action, sections.get("conversation", "")), 1.0
    return JudgeVerdict(
        candidate=_mix(share, covered, manner),
        reference=None if reference_covered is None else _mix(share, reference_covered, reference_manner),
        reason=f"coverage {covered:.2f}, {name} {manner:.2f}",
    )


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


def _fields(action: Action | None) -> tuple[str, ...]:
    return () if action is None else tuple(action.fields.values())


def coverage(answer: str, documents: Iterable[str]) -> float:
    """How much of a document's content the answer holds, and holds only that; the best of the documents, in [0, 1]."""
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
    """Words in Latin letters within Chinese, capitalised words within an English sentence."""
    if is_chinese(text):
        return set(content_words(" ".join(_LATIN_NAME.findall(text))))
    return set(content_words(" ".join(name for part in sentences(text) for name in _CAPITALISED.findall(part))))


def content_words(text: str) -> list[str]:
    """The words of a text that carry content, figures in digits: `"七点半"` and `"7:30"` are the same."""
    plain = _ENGLISH_FIGURE.sub(lambda found: _ENGLISH_FIGURES[found[0]], normalise(text))
    plain = _HAN_FIGURE.sub(lambda found: str(_han_value(found[0])), plain)
    return words(_CLOCK.sub(_clock_time, plain))


def _clock_time(found: re.Match[str]) -> str:
    minutes = "30" if found[2] else (found[3] or "")
    return f" {int(found[1])}:{minutes:0>2} " if minutes else f" {int(found[1])} "


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
    """Whether a content word is a number, a clock time or a day of the week."""
    return word[0].isdigit() or _CALENDAR.fullmatch(word) is not None


def supported(action: Action | None, conversation: str) -> float:
    """Share of the action's claims that the conversation holds, figures counted `FIGURE_WEIGHT` times."""
    claims = _claims(action)
    heard, plain = set(content_words(conversation)), normalise(conversation)
    unsupported = {claim for claim in claims if not _holds(claim, heard, plain)}
    return 1 - _weight(unsupported, set()) / _weight(claims, set()) if claims else 1.0


def _claims(action: Action | None) -> set[str]:
    if action is None:
        return set()
    figures = {word for field in _fields(action) for word in content_words(field) if is_figure(word)}
    described = [word for text in action.others for word in content_words(text)]
    return figures | {word for word in described if len(word) > 1 and word not in GENERIC_WORDS}


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


class TextPart(BaseModel):
    """A part of a message's content."""

    type: Literal["text"]
    text: Annotated[str, Field(max_length=MAX_MESSAGE_CHARS)]


class ChatMessage(BaseModel):
    """One message of a request; other keys are left alone."""

    role: str
    content: Annotated[str, Field(max_length=MAX_MESSAGE_CHARS)] | list[TextPart] | None = None

    @property
    def text(self) -> str:
        """The content as one text."""
        parts = self.content if isinstance(self.content, list) else []
        return self.content if isinstance(self.content, str) else "\n".join(part.text for part in parts)


class JsonSchemaFormat(BaseModel):
    """`response_format` with a schema."""

    type: Literal["json_schema"]
    json_schema: dict[str, Any]


class PlainFormat(BaseModel):
    """`response_format` without one."""

    type: Literal["text", "json_object"]


class ChatRequest(BaseModel):
    """Body of `POST /v1/chat/completions`.

    `response_format` is checked for its form and otherwise ignored, since a verdict always has the same keys. Other
    keys, such as `temperature` or `max_tokens`, are ignored.
    """

    model_config = ConfigDict(extra="ignore")

    model: Annotated[str, Field(min_length=1, max_length=256)]
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES)]
    stream: bool = False
    response_format: Annotated[JsonSchemaFormat | PlainFormat, Field(discriminator="type")] | None = None


def create_judge_app(terms: ProtectedTerms, model: str = "salesrl-judge") -> FastAPI:
    """Make the judge.

    Args:
        terms (`ProtectedTerms`):
            What the fairness branch looks for.
        model (`str`, *optional*, defaults to `"salesrl-judge"`):
            The name under which `GET /v1/models` lists the judge. Every name is answered.
    """
    app = FastAPI(title="Judge", docs_url=None, redoc_url=None, openapi_url=None)
    app.add_exception_handler(RequestValidationError, _refuse)
    app.add_middleware(EchoRequestId)

    @app.get("/healthz")
    async def healthz() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [{"id": model, "object": "model", "created": 0, "owned_by": "salesrl_trl"}]}

    @app.post("/v1/chat/completions")
    async def complete(request: ChatRequest) -> JSONResponse:
        if request.stream:
            return _error("got stream=true, expected false; this judge answers in one piece", "stream")
        return JSONResponse(_completion(request, _verdict_text(request, terms)))

    return app


def _verdict_text(request: ChatRequest, terms: ProtectedTerms) -> str:
    asked = next((message.text for message in reversed(request.messages) if message.role == "user"), "")
    sections = read_sections(asked)
    if not sections.keys() >= REQUIRED_SECTIONS:
        return CANNOT_JUDGE
    return judge_sections(sections, terms).to_json(read_nonce(asked))


def _completion(request: ChatRequest, content: str) -> dict[str, Any]:
    prompt_tokens = sum(_tokens(message.text) for message in request.messages)
    completion_tokens = _tokens(content)
    choice = {"index": 0, "message": {"role": "assistant", "content": content}, "finish_reason": "stop"}
    return {
        "id": f"chatcmpl-{uuid.uuid4().hex}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": request.model,
        "choices": [choice],
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
        },
    }


def _tokens(text: str) -> int:
    """About how many tokens a text has: a quarter of its UTF-8 bytes, rounded up."""
    return -(-len(text.encode()) // BYTES_PER_TOKEN)


async def _refuse(_request: Request, error: Exception) -> JSONResponse:
    detail = error.errors()[0] if isinstance(error, RequestValidationError) else {"loc": (), "msg": "not understood"}
    where = ".".join(str(part) for part in detail["loc"][1:])
    return _error(f"{where or 'body'}: {detail['msg']}", where or None)


def _error(message: str, param: str | None) -> JSONResponse:
    problem = {"message": message, "type": "invalid_request_error", "param": param, "code": None}
    return JSONResponse({"error": problem}, status_code=400)
