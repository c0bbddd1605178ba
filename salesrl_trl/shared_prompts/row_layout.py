"""The token row that represents a padded batch: each prompt once, then the completions.

Pure index arithmetic, without model or attention. Used by `shared_passes`.

    padded batch of TRL             row
    . . p p p c c .                 p p | p c | p c c | p
    . . p p p c c c                 prefix, then a segment for each completion
    . . p p p c . .

The last token of a prompt predicts the first token of each of its completions, so it is repeated: a segment begins
with it, and ends before the completion's last token, which predicts nothing. Tokens keep their positions in the padded
batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate

import numpy as np
import torch

IGNORED = -100  # label of a token whose prediction is not needed
Bounds = tuple[torch.Tensor, torch.Tensor, int, int, bool]
"""Boundaries of the parts of queries and of keys (int32), the longest of each, and whether attention is causal."""


@dataclass(frozen=True, slots=True)
class Group:
    prompt: int
    rows: tuple[int, ...]  # rows of the padded batch
    completions: tuple[int, ...]  # tokens of each completion

    @property
    def tokens(self) -> int:
        """Tokens of its row; 0 without completions."""
        return self.prompt - 1 + sum(self.completions) if self.rows else 0

    def only(self, which: Sequence[int]) -> "Group":
        return Group(self.prompt, *(tuple(values[i] for i in which) for values in (self.rows, self.completions)))

    def below(self, end: int) -> "Group":
        return self.only([i for i, row in enumerate(self.rows) if row < end])


def groups_of(input_ids: torch.Tensor, attention_mask: torch.Tensor, width: int) -> list[Group] | None:
    """The groups of a padded batch, ordered by their first completion. Synchronises with the device. `input_ids` and
    `attention_mask` have shape (B, L): prompts padded on the left, completions of `width` columns padded on the right.
    `None` if the batch is padded differently or has an empty prompt."""
    ids, mask = torch.stack((input_ids, attention_mask.to(input_ids))).cpu().numpy()
    first = ids.shape[1] - width
    prompts, completions = mask[:, :first].sum(axis=1), mask[:, first:].sum(axis=1)
    columns = np.arange(ids.shape[1])
    expected = (columns >= first - prompts[:, None]) & (columns < first + completions[:, None])
    if (expected != mask.astype(bool)).any() or not prompts.all():
        return None
    rows_by_prompt: dict[bytes, list[int]] = {}
    for row, length in enumerate(prompts.tolist()):
        rows_by_prompt.setdefault(ids[row, first - length : first].tobytes(), []).append(row)
    return [
        Group(int(prompts[rows[0]]), tuple(rows), tuple(completions[rows].tolist()))
        for rows in rows_by_prompt.values()
    ]


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A row of S tokens: all prefixes, then all segments. Groups without a prefix come last."""

    prefixes: tuple[int, ...]  # tokens of each prefix, for groups with one
    segments: tuple[tuple[int, ...], ...]
    """By group: tokens of its segments. Groups with a prefix are first, in the same order."""
    source: np.ndarray = field(repr=False)  # shape (S,): each token's index in the flattened padded batch
    weights: np.ndarray = field(repr=False)  # shape (S,): how many tokens of the padded batch a token represents
    device: torch.device

    @property
    def prefix_tokens(self) -> int:
        return sum(self.prefixes)

    @property
    def crossing_tokens(self) -> int:
        return sum(sum(segment) for segment in self.segments[: len(self.prefixes)])

    def bounds(self, lengths: Sequence[int]) -> torch.Tensor:
        """The starts of parts of these lengths, and the end of the last: shape (n + 1,), int32."""
        return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32).to(self.device, non_blocking=True)

    @cached_property
    def parts(self) -> Bounds:
        lengths = [*self.prefixes, *(length for group in self.segments for length in group)]
        bounds, most = self.bounds(lengths), max(lengths)
        return bounds, bounds, most, most, True

    @cached_property
    def crossings(self) -> Bounds:
        """For each group's segments together, which attend to its prefix."""
        together = [sum(segment) for segment in self.segments[: len(self.prefixes)]]
        return self.bounds(together), self.bounds(self.prefixes), max(together), max(self.prefixes), False

    @cached_property
    def padded(self) -> "Padded":
        return Padded.of(self)

    @cached_property
    def index(self) -> torch.Tensor:
        return torch.from_numpy(self.source).to(self.device, non_blocking=True)

    @cached_property
    def weight(self) -> torch.Tensor:
        return torch.from_numpy(self.weights).to(self.device, non_blocking=True)


