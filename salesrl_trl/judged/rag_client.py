"""RAG service client: the interface of retrieval backends, the wire format, and cached answers.

Each request carries its own id in header and body. An answer with another request's id is rejected.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import partial

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from salesrl_trl.errors import BadServiceResponse
from salesrl_trl.judged.cache import AnswerStore, Cache, cache_key
from salesrl_trl.judged.parsing import MAX_FIELD_CHARS, is_empty_text
from salesrl_trl.service.http import HttpClient, check_echo, form_of, make_request_id, read_json, refuse_stated_error
from salesrl_trl.service.transport import Transport
from salesrl_trl.types import Action, ActionFormat, Answer, Passage, RequestIds, SalesRow

RESERVED_FIELDS = (*RequestIds().as_dict(), "context", "score_threshold", "top_k", "request_id")
"""Request fields other than the action's."""
ENDPOINTS = ("rag_8b", "rag_32b")


class RagBackend(ABC):
    """Answers the reward pipeline's queries: the HTTP service below, a run's record (`rejudge`), or your own class for
    another service, named by the setting `rag` (examples/rag_adapter.py).

    One object serves all completions concurrently on one event loop. It must be picklable, like a `Judge`.
    """

    transports: dict[str, Transport]
    """Each endpoint's transport with its limits and retries: `{"rag_8b": ..., "rag_32b": ...}`."""
    identity: str
    """Identifies the service in cache keys and messages, without credentials."""

    @abstractmethod
    async def chat_8b(
        self, context: str, action: Action, score_threshold: float, top_k: int, *, ids: RequestIds
    ) -> Answer:
        """Answer from the policy's action. Raises `ServiceError` on failure.

        `context`: the conversation, a line per turn. Passages whose normalised score in [0, 1] is below
        `score_threshold` are dropped.
        """

    @abstractmethod
    async def chat(self, context: str, score_threshold: float, top_k: int, *, ids: RequestIds) -> Answer:
        """The frozen 32B reference's answer to the raw conversation. Arguments and errors as in `chat_8b`."""

    async def aclose(self) -> None:  # noqa: B027  for those that have something to close
        """Close the running loop's connections. The next call reopens them."""


MAX_ANSWER_CHARS = 65_536
"""Longest answer: far more than a customer reads, and within a judge's context."""
MAX_PASSAGES = 1000


class _PassageBody(BaseModel):
    id: str
    text: str
    score: float = Field(ge=0, le=1, strict=True)


class _AnswerBody(BaseModel):
    model_config = ConfigDict(extra="allow")  # other fields may report an error
    answer: str = Field(max_length=MAX_ANSWER_CHARS)
    passages: list[_PassageBody] = Field(max_length=MAX_PASSAGES)
    took_ms: float = Field(ge=0, allow_inf_nan=False)
    request_id: object = None


class RagClient(RagBackend):
    """Calls both endpoints over HTTP. `base_url` precedes `/v1/rag/...`; the key is sent as a bearer token."""

    def __init__(
        self, base_url: str, *, transport_8b: Transport, transport_32b: Transport, api_key: str | None = None
    ) -> None:
        self.identity = base_url.rstrip("/")
        self.transports = {"rag_8b": transport_8b, "rag_32b": transport_32b}
        self._http = {
            name: HttpClient(transport.service, base_url, api_key=api_key)
            for name, transport in self.transports.items()
        }

    async def chat_8b(
        self, context: str, action: Action, score_threshold: float, top_k: int, *, ids: RequestIds
    ) -> Answer:
        asked = {"context": context, **action.as_dict(), "score_threshold": score_threshold, "top_k": top_k}
        return await self._ask("8b", {**ids.as_dict(), **asked})

    async def chat(self, context: str, score_threshold: float, top_k: int, *, ids: RequestIds) -> Answer:
        named = {name: value for name, value in ids.as_dict().items() if value}
        asked = {"context": context, "score_threshold": score_threshold, "top_k": top_k}
        return await self._ask("32b", {**named, **asked})

    async def aclose(self) -> None:
        for http in self._http.values():
            await http.aclose()

    async def _ask(self, endpoint: str, body: Mapping[str, object]) -> Answer:
        transport, http = self.transports[f"rag_{endpoint}"], self._http[f"rag_{endpoint}"]

        async def attempt() -> Answer:
            request_id = make_request_id()
            read = partial(_read_answer, http, request_id)
            asked = {**body, "request_id": request_id}
            return await http.post(f"/v1/rag/{endpoint}", asked, read, request_id=request_id)

        return await transport.call(attempt)


