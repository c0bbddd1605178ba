"""The judge's client: which provider is asked, and what becomes of several verdicts.

Owns providers, their order and weights, repeats and their aggregation, tokens and cost. What a judge is shown and what
counts as a verdict is `verdict`'s; retries and limits are the transports'.
"""

import asyncio
import functools
import hashlib
import json
import logging
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from openai.types.shared_params import ResponseFormatJSONSchema
from pydantic import BaseModel, ConfigDict, ValidationError

from salesrl_trl.errors import (
    AccessDenied,
    BadServiceResponse,
    ConfigError,
    JudgeInvalid,
    ServiceError,
    ServiceRejected,
)
from salesrl_trl.fencing import make_nonce
from salesrl_trl.reward.cache import cache_key
from salesrl_trl.reward.http import HttpClient
from salesrl_trl.reward.transport import Transport
from salesrl_trl.reward.verdict import (
    MESSAGE_VERSION,
    judge_message,
    read_text_verdict,
    read_verdict,
    response_format,
    text_rubric,
)
from salesrl_trl.types import Action, Answer, SalesRow, Verdict

logger = logging.getLogger(__name__)

AGGREGATIONS: Mapping[str, Callable[[Sequence[float]], float]] = {
    "mean": statistics.fmean,
    "median": statistics.median,
    "min": min,
}
"""How the verdicts of several repeats become one."""
RESPONSE_FORMATS = ("auto", "json_schema", "text")
"""`auto` holds a provider to the schema, and falls back to text where it answers nothing, or no JSON, that way."""

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
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of every request: `{"chat_template_kwargs": {"enable_thinking": False}}`."""
    usd_per_million_prompt_tokens: float = 0.0
    """Price, for the cost metrics."""
    usd_per_million_completion_tokens: float = 0.0
    """Price, for the cost metrics."""


@dataclass(kw_only=True, slots=True)
class ProviderUsage:
    """What one provider did since it was last asked about."""

    verdicts: int = 0
    """Valid ones."""
    prompt_tokens: int = 0
    """As the provider counts them; 0 where it doesn't."""
    completion_tokens: int = 0
    """As the provider counts them, thoughts included."""
    usd: float = 0.0
    """By the configured prices."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JudgeRecord:
    """One valid verdict, for the check of what else than quality a judge likes."""

    score: float
    """Of the candidate."""
    chars: int
    """Length of the candidate's answer."""
    candidate_first: bool | None
    """Whether it stood before the reference; `None` where there was none."""


class _Message(BaseModel):
    model_config = ConfigDict(extra="ignore")
    content: str


class _Choice(BaseModel):
    model_config = ConfigDict(extra="ignore")
    message: _Message
    finish_reason: str | None = None


class _Usage(BaseModel):
    model_config = ConfigDict(extra="ignore")
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Completion(BaseModel):
    model_config = ConfigDict(extra="ignore")
    choices: list[_Choice]


def load_rubrics(names: Sequence[str], directory: str | None = None) -> dict[str, str]:
    """Rubrics by name: `<name>.txt` in `directory`, else the packaged one.

    Raises:
        `ConfigError`: for one that is in neither place.
    """
    packaged = resources.files("salesrl_trl.reward") / "rubrics"
    rubrics = {}
    for name in names:
        places = [Path(directory).expanduser() / f"{name}.txt"] if directory else []
        places.append(Path(str(packaged / f"{name}.txt")))
        found = next((place for place in places if place.is_file()), None)
        if found is None:
            raise ConfigError(
                f"branch {name!r} has no rubric. Expected a file {name}.txt in "
                f"{directory or 'a folder named by `rubric_dir`'}. Write one, or correct `branches` or "
                "`branch_reward_weights`."
            )
        rubrics[name] = found.read_text(encoding="utf-8")
    return rubrics


