"""One judge provider: verdict requests as chat completions, the fields it supports, and its cost."""

import functools
import logging
import random
import re
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from salesrl_trl import errors
from salesrl_trl.ground.fencing import make_nonce
from salesrl_trl.judged import verdict
from salesrl_trl.judged.budget import FREE, Price
from salesrl_trl.judged.cache import cache_key
from salesrl_trl.service.breaker import Bill
from salesrl_trl.service.error_bodies import WITHHELD_MARKS
from salesrl_trl.service.http import HttpClient, form_of, read_json, refuse_stated_error
from salesrl_trl.service.transport import Transport
from salesrl_trl.types import Answer, ProviderUsage, SalesRow, Verdict

logger = logging.getLogger(__name__)
T = TypeVar("T")

JUDGES = "judge_providers"  # the setting
OTHER_NAME = {"max_completion_tokens": "max_tokens"}  # older servers' names of fields
WINDOW = 32  # number of recent schema replies considered
FEWEST = 16  # fewest schema replies before a failure rate of half disables the schema
TRY_AGAIN = 128  # one in this many text requests retries the schema


class RequestForm:
    """The fields sent to a provider. `formats`: its `response_format`.

    A field that the provider rejects is dropped from all later requests, or renamed. With `auto`, the schema is
    disabled if the provider rejects it, or if half of at least `FEWEST` recent replies contained a verdict only when
    requested as text. A later successful retry enables it again.
    """

    def __init__(self, name: str, formats: str = "auto", setting: str = JUDGES) -> None:
        self._name = f"judge {name}" if setting == JUDGES else name
        self._setting = f"its entry of `{JUDGES}`" if setting == JUDGES else f"`{setting}`"
        self._formats = formats
        self._renamed: dict[str, str | None] = {}  # rejected field -> replacement, if any
        self._replies: deque[bool] = deque(maxlen=WINDOW)
        self._is_schema_off = False
        self._by_text = 0  # text requests since the schema was disabled

    def of(self, body: Mapping[str, object]) -> dict[str, object]:
        fields = dict(body)
        if "max_tokens" in fields and "max_tokens" not in self._renamed:  # from `extra_body`
            fields.pop("max_completion_tokens", None)
        for name in sorted(self._renamed.keys() & fields.keys()):
            value, other = fields.pop(name), self._renamed[name]
            if other is not None and other not in self._renamed:
                fields[other] = value
        return fields

    def leave_out(self, refused: Collection[str]) -> bool:
        """Drop or rename fields that a request was rejected for. Returns whether the request changed."""
        fields = {name for name in refused if name not in ("model", "messages", "response_format")}
        for name in sorted(fields - self._renamed.keys()):  # others are known already
            self._renamed[name] = instead = OTHER_NAME.get(name)
            goes = f"it is sent as `{instead}` from now on" if instead else "it is dropped from now on"
            fix = f"`extra_body: {{{instead}: ...}}`" if instead else f"`extra_body` without `{name}`"
            self._learn(f"rejects `{name}`: {goes}", "`temperature: null`" if name == "temperature" else fix)
        if "response_format" in refused and self._formats == "auto" and not self._is_schema_off:
            self._give_up("it rejects `response_format`")
        return bool(fields)

    def goes_by_schema(self) -> bool:
        if self._formats == "text" or not self._is_schema_off:
            return self._formats != "text"
        self._by_text += 1
        return self._by_text % TRY_AGAIN == 0

    def record_schema(self, *, worked: bool) -> None:
        """Record whether a schema request returned a verdict, or only its text version did."""
        if self._is_schema_off:
            if worked:
                self._is_schema_off = False
                logger.info(f"{self._name}: `response_format` works again; verdicts are requested by schema")
            return
        self._replies.append(worked)
        failed = self._replies.count(False)
        if len(self._replies) >= FEWEST and 2 * failed >= len(self._replies):
            self._give_up(f"{failed} of {len(self._replies)} replies lacked a verdict with `response_format`")

    def _give_up(self, why: str) -> None:
        self._is_schema_off, self._by_text = True, 0
        self._replies.clear()
        self._learn(f"is asked for verdicts by text, because {why}", "`response_format: text`")

    def _learn(self, what: str, fix: str) -> None:
        logger.info(f"{self._name} {what}. Set {fix} in {self._setting} to make this permanent")


