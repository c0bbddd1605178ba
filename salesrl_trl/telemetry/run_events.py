"""What a trainer reports of a run to its instruments, and its timeline. `telemetry.instruments` measures it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from accelerate import Accelerator
from transformers import TrainerCallback, TrainerState

from salesrl_trl.names import Phase, StartUp
from salesrl_trl.telemetry.timeline import Timeline
from salesrl_trl.timing import Span


class RunEvents:
    """The events of a run. This one keeps its timeline alone."""

    def __init__(self, timeline: Timeline) -> None:
        self.timeline = timeline
        self.details: dict[str, Callable[[], str]] = {}
        """By phase, returns more text for a heartbeat. Called from the heartbeat's thread."""

    def start(self, is_main: bool) -> None:
        """A process begins to measure. A second call does nothing."""

    def run_begins(self, step: int, last_step: int) -> None:
        """Begin training after `step` optimizer steps. Measurements of an earlier training are dropped."""
        self.timeline.starts()

    def step_ends(self) -> None:
        self.timeline.step_ends()

    def record_batch(
        self, prompt_mask: torch.Tensor, completion_mask: torch.Tensor, has_prompt: Sequence[bool] | None = None
    ) -> None:
        """Record a micro-batch that goes through forward and backward, without a wait for the device. The masks have
        shapes (B, P) and (B, C). `has_prompt` is False for a completion whose prompt went through the model with
        another one."""

    def record_rewards(
        self, started: float, seconds: float, waits: Sequence[tuple[float, float]], spans: Sequence[Span]
    ) -> None:
        """Record a scored batch of training. Its first call began at `started`, of `time.perf_counter`; its last
        answer came `seconds` later. `waits`: first and last time of each wait of the trainer's thread for it. `spans`:
        the stages of its completions."""

    def figures(self, accelerator: Accelerator) -> dict[str, float]:
        """The figures of the steps since the last call, over all ranks; a collective. They are the same on every rank,
        except those of `names.MACHINE`, which are its own. Empty while nothing is measured."""
        return {}

    def close(self) -> None:
        """End all open phases and write the main rank's last spans; no collective. May be called twice."""
        self.timeline.close()


@dataclass(eq=False)
class StepMarks(TrainerCallback):
    """Marks the start of a run, the end of each step, and the end of the run. `prepare` is called before the first
    mark, `begin` after it, and `end` before the last one."""

    events: RunEvents
    prepare: Callable[[], None]
    begin: Callable[[], None]
    end: Callable[[], None]

    def on_train_begin(self, _: object, state: TrainerState, *__: object, **___: object) -> None:
        self.prepare()
        self.events.timeline.end(StartUp.PREPARE)
        self.events.run_begins(state.global_step, state.max_steps)
        self.begin()

    def on_step_end(self, *_: object, **__: object) -> None:
        self.events.timeline.end(Phase.OPTIMIZER)
        self.events.step_ends()

    def on_train_end(self, *_: object, **__: object) -> None:
        self.end()
        self.events.timeline.stops()
