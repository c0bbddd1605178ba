"""The HTTP contracts of both services: `/v1/rag/8b` and `/v1/rag/32b`, and an OpenAI-compatible judge.

The judge stands in for an LLM: it reads the same fenced sections, and answers with the same JSON. A refusal names the
field and the reason, and never repeats a customer's text. `demo_server` runs the app.
"""

import json
import time
import uuid
from collections.abc import Mapping
from typing import Annotated, Literal

from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from salesrl_trl.demo.services.bm25_index import KnowledgeIndex
from salesrl_trl.demo.services.rubric import ProtectedTerms, judge_sections
from salesrl_trl.demo.services.writers import Writer, WriterFailed
from salesrl_trl.ground.fencing import read_nonce, read_sections

QUERY_WEIGHT = 3
"""How often each word of `rewritten_query` counts, because it holds the question. The other fields' words count once.
That is enough for an age in `user_profile` to find the offers for this age."""

REQUIRED_SECTIONS = frozenset({"branch", "conversation"})
"""A message to the judge without one of these sections, or without a candidate, can't be judged."""
CANDIDATE = "candidate_"  # begins the name of a candidate's section; behind it the candidate's name, `answer` of one
CANNOT_JUDGE = "I can't judge this: the message has no sections with a branch, a conversation and an answer."
"""Content of the answer to such a message. Like a model's refusal, it is no JSON."""

BYTES_PER_TOKEN = 4  # UTF-8 bytes per token, for the usage figures. A rule of thumb for both languages.
MAX_MESSAGE_CHARS = 400_000
"""Longest message, in characters: the limits of the RAG service's texts, and room for the rest."""
ID_HEADER = b"x-request-id"
MAX_ID_BYTES = 256  # longer ids are not returned

# No prompt has room for more passages, and conversations and completions are far shorter.
Score = Annotated[float, Field(ge=0.0, le=1.0)]
TopK = Annotated[int, Field(ge=1, le=50)]
Context = Annotated[str, Field(max_length=200_000)]
FieldText = Annotated[str, Field(max_length=20_000)]
Identifier = Annotated[str, Field(max_length=256)]


class ContextRequest(BaseModel):
    """Body of `POST /v1/rag/32b`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    tenant_id: Identifier = ""
    contact_id: Identifier = ""
    account_id: Identifier = ""
    message_id: Identifier = ""
    context: Context
    score_threshold: Score
    top_k: TopK
    request_id: Identifier = ""


class ActionRequest(ContextRequest):
    """Body of `POST /v1/rag/8b`."""

    tenant_id: Identifier
    contact_id: Identifier
    account_id: Identifier
    message_id: Identifier
    user_profile: FieldText
    rewritten_query: Annotated[FieldText, Field(min_length=1)]
    history_summary: FieldText


class TextPart(BaseModel):
    type: Literal["text"]
    text: Annotated[str, Field(max_length=MAX_MESSAGE_CHARS)]


class ChatMessage(BaseModel):
    role: str
    content: Annotated[str, Field(max_length=MAX_MESSAGE_CHARS)] | list[TextPart] | None = None

    @property
    def text(self) -> str:
        parts = self.content if isinstance(self.content, list) else []
        return self.content if isinstance(self.content, str) else "\n".join(part.text for part in parts)


class ResponseFormat(BaseModel):
    """`response_format`, whose schema is ignored."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: dict[str, object] | None = None


class ChatRequest(BaseModel):
    """Body of `POST /v1/chat/completions`. The form of `response_format` is checked. Its content is ignored, because a
    verdict always has the same keys, and so are other keys, such as `temperature`."""

    model_config = ConfigDict(extra="ignore")

    model: Annotated[str, Field(min_length=1, max_length=256)]
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=200)]  # a judge's prompt has two
    stream: bool = False
    response_format: ResponseFormat | None = None


