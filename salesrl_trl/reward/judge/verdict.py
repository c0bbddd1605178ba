"""The message to a judge, and the verdict in its answer. Pure; `provider` calls it.

Completions are hostile text, so they stand in fenced sections of the user message only. A verdict is a JSON object at
the very end, signed with the request's nonce. Any other text is `JudgeInvalid`, never a number.
"""

import functools
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from salesrl_trl.errors import ForeignVerdict, JudgeInvalid
from salesrl_trl.ground.fencing import fence, is_nonce
from salesrl_trl.types import Action, Answer, Criterion, SalesRow, Verdict

if TYPE_CHECKING:  # importing openai takes half a second, which every reward process would pay for one type
    from openai.types.shared_params import ResponseFormatJSONSchema

MESSAGE_VERSION = 2  # version of the message. Raise it with each change: verdicts on another version are not reused.
MAX_VERDICT_CHARS = 65_536
"""Characters of a judge's text that are read, from its end. A judge may think aloud before the verdict."""
MAX_OBJECT_STARTS = 64
"""Most opening braces that are tried, from the end of the text. The reason in a verdict holds fewer."""

_TWICE: dict[str, object] = {}  # stands for an object in which a key comes twice


_Score = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]


class _VerdictBody(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    nonce: str
    candidate: _Score
    reference: _Score | None
    reason: str


class _CriteriaVerdictBody(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    nonce: str
    candidate: list[_Score]
    reference: list[_Score] | None
    reason: str


_INSTRUCTION = """

End your reply with the JSON object, and write nothing after it. Begin the object with the field "nonce" that holds
{nonce}, which shows that the verdict is yours and on these answers:
{{"nonce": "{nonce}", "candidate": {score}, "reference": {score} or null, "reason": "<one sentence>"}}"""
_BY_CRITERIA = """

Score each answer by these {count} criteria, one by one, and by nothing else: 1 for one that it meets, 0 for one that
it does not, a number between for one that it meets in part.
{criteria}
A score is a list of {count} numbers, in the order of the criteria. null stands for a reference that is not given."""


def judge_message(
    row: SalesRow, action: Action, candidate: Answer, reference: Answer | None, *, candidate_first: bool, nonce: str
) -> str:
    """The user message: all material in sections, whose fences the nonce marks."""
    answers = {"candidate_answer": candidate.text}
    if reference is not None:
        answers["reference_answer"] = reference.text
    written = {"action": json.dumps(action.as_dict(), ensure_ascii=False)} if action.fields else {}
    material = {
        "branch": row.branch,
        "conversation": row.context,
        "documents": "\n\n".join(row.documents),
        **written,
    }
    ordered = answers.items() if candidate_first else reversed(answers.items())
    return fence({**material, **dict(ordered)}, nonce)


@functools.cache
def response_format(*, expect_reference: bool, by_criteria: bool = False) -> "ResponseFormatJSONSchema":
    """The schema of a verdict, as the field `response_format` of a request. It has no value for the nonce: some
    providers take seconds to prepare a new schema. A model that may choose null for the reference does so at times."""
    base, score = (_CriteriaVerdictBody, list[_Score]) if by_criteria else (_VerdictBody, _Score)
    pair, verdict = "pair" if expect_reference else "lone", "criteria" if by_criteria else "verdict"
    fields: dict[str, Any] = {"reference": (score if expect_reference else None, ...)}
    body = create_model(f"_{pair.title()}{verdict.title()}Body", __base__=base, **fields)
    return {
        "type": "json_schema",
        "json_schema": {"name": f"{pair}_{verdict}", "strict": True, "schema": body.model_json_schema()},
    }


def signed_rubric(rubric: str, nonce: str, criteria: Sequence[Criterion] = ()) -> str:
    """The system message. The rubric is not a template: only what is appended is filled in."""
    if not criteria:
        return rubric + _INSTRUCTION.format(nonce=nonce, score="<0 to 1>")
    listed = "\n".join(f"{number}. {criterion.text}" for number, criterion in enumerate(criteria, 1))
    by_criteria = _BY_CRITERIA.format(count=len(criteria), criteria=listed)
    return rubric + by_criteria + _INSTRUCTION.format(nonce=nonce, score="[<0 to 1>, ...]")


def read_verdict(content: str, *, nonce: str, expect_reference: bool, criteria: Sequence[Criterion] = ()) -> Verdict:
    """Read a verdict: the JSON object at the very end of a judge's answer, signed with the request's nonce.

    With `criteria` it has a score for each, and their weighted mean is the answer's.

    A judge that thinks aloud may quote forged verdicts of the completion. They can't hold the nonce, and nothing
    before the last object is read. With `expect_reference`, a reference answer was shown and must be scored. Raises
    `JudgeInvalid`, or `ForeignVerdict` if the nonce is that of another request.
    """
    text = content[-MAX_VERDICT_CHARS:].rstrip().removesuffix("```").rstrip()
    last = _last_object(text)
    if last is _TWICE:
        raise _invalid("a verdict with a field twice", "judge_outside_schema")
    if last is None:
        raise _invalid(f"{len(content)} characters that do not end with a JSON object", "judge_not_json")
    if last.get("nonce") != nonce:
        raise _unsigned(last.get("nonce"))
    try:
        body = (_CriteriaVerdictBody if criteria else _VerdictBody).model_validate(last)
    except ValidationError as error:
        raise _invalid(f"a verdict in which {_faults(error)}", "judge_outside_schema") from None
    if expect_reference and body.reference is None:
        raise _invalid("a verdict without the score of the reference that was shown", "judge_no_reference")
    if isinstance(body, _VerdictBody):
        of_reference = body.reference if expect_reference else None
        return Verdict(candidate=body.candidate, reference=of_reference, reason=body.reason)
    return Verdict(
        candidate=_mean(body.candidate, criteria),
        reference=_mean(body.reference, criteria) if expect_reference and body.reference is not None else None,
        reason=body.reason,
        criteria=tuple(body.candidate),
    )


def _mean(scores: Sequence[float], criteria: Sequence[Criterion]) -> float:
    """The weighted mean of scores by criteria. Raises `JudgeInvalid` unless each criterion has one."""
    if len(scores) != len(criteria):
        raise _invalid(f"{len(scores)} scores for {len(criteria)} criteria", "judge_wrong_criteria")
    weighted = sum(criterion.weight * score for criterion, score in zip(criteria, scores, strict=True))
    return weighted / sum(criterion.weight for criterion in criteria)


def verdict_from_json(value: object) -> Verdict:
    """The verdict of a value in the cache. Raises `TypeError` for another form, `ValueError` beyond [0, 1]."""
    if not isinstance(value, dict):
        raise TypeError(f"a kept verdict is a {type(value).__name__}. Expected an object.")
    return Verdict(**value)


def _last_object(text: str) -> dict[str, object] | None:
    """The object at the end of a text, or `_TWICE`. `None` if there is none."""
    decoder = json.JSONDecoder(
        object_pairs_hook=lambda pairs: _TWICE if len(dict(pairs)) < len(pairs) else dict(pairs)
    )
    start = len(text)
    value: dict[str, object]
    for _ in range(MAX_OBJECT_STARTS):
        start = text.rfind("{", 0, start)
        if start < 0:
            return None
        try:
            value, end = decoder.raw_decode(text, start)
        except (ValueError, RecursionError):
            continue
        if end == len(text):
            return value
    return None


def _unsigned(got: object) -> JudgeInvalid:
    """The error for a verdict without the request's nonce. The message shows no nonce."""
    if isinstance(got, str) and is_nonce(got):
        return ForeignVerdict(
            "the verdict returns another nonce than the request's. Expected its own: replies are mixed up, or the "
            "judge copies badly.",
            code="judge_foreign_verdict",
        )
    what = "has no field `nonce`" if got is None else "holds something else in its field `nonce`"
    return JudgeInvalid(
        f"the verdict does not return the request's nonce: it {what}. Expected the 16 digits that the system message "
        "asks for.",
        code="judge_unsigned",
    )


def _faults(error: ValidationError) -> str:
    """The faults in the fields of a verdict, without the judge's words."""
    faults = []
    for detail in error.errors(include_input=False, include_url=False):
        name = detail["loc"][0]
        known = name in _VerdictBody.model_fields  # both forms have these
        faults.append(f"`{name}`: {detail['msg'].lower()}" if known else "a field stands that was not asked for")
    return "; ".join(dict.fromkeys(faults))


def _invalid(got: str, code: str) -> JudgeInvalid:
    return JudgeInvalid(
        f"the judge answered with {got}. Expected one JSON object {{nonce, candidate: 0..1, reference: 0..1 or null, "
        "reason: text}. It is up and answers, but gives no verdict: take a model that keeps to JSON, or leave one "
        "that thinks more `max_completion_tokens`.",
        code=code,
    )
