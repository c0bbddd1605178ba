"""The judge's client: what it is shown, and what of its answer counts as a verdict.

Owns the judge prompt and the verdict's schema. Completions are hostile text here: they travel in fenced sections of
the user message only, and a verdict outside the schema is `JudgeInvalid`, never a number.
"""

import dataclasses
import json
from collections.abc import Mapping
from importlib import resources
from pathlib import Path

import httpx2
import openai
from openai.types.shared_params import ResponseFormatJSONSchema
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from salesrl_trl.errors import ConfigError, JudgeInvalid
from salesrl_trl.fencing import fence
from salesrl_trl.reward.transport import Transport
from salesrl_trl.types import Action, Answer, SalesRow, Verdict

MAX_VERDICT_TOKENS = 512
"""Room for the verdict and one sentence of reason."""


class _VerdictBody(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    candidate: float = Field(ge=0, le=1, allow_inf_nan=False)
    reference: float | None = Field(ge=0, le=1, allow_inf_nan=False)
    reason: str


_RESPONSE_FORMAT: ResponseFormatJSONSchema = {
    "type": "json_schema",
    "json_schema": {"name": "verdict", "strict": True, "schema": _VerdictBody.model_json_schema()},
}


def load_rubrics(branches: tuple[str, ...], directory: str | None = None) -> dict[str, str]:
    """The rubric of each branch: `<branch>.txt` in `directory`, else the packaged one.

    Raises:
        `ConfigError`: for a branch without a rubric.
    """
    packaged = resources.files("salesrl_trl.reward") / "rubrics"
    rubrics = {}
    for branch in branches:
        places = [Path(directory).expanduser() / f"{branch}.txt"] if directory else []
        places.append(Path(str(packaged / f"{branch}.txt")))
        found = next((place for place in places if place.is_file()), None)
        if found is None:
            raise ConfigError(
                f"branch {branch!r} has no rubric. Expected a file {branch}.txt in "
                f"{directory or 'a folder named by `rubric_dir`'}. Write one, or correct `branches`."
            )
        rubrics[branch] = found.read_text(encoding="utf-8")
    return rubrics


class JudgeClient:
    """Asks one OpenAI-compatible model for a verdict.

    The HTTP client is made at the first call, on the event loop that makes it.

    Args:
        base_url (`str`):
            OpenAI-style address, `/v1` included.
        model (`str`):
            Model name the endpoint knows.
        rubrics (`Mapping[str, str]`):
            Branch to the system message of its judge.
        transport (`Transport`):
            Limits; the `openai` client's own retries and timeout are off.
        api_key (`str`, *optional*):
            Sent as a bearer token.
    """

    def __init__(
        self,
        base_url: str,
        *,
        model: str,
        rubrics: Mapping[str, str],
        transport: Transport,
        api_key: str | None = None,
    ) -> None:
        self._base_url = base_url
        self._model = model
        self._rubrics = rubrics
        self._transport = transport
        self._api_key = api_key or "none"  # the client refuses an empty key; endpoints without keys ignore it
        self._client: openai.AsyncOpenAI | None = None

    async def judge(self, row: SalesRow, action: Action, candidate: Answer, reference: Answer | None) -> Verdict:
        """Score the candidate and, beside it, the reference.

        Args:
            row (`SalesRow`):
                The conversation, its branch and the documents known to answer it.
            action (`Action`):
                What the policy wrote.
            candidate (`Answer`):
                The 8B endpoint's answer to the action.
            reference (`Answer`, *optional*):
                The 32B endpoint's answer, where there is one.

        Raises:
            `JudgeInvalid`: an answer that is no verdict.
            `ServiceError`: no answer.
        """
        message = judge_message(row, action, candidate, reference)

        async def attempt() -> Verdict:
            completion = await self._http().chat.completions.create(
                model=self._model,
                messages=[
                    {"role": "system", "content": self._rubrics[row.branch]},
                    {"role": "user", "content": message},
                ],
                temperature=0.0,
                max_completion_tokens=MAX_VERDICT_TOKENS,
                response_format=_RESPONSE_FORMAT,
            )
            return read_verdict(_content(completion), expect_reference=reference is not None)

        return await self._transport.call(attempt)

    async def aclose(self) -> None:
        """Close the connections. The next call opens new ones."""
        if self._client is not None:
            await self._client.close()
            self._client = None

    def _http(self) -> openai.AsyncOpenAI:
        if self._client is None:
            self._client = openai.AsyncOpenAI(
                base_url=self._base_url,
                api_key=self._api_key,
                max_retries=0,
                timeout=None,
                http_client=httpx2.AsyncClient(
                    timeout=None,
                    follow_redirects=False,
                    trust_env=False,
                    limits=httpx2.Limits(max_connections=None, max_keepalive_connections=None),
                ),
            )
        return self._client


def judge_message(row: SalesRow, action: Action, candidate: Answer, reference: Answer | None) -> str:
    """The user message: all material in fenced sections, nothing of it outside them."""
    sections = {
        "branch": row.branch,
        "conversation": row.context,
        "documents": "\n\n".join(row.documents),
        "action": json.dumps(dataclasses.asdict(action), ensure_ascii=False),
        "candidate_answer": candidate.text,
    }
    if reference is not None:
        sections["reference_answer"] = reference.text
    return fence(sections)


def read_verdict(content: str, *, expect_reference: bool) -> Verdict:
    """A verdict from the judge's text.

    Args:
        content (`str`):
            One JSON object {candidate, reference, reason}, scores in [0, 1].
        expect_reference (`bool`):
            Whether a reference answer was shown, and so must be scored.

    Raises:
        `JudgeInvalid`: anything else.
    """
    try:
        body = _VerdictBody.model_validate_json(content)
    except ValidationError as error:
        raise JudgeInvalid(
            f"the judge's answer of {len(content)} characters has {error.error_count()} faults. Expected one JSON "
            "object {candidate: 0..1, reference: 0..1 or null, reason: text}.",
            code="judge_outside_schema",
        ) from None
    if expect_reference and body.reference is None:
        raise JudgeInvalid("the judge left out the reference's score", code="judge_no_reference")
    return Verdict(
        candidate=body.candidate, reference=body.reference if expect_reference else None, reason=body.reason
    )


def _content(completion: object) -> str:
    """The text of a chat completion, which a broken endpoint may not have."""
    choices = getattr(completion, "choices", None)
    content = choices[0].message.content if isinstance(choices, list) and choices and choices[0].message else None
    if not isinstance(content, str) or not content.strip():
        raise JudgeInvalid("the judge answered 200 without any text", code="judge_empty")
    return content
