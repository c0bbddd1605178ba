"""The RAG service of a recorded run: every answer as it was. Called by the chain in place of the services."""

from collections.abc import Iterable, Mapping

from salesrl_trl.errors import ServiceUnavailable
from salesrl_trl.recording.reader import Recorded
from salesrl_trl.reward.cache import cache_key
from salesrl_trl.reward.rag_client import answer_from_json
from salesrl_trl.reward.service.transport import Transport
from salesrl_trl.types import Action, Answer, RequestIds, SalesRow


class RecordedRag:
    """A `RagBackend` that asks nobody: it has the recorded completions' answers to the rows, which are given by id."""

    identity = "record"

    def __init__(self, completions: Iterable[Recorded], rows: Mapping[str, SalesRow]) -> None:
        self._answers: dict[str, object] = {}
        for completion in completions:
            row = rows[completion.row]
            if completion.action is not None and completion.answer is not None:
                self._answers[_key(row.context, row.ids, completion.action)] = completion.answer
            if completion.reference is not None:
                self._answers[_key(row.context, row.ids, None)] = completion.reference
        self._transports = {
            name: Transport(name, max_concurrency=1, attempt_timeout_s=1.0, max_attempts=1)
            for name in ("rag_8b", "rag_32b")
        }

    @property
    def transports(self) -> dict[str, Transport]:
        """For the figures, which stay at 0."""
        return self._transports

    async def chat_8b(
        self, context: str, action: Action, score_threshold: float, top_k: int, *, ids: RequestIds
    ) -> Answer:
        """As `RagBackend.chat_8b`."""
        return self._answer("rag_8b", _key(context, ids, action.as_dict()))

    async def chat(self, context: str, score_threshold: float, top_k: int, *, ids: RequestIds) -> Answer:
        """As `RagBackend.chat`."""
        return self._answer("rag_32b", _key(context, ids, None))

    async def aclose(self) -> None:
        """Nothing is open."""

    def _answer(self, service: str, key: str) -> Answer:
        if key not in self._answers:
            raise ServiceUnavailable(f"the record has no such answer of {service}", code=f"{service}_not_recorded")
        return answer_from_json(self._answers[key])


def _key(context: str, ids: RequestIds, action: Mapping[str, str] | None) -> str:
    return cache_key(context, ids.as_dict(), None if action is None else dict(action))
