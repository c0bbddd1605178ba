"""Completions from the moment they are asked for until they have been trained on, and the groups that they form."""

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
from salesrl_trl.kl.penalty import MicroBatch
from salesrl_trl.reward.batch import BatchResult, Completion, RewardBatch
from salesrl_trl.types import Example

T = TypeVar("T")


def parts(size: int, micro_batch: int, group: int) -> list[range]:
    """The smallest parts of a generation batch that hold whole groups and whole micro-batches: places of each part, in
    order; one part where the batch can't be divided so. `size`: completions of this rank's generation batch."""
    part = math.lcm(micro_batch, group)
    if size % part:
        return [range(size)]
    return [range(first, first + part) for first in range(0, size, part)]


class Order(NamedTuple):
    """The order in which the parts of a generation batch were trained on. A sum of gradients depends on it."""

    parts: Sequence[int] = ()  # the first place of each; none where all rewards were in when the batch began
    seen: Sequence[int] = ()
    """How many micro-batches were known behind each one that was trained on before all rewards were in."""


AT_ONCE = Order()


class ScoredGroups:
    """The parts of a generation batch, and the micro-batches of those whose advantages are final. `recorded` is the
    order in which a replayed run trained on them: the replay repeats it once all are scored."""

    def __init__(self, size: int, micro_batch: int, group: int, recorded: Order = AT_ONCE) -> None:
        self.remaining = parts(size, micro_batch, group)  # parts without a micro-batch in the queue so far
        self.complete = bool(recorded.parts)  # whether every reward was in, on every rank, at the last `record`
        if recorded.parts:
            by_start = {part.start: part for part in self.remaining}
            self.remaining = [by_start[start] for start in recorded.parts]
        self._released: list[int] = []
        self._seen = [*recorded.seen]
        self._taken = 0  # micro-batches that were trained on
        self.pending: list[range] = []
        """Parts this rank waits for. Until enough is scored, only the ranks with the most missing parts wait; on the
        others it is empty."""
        self._micro_batch = micro_batch
        self._ready: list[range] = []
        self._queue: deque[MicroBatch] = deque()

    def record(self, settled: torch.Tensor, rank: int, scored_fraction: float, wanted_fraction: float) -> None:
        """Record which rewards are in: `settled`, shape (world size, B), bool. Each rank has its own order, because no
        group lies on two ranks. While fewer completions are scored than wanted, the batch could be skipped, and no
        part is ready."""
        self.complete = bool(settled.all())
        pending_by_rank = [
            [part for part in self.remaining if not of_rank[part.start : part.stop].all()] for of_rank in settled
        ]
        own = pending_by_rank[rank]
        enough = scored_fraction >= wanted_fraction
        self._ready = [part for part in self.remaining if enough and part not in own]
        # While too little is scored, no rank releases a part. The next reward most likely comes where most rewards are
        # missing. A rank that waited for its own last group would hold up the others, although enough is scored.
        self.pending = own if enough or len(own) == max(map(len, pending_by_rank)) else []

    def release(self, output: Mapping[str, object]) -> None:
        """Put the micro-batches of the ready parts, whose advantages are final, into the queue. `output`: the whole
        generation batch as TRL made it: tensors of shape (B, ...), lists of length B, scalars, pixels of pictures."""
        by_sample = split_pixel_values_by_grid(output)  # a picture's pixels are many rows of their tensor
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
        """The micro-batches behind the next one, as far as they are known."""
        return list(self._queue)[: self._seen[self._taken - 1] if self._taken <= len(self._seen) else None]

    @property
    def order(self) -> Order:
        return Order(parts=[*self._released, *(part.start for part in self.remaining)], seen=self._seen)


