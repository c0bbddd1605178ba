"""Completions that an engine in this process leaves unfinished, and goes on with in its next generation.

Owns what is under way in vLLM's engine between two generations: whose output is whose, and which cached keys are of
the weights before a push.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError
from typing import Any

from salesrl_trl.generation.requests import given_up_if_interrupted
from salesrl_trl.ground.patched import patched


class PartialEngine:
    """vLLM's `LLM`, which may have completions under way between two generations.

    `most`: completions that a generation may leave, those of all batches together. A generation of somebody else
    finishes them too, and does not see them. From a push on, a completion goes on with the new weights,
    behind the keys and values of the earlier ones. What begins after a push does not use those: prefixes are cached
    for the requests between two pushes alone.
    """

    def __init__(self, llm: Any, most: int) -> None:
        self._llm, self._most, self._pushes = llm, most, 0
        self._under_way: dict[str, PartialRequests] = {}
        self._beginning: PartialRequests | None = None
        engine = llm.llm_engine
        self._step, self._add = engine.step, engine.add_request
        engine.step, engine.add_request = self.step, self._add_salted

    def begin(
        self, prompts: Sequence[Any], sampling_params: Any, finished: Callable[[int, Sequence[int]], None]
    ) -> "PartialRequests":
        """Generate completions of these prompts until few are left. `finished` gets place and token ids of each."""
        requests = PartialRequests(self, finished)
        with given_up_if_interrupted(requests.give_up):
            with patched(self, "_beginning", requests):
                self._llm.enqueue(prompts, sampling_params=sampling_params, use_tqdm=False)
            while len(self._under_way) > self._most:
                self.step()
        return requests

    def step(self) -> list[Any]:
        """A step of the engine. Returns the outputs of others' requests."""
        others = []
        for output in self._step():
            requests = self._under_way.get(output.request_id)
            if requests is None:
                others.append(output)
            elif output.finished:
                del self._under_way[output.request_id]
                requests.came(output)
        return others

    def drop(self, ids: Sequence[str]) -> None:
        """Nobody will ask for these completions."""
        left = [request_id for request_id in ids if self._under_way.pop(request_id, None)]
        with contextlib.suppress(Exception):  # the engine may be gone: the first error is the one to raise
            self._llm.llm_engine.abort_request(left)

    @contextlib.contextmanager
    def pushing(self) -> Iterator[None]:
        """While active, weights are pushed. vLLM does not empty a cache that requests under way use."""
        self._pushes += 1
        with patched(self._llm, "reset_prefix_cache", bool) if self._under_way else contextlib.nullcontext():
            yield

    def _add_salted(self, request_id: str, prompt: Any, *args: Any, **kwargs: Any) -> Any:
        if self._beginning is not None:
            self._under_way[request_id] = self._beginning
            self._beginning.add(request_id)
        return self._add(request_id, {**prompt, "cache_salt": str(self._pushes)}, *args, **kwargs)


class PartialRequests:
    """The completions of one batch, in place of `generation.requests.Requests`."""

    def __init__(self, engine: PartialEngine, finished: Callable[[int, Sequence[int]], None]) -> None:
        self._engine, self._finished = engine, finished
        self._is_given_up = False
        self._outputs: dict[str, Any] = {}  # by request, in the order of the prompts; `None` while it is under way

    def add(self, request_id: str) -> None:
        self._outputs[request_id] = None

    def came(self, output: Any) -> None:
        """A completion is finished."""
        self._outputs[output.request_id] = output
        self._finished([*self._outputs].index(output.request_id), output.outputs[0].token_ids)

    def result(self) -> list[Any]:
        """Generate what is left, and return vLLM's outputs in the order of the prompts. Raises `CancelledError` after
        `give_up`."""
        with given_up_if_interrupted(self.give_up):
            while None in self._outputs.values():
                if self._is_given_up:
                    raise CancelledError
                self._engine.step()
        return [*self._outputs.values()]

    def give_up(self) -> None:
        """Nobody will ask for the completions."""
        self._is_given_up = True
        self._engine.drop([*self._outputs])
