"""The RAG service of a recorded run: every answer as it was."""

from collections.abc import Iterable, Mapping

from salesrl_trl.errors import ServiceUnavailable
from salesrl_trl.recording.reader import Recorded
from salesrl_trl.reward.cache import cache_key
from salesrl_trl.reward.rag.rag_client import answer_from_json
from salesrl_trl.reward.service.transport import Transport
from salesrl_trl.types import Action, Answer, RequestIds, SalesRow


class RecordedRag:
    """A `RagBackend` that asks nobody.

    Args:
        completions (`Iterable[Recorded]`):
            Completions with their answers.
        rows (`Mapping[str, SalesRow]`):
            Rows by id.
    """

    identity = "record"

    def __init__(self, completions: Iterable[Recorded], rows: Mapping[str, SalesRow]) -> None:
        self._answers: dict[str, object] = {}
        for each in completions:
            row = rows[each.row]
            if each.action is not None and each.answer is not None:
                self._answers[_key(row.context, row.ids, each.action)] = each.answer
            if each.reference is not None:
                self._answers[_key(row.context, row.ids, None)] = each.reference
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
