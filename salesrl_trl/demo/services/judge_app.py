"""The embedded judge: its rubric behind an OpenAI-compatible chat endpoint.

Owns the HTTP form of a request and of a verdict. It stands in for an LLM judge: it reads the same fenced sections, and
answers with the same JSON. `rubric` scores, and `demo_server` runs it.
"""

import json
import time
import uuid
from collections.abc import Mapping
from typing import Annotated, Literal

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field

from salesrl_trl.demo.services.rubric import ProtectedTerms, judge_sections
from salesrl_trl.ground.fencing import read_nonce, read_sections

REQUIRED_SECTIONS = frozenset({"branch", "conversation"})
"""A message without one of these sections, or without a candidate, can't be judged."""
CANDIDATE = "candidate_"  # begins the name of a candidate's section; behind it the candidate's name, `answer` of one
CANNOT_JUDGE = "I can't judge this: the message has no sections with a branch, a conversation and an answer."
"""Content of the answer to such a message. Like a model's refusal, it is no JSON."""

BYTES_PER_TOKEN = 4  # UTF-8 bytes per token, for the usage figures. A rule of thumb for both languages.
MAX_MESSAGE_CHARS = 400_000
"""Longest message, in characters: the limits of the RAG service's texts, and room for the rest."""


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
    verdict always has the same keys. Other keys, such as `temperature` or `max_tokens`, are ignored too."""

    model_config = ConfigDict(extra="ignore")

    model: Annotated[str, Field(min_length=1, max_length=256)]
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=200)]  # a judge's prompt has two
    stream: bool = False
    response_format: ResponseFormat | None = None


def create_judge_app(terms: ProtectedTerms) -> FastAPI:
    """Make the judge, whose fairness branch looks for these terms. Requests may name any model."""
    app = FastAPI(title="Judge", docs_url=None, redoc_url=None, openapi_url=None)
    app.add_exception_handler(RequestValidationError, _refuse)

    @app.get("/healthz")
    async def healthz() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/v1/models")
    async def models() -> dict[str, object]:
        model = {"id": "salesrl-judge", "object": "model", "created": 0, "owned_by": "salesrl_trl"}
        return {"object": "list", "data": [model]}

    @app.post("/v1/chat/completions")
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

    return app


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


async def _refuse(_request: Request, error: Exception) -> JSONResponse:
    detail = error.errors()[0] if isinstance(error, RequestValidationError) else {"loc": (), "msg": "not understood"}
    where = ".".join(str(part) for part in detail["loc"][1:])
    return _error(f"{where or 'body'}: {detail['msg']}", where or None)


def _error(message: str, param: str | None) -> JSONResponse:
    problem = {"message": message, "type": "invalid_request_error", "param": param, "code": None}
    return JSONResponse({"error": problem}, status_code=400)
