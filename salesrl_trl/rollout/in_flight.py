"""Completions from request to training, and the groups they form."""

import math
import zlib
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch
from torch import is_tensor
from torch.nn.functional import pad
from trl.trainer.utils import split_pixel_values_by_grid, unsplit_pixel_values_by_grid

from salesrl_trl.generation.sampler import Handle, Sampled
from salesrl_trl.generation.turns import UNKNOWN
from salesrl_trl.kl.penalty import MicroBatch
from salesrl_trl.reward.batch import BatchResult, Completion, RewardBatch
from salesrl_trl.types import Example

T = TypeVar("T")


def parts(size: int, micro_batch: int, group: int) -> list[range]:
    """The smallest parts of a generation batch with whole groups and whole micro-batches, as places in order; a single
    part if the batch is not divisible. `size`: completions in this rank's generation batch."""
    part = math.lcm(micro_batch, group)
    if size % part:
        return [range(size)]
    return [range(first, first + part) for first in range(0, size, part)]


class Order(NamedTuple):
    """The order in which a generation batch's parts were trained on, which affects the rounding of summed
    gradients."""

    parts: Sequence[int] = ()  # each part's first place; empty if all rewards had arrived when the batch began
    seen: Sequence[int] = ()
    """For each micro-batch trained before all rewards had arrived: how many were known after it."""


AT_ONCE = Order()


class ScoredGroups:
    """The parts of a generation batch, and the micro-batches whose advantages are final. `recorded`: the order in
    which the replayed run trained on them, repeated by the replay once all are scored."""

    def __init__(self, size: int, micro_batch: int, group: int, recorded: Order = AT_ONCE) -> None:
        self.remaining = parts(size, micro_batch, group)  # parts not yet queued as micro-batches
        self.complete = bool(recorded.parts)  # whether all rewards on all ranks had arrived at the last `record`
        if recorded.parts:
            by_start = {part.start: part for part in self.remaining}
            assert len(recorded.parts) == len(by_start)
            self.remaining = [by_start[start] for start in recorded.parts]
        self._released: list[int] = []
        self._seen = [*recorded.seen]
        self._taken = 0  # micro-batches trained on
        self.pending: list[range] = []
        """Parts this rank waits for. Until enough is scored, only the ranks with the most pending parts wait;
        elsewhere it is empty."""
        self._micro_batch = micro_batch
        self._ready: list[range] = []
        self._queue: deque[MicroBatch] = deque()

    def record(self, settled: torch.Tensor, rank: int, scored_fraction: float, wanted_fraction: float) -> None:
        """Record which rewards have arrived: `settled`, shape (world size, B), bool. Ranks have their own order, as no
        group spans two ranks. While fewer completions are scored than wanted, no part is ready, because the batch
        might be skipped."""
        self.complete = bool(settled.all())
        pending_by_rank = [
            [part for part in self.remaining if not of_rank[part.start : part.stop].all()] for of_rank in settled
        ]
        own = pending_by_rank[rank]
        enough = scored_fraction >= wanted_fraction
        self._ready = [part for part in self.remaining if enough and part not in own]
        # While too little is scored, no rank releases a part. The next reward most likely arrives where most are
        # pending. A rank waiting for its own last group would delay the others even once enough is scored.
        self.pending = own if enough or len(own) == max(map(len, pending_by_rank)) else []

    def release(self, output: Mapping[str, object]) -> None:
        """Queue the micro-batches of the ready parts, whose advantages are final. `output`: TRL's whole generation
        batch: tensors of shape (B, ...), lists of length B, scalars, pixels of images."""
        by_sample = split_pixel_values_by_grid(output)  # an image's pixels span many rows of their tensor
        for part in list(self.remaining) if self.complete else self._ready:
            self.remaining.remove(part)
            self._released.append(part.start)
            for first in range(part.start, part.stop, self._micro_batch):
                rows = slice(first, first + self._micro_batch)
                self._queue.append(
                    unsplit_pixel_values_by_grid({
                        name: value[rows] if isinstance(value, list) or (is_tensor(value) and value.ndim) else value
                        for name, value in by_sample.items()
                    })
                )  # fmt: skip
        self._ready = []

    @property
    def has_next(self) -> bool:
        return bool(self._queue)

    @property
    def is_empty(self) -> bool:
        return not self.remaining and not self._queue

    def next(self) -> MicroBatch:
        if not self.complete:
            self._seen.append(len(self._queue) - 1)
        self._taken += 1
        return self._queue.popleft()

    @property
    def following(self) -> list[MicroBatch]:
        """The micro-batches after the next one, as far as known."""
        return list(self._queue)[: self._seen[self._taken - 1] if self._taken <= len(self._seen) else None]

    @property
    def order(self) -> Order:
        return Order(parts=[*self._released, *(part.start for part in self.remaining)], seen=self._seen)


