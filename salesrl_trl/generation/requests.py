"""Completions that are requested from a vLLM server one by one, in the background: threads, and their order."""

import contextlib
import math
import queue
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from threading import Semaphore, Thread
from typing import Any

MOST_REQUESTS = 1024
"""Requests in flight to a server. By default a vLLM server generates at most as many sequences at once."""
Completions = dict[str, Any]
"""Result of `VLLMClient.generate`: by name a list with an entry for each completion, or `None`."""


@contextlib.contextmanager
def given_up_if_interrupted(give_up: Callable[[], object]) -> Iterator[None]:
    """Whatever interrupts the block gives up what is under way."""
    try:
        yield
    except BaseException:
        give_up()
        raise


class Requests:
    """Requests to a server, one for each completion. Threads are daemons: after a failure nobody waits for the others.

    `ask` asks for the completion at a place. `finished` gets the place and token ids of each as it comes, one after
    another, in a thread of its own. `slots` limits the requests in flight, together with those of other `Requests`.
    `lane` differs from that of others in flight.
    """

    def __init__(
        self,
        ask: Callable[[int], Completions],
        count: int,
        finished: Callable[[int, Sequence[int]], None],
        slots: Semaphore,
        lane: int = 0,
    ) -> None:
        self._ask, self._finished, self._count, self._slots = ask, finished, count, slots
        self._places = deque(range(count))
        self._came: queue.SimpleQueue[tuple[int, Completions] | BaseException] = queue.SimpleQueue()
        self._result: Future[Completions] = Future()
        self.lane = lane
        self._given_up = False
        self.started = time.perf_counter()
        self.ended = math.nan  # when the last completion had come, on the same clock
        self._threads = [Thread(target=self._work, daemon=True) for _ in range(min(count, MOST_REQUESTS))]
        self._threads.append(Thread(target=self._collect, daemon=True))
        for thread in self._threads:
            thread.start()

    def result(self) -> Completions:
        """Wait for all completions, and return them as one request for all prompts would. Raises the error of the
        first request that failed; no other one is begun after it."""
        with given_up_if_interrupted(self.give_up):
            return self._result.result()

    def give_up(self) -> None:
        """Begin no more requests, and report no more completions. Requests in flight are left to themselves."""
        self._given_up = True
        self._places.clear()
        self._came.put(CancelledError())

    @property
    def in_flight(self) -> bool:
        return any(thread.is_alive() for thread in self._threads)

    def join(self) -> None:
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
