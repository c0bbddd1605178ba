"""The loops over vLLM in this process, over a vLLM server, and over transformers' `generate`."""

import contextlib
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from operator import attrgetter
from threading import Semaphore, Thread
from typing import Any

from salesrl_trl.generation.tasks import GivenUp, Task, TaskBatch, Turn, TurnLoop
from salesrl_trl.ground.process import patched

LINGER_S = 0.05
"""Seconds for which an idle engine waits for the next turn of a conversation before training resumes."""


class EngineLoop(TurnLoop):
    """The loop over vLLM's `LLM` in this process. Only the trainer's thread calls vLLM.

    A `LLM.generate` of somebody else runs beside the tasks under way and does not see them. After a push such a task
    resumes with the new weights, behind the keys and values of the earlier ones; a `cache_salt` keeps those apart from
    what begins later.
    """

    def __init__(self, llm: Any) -> None:
        super().__init__()
        self.most_unfinished = 0
        """Tasks that a run may leave, those of all batches together."""
        self._llm, self._salt = llm, 0  # pushes for which the cache of prefixes could not be emptied
        self.under_way: dict[str, Task] = {}  # by the request's id
        self._adding: deque[Task] = deque()
        engine = llm.llm_engine
        self._step, self._add = engine.step, engine.add_request
        engine.step, engine.add_request = self.step, self._add_request

    @property
    def leaves_completions(self) -> bool:  # type: ignore[override]
        return self.most_unfinished > 0

    def run(self, batch: TaskBatch[Any], *, ahead: bool = False) -> None:
        """Generate until the batch is over and few tasks are left, those of others among them. With `ahead` it returns
        as soon as few are left; where none is, it waits for the next turn of conversations for a moment."""
        while True:
            if not batch.is_over:
                self._feed()
            if len(self.under_way) > (self.most_unfinished if ahead or batch.is_over else 0):
                self.step()
            elif self.under_way or batch.is_over or not self._wait(batch, LINGER_S if ahead else None):
                return

    def _wait(self, batch: TaskBatch[Any], seconds: float | None) -> bool:
        with self.changed:
            return self.changed.wait_for(lambda: bool(self._waiting) or batch.is_over, seconds)

    def resume(self) -> None:
        self._feed()
        while len(self.under_way) > self.most_unfinished:
            self.step()
            self._feed()

    def step(self) -> list[Any]:
        """A step of vLLM's engine. Returns the outputs of requests that are not tasks. What an exception leaves behind
        nobody knows, so that it ends all tasks under way."""
        try:
            outputs = self._step()  # of requests that are finished: vLLM gives out no other
            others = [output for output in outputs if output.request_id not in self.under_way]
            for output in outputs:
                if output.finished and (task := self.under_way.pop(output.request_id, None)) is not None:
                    task.prompt_ids = output.prompt_token_ids
                    task.answer.set_result(_turn_of(output))
        except BaseException as error:
            self._abort([*self.under_way], error)
            raise
        return others

    def cancel(self, batch: TaskBatch[Any], place: int | None = None) -> None:
        super().cancel(batch, place)
        if place is None:
            self._abort([request for request, task in self.under_way.items() if task.batch is batch])

    def _abort(self, requests: list[str], error: BaseException | None = None) -> None:
        tasks = [self.under_way.pop(request) for request in requests]
        with contextlib.suppress(Exception):  # the engine may be gone: the first error is the one to raise
            self._llm.llm_engine.abort_request(requests)
        _drop(tasks, error)

    def _feed(self) -> None:
        """Add what was submitted. An error of a prompt is that of the tasks that were submitted with it."""
        for tasks in filter(None, self._take()):
            self._adding.extend(tasks)
            try:
                self._llm.enqueue([task.prompt for task in tasks], sampling_params=tasks[0].params, use_tqdm=False)
            except BaseException as error:
                self._abort([request for request, task in self.under_way.items() if task in tasks], error)
                _drop(self._adding, error)
                if not isinstance(error, Exception):
                    raise
            finally:
                self._adding.clear()

    def _add_request(self, request_id: str, prompt: Any, *args: Any, **kwargs: Any) -> Any:
        if self._adding:
            self.under_way[request_id] = self._adding.popleft()
        if self._salt:
            prompt = {**prompt, "cache_salt": str(self._salt)}
        return self._add(request_id, prompt, *args, **kwargs)

    @contextlib.contextmanager
    def pushing(self) -> Iterator[None]:
        """While active, weights are pushed. vLLM does not empty a cache that requests under way use."""
        if not self.under_way:
            yield
            return
        self._salt += 1
        with patched(self._llm, "reset_prefix_cache", bool):
            yield


def _drop(tasks: Iterable[Task], error: BaseException | None) -> None:
    """End tasks that nobody answers: with an error, or as cancelled where there is none or an interruption."""
    for task in tasks:
        if isinstance(error, Exception):
            task.answer.set_exception(error)
        else:
            task.answer.cancel()


def _turn_of(output: Any) -> Turn:
    """A finished output of vLLM, with the log-probs of the sampled tokens, `None` for NaN as by TRL. Its
    `extract_logprobs` sorts those of each token, which holds the engine up ten times as long."""
    sampled = output.outputs[0]
    ids = list(sampled.token_ids)
    if sampled.logprobs is None:
        return Turn(ids, None)
    logprobs = [each[token].logprob for token, each in zip(ids, sampled.logprobs, strict=True)]
    return Turn(ids, [None if math.isnan(each) else each for each in logprobs])  # type: ignore[misc]


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
            self._open.update(tasks)
        queue = deque(tasks)
        for _ in range(min(len(tasks), MOST_REQUESTS)):
            Thread(target=self._work, args=(queue,), name="vLLM requests", daemon=True).start()

    def ask(self, task: Task) -> Turn:
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


Generate = Callable[[list[list[int]], None, dict[str, Any], int], tuple[list[list[int]], list[list[float]] | None]]
"""TRL's `_generate_single_turn`: from token ids of prompts, without pictures, to those of completions."""


class Rounds(TurnLoop):
    """`most` returns the highest of a number over all ranks, where they generate together because the policy is in
    parts; the number itself where each generates alone."""

    leaves_conversations = False

    def __init__(self, generate: Generate, most: Callable[[int], int]) -> None:
        super().__init__()
        self._generate, self._most = generate, most

    def run(self, batch: TaskBatch[Any], *, ahead: bool = False) -> None:
        prompts = [[0]]  # of the last round: a rank that asks for nothing generates once more while others ask
        while True:
            with self.changed:
                self.changed.wait_for(lambda: batch.is_over or len(self._waiting) >= batch.under_way)
            tasks = sorted((task for group in self._take() for task in group), key=attrgetter("place"))
            if not self._most(len(tasks)):
                return
            prompts = [task.ids for task in tasks] or prompts[:1]
            completion_ids, logprobs = self._generate(prompts, None, {}, 1)
            for number, task in enumerate(tasks):
                task.answer.set_result(Turn(completion_ids[number], None if logprobs is None else logprobs[number]))
