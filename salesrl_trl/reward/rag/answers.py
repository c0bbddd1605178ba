"""Answers of both RAG endpoints, each asked for once.

Owns the keys of kept answers, and which check each answer has to pass. The backend owns how an endpoint is asked, the
cache how answers are kept.
"""

from salesrl_trl.reward.answer_store import AnswerStore
from salesrl_trl.reward.cache import Memo, cache_key
from salesrl_trl.reward.parsing import MAX_FIELD_CHARS
from salesrl_trl.reward.rag.checks import check_8b, check_32b, check_kept_8b, check_kept_32b, check_passages
from salesrl_trl.reward.rag.client import RagBackend, answer_from_json, answer_to_json
from salesrl_trl.types import Action, ActionFormat, Answer, SalesRow


class RagAnswers:
    """Asks a backend, and keeps what it answers. The methods that ask raise `ServiceError`.

    Args:
        backend (`RagBackend`):
            Both endpoints.
        score_threshold (`float`):
            Passages below this normalised score in [0, 1] are left out.
        top_k (`int`):
            Most passages to retrieve.
        action_format (`ActionFormat`):
            What an action consists of.
        answers (`AnswerStore`):
            Keeps 8B answers.
        references (`AnswerStore`):
            Keeps 32B answers, which do not depend on the policy.
    """

    def __init__(
        self,
        backend: RagBackend,
        score_threshold: float,
        top_k: int,
        action_format: ActionFormat,
        answers: AnswerStore,
        references: AnswerStore,
    ) -> None:
        self.backend = backend
        self.kept = Memo(answers, answer_to_json, answer_from_json)
        """8B answers."""
        self.kept_references = Memo(references, answer_to_json, answer_from_json)
        """32B answers."""
        self._retrieval = (score_threshold, top_k)
        self._format = action_format

    async def candidate(self, row: SalesRow, action: Action) -> Answer:
        """The 8B answer to an action."""
        key = cache_key("8b", self.backend.identity, self._asked(row), action.as_dict(), action.query_field)
        return await self.kept.get(key, lambda: self.ask_8b(row, action), check_kept_8b)

    async def reference(self, row: SalesRow) -> Answer:
        """The row's 32B answer. It does not depend on the policy."""
        return await self.kept_references.get(self.reference_key(row), lambda: self.ask_32b(row), check_kept_32b)

    async def fetch_reference(self, row: SalesRow) -> None:
        """Ask for the row's 32B answer ahead of the completions that need it."""
        await self.kept_references.fetch(self.reference_key(row), lambda: self.ask_32b(row), check_kept_32b)

    def reference_key(self, row: SalesRow) -> str:
        """The key under which the row's 32B answer is kept."""
        return cache_key("32b", self.backend.identity, self._asked(row))

    async def index_has_some(self, row: SalesRow) -> bool:
        """Whether the 8B endpoint finds any passage with the conversation itself and without a threshold. If not, an
        action that found none is not at fault. Only a yes is kept."""
        query = self.plain_action(row.context)
        key = cache_key("any passage", self.backend.identity, self._asked(row))

        async def ask() -> Answer:
            return await self.backend.chat_8b(row.context, query, 0.0, self._retrieval[1], ids=row.ids)

        return bool((await self.kept.get(key, ask, check_passages)).passages)

    def plain_action(self, query: str) -> Action:
        """An action that holds a query alone."""
        query = query[-MAX_FIELD_CHARS:]  # no action has a longer one, and services may refuse it
        fields = dict.fromkeys(self._format.fields, "") | {self._format.query: query}
        return Action(fields=fields, query_field=self._format.query)

    async def ask_8b(self, row: SalesRow, action: Action) -> Answer:
        """Ask for an 8B answer, without a look at kept ones."""
        answer = await self.backend.chat_8b(row.context, action, *self._retrieval, ids=row.ids)
        check_8b(answer)
        return answer

    async def ask_32b(self, row: SalesRow) -> Answer:
        """Ask for a 32B answer, without a look at kept ones."""
        answer = await self.backend.chat(row.context, *self._retrieval, ids=row.ids)
        check_32b(answer)
        return answer

    async def aclose(self) -> None:
        """Cancel what is under way, and close the running loop's connections."""
        await self.kept.aclose()
        await self.kept_references.aclose()
        await self.backend.aclose()

    def _asked(self, row: SalesRow) -> tuple[object, ...]:
        """The part of a question that both endpoints get, for the keys of answers."""
        return (row.context, row.ids.as_dict(), self._retrieval)