@dataclass(eq=False, kw_only=True, slots=True)
class Rollout:
    """Completions generated together, or groups from several generations trained on together."""

    inputs: list[Example]  # B rows
    rewards: RewardBatch
    steps: list[int]  # for each completion, the optimizer steps taken by the weights that sampled it
    is_trained_on: bool
    handle: Handle | None = None  # the generation; `None` if TRL generates inside its own scoring
    sampled: Sampled | None = None
    behaviour_logps: torch.Tensor | None = None
    """Log-probs of the sampling policy, shape (B, C), if needed and not returned by the sampler."""
    logps: dict[bool, torch.Tensor] = field(default_factory=dict)
    """TRL's log-probs, shape (B, C), by whether they are the reference's. Reused while the batch repeats."""
    is_corrected_at_step: bool = False
    """Whether the training forward pass provides the old log-probs, which are NaN until then."""
    groups: ScoredGroups | None = None  # set while the batch is trained on in parts
    result: BatchResult | None = None
    completions: Sequence[Completion] = ()
    """The B completions in TRL's format, once it has asked for their rewards."""
    scored: torch.Tensor | None = None
    """All ranks' rewards so far, encoded by `RewardFigures`: shape (world size x B, columns), on the CPU."""
    failed: torch.Tensor = field(init=False)
    """Which completions of all ranks are unscored so far: shape (world size x B,), bool."""
    is_in_parts: bool = False  # whether TRL processed the batch before all rewards had arrived
    group: int = 1  # completions per prompt, which are adjacent
    is_reported: bool = False
    turnover: tuple[float, ...] = ()
    """This rank's sums and counts for the metrics `names.TURNOVER`, if groups are replaced."""
    left: list[range] = field(init=False)  # places of the groups not yet trained on
    ended: set[int] = field(default_factory=set)  # places whose completions the sampler has reported

    def __post_init__(self) -> None:
        self.failed = torch.zeros(0, dtype=torch.bool)
        self.left = parts(len(self.inputs), 1, self.group)

    @property
    def groups_left(self) -> "list[PromptGroup]":
        return [PromptGroup(self, places) for places in self.left]

    @property
    def mode(self) -> str:
        return "train" if self.is_trained_on else "eval"

    @property
    def newest(self) -> int:
        return max(self.steps, default=-1)

    def ages(self, update: int) -> list[tuple[float, float]]:
        """The mean and the maximum age in optimizer steps of each completion's tokens; NaN if unknown. Unreported ones
        are as old as the launch. `update`: optimizer steps done."""
        ages = []
        for place, step in enumerate(self.steps):
            own = (self.sampled and self.sampled.own_versions(place)) or [step]
            mean, oldest = sum(own) / len(own), min(own)
            ages.append((math.nan, math.nan) if oldest == UNKNOWN else (update - mean, float(update - oldest)))
        return ages

    @property
    def is_complete(self) -> bool:
        return self.groups is None or self.groups.complete

    def drain_metrics(self) -> tuple[Mapping[str, list[float]], int]:
        """TRL's metrics of the generation and its tokens on all ranks, once; then nothing."""
        if self.sampled is None or self.is_reported:
            return {}, 0
        self.is_reported = True
        return self.sampled.metrics, self.sampled.tokens


