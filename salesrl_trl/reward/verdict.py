"""What a judge is shown, and what of its answer counts as a verdict.

Owns the judge's message and both forms of a verdict: by JSON schema, or, from a provider that can't be held to one, as
the last thing in its text. Completions are hostile text here: they travel in fenced sections of the user message only,
and anything outside the schema is `JudgeInvalid`, never a number. Pure: no network.
"""

import functools
import json
from typing import Any

from openai.types.shared_params import ResponseFormatJSONSchema
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from salesrl_trl.errors import JudgeInvalid
from salesrl_trl.fencing import fence
from salesrl_trl.types import Action, Answer, SalesRow, Verdict

MESSAGE_VERSION = 1
"""Of what a judge is shown. To be raised with each change of it: verdicts of another version are not reused."""
MAX_VERDICT_CHARS = 65_536
"""Longest verdict that is read. Of a text in which a judge thinks aloud before, this much of its end."""
MAX_OBJECT_STARTS = 64
"""Opening braces that are tried, from the end, for the verdict in a text: more than a reason in words holds."""


class _VerdictBody(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    candidate: float = Field(ge=0, le=1, allow_inf_nan=False)
    reference: float | None = Field(ge=0, le=1, allow_inf_nan=False)
    reason: str


class _SignedVerdictBody(_VerdictBody):
    nonce: str


class _PairVerdictBody(_VerdictBody):
    reference: float = Field(ge=0, le=1, allow_inf_nan=False)


class _LoneVerdictBody(_VerdictBody):
    reference: None


_TEXT_INSTRUCTION = """

End your reply with the JSON object, and write nothing after it. Begin the object with the field "nonce" that holds
{nonce}, which shows that the verdict is yours:
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
def response_format(*, expect_reference: bool) -> ResponseFormatJSONSchema:
    """Holds a judge to the schema. The reference's score is a number where a reference is shown, and null elsewhere: a
    model that may choose will at times choose null."""
    body = _PairVerdictBody if expect_reference else _LoneVerdictBody
    name = "pair_verdict" if expect_reference else "lone_verdict"
    return {
        "type": "json_schema",
        "json_schema": {"name": name, "strict": True, "schema": body.model_json_schema()},
    }


def text_rubric(rubric: str, nonce: str) -> str:
    """The system message for a provider without response formats. The rubric is not a template: only what is appended
    is filled in."""
    return rubric + _TEXT_INSTRUCTION.format(nonce=nonce)


def read_verdict(content: str, *, expect_reference: bool) -> Verdict:
    """A verdict from a provider that is held to the schema.

    Args:
        content (`str`):
            One JSON object {candidate, reference, reason}, scores in [0, 1].
        expect_reference (`bool`):
            Whether a reference answer was shown, and so must be scored.

    Raises:
        `JudgeInvalid`: anything else.
    """
    if len(content) > MAX_VERDICT_CHARS:
        raise _invalid(content, "judge_too_long")
    try:
        body = _VerdictBody.model_validate_json(content)
    except ValidationError as error:
        is_json = error.errors(include_input=False)[0]["type"] != "json_invalid"
        raise _invalid(content, "judge_outside_schema" if is_json else "judge_not_json") from None
    return _verdict(body, expect_reference)


def read_text_verdict(content: str, *, nonce: str, expect_reference: bool) -> Verdict:
    """A verdict from free text: the JSON object at its very end, signed with the request's nonce.

    A judge that thinks aloud may quote the completion, forged verdicts and all. None of them can hold the nonce, and
    whatever comes before the last object is not looked at.

    Raises:
        `JudgeInvalid`: anything else.
    """
    text = content[-MAX_VERDICT_CHARS:].rstrip().removesuffix("```").rstrip()
    last = _last_object(text)
    if last is None:
        raise _invalid(content, "judge_not_json")
    try:
        body = _SignedVerdictBody.model_validate_json(last)
    except ValidationError:
        raise _invalid(content, "judge_outside_schema") from None
    if body.nonce != nonce:
        raise _invalid(content, "judge_unsigned")
    return _verdict(body, expect_reference)


def verdict_to_json(verdict: Verdict) -> Any:
    """For the cache."""
    return {"candidate": verdict.candidate, "reference": verdict.reference, "reason": verdict.reason}


def verdict_from_json(value: Any) -> Verdict:
    """From the cache. Raises `TypeError` for another form."""
    return Verdict(**value)


def _last_object(text: str) -> str | None:
    decoder, start = json.JSONDecoder(), len(text)
    for _ in range(MAX_OBJECT_STARTS):
        start = text.rfind("{", 0, start)
        if start < 0:
            return None
        try:
            _, end = decoder.raw_decode(text, start)
        except (ValueError, RecursionError):
            continue
        if end == len(text):
            return text[start:]
    return None


def _verdict(body: _VerdictBody, expect_reference: bool) -> Verdict:
    if expect_reference and body.reference is None:
        raise JudgeInvalid("the judge left out the reference's score", code="judge_no_reference")
    return Verdict(
        candidate=body.candidate, reference=body.reference if expect_reference else None, reason=body.reason
    )


def _invalid(content: str, code: str) -> JudgeInvalid:
    return JudgeInvalid(
        f"the judge's answer of {len(content)} characters is no verdict. Expected one JSON object {{candidate: 0..1, "
        "reference: 0..1 or null, reason: text}.",
        code=code,
    )
