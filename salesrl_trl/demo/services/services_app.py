"""The HTTP APIs of both mock services: `/v1/rag/8b` and `/v1/rag/32b` over a BM25 index, and an OpenAI-compatible mock
judge. Error responses never quote a customer."""

import json
import logging
import math
import re
import time
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

import numpy as np
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field

from salesrl_trl.data.files import Document
from salesrl_trl.demo.services.launcher import EMBEDDED_MODEL
from salesrl_trl.demo.services.rubric import is_chinese, judge_sections, sentences, words
from salesrl_trl.errors import DataError
from salesrl_trl.ground.fencing import read_nonce, read_sections
from salesrl_trl.types import Passage

QUERY_WEIGHT = 3  # weight of words in `rewritten_query`, which contains the question; other fields' words count once
CLOSE_SCORE_RATIO = 0.95  # the second passage is used if its score reaches this share of the best one
NOTHING_FOUND = {
    "zh": "很抱歉，我没有查到相关资料，暂时无法回答这个问题。",
    "en": "I'm sorry, I found nothing about this, so I can't answer the question yet.",
}
"""The answer without passages, by language."""
REQUIRED_SECTIONS = frozenset({"branch", "conversation"})
CANDIDATE = "candidate_"  # prefix of a candidate's section, followed by its name, `answer` for a single one
CANNOT_JUDGE = "I can't judge this: the message lacks sections with a branch, a conversation and an answer."
"""The reply to such a message. Like a model's refusal, it is not JSON."""
BYTES_PER_TOKEN = 4  # UTF-8 bytes per token for usage estimates, a rule of thumb for both languages
BM25_K1, BM25_B = 0.9, 0.4  # term saturation and length normalisation: Anserini's defaults


class KnowledgeIndex:
    """Retrieves documents for a query.

    `n_t` of the `N` documents contain the token `t`, and `idf(t) = ln(1 + (N - n_t + 0.5) / (n_t + 0.5))`. Document
    `d` has `|d|` tokens, `a` on average. Repeated tokens in the query `q` count repeatedly:

        raw(q, d)   = sum over t in q of idf(t) * tf(t, d) / (tf(t, d) + k1 * (1 - b + b * |d| / a))
        bound(q)    = sum over t in q of idf(t)
        score(q, d) = raw(q, d) / bound(q)                                                          in [0, 1)

    `bound` is the limit of the raw score when a document repeats every token of the query. It includes tokens outside
    all documents, with `n_t = 0`, so that off-topic queries score low on the few words they share with the knowledge
    base. With these constants a good passage scores 0.3 to 0.6: one occurrence earns half of `idf`.

    Raises `DataError` without documents that contain a word.
    """

    def __init__(self, documents: Sequence[Document]) -> None:
        import bm25s  # it imports numba and, if installed, JAX, which allocates GPU memory

        logging.getLogger("bm25s").setLevel(logging.NOTSET)  # importing it sets DEBUG
        self._documents = tuple(documents)
        tokens = [words(f"{document.title}\n{document.text}", overlapping=True) for document in self._documents]
        if not any(tokens):
            raise DataError("the knowledge base does not contain any words. Expected documents with text.")
        self._bm25 = bm25s.BM25(method="lucene", k1=BM25_K1, b=BM25_B)
        self._bm25.index(tokens, show_progress=False)
        self._bm25.scores["indices"] = self._bm25.scores["indices"].astype(np.intp)  # halves the time of np.add.at
        self._frequencies = Counter(token for document in tokens for token in set(document))

    def _idf(self, token: str) -> float:
        frequency = self._frequencies[token]
        return math.log(1 + (len(self._documents) - frequency + 0.5) / (frequency + 0.5))

    def search(self, query: str, top_k: int, score_threshold: float) -> tuple[Passage, ...]:
        """Up to `top_k` passages with at least this score in [0, 1], best first. Equal scores keep the order of the
        knowledge base. Empty if the query shares no token with any document."""
        tokens = words(query, overlapping=True)
        known = [token for token in tokens if token in self._frequencies]
        if top_k < 1 or not known:
            return ()
        bound = sum(map(self._idf, tokens))
        raw = self._bm25.get_scores(known)  # (N,)
        places = np.flatnonzero(raw)
        scores = np.minimum(raw[places] / np.float32(bound), 1.0)  # (found,)
        order = np.argsort(-scores, kind="stable")[:top_k]
        order = order[scores[order] >= score_threshold]
        found = [(self._documents[place], score) for place, score in zip(places[order], scores[order], strict=True)]
        return tuple(Passage(id=document.id, text=document.text, score=float(score)) for document, score in found)