def _read_answer(http: HttpClient, request_id: str, content: bytes) -> Answer:
    service = http.service
    try:
        value = read_json(content)
        body = _AnswerBody.model_validate(value)
    except ValueError as error:
        faults = [f"the body ({form_of(content)})"]
        if isinstance(error, ValidationError):
            refuse_stated_error(service, value)
            found = error.errors(include_url=False, include_context=False, include_input=False)
            faults = [f"{'.'.join(map(str, fault['loc'])) or 'the body'} ({fault['type']})" for fault in found[:5]]
        raise BadServiceResponse(
            f"{service} answered with a body of {len(content)} bytes outside its contract: {', '.join(faults)}. "
            "Expected {answer, passages: [{id, text, score in [0, 1]}], took_ms}.",
            code=f"{service}_bad_response",
        ) from None
    check_echo(service, request_id, body.request_id)
    refuse_stated_error(service, body.model_extra)
    passages = tuple(Passage(id=item.id, text=item.text, score=item.score) for item in body.passages)
    return Answer(text=body.answer, passages=passages, took_ms=body.took_ms)


ANSWER = TypeAdapter(Answer)  # as stored and recorded


def kept(answer: Answer) -> dict[str, object]:
    """An answer as stored and recorded."""
    return ANSWER.dump_python(answer, warnings=False)  # type: ignore[no-any-return]  # a warning would quote it


class RagAnswers:
    """Queries a backend and caches its answers in these stores. Queries raise `ServiceError`."""

    def __init__(
        self, backend: RagBackend, score_threshold: float, top_k: int, action_format: ActionFormat,
        answers: AnswerStore, references: AnswerStore,
    ) -> None:  # fmt: skip
        self.backend = backend
        self.answer_cache, self.reference_cache = Cache(answers, ANSWER), Cache(references, ANSWER)
        self._stores = (answers, references)
        self._retrieval = (score_threshold, top_k)
        self._format = action_format

    async def candidate(self, row: SalesRow, action: Action) -> Answer:
        key = self._key("8b", row, action.as_dict(), action.query_field)
        return await self.answer_cache.get(key, lambda: self.ask_8b(row, action), _check_passages)

    async def reference(self, row: SalesRow, *, ahead: bool = False) -> Answer:
        """The row's 32B answer. `ahead`: requested before its completions need it."""
        asked = self.reference_cache.fetch if ahead else self.reference_cache.get
        return await asked(self._key("32b", row), lambda: self.ask_32b(row), _check_passages)

    async def search(self, query: str) -> Answer:
        """The 8B answer to a query alone."""
        retrieval = self._retrieval

        async def ask() -> Answer:
            return await self.backend.chat_8b(query, self.plain_action(query), *retrieval, ids=RequestIds())

        key = cache_key("search", self.backend.identity, query, retrieval)
        return await self.answer_cache.get(key, ask, _check_passages)

    async def index_has_some(self, row: SalesRow) -> bool:
        """Whether the 8B endpoint finds any passage for the conversation itself, without a threshold. If not, an
        action without passages is not at fault."""
        query = self.plain_action(row.context)

        async def ask() -> Answer:
            return await self.backend.chat_8b(row.context, query, 0.0, self._retrieval[1], ids=row.ids)

        return bool((await self.answer_cache.get(self._key("any passage", row), ask, _check_passages)).passages)

    def plain_action(self, query: str) -> Action:
        query = query[-MAX_FIELD_CHARS:]  # the limit of an action, beyond which services may reject it
        fields = dict.fromkeys(self._format.fields, "") | {self._format.query: query}
        return Action(fields=fields, query_field=self._format.query)

    async def ask_8b(self, row: SalesRow, action: Action) -> Answer:
        answer = await self.backend.chat_8b(row.context, action, *self._retrieval, ids=row.ids)
        if answer.passages and not answer.text.strip():  # the service is at fault, not the policy
            raise BadServiceResponse("rag_8b found passages and returned an empty answer", code="rag_8b_empty_answer")
        return answer

    async def ask_32b(self, row: SalesRow) -> Answer:
        answer = await self.backend.chat(row.context, *self._retrieval, ids=row.ids)
        if is_empty_text(answer.text):
            raise BadServiceResponse("rag_32b's answer is hollow", code="rag_32b_hollow_answer")
        return answer

    async def aclose(self) -> None:
        await self.answer_cache.aclose()
        await self.reference_cache.aclose()
        await self.backend.aclose()
        for store in self._stores:
            await store.aclose()

    def _key(self, question: str, row: SalesRow, *others: object) -> str:
        asked = (row.context, row.ids.as_dict(), self._retrieval)
        return cache_key(question, self.backend.identity, asked, *others)


def _check_passages(answer: Answer) -> None:
    """Refuse to store an answer without passages, e.g. from a busy service or a loading index, or with scores outside
    [0, 1]."""
    if not answer.passages or not all(0 <= passage.score <= 1 for passage in answer.passages):
        raise BadServiceResponse("an answer without valid passages", code="rag_no_passages")
