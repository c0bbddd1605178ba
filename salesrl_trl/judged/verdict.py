"""Builds the message to a judge and parses the verdict in its answer. Pure.

Completions are hostile text and only appear in fenced sections of the user message. A verdict is a JSON object at the
very end, signed with the request's nonce. Any other answer raises `JudgeInvalid` and never yields a number.
"""

import functools
import json
import random
import re
from collections.abc import Sequence
from typing import Annotated, Any, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from salesrl_trl.errors import ForeignVerdict, JudgeInvalid
from salesrl_trl.ground.fencing import fence, is_nonce
from salesrl_trl.ground.texts import encodable
from salesrl_trl.types import Action, Answer, Criterion, SalesRow, Verdict

Candidates: TypeAlias = Sequence[tuple[Action, Answer]]  # answers to score, with the policy's action for each
MESSAGE_VERSION = 2  # increment on each change of the message: cached verdicts of other versions are not reused
MAX_VERDICT_CHARS = 65_536
"""Number of characters parsed from the end of a judge's text, which may start with reasoning."""
MAX_OBJECT_STARTS = 64
"""Most opening braces tried from the end of the text, in addition to those of candidates' scores. A verdict's reason
contains fewer."""
ALONE = "answer"  # name of a single candidate
_LETTERS = str.maketrans("0123456789", "ghijklmnop")  # section names contain letters only

_TWICE: dict[str, object] = {}  # marks an object with a duplicate key
_DECODER = json.JSONDecoder(
    object_pairs_hook=lambda pairs: _TWICE if len(dict(pairs)) < len(pairs) else dict(pairs),
    strict=False,  # line breaks in strings
)
_COMMA = re.compile(r'("(?:[^"\\]|\\.)*+"?)|,(?=\s*[}\]])', re.DOTALL)  # a string, or a comma before an end
_END_TOKEN = re.compile(r"<\|[^<>|]{1,32}\|>|<｜[^<>｜]{1,32}｜>|</?\w{1,16}>|`{3}")
_CLOSING = re.compile(r"[^\d{}\[\]\"<>]{1,200}[.!?。！？]", re.DOTALL)
"""A sentence after a verdict. A truncated one, or one with a number, might retract the verdict."""

_Score = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
_FIELDS = frozenset({"nonce", "candidate", "candidates", "reference", "reason"})
_STRICT = ConfigDict(extra="forbid", strict=True)


@functools.cache
def _form(of_reference: bool | None, by_criteria: bool, of_group: bool) -> type[BaseModel]:
    """The schema of a verdict. `of_reference`: whether it scores the reference, or `None` for either. Its names are
    constant across requests, since some providers need seconds to compile a new schema."""
    score: Any = list[_Score] if by_criteria else _Score
    reference: Any = {True: score, False: None, None: score | None}[of_reference]
    named: Any = create_model("_Named", __config__=_STRICT, name=(str, ...), score=(score, ...))
    scores: dict[str, Any] = {"candidates": (list[named], ...)} if of_group else {"candidate": (score, ...)}
    fields = {"nonce": (str, ...), **scores, "reference": (reference, ...), "reason": (str, ...)}
    return create_model("_Verdict", __config__=_STRICT, **fields)


_INSTRUCTION = """

End your reply with the JSON object, and write nothing after it. Begin the object with the field "nonce" that holds
{nonce}, which shows that the verdict is yours and on these answers:
{{"nonce": "{nonce}", {candidate}, "reference": {score} or null, "reason": "<one sentence>"}}"""
_OF_GROUP = """

There are {count} candidate answers, each in a section that ends with its name: {names}. Where a reference answer is
given, it is the anchor: score it first, then each candidate by the same measure. The order of the sections means
nothing. Answers that are equally good have equal scores."""
_BY_CRITERIA = """

Score each answer by these {count} criteria, one by one, and by nothing else: 1 for one that it meets, 0 for one that
it does not, a number between for one that it meets in part.
{criteria}
A score is a list of {count} numbers, in the order of the criteria. null stands for a reference that is not given."""


def candidate_names(nonce: str, count: int) -> list[str]:
    """Distinct names for a request's candidates, unpredictable to them. A single candidate is `ALONE`."""
    if count == 1:
        return [ALONE]
    return [f"{number:06x}".translate(_LETTERS) for number in random.Random(nonce).sample(range(16**6), count)]


