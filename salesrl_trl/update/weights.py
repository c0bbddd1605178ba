"""Weights: adapters in float32, and a check that vLLM samples from the weights being trained."""

import torch
from accelerate.logging import get_logger
from accelerate.utils import reduce
from peft.tuners.tuners_utils import BaseTunerLayer

from salesrl_trl.errors import WeightSyncError

logger = get_logger(__name__)

SIXTEEN_BITS = (torch.bfloat16, torch.float16)


def raise_adapters(model: torch.nn.Module, autocast: bool) -> None:
    """Convert a PEFT model's trainable weights to float32, in place. TRL converts a quantised model's to bf16, and
    peft keeps trained modules (`modules_to_save`) in the base model's dtype. Without `autocast` only adapters are
    converted: other modules would receive activations of another dtype."""
    for module in model.modules():
        if autocast or isinstance(module, BaseTunerLayer):
            for parameter in module.parameters():
                if parameter.requires_grad and parameter.dtype in SIXTEEN_BITS:
                    parameter.data = parameter.data.float()


class WeightCheck:
    """Checks once, on one batch's log-probs, that vLLM samples from the weights being trained. Cannot detect a push
    without effect if vLLM loaded the same weights from disk; preflight's stage `step` can. `limit`: largest mean
    absolute difference in nats. `hints`: possible causes."""

    def __init__(self, limit: float, hints: str = "") -> None:
        self._limit = limit
        self._hints = hints
        self.is_done = False
        self.difference: float | None = None  # mean absolute difference in nats, after a comparison

    def skip(self, reason: str) -> None:
        """Log why nothing can be compared, and end the check."""
        self.is_done = True
        logger.info(f"off: the check that vLLM samples from the weights being trained, because {reason}")

    def check(self, ours: torch.Tensor | None, sampled: torch.Tensor | None, mask: torch.Tensor) -> None:
        """Check a generation batch's log-probs, shape (B, T); a collective. Raises `WeightSyncError` if they differ
        too much or are NaN. `None`: vLLM returned none."""
        if ours is None or sampled is None:
            self.skip("these rollouts lack log-probs")
        else:
            self.record(reduce(logp_difference(ours, sampled, mask), "sum"))

    def record(self, sums: torch.Tensor) -> None:
        """Check the sums of `logp_difference` over all ranks, shape (3,)."""
        difference, tokens, missing = sums.tolist()
        if not tokens + missing:
            return
        self.is_done = True
        mean = self.difference = difference / tokens if tokens else 0.0
        if missing:
            raise WeightSyncError(
                f"{missing:.0f} of the first {tokens + missing:.0f} sampled tokens have a NaN log-prob in vLLM or in "
                f"the trainer. Expected numbers: the weights are broken, or overflow in their dtype. {self._hints}"
            )
        if not mean <= self._limit:  # also rejects infinity
            raise WeightSyncError(
                f"vLLM's log-probs differ from the trainer's by {mean:.3f} nats on average over the first "
                f"{tokens:.0f} tokens (limit: {self._limit:g}): it samples from other weights than those being "
                f"trained, or in another dtype. {self._hints}"
            )
        logger.info(
            f"[Weights] vLLM samples from the weights being trained: log-probs differ by {mean:.4f} nats on average "
            f"over {tokens:.0f} tokens"
        )


def logp_difference(ours: torch.Tensor, sampled: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Over the counted tokens of shape (B, T): the sum of absolute differences in nats, the number of tokens compared,
    and the number with a NaN log-prob. Shape (3,), float64."""
    difference = (ours.double() - sampled.double()).abs()
    missing = difference.isnan() & mask.bool()
    counted = mask.bool() & ~missing
    return torch.stack((torch.where(counted, difference, 0.0).sum(), counted.sum(), missing.sum())).double()
