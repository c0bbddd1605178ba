"""A client for a RAG service with its own API, for the setting `rag`: `--rag examples.rag_adapter.QuestionService`.

This example's service accepts `{"question", "limit"}` at one address and returns `{"answer", "contexts": [{"id",
"text", "score"}]}`. Adapt `ask` and `read` to yours.
"""

import json
import os
import time

from salesrl_trl import Action, Answer, RagBackend, Transport
from salesrl_trl.errors import BadServiceResponse
from salesrl_trl.service.http import HttpClient
from salesrl_trl.types import Passage, RequestIds


class QuestionService(RagBackend):
    """Searches with the policy's query; for the reference, with the last line of the conversation."""

    def __init__(self) -> None:
        self.identity = os.environ.get("QUESTION_SERVICE", "http://127.0.0.1:9000")
        limits = {"max_concurrency": 64, "attempt_timeout_s": 30.0, "max_attempts": 3, "outage_patience_s": 60.0}
        # The transport handles retries, limits and hedging.
        self.transports = {name: Transport(name, **limits) for name in ("rag_8b", "rag_32b")}
        # Use `headers={"X-Api-Key": ...}` if the service expects its key elsewhere. Another client, e.g. httpx, works
        # too: its errors are recognised by status, or as a timeout or a lost connection.
        self._http = HttpClient("rag", self.identity, api_key=os.environ.get("QUESTION_SERVICE_KEY"))

    async def chat_8b(
        self, context: str, action: Action, score_threshold: float, top_k: int, *, ids: RequestIds
    ) -> Answer:
        return await self.ask("rag_8b", action.query, score_threshold, top_k)

    async def chat(self, context: str, score_threshold: float, top_k: int, *, ids: RequestIds) -> Answer:
        return await self.ask("rag_32b", context.splitlines()[-1], score_threshold, top_k)

    async def ask(self, endpoint: str, question: str, least: float, most: int) -> Answer:
        async def attempt() -> Answer:
            start = time.perf_counter()
            content = await self._http.post("/ask", {"question": question, "limit": most})
            return read(content, least, (time.perf_counter() - start) * 1000)

        return await self.transports[endpoint].call(attempt)

    async def aclose(self) -> None:
        await self._http.aclose()


def read(content: bytes, least: float, took_ms: float) -> Answer:
    """Parse a response. A malformed one is retried, and in the end counts as a failure of the service."""
    try:
        body = json.loads(content)
        found = [Passage(id=str(each["id"]), text=each["text"], score=each["score"]) for each in body["contexts"]]
        passages = tuple(passage for passage in found if 1 >= passage.score >= least)
        return Answer(text=str(body["answer"]), passages=passages, took_ms=took_ms)
    except (ValueError, KeyError, TypeError) as error:
        raise BadServiceResponse("the service returned a malformed response", code="rag_bad_response") from error
