"""Answers of both RAG endpoints, each asked for once.

Owns the keys of kept answers, the checks that each answer has to pass, and whether references that an earlier run kept
still hold. The chain, its warm-up and the tool `search` call it.
"""

import asyncio
import secrets
from collections.abc import Iterable
from datetime import datetime

from salesrl_trl.errors import BadServiceResponse, ServiceError
from salesrl_trl.judged.cache import AnswerStore, Cache, cache_key
from salesrl_trl.judged.parsing import MAX_FIELD_CHARS, is_empty_text
from salesrl_trl.judged.rag_client import RagBackend, answer_from_json, answer_to_json
from salesrl_trl.types import Action, ActionFormat, Answer, RequestIds, SalesRow

COMPARED_REFERENCES = 8
"""Kept references that are asked for again. Several, because a changed document shows only in the rows about it."""


class RagAnswers:
    """Asks a backend, and keeps what it answers. The methods that ask raise `ServiceError`.

    `answers` keeps 8B answers, of this run. `references` keeps 32B answers, which do not depend on the policy, of all
    runs. Both are kept for one state of the knowledge behind the endpoints (`_state`).
    """

    def __init__(
        self, backend: RagBackend, score_threshold: float, top_k: int, action_format: ActionFormat,
        answers: AnswerStore, references: AnswerStore,
    ) -> None:  # fmt: skip
        self.backend = backend
        self.answer_cache = Cache(answers, answer_to_json, answer_from_json)
        self.reference_cache = Cache(references, answer_to_json, answer_from_json)
        self._stores, self._references = (answers, references), references
        self._retrieval = (score_threshold, top_k)
        self._format = action_format
        self._state_key = cache_key("knowledge", backend.identity)
        self._own_state = secrets.token_hex(8)  # of this process
        self._known_state: str | None = None

    async def candidate(self, row: SalesRow, action: Action) -> Answer:
        """The 8B answer to an action."""
        key = await self._key("8b", row, action.as_dict(), action.query_field)
        return await self.answer_cache.get(key, lambda: self.ask_8b(row, action), _check_passages)

    async def reference(self, row: SalesRow) -> Answer:
        """The row's 32B answer. It does not depend on the policy."""
        key = await self._key("32b", row)
        return await self.reference_cache.get(key, lambda: self.ask_32b(row), _check_32b_to_keep)

    async def fetch_reference(self, row: SalesRow) -> None:
        """Ask for the row's 32B answer ahead of the completions that need it."""
        await self.reference_cache.fetch(await self._key("32b", row), lambda: self.ask_32b(row), _check_32b_to_keep)

    async def search(self, query: str, *, anew: bool = False) -> Answer:
        """The 8B answer to a query alone. `anew`: asked for whatever is kept."""
        retrieval = self._retrieval

        async def ask() -> Answer:
            return await self.backend.chat_8b(query, self.plain_action(query), *retrieval, ids=RequestIds())

        if anew:
            return await ask()
        key = cache_key("search", self.backend.identity, await self._state(), query, retrieval)
        return await self.answer_cache.get(key, ask, _check_passages)

    async def index_has_some(self, row: SalesRow) -> bool:
        """Whether the 8B endpoint finds any passage with the conversation itself and without a threshold. If not, an
        action that found none is not at fault."""
        query = self.plain_action(row.context)

        async def ask() -> Answer:
            return await self.backend.chat_8b(row.context, query, 0.0, self._retrieval[1], ids=row.ids)

        return bool((await self.answer_cache.get(await self._key("any passage", row), ask, _check_passages)).passages)

    def plain_action(self, query: str) -> Action:
        """An action that holds a query alone."""
        query = query[-MAX_FIELD_CHARS:]  # no action has a longer one, and services may refuse it
        fields = dict.fromkeys(self._format.fields, "") | {self._format.query: query}
        return Action(fields=fields, query_field=self._format.query)

    async def ask_8b(self, row: SalesRow, action: Action) -> Answer:
        """Ask for an 8B answer, without looking for a kept one."""
        answer = await self.backend.chat_8b(row.context, action, *self._retrieval, ids=row.ids)
        if answer.passages and not answer.text.strip():  # the service is at fault, not the policy
            raise BadServiceResponse("rag_8b found passages and answered nothing", code="rag_8b_empty_answer")
        return answer

    async def ask_32b(self, row: SalesRow) -> Answer:
        """Ask for a 32B answer, without looking for a kept one."""
        answer = await self.backend.chat(row.context, *self._retrieval, ids=row.ids)
        _check_32b(answer)
        return answer

    async def compare_references(self, rows: Iterable[SalesRow]) -> tuple[str, bool] | None:
        """Compare some references that an earlier run kept with fresh ones. If one differs, the knowledge has changed:
        use no answer of the earlier state any more. Returns a line for the log, with whether it is a warning; `None`
        if nothing is kept."""
        store, state = self._references, await self._state()
        by_key = {await self._key("32b", row): row for row in rows}
        in_file = await store.known(by_key)
        kept = [key for key in by_key if key in in_file]
        if not kept or store.path is None:
            return None
        written = datetime.fromtimestamp(store.path.stat().st_mtime)
        place = f"the cache {store.path}, last written {written:%Y-%m-%d %H:%M}"
        share = f"{len(kept):,} of {len(by_key):,}"
        some = kept[:: -(-len(kept) // COMPARED_REFERENCES)]
        results = await asyncio.gather(*(self._has_changed(key, by_key[key]) for key in some))
        compared = [changed for changed in results if changed is not None]
        if not any(compared):
            same = f"{len(compared)} of them were asked for again: they are the same"
            return (
                f"{share} references come from {place}; {same if compared else 'none could be compared'}. Delete the "
                "file when the knowledge base has changed",
                not compared,
            )
        fresh = secrets.token_hex(8)
        # Of all processes that see the change, the first one's state stays. A file that can't be written has none.
        self._known_state = None if await store.replace(self._state_key, state, fresh) else fresh
        await store.forget(kept)
        return (
            f"the knowledge behind the 32B endpoint has changed: {sum(compared)} of {len(compared)} references differ "
            f"from those in {place}. Its answers to this run's rows ({share}) are forgotten and asked for anew, as "
            "are 8B answers that were kept beside them",
            True,
        )

    async def aclose(self) -> None:
        await self.answer_cache.aclose()
        await self.reference_cache.aclose()
        await self.backend.aclose()
        for store in self._stores:
            await store.aclose()

    async def _key(self, question: str, row: SalesRow, *others: object) -> str:
        asked = (row.context, row.ids.as_dict(), self._retrieval)
        return cache_key(question, self.backend.identity, await self._state(), asked, *others)

    async def _state(self) -> str:
        """The name of the state of the knowledge behind the endpoints, as part of every key.

        It stands in the references' file, so it is new when that file was deleted. While the file can't be used, this
        process has a state of its own: it finds no answers of earlier runs. Without a file there is one state.
        """
        if self._known_state is None and self._references.path is not None:
            state = await self._references.get_or_put(self._state_key, self._own_state)
            if state is None:
                return self._own_state
            self._known_state = self._known_state or str(state)  # another call may have been quicker
        return self._known_state or ""

    async def _has_changed(self, key: str, row: SalesRow) -> bool | None:
        """Whether a kept reference has other passages than a fresh one; `None` if either can't be had. The answer's
        text proves nothing: an endpoint that samples never repeats it."""
        try:
            answers = answer_from_json(await self._references.get(key)), await self.ask_32b(row)
        except (ServiceError, ValueError, TypeError, KeyError):
            return None
        earlier, fresh = ({(passage.id, passage.text) for passage in answer.passages} for answer in answers)
        return earlier != fresh


def _check_32b(answer: Answer) -> None:
    """Refuse a reference that says nothing."""
    if is_empty_text(answer.text):
        raise BadServiceResponse("rag_32b's answer says nothing", code="rag_32b_hollow_answer")


def _check_passages(answer: Answer) -> None:
    """Refuse to keep an answer without passages. A busy service or an index that is being loaded may answer so."""
    if not answer.passages:
        raise BadServiceResponse("an answer from no passages", code="rag_no_passages")


def _check_32b_to_keep(answer: Answer) -> None:
    _check_passages(answer)
    _check_32b(answer)
