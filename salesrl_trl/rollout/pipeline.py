"""Rollouts in flight: launched early, collected late.

Owns what lies between a generation batch's prompts and the moment it is trained on: the generation, and each
completion's reward from the moment the completion is finished. Refuses to decide when a rollout may be launched (the
schedule does), and to use completions and rewards (TRL does).
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from trl.data_utils import is_conversational

from salesrl_trl.errors import ConfigError
from salesrl_trl.generation.sampler import Finished, Handle, Ready, Sampled, Sampler
from salesrl_trl.names import Phase
from salesrl_trl.reward.batch import BatchResult, Completion, Origin, RewardBatch
from salesrl_trl.reward.reward_loop import RewardLoop
from salesrl_trl.rollout.examples import keys_of, prompts_of
from salesrl_trl.rollout.groups import ScoredGroups
from salesrl_trl.rollout.schedule import MicroBatches, RolloutSchedule, Update, UpdatesAhead
from salesrl_trl.telemetry.timeline import Timeline
from salesrl_trl.timing import Span
from salesrl_trl.types import Example


@dataclass(eq=False, kw_only=True, slots=True)
class Rollout:
    """Completions of one generation batch, from the moment they are asked for until they have been trained on."""

    inputs: list[Example]
    """Rows of this rank's generation batch, B of them."""
    rewards: RewardBatch
    """Their rewards, which may still be pending."""
    step: int
    """Optimizer steps that the weights had taken which sampled them."""
    is_trained_on: bool
    """Whether it is for training. Else it is for an evaluation."""
    handle: Handle | None = None
    """The generation. `None` where TRL generates inside its own scoring."""
    sampled: Sampled | None = None
    """The completions, once they are there."""
    behaviour_logps: torch.Tensor | None = None
    """Log-probs of the policy that sampled, shape (B, C), where the sampler gives none and they are needed."""
    logps: dict[bool, torch.Tensor] = field(default_factory=dict)
    """Log-probs that TRL has computed, shape (B, C). Key True: of the reference; False: old ones. Unchanged between
    passes over the same batch."""
    is_corrected_at_step: bool = False
    """Whether the pass that trains gives the old log-probs. `logps` then has NaN for them."""
    groups: ScoredGroups | None = None
    """Set while the batch is trained on part by part."""
    result: BatchResult | None = None
    """All rewards, once they are in."""
    completions: Sequence[Completion] = ()
    """The completions as TRL has them, B of them, once it has asked for their rewards."""
    scored: torch.Tensor | None = None
    """Table of `encode` with the rewards of all ranks so far: shape (world size x B, columns), on the CPU."""
    failed: torch.Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.bool))
    """Which completions of all ranks have no reward so far: shape (world size x B,), bool."""
    is_in_parts: bool = False
    """Whether TRL has gone over the batch before all rewards were in."""
    group: int = 1
    """Completions of a prompt. They are neighbours."""
    is_reported: bool = False
    """Whether TRL's figures of the generation were drained."""

    @property
    def mode(self) -> str:
        """TRL's name of its purpose: `"train"` or `"eval"`."""
        return "train" if self.is_trained_on else "eval"

    @property
    def is_complete(self) -> bool:
        """Whether TRL has gone over the batch with all rewards in."""
        return self.groups is None or self.groups.complete

    def drain_metrics(self) -> tuple[Mapping[str, list[float]], int]:
        """TRL's figures of the generation, and its tokens on all ranks: once, then nothing."""
        if self.sampled is None or self.is_reported:
            return {}, 0
        self.is_reported = True
        return self.sampled.metrics, self.sampled.tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class KeptRollouts:
    """A rollout of an earlier start of the run."""

    rows: list[int]
    """The row of each of the B completions, by the numbers of `keys_of`."""
    step: int
    """Optimizer steps that the weights had taken which sampled it."""
    sampled: Sampled
    behaviour_logps: torch.Tensor | None
    """As in `Rollout`."""


