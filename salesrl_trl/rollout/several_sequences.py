"""Rows that hold several sequences, as an episode has that rewrites its history.

    row of TRL's batch      . . p p c c c q q q d d .     a prompt and its completion, then others of the episode
    passed to the model     . p p c c c
                            q q q d d .

Only the model's passes tell them apart: they get each sequence as a row of its own, and its log-probs return to its
columns. All else is TRL's: masks, advantages and ratios cover a row's columns, in which further prompts are masked. So
`loss_type` decides how often an episode counts: by its tokens (dapo, TRL's default; `AsyncGRPOTrainer` counts forked
rows alike), or once (grpo).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from salesrl_trl.generation.sampler import Sampled

SEQUENCES = "salesrl_sequences"
"""A micro-batch's column, shape (B, most sequences, 2), int: tokens of each sequence's prompt and of its completion; 0
for the first prompt, which has its own columns. Absent if no row of the generation batch has several."""


def sequences_of(sampled: Sampled | None) -> torch.Tensor | None:
    rows: Sequence[Sequence[Sequence[int]]] = ((sampled and sampled.generated[5]) or {}).get(SEQUENCES, ())
    most = max(map(len, rows), default=0)
    return torch.tensor([[*row, *[[0, 0]] * (most - len(row))] for row in rows]) if most > 1 else None


@dataclass(frozen=True, slots=True)
class Apart:
    """A padded batch of N sequences, made of B rows with L columns."""

    source: torch.Tensor  # (N, prompt columns + width): places in the flattened (B, L)
    mask: torch.Tensor  # the same shape, bool
    width: int  # columns of what follows the prompts
    count: int  # sequences; any further rows repeat the first one

    @classmethod
    def of(cls, sequences: torch.Tensor, mask: torch.Tensor, width: int, passes: int = 1) -> "Apart":
        """`mask`: (B, L), whose last `width` columns follow the prompt. Rows are repeated until there is an equal
        number for each of `passes`."""
        columns = mask.size(1)
        first = columns - width
        spans = []  # for each sequence: the place of its first token, the tokens of its prompt, and those after it
        for row, (own, parts) in enumerate(zip(mask[:, :first].sum(dim=1).tolist(), sequences.tolist(), strict=True)):
            place = row * columns + first - own
            for prompt, tokens in parts:
                if tokens:
                    spans.append((place, prompt or own, tokens))
                place += (prompt or own) + tokens
        if not spans:  # the pass needs a token, though none counts
            spans = [(first - int(mask[0, :first].sum()), int(mask[0, :first].sum()), 1)]
        count = len(spans)
        spans += spans[:1] * (-count % passes)
        start, prompt, tokens = torch.tensor(spans, device=mask.device)[:, :, None].unbind(dim=1)  # each (N, 1)
        before, after = int(prompt.max()), int(tokens.max())
        column = torch.arange(before + after, device=mask.device) - (before - prompt)  # within the sequence
        present = (column >= 0) & (column < prompt + tokens)
        return cls(torch.where(present, start + column, 0), present, after, count)

    def together(self, values: torch.Tensor, shape: torch.Size, width: int) -> torch.Tensor:
        """Values of each sequence, shape (N, its width), in the columns of the rows: (B, `width`), else 0."""
        present, source = (each[: self.count, -self.width :] for each in (self.mask, self.source))
        flat = values.new_zeros(shape.numel()).index_put((source[present],), values[: self.count][present])
        return flat.view(shape)[:, -width:]


def log_probs(
    passed: Callable[..., Any], sequences: torch.Tensor, model: torch.nn.Module, input_ids: torch.Tensor,
    attention_mask: torch.Tensor, logits_to_keep: int, batch_size: int | None = None, **wanted: object,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:  # fmt: skip
    """As `passed`, TRL's `_get_per_token_logps_and_entropies`, for rows with these `sequences`. It makes as many
    passes as for the rows, because ranks with sharded weights make them together."""
    passes = -(-len(input_ids) // (batch_size or len(input_ids)))
    apart = Apart.of(sequences, attention_mask, logits_to_keep, passes)
    ids, mask = input_ids.reshape(-1)[apart.source], apart.mask.to(attention_mask)
    made = passed(model, ids, mask, apart.width, batch_size=len(ids) // passes, **wanted)
    logps, entropies = (
        None if each is None else apart.together(each, input_ids.shape, logits_to_keep) for each in made[:2]
    )
    assert logps is not None
    return logps, entropies, made[2]