class JudgeClient:
    """Asks one of several OpenAI-compatible models for a verdict.

    Which provider is asked first follows the weights, and is the same for the same material. The others follow in the
    order they are listed when it fails or gives no valid verdict.

    Args:
        providers (`Sequence[JudgeProvider]`):
            At least one, in fallback order.
        rubrics (`Mapping[str, str]`):
            Name to the system message of that judge; a branch's rubric has the branch's name.
        repeats (`int`, *optional*, defaults to `1`):
            Verdicts for each answer. The order of candidate and reference alternates among them.
        aggregation (`str`, *optional*, defaults to `"mean"`):
            How they become one; a key of `AGGREGATIONS`. More than half have to be valid.
    """

    def __init__(
        self,
        providers: Sequence[JudgeProvider],
        rubrics: Mapping[str, str],
        *,
        repeats: int = 1,
        aggregation: str = "mean",
    ) -> None:
        self._providers = {provider.name: _Provider(provider) for provider in providers}
        self._rubrics = rubrics
        self._repeats = repeats
        self._aggregation = aggregation
        self._identities = {name: self._identity(rubric) for name, rubric in rubrics.items()}
        self._records: list[JudgeRecord] = []

    @property
    def provider_names(self) -> tuple[str, ...]:
        """In fallback order."""
        return tuple(self._providers)

    @property
    def transports(self) -> dict[str, Transport]:
        """By service name."""
        return {each.settings.transport.service: each.settings.transport for each in self._providers.values()}

    def identity(self, rubric: str) -> str:
        """Says what decides a verdict beside the material, for cache keys. No credential."""
        return self._identities[rubric]

    async def judge(
        self, rubric: str, row: SalesRow, action: Action, candidate: Answer, reference: Answer | None
    ) -> Verdict:
        """Score the candidate and, beside it, the reference.

        Args:
            rubric (`str`):
                Which of the rubrics to judge by.
            row (`SalesRow`):
                The conversation, its branch and the documents known to answer it.
            action (`Action`):
                What the policy wrote.
            candidate (`Answer`):
                The 8B endpoint's answer to the action.
            reference (`Answer`, *optional*):
                The 32B endpoint's answer, where there is one.

        Raises:
            `JudgeInvalid`: answers that are no verdict.
            `ServiceError`: no answer.
        """
        material = _Material(rubric, self._rubrics[rubric], row, action, candidate, reference)
        results = await asyncio.gather(
            *(self._one_verdict(material, repeat) for repeat in range(self._repeats)), return_exceptions=True
        )
        return self._merge(results)

    def take_usage(self) -> dict[str, ProviderUsage]:
        """What each provider did since the last time."""
        return {name: each.take_usage() for name, each in self._providers.items()}

    def take_records(self) -> list[JudgeRecord]:
        """Every valid verdict since the last time."""
        records, self._records = self._records, []
        return records

    async def warm_up(self, row: SalesRow, action: Action, answer: Answer) -> dict[str, float | ServiceError]:
        """Ask every provider once, by the branch's rubric; returns seconds, or what went wrong, by service name."""
        material = _Material(row.branch, self._rubrics[row.branch], row, action, answer, answer)

        async def one(provider: _Provider) -> float | ServiceError:
            started = time.perf_counter()
            try:
                await provider.ask(material, candidate_first=True, patient=True)
            except ServiceError as error:
                return error
            return time.perf_counter() - started

        results = await asyncio.gather(*(one(provider) for provider in self._providers.values()))
        self.take_usage()
        return dict(zip(self.transports, results, strict=True))

    async def aclose(self) -> None:
        """Close the running loop's connections. The next call opens new ones."""
        for provider in self._providers.values():
            await provider.http.aclose()

    def _identity(self, rubric: str) -> str:
        providers = [each.settings for each in self._providers.values()]
        asked = [
            (
                (each.base_url, each.model, each.weight),
                (each.temperature, each.max_completion_tokens, each.response_format, dict(each.extra_body)),
            )
            for each in providers
        ]
        return cache_key("judge", MESSAGE_VERSION, asked, rubric, self._repeats, self._aggregation)

    async def _one_verdict(self, material: "_Material", repeat: int) -> Verdict:
        lot = hashlib.sha256(f"{material.key} {repeat}".encode()).digest()
        order = self._order(int.from_bytes(lot[:8]) / 2**64)
        candidate_first = (material.lot + repeat) % 2 == 0
        failure: ServiceError | None = None
        for provider in order:
            try:
                verdict = await provider.ask(material, candidate_first=candidate_first, patient=provider is order[-1])
            except ServiceError as error:
                # An invalid verdict says more than a provider that was down.
                failure = failure if isinstance(failure, JudgeInvalid) else error
                continue
            first = None if material.reference is None else candidate_first
            self._records.append(
                JudgeRecord(score=verdict.candidate, chars=len(material.candidate.text), candidate_first=first)
            )
            return verdict
        assert failure is not None
        raise failure

    def _order(self, lot: float) -> list["_Provider"]:
        """The provider that the lot in [0, 1) falls to, and the others as listed."""
        providers = list(self._providers.values())
        place = lot * sum(each.settings.weight for each in providers)
        for index, each in enumerate(providers):
            place -= each.settings.weight
            if place < 0:
                return [each, *providers[:index], *providers[index + 1 :]]
        return providers

    def _merge(self, results: Sequence[Verdict | BaseException]) -> Verdict:
        verdicts = [result for result in results if isinstance(result, Verdict)]
        errors = [result for result in results if isinstance(result, BaseException)]
        for error in errors:
            if not isinstance(error, ServiceError):
                raise error
        if 2 * len(verdicts) <= len(results):
            raise errors[0]
        merge = AGGREGATIONS[self._aggregation]
        references = [verdict.reference for verdict in verdicts if verdict.reference is not None]
        return Verdict(
            candidate=merge([verdict.candidate for verdict in verdicts]),
            reference=merge(references) if references else None,
            reason=verdicts[0].reason,
        )


