"""Scheduling of rollouts: prefetches prompts, and launches due turns and evaluation batches."""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from salesrl_trl.names import Phase
from salesrl_trl.rollout.buffer import Buffer
from salesrl_trl.rollout.in_flight import KeptRollouts, Rollout
from salesrl_trl.rollout.reading_ahead import MicroBatches, Pull, RolloutSchedule, Update, UpdatesAhead
from salesrl_trl.rollout.rollout_launcher import Launcher
from salesrl_trl.types import Example

MOST_AHEAD = 1024
"""Maximum completions of an evaluation waiting in a process; their tokens and texts need some 100 MB."""


class Pipeline:
    """Launches rollouts in time for TRL to consume them. Each call passes the step counts: TRL's micro-steps, and
    optimizer steps done. `window`: micro-steps between two generation batches. `lookahead`: optimizer steps that
    rollouts may currently be ahead; `most_lookahead`: at any time. `seed`: for drawing replacement rows."""

    def __init__(
        self, launcher: Launcher, *, window: int, lookahead: int, most_lookahead: int = 0, seed: int = 0
    ) -> None:
        self.launcher = launcher
        self.turns = RolloutSchedule(lookahead, window)
        # A step's 32B answers are requested one step earlier.
        self.updates = UpdatesAhead(max(lookahead, most_lookahead) + 1, self._schedule)
        self.buffer = Buffer(launcher=launcher, turns=self.turns, updates=self.updates, seed=seed)
        self._evaluated: list[Rollout] = []  # begun but not yet consumed

    def restart(self, micro_step: int, update: int, has_batch: bool, kept: Mapping[int, KeptRollouts]) -> None:
        self.forget()
        self.buffer.restart(micro_step, update, has_batch, kept)

    def forget(self) -> None:
        self.updates.restart()
        self._evaluated = []
        self.buffer.cancel()

    def next_update(self, epoch: int, iterator: Iterator[object], pull: Pull, steps_left: int) -> Update:
        """The micro-batches of the next optimizer step. Also prefetches later steps', schedules their generation
        batches and requests their reference answers."""
        self.buffer.begin_step()
        return self.updates.next(epoch, iterator, pull, steps_left)

    def _schedule(self, micro_batches: MicroBatches) -> None:
        for window in self.turns.add(micro_batches):
            self.launcher.prepare(window.inputs)

    def launch_due(self, micro_step: int, update: int) -> None:
        """Generate what is due, and start its rewards."""
        if self.launcher.inside_trl:
            return
        if self.turns.lookahead and any(rollout.sampled is None for rollout in self.turns.launched().values()):
            with self.launcher.timeline.phase(Phase.GENERATION):
                self.launcher.trl.go_on()
        self.buffer.launch_due(micro_step, update)

    def evaluate(self, inputs: list[Example], update: int, group: int | None = None) -> Rollout:
        """The rollout of these inputs for an evaluation. `group`: completions per prompt, by default the trainer's."""
        for rollout in self._evaluated:
            if rollout.inputs is inputs:
                self._evaluated.remove(rollout)
                return rollout
        self.launcher.prepare(inputs)
        return self.launcher.launch(inputs, update, is_trained_on=False, group=group)

    def evaluations(
        self, batches: Iterable[list[Example]], update: int, group: int | None = None
    ) -> Iterator[list[Example]]:
        """The batches of an evaluation, generated in order, each to be passed to `evaluate`. Later ones are generated
        before waiting for one's rewards: twice as many as the reward's concurrency."""
        names, inside_trl = self.launcher.reward_loop.reward.names, self.launcher.inside_trl
        waiting: deque[list[Example]] = deque()
        loader: Any = batches
        limit = 0
        try:
            for inputs in batches:
                size = len(inputs)
                if not inside_trl:
                    self._evaluated.append(self.evaluate(inputs, update, group))
                waiting.append(inputs)
                if not limit:  # from the first batch, so that it is the same on all ranks
                    at_once = names.at_once * names.together.size(group or self.launcher.trl.group(), size)
                    limit = 1 if inside_trl else max(min(2 * at_once, MOST_AHEAD) // size, 1)
                # accelerate's dataloader marks the batch being read as the last; mark the one being yielded instead
                is_end = getattr(loader, "end_of_dataloader", False)
                while waiting and (is_end or len(waiting) >= limit):
                    if is_end:
                        loader.end_of_dataloader = len(waiting) == 1
                    yield waiting.popleft()
            yield from waiting
        finally:  # an abandoned evaluation will not consume them
            self.launcher.reward_loop.give_up([rollout.rewards for rollout in self._evaluated])
            self._evaluated = []


class LoaderAhead:
    """Wraps an evaluation's dataloader so that its batches pass through a pipeline."""

    def __init__(self, loader: Iterable[list[Example]], pipeline: Pipeline, update: int) -> None:
        self._loader: Any = loader
        self._pipeline, self._update = pipeline, update

    def __iter__(self) -> Iterator[list[Example]]:
        return self._pipeline.evaluations(self._loader, self._update)

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> object:
        return getattr(self._loader, name)
