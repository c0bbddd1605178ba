"""Completions that a vLLM server is asked for one by one, in the background.

Knows neither vLLM nor TRL: `generation/vllm.py` says what one request is.
"""

import contextlib
import math
import queue
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from threading import Semaphore, Thread
from typing import Any

MOST_REQUESTS = 1024
"""In flight from a process to a server: as many sequences as vLLM's generates at once by default, on the GPUs where it
is most."""


class Requests:
    """Completions that a server is being asked for, each in a request of its own.

    Threads are daemons: where one request fails, or the thread that waits is interrupted, nobody waits for the others.

    Args:
        ask (`Callable[[int], dict]`):
            Asks for the completion of this place; returns what `VLLMClient.generate` does, of one completion.
        count (`int`):
            Completions.
        finished (`Callable[[int, Sequence[int]], None]`):
            Told of each completion's place and token ids as it comes, one after another, in a thread of its own.
        slots (`Semaphore`):
            How many requests may be in flight, these and others.
        lane (`int`, *optional*, defaults to 0):
            A number that no others have which may be in flight at the same time.
    """

    def __init__(
        self,
        ask: Callable[[int], dict[str, Any]],
        count: int,
        finished: Callable[[int, Sequence[int]], None],
        slots: Semaphore,
        lane: int = 0,
    ) -> None:
        self._ask, self._finished, self._count, self._slots = ask, finished, count, slots
        self._places = deque(range(count))
        self._came: queue.SimpleQueue[tuple[int, dict[str, Any]] | BaseException] = queue.SimpleQueue()
        self._result: Future[dict[str, Any]] = Future()
        self.lane = lane
        self._given_up = False
        self.started = time.perf_counter()
        self.ended = math.nan
        """When the last one had come, on the same clock."""
        self._threads = [Thread(target=self._work, daemon=True) for _ in range(min(count, MOST_REQUESTS))]
        self._threads.append(Thread(target=self._collect, daemon=True))
        for thread in self._threads:
            thread.start()

    def result(self) -> dict[str, Any]:
        """All of them, as `VLLMClient.generate` returns those of as many prompts; waits.

        Raises:
            Whatever a request did, the first that failed. No other is begun then.
        """
        try:
            return self._result.result()
        except BaseException:
            self.give_up()
            raise

    def give_up(self) -> None:
        """Ask for no more, and tell of no more; what is being asked for is left to itself."""
        self._given_up = True
        self._places.clear()
        self._came.put(CancelledError())

    @property
    def in_flight(self) -> bool:
        """Whether there is something to wait for."""
        return any(thread.is_alive() for thread in self._threads)

    def join(self) -> None:
        """Wait until no request is in flight, whatever comes of it."""
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        with contextlib.suppress(IndexError):  # none left
            while True:
                with self._slots:
                    place = self._places.popleft()
                    try:
                        self._came.put((place, self._ask(place)))
                    except Exception as error:  # raised by `result`
                        self._came.put(error)

    def _collect(self) -> None:
        outputs: list[Any] = [None] * self._count
        try:
            for _ in range(self._count):
                came = self._came.get()
                if isinstance(came, BaseException):
                    raise came
                if self._given_up:
                    raise CancelledError
                place, output = came
                outputs[place] = output
                self._finished(place, output["completion_ids"][0])
            self.ended = time.perf_counter()
            merged = {
                name: None if first is None else [output[name][0] for output in outputs]
                for name, first in outputs[0].items()
            }
        except BaseException as error:
            self._places.clear()
            self._result.set_exception(error)
        else:
            self._result.set_result(merged)