@dataclass(frozen=True)
class _Material:
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


class _Provider:
    """One provider's connection, usage, and whether it takes response formats."""

    def __init__(self, settings: JudgeProvider) -> None:
        self.settings = settings
        self.http = HttpClient(settings.transport.service, settings.base_url, api_key=settings.api_key)
        self._usage = ProviderUsage()
        self._by_text = settings.response_format == "text"

    def take_usage(self) -> ProviderUsage:
        usage, self._usage = self._usage, ProviderUsage()
        return usage

    async def ask(self, material: _Material, *, candidate_first: bool, patient: bool) -> Verdict:
        """A verdict, by schema or by text. Raises `ServiceError`."""
        return await self.settings.transport.call(lambda: self._attempt(material, candidate_first), patient=patient)

    async def _attempt(self, material: _Material, candidate_first: bool) -> Verdict:
        """One verdict. The step from schema to text happens within an attempt, so that it is taken once for all."""
        if not self._by_text:
            try:
                return await self._one_way(material, candidate_first, by_text=False)
            except (JudgeInvalid, ServiceRejected) as error:
                if not self._may_not_take_formats(error):
                    raise
        verdict = await self._one_way(material, candidate_first, by_text=True)
        if not self._by_text:
            self._by_text = True
            logger.info(f"judge {self.settings.name}: no verdict by response_format; from here on by text")
        return verdict

    def _may_not_take_formats(self, error: ServiceError) -> bool:
        if self.settings.response_format != "auto":
            return False
        if isinstance(error, ServiceRejected):
            return not isinstance(error, AccessDenied) and error.code.endswith(("_http_400", "_http_422"))
        return error.code in _UNHELD

    async def _one_way(self, material: _Material, candidate_first: bool, *, by_text: bool) -> Verdict:
        nonce = make_nonce()
        message = judge_message(
            material.row,
            material.action,
            material.candidate,
            material.reference,
            candidate_first=candidate_first,
            nonce=nonce,
        )
        expect_reference = material.reference is not None
        system = text_rubric(material.rubric, nonce) if by_text else material.rubric
        held_to = None if by_text else response_format(expect_reference=expect_reference)
        content = self._content(await self.http.post("/chat/completions", self._body(system, message, held_to)))
        if by_text:
            verdict = read_text_verdict(content, nonce=nonce, expect_reference=expect_reference)
        else:
            verdict = read_verdict(content, expect_reference=expect_reference)
        self._usage.verdicts += 1
        return verdict

    def _body(self, system: str, message: str, held_to: ResponseFormatJSONSchema | None) -> dict[str, Any]:
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

    def _content(self, answer: bytes) -> str:
        """The text of a chat completion, which a broken endpoint may not have."""
        try:
            value = json.loads(answer)
        except (ValueError, RecursionError):
            raise BadServiceResponse(
                f"{self.settings.transport.service} answered with a body of {len(answer)} bytes that is not JSON. "
                "Expected a chat completion.",
                code=f"{self.settings.transport.service}_bad_response",
            ) from None
        self._count_tokens(value)
        try:
            choices = _Completion.model_validate(value).choices
        except ValidationError:
            choices = []
        if not choices or not choices[0].message.content.strip():
            cut_off = bool(choices) and choices[0].finish_reason == "length"
            raise JudgeInvalid(
                "the judge answered 200 without any text"
                + (": it used up `max_completion_tokens` before" if cut_off else ""),
                code="judge_cut_off" if cut_off else "judge_empty",
            )
        if choices[0].finish_reason == "length":
            raise JudgeInvalid("the verdict was cut off at `max_completion_tokens`", code="judge_cut_off")
        return choices[0].message.content

    def _count_tokens(self, value: Any) -> None:
        try:
            usage = _Usage.model_validate(value["usage"])
        except (ValidationError, TypeError, KeyError):
            return
        self._usage.prompt_tokens += usage.prompt_tokens
        self._usage.completion_tokens += usage.completion_tokens
        self._usage.usd += (
            usage.prompt_tokens * self.settings.usd_per_million_prompt_tokens
            + usage.completion_tokens * self.settings.usd_per_million_completion_tokens
        ) / 1e6
