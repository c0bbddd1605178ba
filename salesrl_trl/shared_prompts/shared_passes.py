"""Log-probs of a padded batch with each prompt passed through the model once: which batches qualify, how many passes
they need, and the comparison with TRL's passes at first use."""

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from accelerate.logging import get_logger
from torch import nn

from salesrl_trl.ground.process import patched
from salesrl_trl.shared_prompts import shared_attention
from salesrl_trl.shared_prompts.row_layout import Group, Layout, Row, groups_of, layout_of

logger = get_logger(__name__)

LogProbs = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]
"""Log-probs (B, C) and, on request, entropies (B, C), both in nats, and a mixture's router loss."""
Pass = Callable[..., LogProbs]
"""TRL's `_get_per_token_logps_and_entropies`."""
MOST_TOKENS = 16_384
"""Tokens per forward pass without gradients. Activations are not kept, and larger passes are not faster."""
ROUNDING = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 4e-2}
"""Mean difference from TRL's log-probs explained by rounding in any model, in nats, by dtype."""
MORE_PADDING = 8
"""Prompt tokens masked as padding in the comparison, because a first batch may lack padding and models may ignore it
in positions. In 16 bits, TRL's own log-probs without these columns measure the rounding error."""
TIMES_THE_ROUNDING = 4.0
"""Allowed multiple of that rounding error for the row's log-probs."""
AGAIN_AFTER = (1, 2)
"""Updates after which both ways are compared again: a fresh adapter is the identity, so the first comparison cannot
detect it, and with warm-up the first update's learning rate is 0."""
MOST_OF_AN_ERROR = 200  # most characters of an error quoted in a log line
_ON_ANOTHER_RANK = "another rank found that it cannot"
_COMPARED = "at first use log-probs differ from TRL's by {:.1g} nats on average"


@dataclass(frozen=True, kw_only=True, slots=True)
class PassSettings:
    is_on: bool  # `shared_prompts: auto`
    reason: str | None = None
    autocast: Callable[[], AbstractContextManager[object]]
    most_tokens: int | None = None  # per pass without gradients; defaults to `MOST_TOKENS`
    highest: Callable[[int], int]
    """The maximum over ranks whose passes must be synchronised; a collective if there are several."""
    highest_of_all: Callable[[int], int] = int  # the maximum over all ranks; a collective if there are several


