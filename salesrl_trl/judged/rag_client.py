"""The RAG service's client: the interface that every retrieval backend has, and the wire format of both endpoints.

Each request has an id of its own, in the header and in the body. An answer with the id of another request is refused.
The transport owns retries, time-outs and limits. `rag_answers` and the checks of services call it.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import partial

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from salesrl_trl.errors import BadServiceResponse
from salesrl_trl.service.http import HttpClient, check_echo, form_of, make_request_id, read_json, refuse_stated_error
from salesrl_trl.service.transport import Transport
from salesrl_trl.types import Action, Answer, Passage, RequestIds

RESERVED_FIELDS = (*RequestIds().as_dict(), "context", "score_threshold", "top_k", "request_id")
"""The fields of a request beside the action's."""


ENDPOINTS = ("rag_8b", "rag_32b")


class RagBackend(ABC):
    """Answers the reward chain: the HTTP service below, a run's record (`rejudge`), or a service of another form by a
    class of your own, which the setting `rag` names (examples/rag_adapter.py).

    One object serves all completions, many at a time, on one event loop. It must be picklable, as a `Judge`.
    """

    transports: dict[str, Transport]
    """The transport of each endpoint, which has its limits and retries: `{"rag_8b": ..., "rag_32b": ...}`."""
    identity: str
    """Names the service that answers, for cache keys and messages. No credential."""

    @abstractmethod
    async def chat_8b(
        self, context: str, action: Action, score_threshold: float, top_k: int, *, ids: RequestIds
    ) -> Answer:
        """Answer from the policy's action. Raises `ServiceError` where there is no answer.

        `context`: the conversation, a line per turn. `score_threshold`: passages below this normalised score in [0, 1]
        are left out.
        """

    @abstractmethod
    async def chat(self, context: str, score_threshold: float, top_k: int, *, ids: RequestIds) -> Answer:
        """The frozen 32B reference's answer, from the raw conversation. Arguments and errors as in `chat_8b`."""

    async def aclose(self) -> None:  # noqa: B027  for those that have something to close
        """Close the running loop's connections. The next call opens new ones."""


MAX_ANSWER_CHARS = 65_536
"""Longest answer: far more than a customer reads, and no more than a judge's context holds beside the rest."""
MAX_PASSAGES = 1000
SHOWN_FAULTS = 5  # of an answer outside its contract


class _PassageBody(BaseModel):
    id: str
    text: str
    score: float = Field(ge=0, le=1, strict=True)


class _AnswerBody(BaseModel):
    model_config = ConfigDict(extra="allow")  # other fields may say that it is an error
    answer: str = Field(max_length=MAX_ANSWER_CHARS)
    passages: list[_PassageBody] = Field(max_length=MAX_PASSAGES)
    took_ms: float = Field(ge=0, allow_inf_nan=False)
    request_id: object = None


class RagClient(RagBackend):
    """Asks the policy-driven "8B" endpoint and the frozen "32B" reference endpoint over HTTP.

    The address is that before `/v1/rag/...`. The key is sent as a bearer token.
    """

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
        """`POST /v1/rag/8b`; see `RagBackend`."""
        asked = {"context": context, **action.as_dict(), "score_threshold": score_threshold, "top_k": top_k}
        return await self._ask("8b", {**ids.as_dict(), **asked})

    async def chat(self, context: str, score_threshold: float, top_k: int, *, ids: RequestIds) -> Answer:
        """`POST /v1/rag/32b`, with the identifiers that the row has; see `RagBackend`."""
        named = {name: value for name, value in ids.as_dict().items() if value}
        asked = {"context": context, "score_threshold": score_threshold, "top_k": top_k}
        return await self._ask("32b", {**named, **asked})

    @property
    def returns_ids(self) -> bool:
        """Whether both endpoints return the request's id, in the header or in the body."""
        return all(http.echoes_ids for http in self._http.values())

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
            faults = [f"{'.'.join(map(str, fault['loc'])) or 'the body'} ({fault['type']})" for fault in found]
        more = f" and {len(faults) - SHOWN_FAULTS} more" if len(faults) > SHOWN_FAULTS else ""
        raise BadServiceResponse(
            f"{service} answered with a body of {len(content)} bytes outside its contract: "
            f"{', '.join(faults[:SHOWN_FAULTS])}{more}. "
            "Expected {answer, passages: [{id, text, score in [0, 1]}], took_ms}.",
            code=f"{service}_bad_response",
        ) from None
    check_echo(service, request_id, body.request_id)
    http.echoes_ids |= body.request_id == request_id
    refuse_stated_error(service, body.model_extra)
    return _answer(body)


def _answer(body: _AnswerBody) -> Answer:
    passages = tuple(Passage(id=item.id, text=item.text, score=item.score) for item in body.passages)
    return Answer(text=body.answer, passages=passages, took_ms=body.took_ms)


def answer_to_json(answer: Answer) -> dict[str, object]:
    """The answer as a JSON value, for the cache and the record. `asdict` would call 150 functions for it."""
    passages = [{"id": passage.id, "text": passage.text, "score": passage.score} for passage in answer.passages]
    return {"text": answer.text, "passages": passages, "took_ms": answer.took_ms}


def answer_from_json(value: object) -> Answer:
    """The answer of a value in the cache, as of a service's reply. Raises `TypeError`, `KeyError` or `ValueError`."""
    if not isinstance(value, dict):
        raise TypeError(f"a kept answer is a {type(value).__name__}. Expected an object.")
    return _answer(_AnswerBody.model_validate({**value, "answer": value["text"]}))