class ContextRequest(BaseModel):
    """Body of `POST /v1/rag/32b`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    tenant_id: str = ""
    contact_id: str = ""
    account_id: str = ""
    message_id: str = ""
    context: str
    score_threshold: Annotated[float, Field(ge=0.0, le=1.0)]
    top_k: Annotated[int, Field(ge=1)]
    request_id: str = ""


class ActionRequest(ContextRequest):
    """Body of `POST /v1/rag/8b`."""

    tenant_id: str
    contact_id: str
    account_id: str
    message_id: str
    user_profile: str
    rewritten_query: Annotated[str, Field(min_length=1)]
    history_summary: str


class ChatMessage(BaseModel):
    role: str
    content: str


class ChatRequest(BaseModel):
    """Body of `POST /v1/chat/completions`. Other keys, e.g. `response_format`, are ignored: verdicts have a fixed
    format."""

    model: str
    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    stream: Literal[False] = False


def create_app(index: KnowledgeIndex, terms: re.Pattern[str]) -> FastAPI:
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    app.add_exception_handler(RequestValidationError, _refuse)
    serve_rag(app, index)
    serve_judge(app, terms)

    @app.get("/healthz")
    async def healthz() -> dict[str, str]:
        return {"status": "ok"}

    return app


async def _refuse(_: Request, error: Exception) -> JSONResponse:
    """FastAPI's validation error without the invalid text."""
    details = error.errors() if isinstance(error, RequestValidationError) else ()
    problems = [{"loc": detail["loc"], "type": detail["type"], "msg": detail["msg"]} for detail in details]
    return JSONResponse({"detail": problems}, status_code=422)


def serve_rag(app: FastAPI, index: KnowledgeIndex) -> None:
    def answer(question: str, query: str, request: ContextRequest) -> dict[str, object]:
        started = time.perf_counter()
        passages = index.search(query, request.top_k, request.score_threshold)
        text = answer_from(passages, question)
        took_ms = (time.perf_counter() - started) * 1000
        return {"answer": text, "passages": passages, "took_ms": took_ms, "request_id": request.request_id}

    @app.post("/v1/rag/8b")
    async def answer_action(request: ActionRequest) -> dict[str, object]:
        query = search_text(request.rewritten_query, request.user_profile, request.history_summary)
        return answer(request.rewritten_query, query, request)

    @app.post("/v1/rag/32b")
    async def answer_context(request: ContextRequest) -> dict[str, object]:
        return answer(request.context, request.context, request)


def search_text(query: str, profile: str, summary: str) -> str:
    """The 8B endpoint's search text: the action's fields, never the context."""
    return "\n".join([query] * QUERY_WEIGHT + [profile, summary])


def answer_from(passages: Sequence[Passage], question: str) -> str:
    """The best passage verbatim, so that search mistakes stay visible, and from a close second passage
    (`CLOSE_SCORE_RATIO`) the sentence that shares most words with the question."""
    if not passages:
        return NOTHING_FOUND["zh" if is_chinese(question) else "en"]
    best, second = passages[0], passages[1] if len(passages) > 1 else None
    if second is None or second.score < CLOSE_SCORE_RATIO * best.score:
        return best.text
    asked = set(words(question))
    addition = max(sentences(second.text), key=lambda sentence: len(asked & set(words(sentence))))
    return best.text if addition in best.text else f"{best.text} {addition}"


def serve_judge(app: FastAPI, terms: re.Pattern[str]) -> None:
    """The judge; its fairness branch checks for these terms."""

    @app.get("/v1/models")
    async def models() -> dict[str, object]:
        model = {"id": EMBEDDED_MODEL, "object": "model", "created": 0, "owned_by": "salesrl_trl"}
        return {"object": "list", "data": [model]}

    @app.post("/v1/chat/completions", response_model=None)
    async def complete(request: ChatRequest) -> dict[str, object] | JSONResponse:
        if request.model != EMBEDDED_MODEL:  # the body of OpenAI's own API
            message = f"The model does not exist. The only one is `{EMBEDDED_MODEL}`."
            error = {"message": message, "type": "invalid_request_error", "param": "model", "code": "model_not_found"}
            return JSONResponse({"error": error}, status_code=404)
        asked = next((message.content for message in reversed(request.messages) if message.role == "user"), "")
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
        return _completion(request, content)


def _alone(sections: Mapping[str, str], name: str) -> dict[str, str]:
    """One candidate's sections, as if judged alone."""
    written = {"action": sections[f"action_{name}"]} if f"action_{name}" in sections else {}
    return {**sections, **written, f"{CANDIDATE}answer": sections[CANDIDATE + name]}


def _completion(request: ChatRequest, content: str) -> dict[str, object]:
    prompt_tokens = sum(_tokens(message.content) for message in request.messages)
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