class SharedPrompts:
    """Replaces TRL's `_get_per_token_logps_and_entropies` for one trainer. Takes the unwrapped policy; its reference
    must have the same architecture."""

    def __init__(self, model: nn.Module, settings: PassSettings) -> None:
        self._settings = settings
        self._has_dropout = shared_attention.has_dropout(model)
        self._attention_of = functools.cache(shared_attention.attention_of)  # an answer visits all modules
        self.is_checked = False
        self._is_due = True  # whether the next batch with a shared prompt is compared
        self._updates = 0
        self._reported: set[str] = set()
        reason = settings.reason or shared_attention.why_not_shared(model) if settings.is_on else None
        self.is_on = settings.is_on and reason is None
        self._is_agreed = not self.is_on
        if reason is not None:
            self._tell(reason)
        if self.is_on:
            self._window, self._rope_limit = shared_attention.window_of(model), shared_attention.rope_limit_of(model)
            self._attention = shared_attention.attention_of(model)
            shared_attention.install(self._attention)

    def begin_update(self) -> None:
        """Begin an update; a collective until all ranks have compared. If one rank cannot share prompts, none does."""
        self._updates += 1
        self._is_due |= self._updates - 1 in AGAIN_AFTER
        if self._is_agreed:
            return
        is_open = not self.is_checked or self._updates <= max(AGAIN_AFTER) + 1
        stage = self._settings.highest_of_all(int(is_open) if self.is_on else 2)
        self._is_agreed = stage != 1
        if stage == 2 and self.is_on:
            self.is_on = False
            self._tell(_ON_ANOTHER_RANK)

    def log_probs(
        self,
        upstream: Pass,
        model: nn.Module,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        compute_entropy: bool = False,
        compute_aux_loss: bool = False,
        **vision: object,
    ) -> LogProbs:
        """Like TRL's `_get_per_token_logps_and_entropies`, passed as `upstream`, which some batches still use."""
        wanted = {"compute_entropy": compute_entropy, "compute_aux_loss": compute_aux_loss}
        batch = Columns(input_ids, attention_mask, logits_to_keep)
        groups = self.groups(upstream, model, batch, vision)
        if groups is None:
            return upstream(model, *batch, batch_size=batch_size, **wanted, **vision)
        at_once = torch.is_grad_enabled() or compute_aux_loss
        packs = [groups] if at_once else self._packs(groups)
        logps, entropies, aux_losses = zip(*(self.of(model, batch, pack, **wanted) for pack in packs), strict=True)
        return _sum(logps), _sum(entropies), aux_losses[0]

    def groups(
        self, upstream: Pass, model: nn.Module, batch: "Columns", vision: Mapping[str, object]
    ) -> list[Group] | None:
        """The groups of a batch; `None` if it needs TRL's passes. The first batch with a shared prompt, and one after
        each of the first updates, is compared with TRL's passes."""
        if not self.is_on or vision.get("pixel_values") is not None:
            return None
        groups = groups_of(*batch)
        reason = None
        if groups is None:
            reason = "a batch has an empty prompt, or is padded differently than TRL's"
        elif self._window is not None and self._window < max(each.prompt + max(each.completions) for each in groups):
            reason = f"a sequence is longer than the model's sliding window of {self._window} tokens"
        elif (name := self._attention_of(model)) != self._attention:
            reason = f"the reference's attention is `{name}`, not the policy's `{self._attention}`"
        elif self._rope_limit is not None and batch.ids.size(1) >= self._rope_limit:
            reason = f"from {self._rope_limit} tokens on, rotary embeddings depend on a batch's longest row"
        if self._settings.highest(reason is not None) and reason is None:
            reason = "another rank has a batch that cannot"
        if reason is not None or groups is None:
            self._tell(str(reason))
            return None
        if self._is_due:
            self._compare(upstream, model, batch, groups)
        return groups if self.is_checked and self.is_on else None

    def _packs(self, groups: Sequence[Group]) -> list[list[Group]]:
        """The groups in as few passes as possible; the same number on ranks that pass together."""
        packs = packed(groups, self._settings.most_tokens or MOST_TOKENS)
        for _ in range(self._settings.highest(len(packs)) - len(packs)):
            packs.append(_split_off(packs))
        return packs

    def of(
        self,
        model: nn.Module,
        batch: "Columns",
        groups: Sequence[Group],
        *,
        compute_entropy: bool = False,
        compute_aux_loss: bool = False,
    ) -> LogProbs:
        """One forward pass over some groups of a batch, with 0 for other groups."""
        ids, mask, width = batch
        size, columns = ids.shape
        layout = layout_of(groups, columns, width, ids.device, with_last=compute_aux_loss)
        row = Row.of(layout, ids, mask, width)
        arguments = {shared_attention.LAYOUT: layout, **({"output_router_logits": True} if compute_aux_loss else {})}
        with self._settings.autocast(), _every_copy_counted(layout) if compute_aux_loss else contextlib.nullcontext():
            outputs = model(
                input_ids=row.input_ids,
                attention_mask=ids.new_ones((1, 1, 1, 1), dtype=torch.bool),  # passed through: models build none
                position_ids=row.position_ids,
                shift_labels=row.labels,
                fused_lm_head=True,
                **arguments,
            )
        entropy = row.spread(outputs.entropy, size, width) if compute_entropy else None
        aux_loss = outputs.aux_loss if compute_aux_loss else None
        return row.spread(outputs.log_probs, size, width), entropy, aux_loss

    @torch.no_grad()
    def _compare(self, upstream: Pass, model: nn.Module, batch: "Columns", groups: Sequence[Group]) -> None:
        """Compare two completions of a prompt, if any, with TRL's passes. Sharded ranks make equally many passes."""
        model = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model  # no collectives
        ids, mask, width = batch
        written = (group.only([i for i, tokens in enumerate(group.completions) if tokens]) for group in groups)
        shared = next((group.rows for group in written if len(group.rows) > 1 and group.prompt > 1), None)
        if not self._settings.highest(shared is not None) or len(ids) < 2:
            return
        pair = torch.tensor((shared or range(2))[:2], device=ids.device)
        ids, mask = ids[pair], mask[pair]
        begins = mask.argmax(dim=1, keepdim=True)  # (2, 1)
        hidden = min(MORE_PADDING, ids.size(1) - width - int(begins.max()) - 1)
        mask = mask * (torch.arange(ids.size(1), device=ids.device) >= begins + hidden)
        counted = mask[:, -width:].bool()
        with self._settings.autocast():
            kind = _format(model)
        bound = ROUNDING.get(kind, max(ROUNDING.values()))
        was_training, ours, fault = model.training, None, None
        model.eval()  # dropout would make them all differ
        try:
            trl = upstream(model, ids, mask, width)[0]
            if kind in shared_attention.HALVES:  # shifted positions round rotary embeddings differently
                again = upstream(model, ids[:, hidden:], mask[:, hidden:], width)[0]
                bound = max(bound, TIMES_THE_ROUNDING * _apart(again, trl, counted))
            ours, fault = self._tried(model, Columns(ids, mask, width))
        finally:
            model.train(was_training)
        apart = math.nan if ours is None else _apart(ours, trl, counted)
        if fault is None and not apart <= bound:
            fault = f"{_COMPARED.format(apart)}, expected at most {bound:.2g}"
        is_first, self.is_checked, self._is_due = not self.is_checked, True, False
        self.is_on = not self._settings.highest(fault is not None)
        if not self.is_on:
            self._tell(fault or _ON_ANOTHER_RANK, everywhere=fault is not None)
        elif is_first:
            dropout = "; with a single dropout draw for all of them" if self._has_dropout else ""
            line = f"completions of a prompt share one copy of it in forward passes{dropout}"
            logger.info(f"[Prompts] {line}; {_COMPARED.format(apart)}")

    def _tried(self, model: nn.Module, pair: "Columns") -> tuple[torch.Tensor | None, str | None]:
        """The log-probs of a pass over two completions, and any reason against such passes. An error is a reason,
        since TRL may still succeed. Running out of memory is not, as they need at least as much."""
        groups = groups_of(*pair) or ()
        try:
            ours = self.of(model, pair, groups)[0]
            draws = shared_attention.draws_beyond_dropout
            if not self.is_checked and draws(model, ours, lambda: self.of(model, pair, groups)[0]):
                return ours, "the model draws random numbers in training, which completions of a prompt would share"
            return ours, None
        except torch.OutOfMemoryError:
            raise
        except shared_attention.LayoutLostError as error:
            return None, str(error)
        except Exception as error:
            said = f"{type(error).__name__}: {error}".partition("\n")[0]
            return None, f"such a pass fails ({said[:MOST_OF_AN_ERROR]})"

    def _tell(self, reason: str, *, everywhere: bool = False) -> None:
        if reason not in self._reported:
            self._reported.add(reason)
            what = "for such a batch" if self.is_on else "from here on"
            line = f"off: sharing a group's prompt in forward passes, because {reason}. Using TRL's own passes {what}"
            logger.info(line, main_process_only=not everywhere)


