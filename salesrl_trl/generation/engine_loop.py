"""The loop that turns prompts into tokens: tasks, their batches, and loops over a colocated vLLM, a vLLM server, and
transformers' `generate`. docs/background/architecture.md documents the contract ("The engine loop")."""

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from threading import Condition, Semaphore, Thread
from typing import Any, NotRequired, TypedDict

from salesrl_trl.generation.turns import NO_TURN, EngineLabels, Turn, refusal, turn_of
from salesrl_trl.ground.process import patched


class Prompt(TypedDict):
    """A prompt in vLLM's format."""

    prompt_token_ids: list[int]
    multi_modal_data: NotRequired[object]  # of pictures


class GivenUp(BaseException):
    """Raised in a cancelled conversation. Not caught by `except Exception`."""


@dataclass(eq=False, slots=True)
class Task:
    batch: "TaskBatch"
    place: int
    prompt: Prompt
    params: object  # the engine's own sampling parameters
    answer: "Future[Turn]" = field(default_factory=Future)
    prompt_ids: Sequence[int] = ()  # the prompt as expanded by a colocated vLLM

    @property
    def ids(self) -> list[int]:
        return self.prompt["prompt_token_ids"]


class TurnLoop:
    """The tasks of all batches. `submit`, `ask`, and `cancel` for a single place are thread-safe."""

    leaves_completions = False  # whether `run` with `ahead` may leave them unfinished
    leaves_conversations = True
    most_unfinished = 0  # tasks of all batches that a run may leave unfinished

    def __init__(self) -> None:
        self.changed = Condition()
        """Notified when a task is submitted and when a completion or conversation ends."""
        self._waiting: list[list[Task]] = []  # in order of submission

    def submit(self, tasks: list[Task]) -> None:
        with self.changed:
            self._waiting.append(tasks)
            self.changed.notify_all()

    def ask(self, task: Task) -> Turn:
        """Submit a task and wait for its turn. Raises `GivenUp` if cancelled."""
        self.submit([task])
        try:
            return task.answer.result()
        except CancelledError:
            raise GivenUp from None

    def _take(self) -> list[list[Task]]:
        if not self._waiting:  # checked without the lock, which would otherwise be acquired before each step
            return []
        with self.changed:
            taken, self._waiting = self._waiting, []
        return taken

    def cancel(self, batch: "TaskBatch", place: int | None = None) -> None:
        """Cancel a batch's tasks, or those at one place that have not started."""
        with self.changed:
            tasks = [task for group in self._waiting for task in group]
            cancelled = [task for task in tasks if task.batch is batch and place in (None, task.place)]
            self._waiting = [[task for task in group if task not in cancelled] for group in self._waiting]
        for task in cancelled:
            task.answer.cancel()

    def run(self, batch: "TaskBatch", *, ahead: bool = False) -> None:
        """Generate until the batch is finished; with `ahead` it may return earlier."""
        raise NotImplementedError

    def resume(self) -> None:
        """Generate the turns requested since `run`."""