class PromptGroup(NamedTuple):
    """Completions of one prompt, at these places of a rollout; a whole batch if prompts' completions span ranks."""

    rollout: Rollout
    places: range

    @property
    def version(self) -> int:
        """Optimizer steps taken by the weights that sampled it."""
        return self.rollout.steps[self.places.start]

    @property
    def lengths(self) -> list[int]:
        """Tokens of each completion, once generated."""
        assert self.rollout.sampled is not None
        return [len(self.rollout.sampled.completion_ids[place]) for place in self.places]

    @property
    def is_scored(self) -> bool:
        """Whether each completion has its reward or a reason for its failure."""
        return self.rollout.rewards.is_settled(self.places)

    @property
    def is_uniform(self) -> bool:
        """Whether all rewards have arrived and are equal, so that all advantages are 0."""
        return self.rollout.rewards.is_equal(self.places)

    def cut(self, column: Sequence[T]) -> list[T]:
        return [column[place] for place in self.places]


@dataclass(frozen=True, kw_only=True, slots=True)
class KeptRollouts:
    """A turn's completions, as kept for training or in a checkpoint."""

    rows: list[int]  # each completion's row, identified by `keys_of`
    steps: list[int]
    sampled: Sampled | None  # `None` if the completions do not exist or are not kept
    behaviour_logps: torch.Tensor | None
    inputs: list[Example] = field(default_factory=list)  # the rows, if a policy chooses groups; may be empty

    @classmethod
    def of(cls, groups: Sequence[PromptGroup], figures: Sampled | None) -> "KeptRollouts":
        """The completions of these groups, without images, with the generation metrics of `figures`."""
        rollouts = [group.rollout for group in groups]
        inputs = [row for group in groups for row in group.cut(group.rollout.inputs)]
        sampled = [rollout.sampled for rollout in rollouts if rollout.sampled is not None]
        return cls(
            rows=keys_of(inputs),
            steps=[step for group in groups for step in group.cut(group.rollout.steps)],
            sampled=_sampled_of(groups, sampled, figures) if figures and len(sampled) == len(groups) else None,
            behaviour_logps=_padded([
                rollout.behaviour_logps[group.places.start : group.places.stop]
                for rollout, group in zip(rollouts, groups, strict=True)
                if rollout.behaviour_logps is not None
            ]),
            inputs=inputs,
        )  # fmt: skip


def _padded(logps: Sequence[torch.Tensor]) -> torch.Tensor | None:
    width = max((piece.size(1) for piece in logps), default=0)
    return torch.cat([pad(piece, (0, width - piece.size(1))) for piece in logps]) if logps else None


def _sampled_of(groups: Sequence[PromptGroup], sampled: Sequence[Sampled], figures: Sampled) -> Sampled:
    def column(values: Sequence[Any]) -> Any:
        first = values[0]
        if isinstance(first, Mapping):  # of a `rollout_func`
            return {name: column([value[name] for value in values]) for name in first}
        if not isinstance(first, list) or not first:
            return first
        return [entry for value, group in zip(values, groups, strict=True) for entry in group.cut(value)]

    columns = tuple(column(values) for values in zip(*(batch.generated for batch in sampled), strict=True))
    versions = column([batch.versions for batch in sampled]) if all(batch.versions for batch in sampled) else ()
    return Sampled(generated=columns, metrics=figures.metrics, tokens=figures.tokens, versions=versions)


def keys_of(inputs: Sequence[Example]) -> list[int]:
    """A number for each row by which it can be identified later."""
    return [
        row
        if isinstance(row := example.get("row"), int)
        else zlib.crc32(repr(example.get("prompt", example)).encode())
        for example in inputs
    ]