RESPONSE_FORMATS = ("auto", "json_schema", "text")
"""`json_schema` sends the schema, `text` describes the verdict in words, `auto` falls back to text."""
MAX_TOKENS = 10**9  # largest plausible token count of a call; larger ones are ignored
TOKENS_OF_SCORE, TOKENS_OF_CRITERION = 32, 8  # allowance per further candidate in a verdict, and per criterion
CUT_OFF = frozenset({"length", "max_tokens", "model_length"})
"""`finish_reason` of a truncated text, in lower case: OpenAI, Gemini and Mistral."""
WITHHELD = frozenset(
    {"content_filter", "refusal", "safety", "recitation", "blocklist", "prohibited_content", "spii", "sensitive"}
)
"""`finish_reason` of a text withheld by a filter or the model: OpenAI, Anthropic, Gemini and GLM."""
BROKEN_OFF = frozenset({"error", "abort", "cancelled", "network_error", "insufficient_system_resource"})
"""`finish_reason` of a text that the server aborted: OpenRouter, vLLM, SGLang, GLM and DeepSeek."""
_LESS = (
    ", or limit thinking with `extra_body`: {reasoning_effort: low} for OpenAI and Gemini, {reasoning_effort: none} "
    "for Ollama, {chat_template_kwargs: {enable_thinking: false}} for vLLM and SGLang"
)
ASKING = frozenset({"user", "system", "developer", "tool"})
"""Roles of messages sent to a model. A reply with such a role is an echo or a mix-up."""
_UNHELD = frozenset({"judge_empty", "judge_not_json", "judge_only_thoughts"})  # failures that ignore the schema
_TEXTS = (None, "text", "output_text")  # types of text parts, as opposed to `reasoning_text`
_THOUGHTS = ("reasoning", "reasoning_content", "thinking")  # message fields that contain reasoning


@dataclass(frozen=True, kw_only=True, slots=True)
class JudgeProvider:
    """One OpenAI-compatible endpoint."""

    name: str  # its name in metrics, logs and reason codes: `"openai"`
    base_url: str  # its address, `/v1` included: `"https://api.openai.com/v1"`
    model: str
    transport: Transport
    api_key: str | None = field(default=None, repr=False)
    weight: float = 1.0  # its share of verdicts relative to the other weights; 0: fallback only
    response_format: str = "auto"  # one of `RESPONSE_FORMATS`
    temperature: float | None = 0.0  # `None` for a model that rejects it
    max_completion_tokens: int = 512  # for the verdict and a reasoning model's thoughts
    extra_body: Mapping[str, object] = field(default_factory=dict, repr=False)
    """Additional fields of every request: `{"chat_template_kwargs": {"enable_thinking": False}}`."""
    price: Price = FREE


class _Message(BaseModel):
    model_config = ConfigDict(extra="allow")  # thoughts
    role: object = None
    content: object = None
    refusal: object = None

    @property
    def text(self) -> str:
        if isinstance(self.content, str):
            return self.content
        parts = self.content if isinstance(self.content, list) else [self.content]
        texts = [part.get("text") if isinstance(part, dict) and part.get("type") in _TEXTS else part for part in parts]
        return "".join(text for text in texts if isinstance(text, str))


class _Choice(BaseModel):
    message: _Message
    finish_reason: str | None = None


class _Completion(BaseModel):
    choices: list[_Choice] = Field(fail_fast=True)


@dataclass(frozen=True)
class Material:
    name: str
    rubric: str
    row: SalesRow
    candidates: verdict.Candidates  # a single one, or several to compare
    reference: Answer | None

    @functools.cached_property
    def key(self) -> str:
        reference = None if self.reference is None else self.reference.text
        written = [(action.as_dict(), answer.text) for action, answer in self.candidates]
        material = (self.row.context, self.row.documents, written, reference)
        return cache_key(self.name, material, *map(asdict, self.row.criteria))

    def orders(self, count: int) -> Iterator[list[int]]:
        """Random orders of the candidates and the reference, which follows them; the same for the same material. Every
        second order reverses the previous one, so that each answer appears in front as often as behind."""
        places, draws = [*range(len(self.candidates) + (0 if self.reference is None else 1))], random.Random(self.key)
        for number in range(count):
            if number % 2 == 0 and (number == 0 or len(places) > 2):
                draws.shuffle(places)
            else:
                places.reverse()
            yield [*places]