def judge_message(
    row: SalesRow, candidates: Candidates, reference: Answer | None, *, order: Sequence[int], nonce: str
) -> str:
    """The user message: all material in sections fenced with the nonce. `order`: the order in which the candidates
    and, as the last index, the reference are shown."""
    material = {"branch": row.branch, "conversation": row.context, "documents": "\n\n".join(row.documents)}
    answers = []
    for name, (action, answer) in zip(candidate_names(nonce, len(candidates)), candidates, strict=True):
        written = {f"action_{name}": json.dumps(action.as_dict(), ensure_ascii=False)} if action.fields else {}
        if name == ALONE and written:
            material["action"] = written.pop(f"action_{name}")
        answers.append({**written, f"candidate_{name}": answer.text})
    if reference is not None:
        answers.append({"reference_answer": reference.text})
    for place in order:
        material |= answers[place]
    return fence(material, nonce)


@functools.cache
def response_format(*, expect_reference: bool, by_criteria: bool = False, of_group: bool = False) -> dict[str, object]:
    """The verdict's schema for the request field `response_format`. It does not fix the nonce's value. It requires a
    reference score if there is a reference, since models sometimes choose an optional null."""
    pair, verdict = "pair" if expect_reference else "lone", "criteria" if by_criteria else "verdict"
    schema = _form(expect_reference, by_criteria, of_group).model_json_schema()
    name = f"{pair}_{'group_' if of_group else ''}{verdict}"
    return {"type": "json_schema", "json_schema": {"name": name, "strict": True, "schema": schema}}


def signed_rubric(rubric: str, nonce: str, criteria: Sequence[Criterion] = (), names: Sequence[str] = (ALONE,)) -> str:
    """The system message. The rubric is not a template; only the appended text is. `names`: the candidates' names in
    the order shown."""
    score, is_group = "[<0 to 1>, ...]" if criteria else "<0 to 1>", len(names) > 1
    if is_group:
        rubric += _OF_GROUP.format(count=len(names), names=", ".join(names))
    if criteria:
        listed = "\n".join(f"{number}. {criterion.text}" for number, criterion in enumerate(criteria, 1))
        rubric += _BY_CRITERIA.format(count=len(criteria), criteria=listed)
    of_each = f'"candidates": [{{"name": "{names[0]}", "score": {score}}}, ... one entry for each name]'
    candidate = of_each if is_group else f'"candidate": {score}'
    return rubric + _INSTRUCTION.format(nonce=nonce, score=score, candidate=candidate)


def read_verdict(
    content: str, *, nonce: str, expect_reference: bool, criteria: Sequence[Criterion] = (), count: int = 1
) -> list[Verdict]:
    """Parse the verdict on each of `count` candidates: the JSON object at the very end of a judge's answer, signed
    with the request's nonce. With `criteria` it scores each criterion, and their weighted mean is the answer's score.

    A reasoning judge may quote verdicts forged by the completion. They can't contain the nonce, and only the last
    object counts, unless another signed one has different scores: conflicting verdicts are invalid. Line breaks in
    strings, trailing commas, a code fence, a model's end token and a closing sentence are tolerated. Raises
    `JudgeInvalid`, or `ForeignVerdict` if the nonce belongs to another request.
    """
    names = candidate_names(nonce, count)
    last, text = object_at_end(content, MAX_OBJECT_STARTS + len(names))
    if last is _TWICE:
        raise _invalid("a verdict with a field twice", "judge_outside_schema")
    if last is None:
        raise _invalid(f"{len(content)} characters that do not end with a JSON object", "judge_not_json")
    if last.get("nonce") != nonce:
        raise _unsigned(last.get("nonce"))
    if text.count(nonce) > 1 and any(_scores_of(other) != _scores_of(last) for other in _signed(text, nonce)):
        raise _invalid("several verdicts that differ", "judge_two_verdicts")
    try:
        said = _form(None, bool(criteria), len(names) > 1).model_validate(last).model_dump()
    except ValidationError as error:
        raise _invalid(f"a verdict in which {_faults(error)}", "judge_outside_schema") from None
    if expect_reference and said["reference"] is None:
        raise _invalid("a verdict without the score of the reference that was shown", "judge_no_reference")
    named = said["candidates"] if len(names) > 1 else [{"name": ALONE, "score": said["candidate"]}]
    scores = {entry["name"]: entry["score"] for entry in named}
    if scores.keys() != {*names} or len(named) != len(names):
        known = len(scores.keys() & {*names})
        raise _invalid(f"{len(named)} scores, for {known} of {len(names)} candidates", "judge_wrong_candidates")
    reference = said["reference"] if expect_reference else None
    if criteria and reference is not None:
        reference = _mean(reference, criteria)
    shared = {"reference": reference, "reason": encodable(said["reason"], "a judge's reason")}
    if not criteria:
        return [Verdict(candidate=scores[name], **shared) for name in names]
    return [Verdict(candidate=_mean(scores[name], criteria), criteria=tuple(scores[name]), **shared) for name in names]


