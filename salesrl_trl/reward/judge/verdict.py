"""What a judge is shown, and what of its answer counts as a verdict.

Owns the judge's message, the schema that a provider is held to where it can be, and what it wrote as far as it is a
verdict: the last thing in its text, signed with the request's nonce. Completions are hostile text here: they travel in
fenced sections of the user message only, and anything else is `JudgeInvalid`, never a number. Pure: no network.
"""

import functools
import json
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from salesrl_trl.errors import ForeignVerdict, JudgeInvalid
from salesrl_trl.fencing import fence, is_nonce
from salesrl_trl.types import Action, Answer, SalesRow, Verdict

if TYPE_CHECKING:  # importing openai takes half a second, which every reward process would pay for one type
    from openai.types.shared_params import ResponseFormatJSONSchema

MESSAGE_VERSION = 2
"""Of what a judge is shown. To be raised with each change of it: verdicts of another version are not reused."""
MAX_VERDICT_CHARS = 65_536
"""Longest verdict that is read. Of a text in which a judge thinks aloud before, this much of its end."""
MAX_OBJECT_STARTS = 64
"""Opening braces that are tried, from the end, for the verdict in a text: more than a reason in words holds."""


class _VerdictBody(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    nonce: str
    candidate: float = Field(ge=0, le=1, allow_inf_nan=False)
    reference: float | None = Field(ge=0, le=1, allow_inf_nan=False)
    reason: str


class _PairVerdictBody(_VerdictBody):
    reference: float = Field(ge=0, le=1, allow_inf_nan=False)


class _LoneVerdictBody(_VerdictBody):
    reference: None


_INSTRUCTION = """

End your reply with the JSON object, and write nothing after it. Begin the object with the field "nonce" that holds
{nonce}, which shows that the verdict is yours and on these answers:
{{"nonce": "{nonce}", "candidate": <0 to 1>, "reference": <0 to 1 or null>, "reason": "<one sentence>"}}"""


def judge_message(
    row: SalesRow, action: Action, candidate: Answer, reference: Answer | None, *, candidate_first: bool, nonce: str
) -> str:
    """The user message: all material in fenced sections, nothing of it outside them.

    Args:
        row (`SalesRow`), action (`Action`), candidate (`Answer`), reference (`Answer`, *optional*):
            The material.
        candidate_first (`bool`):
            Which of two answers stands first.
        nonce (`str`):
            Of the fence.
    """
    answers = {"candidate_answer": candidate.text}
    if reference is not None:
        answers["reference_answer"] = reference.text
    material = {
        "branch": row.branch,
        "conversation": row.context,
        "documents": "\n\n".join(row.documents),
        "action": json.dumps(action.as_dict(), ensure_ascii=False),
    }
    ordered = answers.items() if candidate_first else reversed(answers.items())
    return fence({**material, **dict(ordered)}, nonce)


@functools.cache
def response_format(*, expect_reference: bool) -> "ResponseFormatJSONSchema":
    """Holds a judge to the schema. The reference's score is a number where a reference is shown, and null elsewhere: a
    model that may choose will at times choose null.

    The nonce is a field of the schema, but its value is not: providers prepare a schema when they first see it, which
    takes seconds with some, and a schema of its own for each request would cost that each time.
    """
    body = _PairVerdictBody if expect_reference else _LoneVerdictBody
    name = "pair_verdict" if expect_reference else "lone_verdict"
    return {
        "type": "json_schema",
        "json_schema": {"name": name, "strict": True, "schema": body.model_json_schema()},
    }


def signed_rubric(rubric: str, nonce: str) -> str:
    """The system message. The rubric is not a template: only what is appended is filled in."""
    return rubric + _INSTRUCTION.format(nonce=nonce)


def read_verdict(content: str, *, nonce: str, expect_reference: bool) -> Verdict:
    """A verdict: the JSON object at the very end of a judge's answer, signed with the request's nonce.

    A judge that thinks aloud may quote the completion, forged verdicts and all. None of them can hold the nonce, and
    whatever comes before the last object is not looked at. A reply that was meant for another request, or an earlier
    one, holds another nonce.

    Args:
        content (`str`):
            What the judge wrote.
        nonce (`str`):
            What the request asked it to sign with.
        expect_reference (`bool`):
            Whether a reference answer was shown, and so must be scored.

    Raises:
        `JudgeInvalid`: anything else. `ForeignVerdict` where it is signed with another nonce.
    """
    text = content[-MAX_VERDICT_CHARS:].rstrip().removesuffix("```").rstrip()
    last = _last_object(text)
    if last is None:
        raise _invalid(f"{len(content)} characters that do not end with a JSON object", "judge_not_json")
    if last.get("nonce") != nonce:
        raise _unsigned(last.get("nonce"))
    try:
        body = _VerdictBody.model_validate(last)
    except ValidationError as error:
        raise _invalid(f"a verdict in which {_faults(error)}", "judge_outside_schema") from None
    if expect_reference and body.reference is None:
        raise _invalid("a verdict without the score of the reference that was shown", "judge_no_reference")
    return Verdict(
        candidate=body.candidate, reference=body.reference if expect_reference else None, reason=body.reason
    )


def verdict_to_json(verdict: Verdict) -> Any:
    """For the cache."""
    return {"candidate": verdict.candidate, "reference": verdict.reference, "reason": verdict.reason}


def verdict_from_json(value: Any) -> Verdict:
    """From the cache. Raises `TypeError` for another form, `ValueError` for scores that are none."""
    return Verdict(**value)


def _last_object(text: str) -> dict[str, Any] | None:
    decoder, start = json.JSONDecoder(), len(text)
    for _ in range(MAX_OBJECT_STARTS):
        start = text.rfind("{", 0, start)
        if start < 0:
            return None
        try:
            value, end = decoder.raw_decode(text, start)
        except (ValueError, RecursionError):
            continue
        if end == len(text):
            return value  # type: ignore[no-any-return]
    return None


def _unsigned(got: Any) -> JudgeInvalid:
    """What to say of a verdict that does not return the nonce. It is shown in neither case."""
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
    """What is wrong with the fields of a verdict, without anything that the judge wrote."""
    faults = []
    for each in error.errors(include_input=False, include_url=False):
        name = each["loc"][0]
        known = name in _VerdictBody.model_fields
        faults.append(f"`{name}`: {each['msg'].lower()}" if known else "a field stands that was not asked for")
    return "; ".join(dict.fromkeys(faults))


def _invalid(got: str, code: str) -> JudgeInvalid:
    return JudgeInvalid(
        f"the judge answered with {got}. Expected one JSON object {{nonce, candidate: 0..1, reference: 0..1 or null, "
        "reason: text}.",
        code=code,
    )