class ProviderClient:
    """Requests verdicts from one provider and tracks its connections, usage and supported fields. `setting`: where it
    is configured."""

    def __init__(self, settings: JudgeProvider, setting: str = JUDGES) -> None:
        self.settings = settings
        self.http = HttpClient(settings.transport.service, settings.base_url, api_key=settings.api_key)
        self.form = RequestForm(settings.name, settings.response_format, setting)
        self._usage = ProviderUsage()

    def drain_usage(self) -> ProviderUsage:
        usage, self._usage = self._usage, ProviderUsage()
        return usage

    async def ask(self, material: Material, *, order: Sequence[int], patient: bool) -> list[Verdict]:
        """The verdict on each candidate, by schema or, if that fails, by text."""
        unheld = False  # whether the schema failed for this material

        async def attempt() -> list[Verdict]:
            nonlocal unheld
            if not unheld and self.form.goes_by_schema():
                try:
                    verdicts = await self._one_way(material, order, by_text=False)
                except (errors.JudgeInvalid, errors.ServiceRejected) as error:
                    if not self._may_not_take_formats(error):
                        raise
                else:
                    self.form.record_schema(worked=True)
                    return verdicts
                unheld = True
                await self.settings.transport.admit()
            verdicts = await self._one_way(material, order, by_text=True)
            if unheld:
                self.form.record_schema(worked=False)
            return verdicts

        return await self.settings.transport.call(attempt, patient=patient)

    def _may_not_take_formats(self, error: errors.ServiceError) -> bool:
        if self.settings.response_format != "auto":
            return False
        if isinstance(error, errors.ServiceRejected):
            is_of_request = error.code.endswith(("_http_400", "_http_422"))
            return is_of_request and not isinstance(error, errors.AccessDenied) and not error.marks & WITHHELD_MARKS
        return error.code in _UNHELD

    async def _one_way(self, material: Material, order: Sequence[int], *, by_text: bool) -> list[Verdict]:
        nonce = make_nonce()  # of this request's fence and verdict
        row, candidates = material.row, material.candidates
        message = verdict.judge_message(row, candidates, material.reference, order=order, nonce=nonce)
        names = verdict.candidate_names(nonce, len(candidates))
        shown = [names[place] for place in order if place < len(names)]
        criteria, expect_reference = row.criteria, material.reference is not None
        room = (len(names) - 1) * (TOKENS_OF_SCORE + TOKENS_OF_CRITERION * len(criteria))
        body: dict[str, object] = {
            "model": self.settings.model,
            "messages": [
                {"role": "system", "content": verdict.signed_rubric(material.rubric, nonce, criteria, shown)},
                {"role": "user", "content": message},
            ],
            "max_completion_tokens": self.settings.max_completion_tokens + room,
        }
        if self.settings.temperature is not None:
            body["temperature"] = self.settings.temperature
        if not by_text:
            body["response_format"] = verdict.response_format(
                expect_reference=expect_reference, by_criteria=bool(criteria), of_group=len(names) > 1
            )

        def read(bill: Bill, answer: bytes) -> list[Verdict]:
            value = self._completion(answer, {**body, **self.settings.extra_body})
            usage = value.get("usage") if isinstance(value, dict) else None
            try:
                verdicts = verdict.read_verdict(
                    _text_of(value), nonce=nonce, expect_reference=expect_reference, criteria=criteria,
                    count=len(names),
                )  # fmt: skip
            except errors.ForeignVerdict:
                usage = None  # another request counts its tokens
                raise
            finally:
                self._count_tokens(usage, bill)
            self._usage.verdicts += 1
            return verdicts

        return await self._sent(body, read)

    async def say(self, messages: Sequence[Mapping[str, object]], read: Callable[[str], T]) -> T:
        """What `read` makes of the model's next message. It raises `JudgeInvalid` for a message of another form, and
        another one is sampled."""
        body = {
            "model": self.settings.model, "messages": [*messages],
            "max_completion_tokens": self.settings.max_completion_tokens,
        }  # fmt: skip
        if self.settings.temperature is not None:
            body["temperature"] = self.settings.temperature

        def read_answer(bill: Bill, answer: bytes) -> T:
            value = self._completion(answer, {**body, **self.settings.extra_body})
            try:
                return read(_text_of(value))
            except errors.JudgeInvalid as error:
                error.worth_retrying = True
                raise
            finally:
                self._count_tokens(value.get("usage") if isinstance(value, dict) else None, bill)

        return await self.settings.transport.call(lambda: self._sent(body, read_answer))

    async def _sent(self, body: Mapping[str, object], read: Callable[[Bill, bytes], T]) -> T:
        """Post a request, without the fields that the provider rejects."""
        while True:
            sent = self.form.of({**body, **self.settings.extra_body})
            try:
                with self.settings.transport.bill() as bill:
                    return await self.http.post("/chat/completions", sent, functools.partial(read, bill))
            except errors.ServiceRejected as error:
                if error.marks & WITHHELD_MARKS:
                    raise _refused("an error of its content filter") from None
                if not self.form.leave_out(error.refused & sent.keys()):
                    raise
            await self.settings.transport.admit()

    def _completion(self, answer: bytes, sent: Collection[str] = ()) -> object:
        """Parse a reply's body. Raises `ServiceError` if it is not JSON or reports an error."""
        service = self.settings.transport.service
        try:
            value = of_stream(answer) if re.match(rb"\s*(data|event|id|):", answer) else read_json(answer)
        except ValueError:
            raise errors.BadServiceResponse(
                f"{service} answered with a body of {len(answer)} bytes that is {form_of(answer)}. Expected a chat "
                "completion.",
                code=f"{service}_bad_response",
            ) from None
        refuse_stated_error(service, value, sent)
        choices = value.get("choices") if isinstance(value, dict) else None
        for choice in choices if isinstance(choices, list) else ():
            if isinstance(choice, dict) and "error" in choice:  # OpenRouter's errors within a text
                refuse_stated_error(service, choice, sent)
        return value

    def _count_tokens(self, stated: object, bill: Bill) -> None:
        usage = stated if isinstance(stated, dict) else {}
        counts = [usage.get(name) or 0 for name in ("prompt_tokens", "completion_tokens")]  # gateways send nulls
        if not all(type(count) is int and 0 <= count <= MAX_TOKENS for count in counts):
            return
        prompt, completion = counts
        if any(counts) and None not in map(usage.get, ("prompt_tokens", "completion_tokens")):  # else by the mean
            bill.count(prompt, completion)
        self._usage.prompt_tokens += prompt
        self._usage.completion_tokens += completion
        self._usage.usd += self.settings.price.of(prompt, completion)