class Pipeline:
    """Launches rollouts and starts their rewards.

    Counts of steps come with each call: micro-steps as TRL counts them, and optimizer steps done.

    - `decode`: from a completion's token ids to its text. Called from the thread in which the sampler reports.
    - `window`: micro-steps between two generation batches. `lookahead`: optimizer steps that rollouts may be ahead.
    - `behaviour_logps`: log-probs of completions under the current policy, where the sampler gives none.
    - `record_span` gets the time of a generation that went on beside training.
    - `group`: completions of a prompt at the moment, in training or in an evaluation.
    - `reward_arguments`: what reward functions may ask for beside a row's columns (`reward.scorer.TRL_ARGUMENTS`).
    - `inside_trl`: TRL generates inside its own scoring: completions with tools, and prompts from an environment.
    """

    def __init__(
        self,
        sampler: Sampler,
        reward_loop: RewardLoop,
        timeline: Timeline,
        *,
        decode: Callable[[Sequence[int]], str],
        window: int,
        lookahead: int,
        behaviour_logps: Callable[[Sampled], torch.Tensor],
        record_span: Callable[[Span], None],
        group: Callable[[], int] = lambda: 1,
        reward_arguments: Callable[[], Mapping[str, object]] = dict,
        inside_trl: bool = False,
    ) -> None:
        self._sampler = sampler
        self._reward_loop = reward_loop
        self._timeline = timeline
        self._decode = decode
        self._behaviour_logps = behaviour_logps
        self._record_span = record_span
        self._group = group
        self._reward_arguments = reward_arguments
        self._inside_trl = inside_trl
        self._window = window
        self._dataloader: Iterable[object] = ()
        self._kept: dict[int, KeptRollouts] = {}
        self._taken: dict[int, Rollout] = {}
        self.set_lookahead(lookahead)

    def set_lookahead(self, lookahead: int) -> None:
        """Change the lookahead, between two runs."""
        self._lookahead = lookahead
        self._schedule: RolloutSchedule[Rollout] = RolloutSchedule(lookahead, self._window)
        self._updates = UpdatesAhead(lookahead + 1)  # the 32B answers of a step are asked for one step earlier

    @property
    def epoch(self) -> int:
        """The epoch whose prompts are pulled at the moment."""
        return self._updates.epoch

    def restart(self, micro_step: int, update: int, has_batch: bool, kept: Mapping[int, KeptRollouts]) -> None:
        """A run begins at these micro-steps and optimizer steps done. `has_batch`: a generation batch is there to go
        on with in the middle of a window. `kept`: from `in_flight` of an earlier start of the run."""
        self.forget()
        self._kept = dict(kept)
        self._schedule.restart(micro_step, update, has_batch)

    def forget(self) -> None:
        """Give up everything in flight, with the batch of an interrupted step."""
        self._updates.restart()
        self._dataloader, self._kept, self._taken = (), {}, {}
        for rollout in self._schedule.restart(0, 0, False):
            if rollout.handle is not None:
                rollout.handle.give_up()
        self._reward_loop.give_up()

    def epoch_begins(self, dataloader: Iterable[object]) -> None:
        """Training goes through `dataloader` once, and then perhaps once more."""
        self._dataloader = dataloader

    def next_update(
        self, epoch: int, iterator: Iterator[object], pull: Callable[[Iterator[object]], Update], steps_left: int
    ) -> Update:
        """The micro-batches of the next optimizer step. Those of later steps are read too (`UpdatesAhead.next`), and
        what they generate is scheduled as soon as it is known (`_record_update`)."""
        return self._updates.next(
            epoch, iterator, self._next_epoch, pull, steps_left, self._record_update, _draw_as_a_dataloader
        )

    def _next_epoch(self) -> Iterator[object]:
        """The micro-batches of the epoch after the one in training.

        Leaves torch's generator as it is. A dataloader draws from it when it begins; here that draw is made when the
        epoch begins (`_draw_as_a_dataloader`). So all samples are the same as without a lookahead.
        """
        with torch.random.fork_rng(devices=[]):
            iterator = iter(self._dataloader)
            first = list(itertools.islice(iterator, 1))
        return itertools.chain(first, iterator)

    def _record_update(self, micro_batches: MicroBatches) -> None:
        for window in self._schedule.add(micro_batches):
            self._reward_loop.prepare(self._rows(window.inputs))

    def launch_due(self, micro_step: int, update: int) -> None:
        """Generate what may be generated by now, and start its rewards."""
        if self._inside_trl:
            return
        for window in self._schedule.due(micro_step, update):
            kept = self._kept.pop(window.first, None)
            if kept is not None and kept.rows == keys_of(window.inputs):
                window.rollout = self._go_on(window.inputs, kept)
            else:
                window.rollout = self.launch(window.inputs, update)

    def in_flight(self, micro_step: int, update: int) -> dict[int, KeptRollouts]:
        """The rollouts with all their completions that were launched before the end of the step with these counts, and
        that nobody had trained on then: by the micro-step at which they are first trained on."""
        there = {first: each for first, each in self._taken.items() if first >= micro_step} | self._schedule.launched()
        return {
            first: KeptRollouts(
                rows=keys_of(each.inputs), step=each.step, sampled=each.sampled, behaviour_logps=each.behaviour_logps
            )
            for first, each in there.items()
            if each.sampled is not None and each.step < update
        }

    def _go_on(self, inputs: list[Example], kept: KeptRollouts) -> Rollout:
        """A rollout with the completions of an earlier start. Their rewards start anew, from answers in the cache."""
        group = self._group()
        rewards = self._begin(inputs, group, "train", kept.step)
        rollout = Rollout(
            inputs=inputs,
            rewards=rewards,
            step=kept.step,
            is_trained_on=True,
            handle=Ready(kept.sampled),
            group=group,
        )
        rollout.behaviour_logps = kept.behaviour_logps
        self._record(rollout, kept.sampled)
        return rollout

    def take(self, inputs: list[Example], micro_step: int, update: int) -> Rollout:
        """The rollout of these inputs, with all its completions. It is generated now, if it was not before."""
        rollout = self._schedule.take(micro_step, inputs)
        if rollout is None:
            rollout = self.launch(inputs, update)
        self._taken = {micro_step: rollout}
        if rollout.sampled is not None or rollout.handle is None:
            return rollout
        with self._timeline.phase(Phase.GENERATION):
            sampled = rollout.handle.result()
        self._record(rollout, sampled)
        if sampled.logprobs is None:
            raise ConfigError(
                "completions were generated ahead of training, and the sampler gives no log-probs of them. Expected "
                "log-probs, or a sampler that generates in `start`. Mend the sampler, or set `rollout_lookahead: 0`."
            )
        return rollout

    def launch(self, inputs: list[Example], update: int) -> Rollout:
        """Generate for a step to train on, or begin to, and start the reward of each completion when it is finished.
        `update`: optimizer steps that the weights have taken."""
        rollout = self._start(inputs, update, ahead=bool(self._lookahead), is_trained_on=True)
        if rollout.sampled is not None and rollout.sampled.logprobs is None and self._lookahead:
            rollout.behaviour_logps = self._behaviour_logps(rollout.sampled)
        return rollout

    def evaluate(self, inputs: list[Example], update: int, group: int | None = None) -> Rollout:
        """Generate for an evaluation, and start the reward of each completion when it is finished. `group`:
        completions of a prompt, by default the trainer's number."""
        self._reward_loop.prepare(self._rows(inputs))
        return self._start(inputs, update, ahead=False, is_trained_on=False, group=group)

    def _start(
        self, inputs: list[Example], update: int, *, ahead: bool, is_trained_on: bool, group: int | None = None
    ) -> Rollout:
        group = group or self._group()
        rewards = self._begin(inputs, group, "train" if is_trained_on else "eval", update)
        rollout = Rollout(inputs=inputs, rewards=rewards, step=update, is_trained_on=is_trained_on, group=group)
        if self._inside_trl:
            return rollout
        with self._timeline.phase(Phase.GENERATION):
            handle = self._sampler.start(prompts_of(inputs), self._reporter(rewards, inputs), ahead=ahead)
            rollout.handle = handle
            sampled = handle.result() if handle.is_ready or not ahead else None
        if sampled is not None:
            self._record(rollout, sampled)
        return rollout

    def generated(
        self, rollout: Rollout, sampled: Sampled, prompts: Sequence[object], environments: Sequence[object] | None
    ) -> None:
        """Completions that TRL generated inside its own scoring, with the prompts as TRL used them, to which an
        environment adds, and the environment of each completion."""
        given = [{**example, "prompt": prompt} for example, prompt in zip(rollout.inputs, prompts, strict=True)]
        if environments is not None:
            given = [{**row, "environments": each} for row, each in zip(given, environments, strict=True)]
        self._record(rollout, sampled, given)

    def _record(self, rollout: Rollout, sampled: Sampled, given: Sequence[Example] = ()) -> None:
        """Keep the completions. Rewards that have not started yet start now. `given`: rows with more in them."""
        rollout.sampled = sampled
        if sampled.span is not None:
            self._record_span(sampled.span)
        extra: Mapping[str, Any] = sampled.generated[5] or {}  # from a `rollout_func`
        if extra:
            given = [
                {**row, **{name: each[place] if isinstance(each, list) else each for name, each in extra.items()}}
                for place, row in enumerate(given or rollout.inputs)
            ]
        rows = self._rows(given) if given else ()
        self._reward_loop.start_all(rollout.rewards, sampled.completions, sampled.completion_ids, rows)

    def _reporter(self, rewards: RewardBatch, inputs: Sequence[Example]) -> Finished:
        in_messages = is_conversational({"prompt": inputs[0]["prompt"]})

        def finished(place: int, token_ids: Sequence[int]) -> None:
            text = self._decode(token_ids)
            completion = [{"role": "assistant", "content": text}] if in_messages else text
            self._reward_loop.start(rewards, place, completion, token_ids)

        return finished

    def _begin(self, inputs: Sequence[Example], group: int, mode: str, step: int) -> RewardBatch:
        return self._reward_loop.begin(self._rows(inputs), group, Origin(rows=inputs, mode=mode, step=step))

    def _rows(self, rows: Sequence[Example]) -> list[Example]:
        """The rows with their pictures in the prompts, and with what functions may ask for beside columns."""
        further = self._reward_arguments()
        return [{**row, "prompt": prompt, **further} for row, prompt in zip(rows, prompts_of(rows), strict=True)]


def _draw_as_a_dataloader() -> None:
    """The draw from torch's generator with which `DataLoader` seeds its workers, whether it has any or not."""
    torch.empty((), dtype=torch.int64).random_()