class TaskBatch:
    """The outcomes of one generation's prompts on this rank, by place. The first error fails the batch."""

    under_way = 0  # conversations in progress
    ahead = False  # whether training continues before the results are requested
    by_new_weights = False
    """Whether the rest is generated with the weights current when the results are requested."""

    def __init__(self, size: int, loop: TurnLoop) -> None:
        self.loop = loop
        self._size = self._left = size
        self._tasks: list[Task] = []  # the first task of each place
        self.error: BaseException | None = None
        self.is_cancelled = False

    def __len__(self) -> int:
        return self._size

    def begin(self, prompts: Sequence[Prompt], params: Sequence[object], first: int = 0) -> None:
        """Submit the first tasks, or start what submits them. This rank's prompts begin at `first`."""
        raise NotImplementedError

    def _submit(self, tasks: list[Task]) -> None:
        for task in tasks:
            task.answer.add_done_callback(partial(self._came, task.place))
        self.loop.submit(tasks)

    def _came(self, place: int, answer: "Future[Turn]") -> None:
        raise NotImplementedError

    @property
    def may_be_left(self) -> bool:
        """Whether a run ahead may end before the batch does; the same on all ranks."""
        return self.loop.leaves_conversations

    @property
    def is_over(self) -> bool:
        """Whether all completions or conversations have ended, or one has failed. Thread-safe."""
        return self.error is not None or self.is_cancelled or not self._left

    def _end(self) -> None:
        with self.loop.changed:
            self._left -= 1
            self.loop.changed.notify_all()

    def _fail(self, error: BaseException) -> None:
        with self.loop.changed:
            self.error = self.error or error
            self.loop.changed.notify_all()

    @property
    def read(self) -> list[Sequence[int]]:
        """The prompts as expanded by a colocated vLLM, with image tokens."""
        return [task.prompt_ids for task in self._tasks]

    def check(self) -> None:
        """Raise the error of a finished batch; `CancelledError` after `cancel`."""
        if self.error is not None:
            raise self.error
        if self.is_cancelled:
            raise CancelledError

    def cancel(self) -> None:
        self.is_cancelled = True
        self.loop.cancel(self)

    @contextlib.contextmanager
    def cancelled_by_errors(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.cancel()
            raise


class CompletionTasks(TaskBatch):
    """One task per prompt. `finished` is called with place and token ids of each completion, one at a time, and with
    why it `failed` if it is excluded from training."""

    def __init__(self, size: int, loop: TurnLoop, finished: Callable[..., None]) -> None:
        super().__init__(size, loop)
        self._finished = finished
        self._turns = [NO_TURN] * size

    def begin(self, prompts: Sequence[Prompt], params: Sequence[object], first: int = 0) -> None:
        places = range(-first, len(prompts) - first)
        tasks = [Task(self, *of_task) for of_task in zip(places, prompts, params, strict=True)]
        self._tasks, self._left = tasks[first : first + len(self)], len(tasks)
        self._submit(tasks)

    @property
    def may_be_left(self) -> bool:
        return self.loop.leaves_completions

    def _came(self, place: int, answer: "Future[Turn]") -> None:
        with self.loop.changed:  # one at a time
            if self.is_cancelled or self.error is not None:
                return
            try:
                turn = answer.result()
                if 0 <= place < len(self):
                    reason = refusal(turn.versions)
                    self._finished(place, turn.ids, **({} if reason is None else {"failed": reason}))
                    self._turns[place] = turn
            except Exception as error:
                self._fail(error)
                self.loop.cancel(self)
            else:
                self._end()

    def results(self) -> list[Turn]:
        """One turn per prompt, once the batch is finished."""
        self.check()
        return self._turns


LINGER_S = 0.05  # seconds that an idle engine waits for a conversation's next turn before training resumes


class EngineLoop(TurnLoop):
    """The loop over a colocated vLLM `LLM`, called only by the trainer's thread. Others' `LLM.generate` does not
    see its tasks. After a weight push, pending tasks resume with the new weights on top of old keys and values, which
    a `cache_salt` separates from later requests. `labels`: of the weights, if vLLM reports them."""

    def __init__(self, llm: Any, labels: EngineLabels | None = None) -> None:
        super().__init__()
        self._llm, self._labels, self._salt = llm, labels, 0  # pushes after which the prefix cache could not be reset
        self.under_way: dict[str, Task] = {}  # by request id
        self._adding: deque[Task] = deque()
        engine = llm.llm_engine
        self._step, self._add = engine.step, engine.add_request
        engine.step, engine.add_request = self.step, self._add_request

    @property
    def leaves_completions(self) -> bool:  # type: ignore[override]
        return self.most_unfinished > 0

    def run(self, batch: TaskBatch, *, ahead: bool = False) -> None:
        """Generate until the batch is finished and few tasks are left, including other batches'. With `ahead`, return
        as soon as few are left; if none is, wait briefly for conversations' next turns."""
        while True:
            if not batch.is_over:
                self._feed()
            if len(self.under_way) > (self.most_unfinished if ahead or batch.is_over else 0):
                self.step()
            elif self.under_way or batch.is_over or not self._wait(batch, LINGER_S if ahead else None):
                return

    def _wait(self, batch: TaskBatch, seconds: float | None) -> bool:
        with self.changed:
            return self.changed.wait_for(lambda: bool(self._waiting) or batch.is_over, seconds)

    def resume(self) -> None:
        self._feed()
        while len(self.under_way) > self.most_unfinished:
            self.step()
            self._feed()

    def step(self) -> list[Any]:
        """One step of vLLM's engine. Returns the outputs of other requests. An exception fails all pending tasks."""
        try:
            outputs = self._step()  # of finished requests: vLLM returns no others
            if self._labels is not None:
                self._labels.stepped()
            others = [output for output in outputs if output.request_id not in self.under_way]
            for output in outputs:
                if output.finished and (task := self.under_way.pop(output.request_id, None)) is not None:
                    task.prompt_ids = output.prompt_token_ids
                    task.answer.set_result(turn_of(output, self._labels))
        except BaseException as error:
            self._abort([*self.under_way], error)
            raise
        return others

    def cancel(self, batch: TaskBatch, place: int | None = None) -> None:
        super().cancel(batch, place)
        if place is None:
            self._abort([request for request, task in self.under_way.items() if task.batch is batch])

    def _abort(self, requests: list[str], error: BaseException | None = None) -> None:
        tasks = [self.under_way.pop(request) for request in requests]
        with contextlib.suppress(Exception):  # the engine may be dead; the first error should be raised
            self._llm.llm_engine.abort_request(requests)
        _drop(tasks, error)

    def _feed(self) -> None:
        """Add submitted tasks. A prompt's error fails all tasks submitted with it."""
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

    def _add_request(self, request_id: str, prompt: Prompt, *args: object, **kwargs: object) -> object:
        if self._adding:
            self.under_way[request_id] = self._adding.popleft()
        if self._salt:
            return self._add(request_id, {**prompt, "cache_salt": str(self._salt)}, *args, **kwargs)
        return self._add(request_id, prompt, *args, **kwargs)

    def pushing(self) -> AbstractContextManager[object]:
        """Context for a weight push. vLLM does not reset a cache that pending requests use."""
        if not self.under_way:
            return contextlib.nullcontext()
        self._salt += 1
        return patched(self._llm, "reset_prefix_cache", bool)


def _drop(tasks: Iterable[Task], error: BaseException | None) -> None:
    """End unanswered tasks with an error, or as cancelled without one or after an interruption."""
    for task in tasks:
        if isinstance(error, Exception):
            task.answer.set_exception(error)
        else:
            task.answer.cancel()


MOST_REQUESTS = 1024
"""Maximum concurrent requests to a server; by default a vLLM server generates at most as many sequences."""


class ServerLoop(TurnLoop):
    """The loop over a vLLM server. A task's `params`: `VLLMClient.generate`, and its arguments besides the prompt."""

    leaves_completions = True

    def __init__(self) -> None:
        super().__init__()
        self._slots = Semaphore(MOST_REQUESTS)
        self._open: set[Task] = set()  # submitted but unanswered

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
        assert isinstance(task.params, tuple)
        send, arguments = task.params
        output = send(prompts=[task.ids], **arguments)
        [ids], logprobs = output["completion_ids"], output["logprobs"]
        logprobs = logprobs and [token[0] for token in logprobs[0]]
        return Turn(list(ids), logprobs, output.get("versions"))

    def cancel(self, batch: TaskBatch, place: int | None = None) -> None:
        with self.changed:
            tasks = [task for task in self._open if task.batch is batch and place in (None, task.place)]
        for task in tasks:
            task.answer.cancel()  # unless in flight: then its answer is ignored

    def run(self, batch: TaskBatch, *, ahead: bool = False) -> None:
        if not ahead:
            with self.changed:
                while not batch.is_over:
                    self.changed.wait()

    def settle(self) -> None:
        """Wait until all requested completions are answered."""
        with self.changed:
            while self._open:
                self.changed.wait()

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """While active, no request is in flight. Running tools do not hold the semaphore."""
        for _ in range(MOST_REQUESTS):
            self._slots.acquire()
        try:
            yield
        finally:
            self._slots.release(MOST_REQUESTS)


Generate = Callable[[list[list[int]], None, dict[str, object], int], tuple[list[list[int]], list[list[float]] | None]]
"""TRL's `_generate_single_turn`: from prompt token ids, without images, to completion token ids."""


class Rounds(TurnLoop):
    """The loop over transformers' `generate`. `most`: returns the maximum over ranks that must generate together."""

    leaves_conversations = False

    def __init__(self, generate: Generate, most: Callable[[int], int]) -> None:
        super().__init__()
        self._generate, self._most = generate, most

    def run(self, batch: TaskBatch, *, ahead: bool = False) -> None:
        prompts = [[0]]  # of the last round: a rank without requests repeats it while others have some
        while True:
            with self.changed:
                while not batch.is_over and len(self._waiting) < batch.under_way:
                    self.changed.wait()
            tasks = sorted((task for group in self._take() for task in group), key=attrgetter("place"))
            if not self._most(len(tasks)):
                return
            prompts = [task.ids for task in tasks] or prompts[:1]
            completion_ids, logprobs = self._generate(prompts, None, {}, 1)
            for number, task in enumerate(tasks):
                task.answer.set_result(Turn(completion_ids[number], None if logprobs is None else logprobs[number]))