class Columns(NamedTuple):
    """A padded batch, whose last `width` columns are completions."""

    ids: torch.Tensor  # (B, L)
    mask: torch.Tensor  # (B, L)
    width: int

    @classmethod
    def of(cls, batches: Sequence[Mapping[str, torch.Tensor]]) -> "Columns":
        ids, mask = (
            torch.cat([torch.cat((batch[f"prompt_{kind}"], batch[f"completion_{kind}"]), dim=1) for batch in batches])
            for kind in ("ids", "mask")
        )
        return cls(ids, mask, batches[0]["completion_ids"].size(1))


def packed(groups: Sequence[Group], most: int) -> list[list[Group]]:
    """Groups packed to at most `most` tokens, in order; a larger group gets its own pack."""
    packs: list[list[Group]] = []
    tokens = 0
    for group in groups:
        if not packs or tokens + group.tokens > most:
            packs.append([])
            tokens = 0
        packs[-1].append(group)
        tokens += group.tokens
    return packs


def _apart(ours: torch.Tensor, theirs: torch.Tensor, counted: torch.Tensor) -> float:
    """Mean difference of log-probs, in nats; 0 if none counts, as a rank may have nothing to compare."""
    differences = (ours.float() - theirs.float()).abs()[counted]
    return differences.mean().item() if len(differences) else 0.0


def _split_off(packs: list[list[Group]]) -> list[Group]:
    rows = [sum(len(group.rows) for group in pack) for pack in packs]
    largest = packs[rows.index(max(rows))]
    if len(largest) > 1:
        half = len(largest) // 2
        taken, largest[half:] = largest[half:], []
        return taken
    [group] = largest
    half = len(group.rows) // 2
    largest[0], other = group.only(range(half)), group.only(range(half, len(group.rows)))
    return [other]


def _sum(parts: Sequence[torch.Tensor | None]) -> Any:
    present = [part for part in parts if part is not None]
    return functools.reduce(torch.add, present) if present else None


def _format(model: nn.Module) -> torch.dtype:
    weight = next(model.parameters())
    kind = weight.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype


@contextlib.contextmanager
def _every_copy_counted(layout: Layout) -> Iterator[None]:
    """While active, the router's loss counts a token as often as it occurs in the padded batch."""
    import transformers.models.mixtral.modeling_mixtral as mixtral  # TRL uses its loss for every mixture

    counted = mixtral.load_balancing_loss_func

    def weighted(logits: object, experts: int, per_token: int, _: object) -> object:
        return counted(logits, experts, per_token, layout.weight[None])

    with patched(mixtral, "load_balancing_loss_func", weighted):
        yield
