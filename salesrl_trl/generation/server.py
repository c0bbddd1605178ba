"""The loop over a vLLM server: each task is a request of its own, and the server goes on while the run trains."""

import contextlib
import itertools
from collections import deque
from collections.abc import Iterator
from threading import Semaphore, Thread
from typing import Any

from salesrl_trl.generation.tasks import GivenUp, Task, TaskBatch, Turn, TurnLoop

MOST_REQUESTS = 1024
"""Requests in flight to a server. By default a vLLM server generates at most as many sequences at once."""


class ServerLoop(TurnLoop):
    """A task's `params` are `VLLMClient.generate` and its arguments beside the prompt. Threads are daemons: after a
    failure nobody waits for the others."""

    leaves_completions = True

    def __init__(self) -> None:
        super().__init__()
        self._slots = Semaphore(MOST_REQUESTS)
        self._open: set[Task] = set()  # submitted, and not answered yet

    def submit(self, tasks: list[Task]) -> None:
        with self.changed:
            taken = {task.batch.lane for task in self._open}
            lane = next(number for number in itertools.count() if number not in taken)
            self._open.update(tasks)
        for task in tasks:
            task.batch.lane = lane
        queue = deque(tasks)
        for _ in range(min(len(tasks), MOST_REQUESTS)):
            Thread(target=self._work, args=(queue,), name="vLLM requests", daemon=True).start()

    def ask(self, task: Task) -> Turn:
        """In the caller's thread."""
        with self._slots:
            if task.batch.is_over:
                raise GivenUp
            return self._turn(task)

    def _work(self, queue: deque[Task]) -> None:
        with contextlib.suppress(IndexError):  # none left
            while True:
                self._serve(queue.popleft())

    def _serve(self, task: Task) -> None:
        error: Exception | None = None
        try:
            with self._slots:
                if not task.answer.set_running_or_notify_cancel():
                    return
                try:
                    turn = self._turn(task)
                except Exception as raised:
                    error = raised
            if error is None:
                task.answer.set_result(turn)
            else:
                task.answer.set_exception(error)
        finally:
            with self.changed:
                self._open.discard(task)
                self.changed.notify_all()

    def _turn(self, task: Task) -> Turn:
        send, arguments = task.params
        output = send(prompts=[task.ids], **arguments)
        [ids], logprobs = output["completion_ids"], output["logprobs"]
        return Turn(list(ids), None if logprobs is None else [token[0] for token in logprobs[0]])

    def cancel(self, batch: TaskBatch[Any], place: int | None = None) -> None:
        with self.changed:
            tasks = [task for task in self._open if task.batch is batch and place in (None, task.place)]
        for task in tasks:
            task.answer.cancel()  # unless it is in flight: then nobody hears its answer

    def run(self, batch: TaskBatch[Any], *, ahead: bool = False) -> None:
        if not ahead:
            with self.changed:
                self.changed.wait_for(lambda: batch.is_over)

    def settle(self) -> None:
        """Wait until all completions that were asked for are answered."""
        with self.changed:
            self.changed.wait_for(lambda: not self._open)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """While active, no request is in flight. No slot is held while a tool runs."""
        for _ in range(MOST_REQUESTS):
            self._slots.acquire()
        try:
            yield
        finally:
            self._slots.release(MOST_REQUESTS)