def _text_of(completion: object) -> str:
    """The text of a chat completion. Raises `JudgeInvalid` if it is incomplete."""
    try:
        choice = _Completion.model_validate(completion).choices[0]
    except (ValidationError, IndexError):
        text = "the judge answered 200 without any choice. Expected a chat completion."
        raise errors.JudgeInvalid(text, "judge_empty") from None
    end, message = str(choice.finish_reason).lower(), choice.message
    text = message.text
    if message.role in ASKING:
        raise errors.JudgeInvalid("the judge's message has a requester's role. Expected `assistant`.", "judge_role")
    if end in CUT_OFF:
        where = "in" if text else "before"
        raise errors.JudgeInvalid(
            f"`max_completion_tokens` was used up {where} the verdict. Raise it in `judge_providers`{_LESS}.",
            "judge_cut_off",
        )
    if message.refusal or end in WITHHELD:
        raise _refused(f"finish_reason {end}" if end in WITHHELD else "a refusal")
    if end in BROKEN_OFF:
        text = f"the judge broke off (finish_reason {end}). Expected a verdict."
        raise errors.JudgeInvalid(text, "judge_broken_off")
    if text.strip():
        return text
    if isinstance(message.content, list) or any((message.model_extra or {}).get(name) for name in _THOUGHTS):
        raise errors.JudgeInvalid(
            "the judge reasoned, but answered without any text. Raise `max_completion_tokens` in `judge_providers`"
            f"{_LESS}.",
            "judge_only_thoughts",
        )
    raise errors.JudgeInvalid("the judge answered 200 without any text. Expected a verdict.", "judge_empty")


def _refused(what: str) -> errors.JudgeInvalid:
    return errors.JudgeInvalid(
        f"the judge, or its provider's filter, answered with {what}. Expected a verdict.",
        "judge_refused",
    )


def of_stream(answer: bytes) -> object:
    """The completion of an unrequested event stream. Raises `ValueError` if it is incomplete."""
    lines = [line[5:].strip() for line in answer.splitlines() if line.startswith(b"data:")]
    chunks = [read_json(line) for line in lines if line not in (b"", b"[DONE]")]
    text, usage, end = "", None, None
    for chunk in chunks:
        if not isinstance(chunk, dict) or chunk.get("error") or (len(chunks) == 1 and b'"delta"' not in answer):
            return chunk
        usage = chunk.get("usage") or usage
        try:
            for choice in chunk.get("choices") or ():
                text += _Message(content=(choice.get("delta") or {}).get("content")).text
                end = choice.get("finish_reason") or end
        except (AttributeError, TypeError):
            raise ValueError("a stream of other events") from None
    if end is None:
        raise ValueError("a stream that ended early")
    return {"choices": [{"message": {"role": "assistant", "content": text}, "finish_reason": end}], "usage": usage}
