"""The packaged tool `search`: the policy asks the RAG service in the midst of a conversation."""

import asyncio
from collections.abc import Awaitable, Callable

from salesrl_trl.agents.tools import ToolSettings, tool
from salesrl_trl.judged.rag_client import RagAnswers


class Search:
    """Makes the tool, `function`. It asks the 8B endpoint with a query alone, and tells the policy the passages. What
    was asked before, or is under way, is not asked again, as for the reward.

    `deadline_s` is for a call with its retries. An empty query, or one that is no text, is the policy's error.
    """

    def __init__(self, *, deadline_s: float) -> None:
        self._rag: RagAnswers | None = None
        self._loops = set[asyncio.AbstractEventLoop]()  # each trainer has one

        @tool(deadline_s=deadline_s)
        async def search(query: str) -> str:
            """Searches the knowledge base.

            Args:
                query: What to look for, in a few words.

            Returns:
                The passages that fit best, a paragraph each.
            """
            return await self._passages(query)

        self.function: Callable[[str], Awaitable[str]] = search

    def connect(self, rag: RagAnswers) -> None:
        """Ask this service from now on. The transport of its 8B endpoint has retries, limits and counts."""
        self._rag = rag
        ToolSettings.of(self.function).counted[:] = [rag.backend.transports["rag_8b"]]

    def close(self) -> None:
        rag, self._rag = self._rag, None
        for loop in self._loops:
            if rag is not None and loop.is_running():
                asyncio.run_coroutine_threadsafe(rag.aclose(), loop).result()

    async def _passages(self, query: object) -> str:
        if not isinstance(query, str) or not query.strip():
            raise ValueError("`query` is empty or no text.")
        assert self._rag is not None, "`connect` comes first"
        self._loops.add(asyncio.get_running_loop())
        answer = await self._rag.search(query)
        return "\n\n".join(passage.text for passage in answer.passages) or answer.text
