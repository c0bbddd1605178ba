"""Ending a run on request or after an error, undoing an interrupted step.

Other processes may be waiting, e.g. for rewards, so a request reaches them without a collective: a thread in each
(`watched`) polls a key in torch's distributed store.
"""

import contextlib
import copy
import itertools
import logging
import random
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

import numpy as np
import torch
import torch.distributed
from accelerate import PartialState
from torch.distributed import distributed_c10d
from torch.optim.lr_scheduler import LRScheduler
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from salesrl_trl.errors import CheckpointError, RunStopped, SalesRLError, StopRequested
from salesrl_trl.kl.branched import BranchedKL
from salesrl_trl.update.run_control import RunControl, highest

logger = logging.getLogger(__name__)

STOPPED = "stopped"  # reason code of completions cancelled because the run was asked to stop


class StepSnapshot:
    """The state at the end of an optimizer step: transformers' counts, learning rate, KL coefficients, and the
    `position`: TRL's micro-step count and the slices of the current generation batch."""

    def __init__(
        self, state: TrainerState, optimizer: torch.optim.Optimizer, scheduler: LRScheduler, kl: BranchedKL | None,
        position: tuple[int, list[object] | None],
    ) -> None:  # fmt: skip
        self.step: int = state.global_step
        self._owners = (state, optimizer, scheduler, kl)
        self._position = position
        self._kl = None if kl is None else copy.deepcopy(kl.control.state_dict())
        self._counts = (state.global_step, state.epoch, state.num_input_tokens_seen)
        self._lines = len(state.log_history)
        self._rates = [group["lr"] for group in optimizer.param_groups]
        self._scheduler = copy.deepcopy(scheduler.state_dict())
        self._generators = (random.getstate(), np.random.get_state(), torch.get_rng_state())
        self._on_device = torch.cuda.get_rng_state() if torch.cuda.is_available() else None

    def restore(self) -> tuple[int, list[object] | None]:
        """Returns the position, which the trainer restores itself."""
        state, optimizer, scheduler, kl = self._owners
        state.global_step, state.epoch, state.num_input_tokens_seen = self._counts
        del state.log_history[self._lines :]
        scheduler.load_state_dict(self._scheduler)
        for group, rate in zip(optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate
        if kl is not None and self._kl is not None:
            kl.control.load_state_dict(self._kl)
        python, numpy, torchs = self._generators
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(torchs)
        if self._on_device is not None:
            torch.cuda.set_rng_state(self._on_device)
        return self._position


class Undoing(Protocol):
    """Operations of the trainer that end and undo a step."""

    def capture(self) -> StepSnapshot: ...
    def restore(self, snapshot: StepSnapshot) -> None: ...
    def drop_gradients(self) -> None: ...
    def cut_off(self, reason: str) -> None: ...
    def save_checkpoint(self) -> None: ...


@dataclass(eq=False, kw_only=True)
class Stopping(TrainerCallback):
    """Stops a run early, with a checkpoint, if it was asked to stop, cannot be scored, or diverged. Prevents momentum
    from moving the policy on a skipped batch, except with DeepSpeed, whose optimizer already steps inside
    `backward`."""

    run_control: RunControl
    trl: Undoing
    can_undo: bool  # whether a skipped step leaves weights and optimizer unchanged; not with DeepSpeed
    survived: BaseException | None = None  # the error after which a checkpoint was saved
    _snapshot: StepSnapshot | None = None
    _first: int = 0
    _moves: bool = False
    _held: int = 0
    _interrupted: bool = False  # requests no longer interrupt this process

    def forget(self) -> None:
        self._snapshot, self._moves, self.survived = None, False, None
        self._held, self._interrupted = 0, False

    def request(self, reason: str) -> None:
        """End training on all ranks, with a checkpoint. May be called from a signal handler. `reason`: who asked, e.g.
        `"SIGTERM"`. Pending completions count as unscored. A single process ends immediately, by a `StopRequested` in
        its main thread, but not during an optimizer step. Several processes end after the current optimizer step,
        which is undone if it was skipped."""
        self.run_control.requested = reason
        self.trl.cut_off(STOPPED)
        self._interrupt()

    def _interrupt(self) -> None:
        in_main_thread = threading.current_thread() is threading.main_thread()
        may_interrupt = not (self._interrupted or self._held or self._moves)
        if in_main_thread and may_interrupt and PartialState().num_processes == 1:
            self._interrupted = True
            raise StopRequested(self.run_control.requested)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """While active, a request does not interrupt this process; it does afterwards."""
        self._held += 1
        try:
            yield
        finally:
            self._held -= 1
        if self.run_control.requested is not None:
            self._interrupt()

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Inside the block, a request on one process reaches all others. All processes must enter it equally often."""
        key, over = f"salesrl_trl/stop/{next(_runs)}", threading.Event()
        if (store := _store()) is None:
            yield
            return

        def watch() -> None:
            try:
                while not over.wait(POLL_S):
                    if (reason := self.run_control.requested) is not None:
                        store.set(key, reason)
                        return
                    if store.check([key]):
                        self.request(f"{store.get(key).decode()} of another process")
                        return
            except RuntimeError as error:  # the first process is gone, so collectives fail too
                why = type(error).__name__
                logger.warning(f"other processes cannot be notified of a stop ({why}); they end with their step.")

        thread = threading.Thread(target=watch, name="stop notice", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join(PATIENCE.total_seconds())  # calls to the store of a lost machine don't return

    def on_train_begin(self, *_: object, **__: object) -> None:
        self._snapshot = self.trl.capture()
        self._first = self._snapshot.step

    def on_step_begin(self, *_: object, **__: object) -> None:
        self._moves = not self.can_undo

    def on_pre_optimizer_step(self, *_: object, **__: object) -> None:
        if self.run_control.drain_moves():
            self._moves = True
        else:
            self.trl.drop_gradients()

    def on_log(self, *_: object, logs: Mapping[str, object], **__: object) -> None:
        self.run_control.record_line(logs)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        """Stop if any rank was asked to, or if the budget is spent, undoing an interrupted step. A collective."""
        run = self.run_control
        run.record_urgency(highest(run.urgency(), PartialState().device))
        ends = run.requested is not None or run.is_spent  # equal on all ranks, which have gathered the reasons
        if ends and not self._moves and self._snapshot is not None:
            self.trl.restore(self._snapshot)
        step = self.settle()
        if ends:
            run.stop(step, is_new=step > self._first)
        run.end_step(state.global_step, is_last=state.global_step >= state.max_steps)
        if run.error is not None:
            control.should_save = state.global_step > 0
            control.should_training_stop = True
            control.should_evaluate = False  # nothing can be scored

    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        if self.run_control.error is not None:  # the epoch is incomplete, and the step's end has saved
            control.should_evaluate = control.should_save = False

    def settle(self) -> int:
        """Mark an optimizer step as complete; later random draws belong to the next. Returns the steps done."""
        self._snapshot, self._moves = self.trl.capture(), False
        return self._snapshot.step

    def raise_if_asked(self) -> None:
        """Raise `StopRequested` if any rank was asked to stop, `RunStopped` if the budget is spent; a collective."""
        self.run_control.record_urgency(highest(self.run_control.urgency(), PartialState().device))
        if self.run_control.requested is not None:
            raise StopRequested(self.run_control.requested)
        if self.run_control.is_spent:
            raise self.run_control.budget_spent(
                "All steps are done and saved, but not the final evaluation. Resume with a larger limit and "
                "--resume_from_checkpoint auto"
            )

    @contextlib.contextmanager
    def ending(self) -> Iterator[None]:
        """Context after training, in which a request or a spent budget ends the run with a checkpoint and
        `RunStopped`."""
        try:
            yield
        except RunStopped:
            self.trl.save_checkpoint()
            raise
        except StopRequested as request:
            self.trl.save_checkpoint()
            raise RunStopped(
                f"stopped by {request} after the last step. Rerun the command with --resume_from_checkpoint auto to "
                "finish."
            ) from None

    def save_after(self, error: BaseException) -> BaseException:
        """Save a checkpoint of the last complete step, if the error that ends training allows it; a collective.
        Returns the error to raise: `RunStopped` after a request, else the same one with a note on how to resume."""
        is_asked = isinstance(error, StopRequested)
        if not is_asked and (isinstance(error, SalesRLError) or not isinstance(error, Exception)):
            return error
        snapshot, self._interrupted = self._snapshot, True
        self.trl.cut_off(STOPPED)
        step, is_new = (0, False) if snapshot is None else (snapshot.step, snapshot.step > self._first)
        try:
            if snapshot is not None and is_new:
                if self._moves:
                    return _lost(error, "the optimizer was updating the weights")
                if not all_arrive(step):
                    return _lost(error, "other processes are not at the same step")
                self.trl.restore(snapshot)
                self.trl.save_checkpoint()
        except CheckpointError as failure:
            return failure if is_asked else _lost(error, str(failure))
        if not (is_asked or is_new):
            return error  # during start-up or the first step: it would recur
        if is_asked:
            return RunStopped(self.run_control.stopped_by(str(error), step, is_new=is_new))
        error.add_note(self.run_control.stopped_by(type(error).__name__, step, is_new=is_new))
        self.survived = error
        return error


def _lost(error: BaseException, why: str) -> BaseException:
    logger.warning(f"no checkpoint was saved when the run ended, because {why}. Resume from the previous one.")
    return RunStopped(f"stopped by {error}. {why}") if isinstance(error, StopRequested) else error


POLL_S = 0.25  # seconds between polls, each one small message to the first process
PATIENCE = timedelta(seconds=10)  # maximum wait for the store
_runs = itertools.count()  # all processes count alike, so each run has its own key


def _store() -> distributed_c10d.Store | None:
    """A separate connection to the processes' store, as others may block on the existing one. `None` for a single
    process."""
    if not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1:
        return None
    store: distributed_c10d.Store = distributed_c10d._get_default_store().clone()  # type: ignore[attr-defined]
    store.set_timeout(PATIENCE)
    return store


def all_arrive(step: int) -> bool:
    """Whether all processes arrive here within `PATIENCE`, after the same number of optimizer steps. Not a collective:
    after an error on this process alone, the others may be waiting in one."""
    arrived: list[bool] = []
    thread = threading.Thread(target=_arrive, args=(step, next(_runs), arrived), name="arrival", daemon=True)
    thread.start()
    thread.join(2 * PATIENCE.total_seconds())
    return arrived == [True]


def _arrive(step: int, number: int, arrived: list[bool]) -> None:
    with contextlib.suppress(RuntimeError):  # timed out, or the process with the store is gone
        if (store := _store()) is not None:
            keys = [f"salesrl_trl/arrived/{number}/{rank}" for rank in range(torch.distributed.get_world_size())]
            store.set(keys[torch.distributed.get_rank()], str(step))
            store.wait(keys, PATIENCE)
        arrived.append(store is None or {store.get(key) for key in keys} == {str(step).encode()})