@dataclass(eq=False, kw_only=True, slots=True)
class Rollout:
    """Completions that were generated together, or groups of several generations that are trained on together."""

    inputs: list[Example]  # B rows
    rewards: RewardBatch
    steps: list[int]  # of each completion, the optimizer steps that the weights had taken which sampled it
    is_trained_on: bool
    handle: Handle | None = None  # the generation. `None` where TRL generates inside its own scoring.
    sampled: Sampled | None = None
    behaviour_logps: torch.Tensor | None = None
    """Log-probs of the policy that sampled, shape (B, C), where the sampler gives none and they are needed."""
    logps: dict[bool, torch.Tensor] = field(default_factory=dict)
    """Log-probs that TRL has computed, shape (B, C), by whether they are the reference's. Unchanged while the batch is
    repeated."""
    is_corrected_at_step: bool = False
    """Whether the pass that trains gives the old log-probs. `logps` then has NaN for them."""
    groups: ScoredGroups | None = None  # set while the batch is trained on part by part
    result: BatchResult | None = None
    completions: Sequence[Completion] = ()
    """The completions as TRL has them, B of them, once it has asked for their rewards."""
    scored: torch.Tensor | None = None
    """Table of `encode` with the rewards of all ranks so far: shape (world size x B, columns), on the CPU."""
    failed: torch.Tensor = field(init=False)
    """Which completions of all ranks have no reward so far: shape (world size x B,), bool."""
    is_in_parts: bool = False  # whether TRL has gone over the batch before all rewards were in
    group: int = 1  # completions of a prompt. They are neighbours.
    is_reported: bool = False
    turnover: tuple[float, ...] = ()
    """Sums and counts of this rank for the metrics `names.TURNOVER`, where a policy replaces groups."""
    left: list[range] = field(init=False)  # places of the groups that nobody has trained on yet

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

    @property
    def is_complete(self) -> bool:
        return self.groups is None or self.groups.complete

    def drain_metrics(self) -> tuple[Mapping[str, list[float]], int]:
        """TRL's figures of the generation, and its tokens on all ranks: once, then nothing."""
        if self.sampled is None or self.is_reported:
            return {}, 0
        self.is_reported = True
        return self.sampled.metrics, self.sampled.tokens


class PromptGroup(NamedTuple):
    """Completions of one prompt, at these places of a rollout. A rank's whole batch where a prompt's completions lie
    on two ranks."""

    rollout: Rollout
    places: range

    @property
    def version(self) -> int:
        """Optimizer steps that the weights had taken which sampled it."""
        return self.rollout.steps[self.places.start]

    @property
    def lengths(self) -> list[int]:
        """Tokens of each completion, once they are generated."""
        assert self.rollout.sampled is not None
        return [len(self.rollout.sampled.completion_ids[place]) for place in self.places]

    @property
    def is_scored(self) -> bool:
        """Whether each completion has its reward, or the reason of its failure."""
        return self.rollout.rewards.is_settled(self.places)

    @property
    def is_uniform(self) -> bool:
        """Whether all rewards are in and the same number, so that the group has no advantage."""
        return self.rollout.rewards.is_equal(self.places)

    def cut(self, column: Sequence[T]) -> list[T]:
        return [column[place] for place in self.places]


@dataclass(frozen=True, kw_only=True, slots=True)
class KeptRollouts:
    """Completions of a turn, as its training or a checkpoint keeps them."""

    rows: list[int]  # the row of each of the B completions, by the numbers of `keys_of`
    steps: list[int]
    sampled: Sampled | None  # `None` for completions that are not there, or not kept
    behaviour_logps: torch.Tensor | None
    inputs: list[Example] = field(default_factory=list)  # the rows, where a policy chooses groups; perhaps none

    @classmethod
    def of(cls, groups: Sequence[PromptGroup], figures: Sampled | None) -> "KeptRollouts":
        """The completions of these groups, without pictures. The figures of generation are those of `figures`."""
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
    return Sampled(generated=columns, metrics=figures.metrics, tokens=figures.tokens)


def keys_of(inputs: Sequence[Example]) -> list[int]:
    """A number for each row by which it is known again."""
    return [
        example["row"] if isinstance(example.get("row"), int) else zlib.crc32(repr(example["prompt"]).encode())
        for example in inputs
    ]