def create_app(*services: APIRouter) -> ASGIApp:
    """An app of these services. It returns each request's `X-Request-Id` with its reply, so that the client can match
    the two."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    app.add_exception_handler(RequestValidationError, _refuse)
    app.add_exception_handler(WriterFailed, _report_writer)
    for service in services:
        app.include_router(service)

    @app.get("/healthz")
    async def healthz() -> dict[str, str]:
        return {"status": "ok"}

    async def echoing(scope: Scope, receive: Receive, send: Send) -> None:
        named = [pair for pair in scope.get("headers", ()) if pair[0] == ID_HEADER and len(pair[1]) <= MAX_ID_BYTES]

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *named]
            await send(message)

        await app(scope, receive, send_named if named else send)

    return echoing


def rag_service(index: KnowledgeIndex, writer: Writer) -> APIRouter:
    """The index finds passages, the writer writes an answer from them."""
    router = APIRouter()

    async def answer(question: str, query: str, request: ContextRequest) -> dict[str, object]:
        started = time.perf_counter()
        passages = index.search(query, request.top_k, request.score_threshold)
        text = await writer.write(question, passages)
        took_ms = (time.perf_counter() - started) * 1000
        return {"answer": text, "passages": passages, "took_ms": took_ms, "request_id": request.request_id}

    @router.post("/v1/rag/8b")
    async def answer_action(request: ActionRequest) -> dict[str, object]:
        query = search_text(request.rewritten_query, request.user_profile, request.history_summary)
        return await answer(request.rewritten_query, query, request)

    @router.post("/v1/rag/32b")
    async def answer_context(request: ContextRequest) -> dict[str, object]:
        return await answer(request.context, request.context, request)

    return router


def search_text(query: str, profile: str, summary: str) -> str:
    """What the 8B endpoint searches with: the fields of the action, and never the context."""
    return "\n".join([query] * QUERY_WEIGHT + [profile, summary])


def judge_service(terms: ProtectedTerms) -> APIRouter:
    """The judge, whose fairness branch looks for these terms. Requests may name any model."""
    router = APIRouter()

    @router.get("/v1/models")
    async def models() -> dict[str, object]:
        model = {"id": "salesrl-judge", "object": "model", "created": 0, "owned_by": "salesrl_trl"}
        return {"object": "list", "data": [model]}

    @router.post("/v1/chat/completions")
    async def complete(request: ChatRequest) -> JSONResponse:
        if request.stream:
            return _error("got stream=true, expected false; this judge does not stream; leave it out", "stream")
        asked = next((message.text for message in reversed(request.messages) if message.role == "user"), "")
        sections, content = read_sections(asked), CANNOT_JUDGE
        names = [name.removeprefix(CANDIDATE) for name in sections if name.startswith(CANDIDATE)]
        if sections.keys() >= REQUIRED_SECTIONS and names:
            verdicts = {name: judge_sections(_alone(sections, name), terms) for name in names}
            first = next(iter(verdicts.values()))
            scores: dict[str, object] = {"candidate": first.candidate}
            if len(names) > 1:
                named = [{"name": name, "score": verdict.candidate} for name, verdict in verdicts.items()]
                scores = {"candidates": named}
            said = {**scores, "reference": first.reference, "reason": first.reason}
            content = json.dumps({"nonce": read_nonce(asked), **said})
        return JSONResponse(_completion(request, content))

    return router


def _alone(sections: Mapping[str, str], name: str) -> dict[str, str]:
    """The sections of one candidate as if it were judged alone."""
    written = {"action": sections[f"action_{name}"]} if f"action_{name}" in sections else {}
    return {**sections, **written, f"{CANDIDATE}answer": sections[CANDIDATE + name]}


def _completion(request: ChatRequest, content: str) -> dict[str, object]:
    prompt_tokens = sum(_tokens(message.text) for message in request.messages)
    completion_tokens = _tokens(content)
    choice = {"index": 0, "message": {"role": "assistant", "content": content}, "finish_reason": "stop"}
    return {
        "id": f"chatcmpl-{uuid.uuid4().hex}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": request.model,
        "choices": [choice],
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
        },
    }


def _tokens(text: str) -> int:
    """Estimated tokens of a text: a quarter of its UTF-8 bytes, rounded up."""
    return -(-len(text.encode()) // BYTES_PER_TOKEN)


async def _refuse(request: Request, error: Exception) -> JSONResponse:
    """A refusal in the form of the path's service."""
    details = error.errors() if isinstance(error, RequestValidationError) else ()
    if request.url.path.startswith("/v1/rag/"):
        problems = [{"loc": detail["loc"], "type": detail["type"], "msg": detail["msg"]} for detail in details]
        return JSONResponse({"detail": problems}, status_code=422)
    where = ".".join(map(str, details[0]["loc"][1:]))
    return _error(f"{where or 'body'}: {details[0]['msg']}", where or None)


def _error(message: str, param: str | None) -> JSONResponse:
    problem = {"message": message, "type": "invalid_request_error", "param": param, "code": None}
    return JSONResponse({"error": problem}, status_code=400)


async def _report_writer(_request: Request, error: Exception) -> JSONResponse:
    return JSONResponse({"error": {"type": "writer_failed", "message": str(error)}}, status_code=502)
