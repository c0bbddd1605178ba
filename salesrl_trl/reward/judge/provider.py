"""One judge provider: how a verdict is asked for and what it cost.

Owns the chat completion's wire format, the step from response formats to text, tokens and prices. The module
`verdict` owns what a judge is shown and what counts as a verdict, `client` which provider is asked.
"""

import functools
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from salesrl_trl.errors import (
    AccessDenied,
    BadServiceResponse,
    ForeignVerdict,
    JudgeInvalid,
    ServiceError,
    ServiceRejected,
)
from salesrl_trl.fencing import make_nonce
from salesrl_trl.reward.cache import cache_key
from salesrl_trl.reward.judge.base import ProviderUsage
from salesrl_trl.reward.judge.verdict import judge_message, read_verdict, response_format, signed_rubric
from salesrl_trl.reward.service.http import HttpClient, refuse_stated_error
from salesrl_trl.reward.service.transport import Transport
from salesrl_trl.types import Action, Answer, SalesRow, Verdict

if TYPE_CHECKING:  # at run time it would cost half a second
    from openai.types.shared_params import ResponseFormatJSONSchema

logger = logging.getLogger(__name__)

RESPONSE_FORMATS = ("auto", "json_schema", "text")
"""`auto` holds a provider to the schema, and falls back to text where it answers nothing, or no JSON, that way."""

MAX_TOKENS = 10**9
"""Of one call. What says more counts nothing."""

CUT_OFF = frozenset({"length", "max_tokens", "model_length"})
"""Values of `finish_reason`, in lower case, of a text that is not whole: OpenAI's, Gemini's, Mistral's."""
WITHHELD = frozenset(
    {"content_filter", "refusal", "safety", "recitation", "blocklist", "prohibited_content", "spii", "sensitive"}
)
"""Of one that a filter or the model itself held back: OpenAI's, Anthropic's, Gemini's, GLM's."""
BROKEN_OFF = frozenset({"error", "abort", "cancelled", "network_error", "insufficient_system_resource"})
"""Of one that the server gave up: OpenRouter's, vLLM's and SGLang's, GLM's, DeepSeek's."""

_UNHELD = frozenset({"judge_empty", "judge_not_json"})


@dataclass(frozen=True, kw_only=True, slots=True)
class JudgeProvider:
    """One OpenAI-compatible endpoint."""

    name: str
    """In metrics, logs and reason codes: `"openai"`."""
    base_url: str
    """`/v1` included: `"https://api.openai.com/v1"`."""
    model: str
    """The model's name there."""
    transport: Transport
    """Its limits."""
    api_key: str | None = field(default=None, repr=False)
    """Sent as a bearer token."""
    weight: float = 1.0
    """Its share of the verdicts, beside the other providers' weights; 0 for one that only steps in."""
    response_format: str = "auto"
    """One of `RESPONSE_FORMATS`."""
    temperature: float | None = 0.0
    """`None` for models that take none."""
    max_completion_tokens: int = 512
    """Room for the verdict, and for a reasoning model's thoughts."""
    extra_body: Mapping[str, object] = field(default_factory=dict, repr=False)
    """Further fields of every request: `{"chat_template_kwargs": {"enable_thinking": False}}`."""
    usd_per_million_prompt_tokens: float = 0.0
    """Price, for the cost metrics."""
    usd_per_million_completion_tokens: float = 0.0
    """Price, for the cost metrics."""


class _Message(BaseModel):
    model_config = ConfigDict(extra="ignore")
    content: str | None = None
    refusal: Any = None


class _Choice(BaseModel):
    model_config = ConfigDict(extra="ignore")
    message: _Message
    finish_reason: str | None = None


class _Usage(BaseModel):
    model_config = ConfigDict(extra="ignore")
    prompt_tokens: int = Field(default=0, ge=0, le=MAX_TOKENS)
    completion_tokens: int = Field(default=0, ge=0, le=MAX_TOKENS)


class _Completion(BaseModel):
    model_config = ConfigDict(extra="ignore")
    choices: list[_Choice] = Field(fail_fast=True)


@dataclass(frozen=True)
class Material:
    """What is judged, and by which rubric."""

    name: str
    rubric: str
    row: SalesRow
    action: Action
    candidate: Answer
    reference: Answer | None

    @functools.cached_property
    def key(self) -> str:
        """Of everything a judge reads."""
        reference = None if self.reference is None else self.reference.text
        material = (self.row.context, self.row.documents, self.action.as_dict(), self.candidate.text, reference)
        return cache_key(self.name, material)

    @property
    def lot(self) -> int:
        """Which answer stands first is drawn, but the same for the same material."""
        return int(self.key[-1], 16)