@dataclass(frozen=True, slots=True)
class Padded:
    """Indices into the row, as batches padded on the right with 0."""

    prefixes: torch.Tensor  # (groups with a prefix, longest prefix)
    segments: torch.Tensor  # (segments, longest segment)
    keys: torch.Tensor  # (segments, longest prefix + longest segment): each segment's prefix, then itself
    mask: torch.Tensor
    """Shape (segments, 1, longest segment, longest prefix + longest segment), bool: the keys visible to a query."""
    prefix_places: torch.Tensor  # (tokens of prefixes,): places in `prefixes`, flattened
    segment_places: torch.Tensor  # (tokens of segments,): places in `segments`, flattened

    @classmethod
    def of(cls, layout: Layout) -> "Padded":
        prefixes, total = np.array(layout.prefixes, dtype=np.int64), layout.prefix_tokens
        lengths = np.array([length for group in layout.segments for length in group], dtype=np.int64)
        owner = np.repeat(np.arange(len(layout.segments)), [len(group) for group in layout.segments])
        prefix, prefix_there = _padded(prefixes, 0)
        segment, segment_there = _padded(lengths, total)
        behind = np.zeros((len(lengths), prefix.shape[1]), dtype=np.int64)
        seen = np.zeros_like(behind, dtype=bool)
        with_prefix = owner < len(prefixes)
        behind[with_prefix], seen[with_prefix] = prefix[owner[with_prefix]], prefix_there[owner[with_prefix]]
        order = np.arange(segment.shape[1])
        causal = (order[:, None] >= order) & segment_there[:, None, :]  # (segments, T, T)
        # Padding queries see what their segment's first token sees: a row without keys would yield NaN.
        causal[:, :, 0] = True
        visible = np.repeat(seen[:, None, :], len(order), axis=1)
        arrays = (
            prefix,
            segment,
            np.concatenate((behind, segment), axis=1),
            np.concatenate((visible, causal), axis=2)[:, None],
            np.flatnonzero(prefix_there),
            np.flatnonzero(segment_there),
        )
        return cls(*(torch.from_numpy(array).to(layout.device) for array in arrays))


def _padded(lengths: np.ndarray, start: int) -> tuple[np.ndarray, np.ndarray]:
    """Indices of consecutive parts starting at `start`, and which are not padding: both of shape (parts, most)."""
    first = start + np.concatenate(([0], np.cumsum(lengths)))[:-1]
    columns = np.arange(lengths.max(initial=0))
    present = columns < lengths[:, None]
    return np.where(present, first[:, None] + columns, 0), present


def layout_of(
    groups: Sequence[Group], columns: int, width: int, device: torch.device, *, with_last: bool = False
) -> Layout:
    """The row of some groups of a padded batch with this many columns, `width` of them for completions. `with_last`:
    include completions' last tokens, and empty completions, because the router's loss counts every token. A row
    without tokens to predict consists of one token."""
    first = columns - width
    filled = []
    for group in groups:
        pairs = [(row, size) for row, size in zip(group.rows, group.completions, strict=True) if size or with_last]
        if pairs:
            filled.append((group.prompt, pairs))
    if not filled:
        row = groups[0].rows[0]
        place = np.array([row * columns + first - 1], dtype=np.int64)
        return Layout(prefixes=(), segments=((1,),), source=place, weights=np.ones(1, np.float32), device=device)
    filled.sort(key=lambda item: item[0] == 1)  # prompts of one token lack a prefix
    prefixes, segments, source, weights = [], [], [], []
    for prompt, pairs in filled:
        if prompt > 1:
            prefixes.append(prompt - 1)
            start = pairs[0][0] * columns + first - prompt
            source.append(np.arange(start, start + prompt - 1))
            weights.append(np.full(prompt - 1, len(pairs), np.float32))
    for _, pairs in filled:
        lengths = tuple(length + 1 if with_last else length for _, length in pairs)
        segments.append(lengths)
        for (row, _), length in zip(pairs, lengths, strict=True):
            start = row * columns + first - 1
            source.append(np.arange(start, start + length))
            weights.append(np.ones(length, np.float32))
    return Layout(
        prefixes=tuple(prefixes),
        segments=tuple(segments),
        source=np.concatenate(source),
        weights=np.concatenate(weights),
        device=device,
    )


@dataclass(frozen=True, slots=True)
class Row:
    """The tensors of a row, built on the device from those of the padded batch."""

    input_ids: torch.Tensor  # (1, S)
    position_ids: torch.Tensor  # (1, S): columns of the padded batch
    labels: torch.Tensor  # (1, S): the next token, or `IGNORED`
    places: torch.Tensor  # (S,): index of a token's prediction in the flattened (B, C)

    @classmethod
    def of(cls, layout: Layout, input_ids: torch.Tensor, attention_mask: torch.Tensor, width: int) -> "Row":
        columns = input_ids.size(1)
        column, row = layout.index % columns, layout.index // columns
        following = layout.index + (column + 1 < columns)
        is_asked = (column >= columns - width - 1) & (column + 1 < columns)
        is_asked = is_asked & attention_mask.reshape(-1)[following].bool()
        flat = input_ids.reshape(-1)
        labels = torch.where(is_asked, flat[following], IGNORED)
        places = row * width + (column + 1 - (columns - width)).clamp(min=0, max=width - 1)
        return cls(flat[layout.index][None], column[None], labels[None], places)

    def spread(self, values: torch.Tensor, size: int, width: int) -> torch.Tensor:
        """Scatter values of shape (1, S), 0 where the label is `IGNORED`, to (B, C) with B = `size`."""
        flat = values.new_zeros(size * width)
        return flat.index_add(0, self.places, values[0]).view(size, width)