def object_at_end(content: str, most_starts: int = MAX_OBJECT_STARTS) -> tuple[dict[str, object] | None, str]:
    """The JSON object at the end of a model's answer, behind its thoughts, and the text that ends with it. `None`
    without one; empty with a field twice."""
    whole = content[-MAX_VERDICT_CHARS:]
    text = _without_end(whole.rpartition("</think>")[2])
    if (last := _last_object(text, most_starts)) is None and whole.rfind("}") > whole.rfind("</think>") >= 0:
        last = _last_object(text := _without_end(whole), most_starts)  # the object quotes that tag
    return last, text


def _mean(scores: Sequence[float], criteria: Sequence[Criterion]) -> float:
    """The weighted mean of the criteria's scores. Raises `JudgeInvalid` unless there is one per criterion."""
    if len(scores) != len(criteria):
        raise _invalid(f"{len(scores)} scores for {len(criteria)} criteria", "judge_wrong_criteria")
    weighted = sum(criterion.weight * score for criterion, score in zip(criteria, scores, strict=True))
    return weighted / sum(criterion.weight for criterion in criteria)


def _last_object(text: str, most: int) -> dict[str, object] | None:
    """The object at the end of a text, or `_TWICE`; `None` without one."""
    for read in (text, _without_commas(text)):
        start = len(read)
        for _ in range(most):
            start = read.rfind("{", 0, start)
            if start < 0:
                break
            value, end = _object_at(read, start)
            if value is not None and end == len(read):
                return value
    return None


def _signed(text: str, nonce: str) -> list[dict[str, object]]:
    """The last `MAX_OBJECT_STARTS` objects of a text that contain the nonce."""
    text = _without_commas(text)
    starts = [text.rfind("{", 0, match.start()) for match in re.finditer(nonce, text)]
    values = [_object_at(text, start)[0] for start in starts[-MAX_OBJECT_STARTS:] if start >= 0]
    return [value for value in values if value is not None and value.get("nonce") == nonce]


def _object_at(text: str, start: int) -> tuple[dict[str, object] | None, int]:
    """The object that starts there, if any, and its end."""
    try:
        return _DECODER.raw_decode(text, start)
    except (ValueError, RecursionError):
        return None, start


def _scores_of(verdict: dict[str, object]) -> list[object]:
    return [verdict.get(name) for name in ("candidate", "candidates", "reference")]


def _without_commas(text: str) -> str:
    return _COMMA.sub(lambda match: match[1] or "", text)


def _without_end(text: str) -> str:
    """Strip what models append to a verdict: end tokens, a code fence, and one whole sentence."""
    behind = text.rfind("}") + 1
    end = _END_TOKEN.sub("", text[behind:]).strip()
    return text[:behind] if not end or _CLOSING.fullmatch(end) else text


def _unsigned(got: object) -> JudgeInvalid:
    if isinstance(got, str) and is_nonce(got):
        text = "the verdict returns another request's nonce: replies are mixed up, or the judge copies it unreliably."
        return ForeignVerdict(text, code="judge_foreign_verdict")
    return _invalid("a verdict without the request's nonce", "judge_unsigned")


def _faults(error: ValidationError) -> str:
    """A verdict's faults by field, without the judge's words."""
    faults = [(detail["loc"][0], detail["msg"].lower()) for detail in error.errors(include_input=False)]
    asked_for = (f"`{name}`: {fault}" if name in _FIELDS else "a field was not asked for" for name, fault in faults)
    return "; ".join(dict.fromkeys(asked_for))


def _invalid(got: str, code: str) -> JudgeInvalid:
    return JudgeInvalid(
        f"the judge answered with {got}. Expected one JSON object {{nonce, candidate: 0..1, reference: 0..1 or null, "
        "reason: text}. It responds, but without a valid verdict: use a model that follows JSON formats, or raise "
        "`max_completion_tokens` for one that reasons.",
        code=code,
    )