class ProviderClient:
    """One provider's connection, usage, and whether it takes response formats."""

    def __init__(self, settings: JudgeProvider) -> None:
        self.settings = settings
        self.http = HttpClient(settings.transport.service, settings.base_url, api_key=settings.api_key)
        self._usage = ProviderUsage()
        self._by_text = settings.response_format == "text"

    def drain_usage(self) -> ProviderUsage:
        """What it did since the last time."""
        usage, self._usage = self._usage, ProviderUsage()
        return usage

    async def ask(self, material: Material, *, candidate_first: bool, patient: bool) -> Verdict:
        """A verdict, by schema or by text. Raises `ServiceError`."""
        unheld = False  # the latest answer to this material was not held to the format, and by text there was none yet

        async def attempt() -> Verdict:
            """The step from schema to text happens within an attempt, so that it is taken once for all. Where there is
            no time left for it, the next attempt begins with it. Of other material one odd answer says nothing."""
            nonlocal unheld
            if not (self._by_text or unheld):
                try:
                    return await self._one_way(material, candidate_first, by_text=False)
                except (JudgeInvalid, ServiceRejected) as error:
                    if not self._may_not_take_formats(error):
                        raise
                unheld = True
            try:
                verdict = await self._one_way(material, candidate_first, by_text=True)
            except ServiceError:
                unheld = False
                raise
            if not self._by_text:
                self._by_text = True
                logger.info(f"judge {self.settings.name}: no verdict by response_format; from here on by text")
            return verdict

        return await self.settings.transport.call(attempt, patient=patient)

    def _may_not_take_formats(self, error: ServiceError) -> bool:
        if self.settings.response_format != "auto":
            return False
        if isinstance(error, ServiceRejected):
            return not isinstance(error, AccessDenied) and error.code.endswith(("_http_400", "_http_422"))
        return error.code in _UNHELD

    async def _one_way(self, material: Material, candidate_first: bool, *, by_text: bool) -> Verdict:
        nonce = make_nonce()  # of the fence and of the verdict, for this one request
        message = judge_message(
            material.row,
            material.action,
            material.candidate,
            material.reference,
            candidate_first=candidate_first,
            nonce=nonce,
        )
        expect_reference = material.reference is not None
        held_to = None if by_text else response_format(expect_reference=expect_reference)
        body = self._body(signed_rubric(material.rubric, nonce), message, held_to)

        def read(answer: bytes) -> Verdict:
            value = self._completion(answer)
            usage = value.get("usage") if isinstance(value, dict) else None
            try:
                verdict = read_verdict(_text_of(value), nonce=nonce, expect_reference=expect_reference)
            except ForeignVerdict:  # whose tokens are counted with another request
                raise
            except ServiceError:
                self._count_tokens(usage)
                raise
            self._count_tokens(usage)
            self._usage.verdicts += 1
            return verdict

        return await self.http.post("/chat/completions", body, read)

    def _body(self, system: str, message: str, held_to: "ResponseFormatJSONSchema | None") -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self.settings.model,
            "messages": [{"role": "system", "content": system}, {"role": "user", "content": message}],
            "max_completion_tokens": self.settings.max_completion_tokens,
        }
        if self.settings.temperature is not None:
            body["temperature"] = self.settings.temperature
        if held_to is not None:
            body["response_format"] = held_to
        return {**body, **self.settings.extra_body}

    def _completion(self, answer: bytes) -> Any:
        """The body of a chat completion, as JSON, where it does not say of itself that it is an error."""
        service = self.settings.transport.service
        try:
            value = json.loads(answer)
        except (ValueError, RecursionError):
            raise BadServiceResponse(
                f"{service} answered with a body of {len(answer)} bytes that is not JSON. Expected a chat completion.",
                code=f"{service}_bad_response",
            ) from None
        refuse_stated_error(service, value)
        return value

    def _count_tokens(self, stated: object) -> None:
        try:
            usage = _Usage.model_validate(stated)
        except ValidationError:
            return
        self._usage.prompt_tokens += usage.prompt_tokens
        self._usage.completion_tokens += usage.completion_tokens
        self._usage.usd += (
            usage.prompt_tokens * self.settings.usd_per_million_prompt_tokens
            + usage.completion_tokens * self.settings.usd_per_million_completion_tokens
        ) / 1e6


def _text_of(completion: object) -> str:
    """The text of a chat completion that came to its end, which a broken endpoint may not have.

    Raises:
        `JudgeInvalid`: there is none, or what is there was cut off, refused or withheld.
    """
    try:
        choices = _Completion.model_validate(completion).choices
    except ValidationError:
        choices = []
    if not choices:
        raise JudgeInvalid("the judge answered 200 without any choice. Expected a chat completion.", "judge_empty")
    end, message = str(choices[0].finish_reason).lower(), choices[0].message
    if end in CUT_OFF:
        where = "in" if message.content else "before"
        raise JudgeInvalid(f"`max_completion_tokens` was used up {where} the verdict. Raise it.", "judge_cut_off")
    if message.refusal or end in WITHHELD:
        refused = f"finish_reason {end}" if end in WITHHELD else "a refusal"
        raise JudgeInvalid(
            f"the judge, or its provider's filter, answered with {refused}. Expected a verdict: text beside is none.",
            "judge_refused",
        )
    if end in BROKEN_OFF:
        raise JudgeInvalid(f"the judge broke off (finish_reason {end}). Expected a verdict.", "judge_broken_off")
    if not message.content or not message.content.strip():
        raise JudgeInvalid("the judge answered 200 without any text. Expected a verdict.", "judge_empty")
    return message.content
