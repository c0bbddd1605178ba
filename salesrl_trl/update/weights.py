"""What both models need of their weights: adapters in float32, and a check that vLLM samples from them."""

import torch
from accelerate.logging import get_logger
from accelerate.utils import reduce
from peft.tuners.lora.layer import Linear
from peft.tuners.tuners_utils import BaseTunerLayer

from salesrl_trl.errors import WeightSyncError

logger = get_logger(__name__)

SIXTEEN_BITS = (torch.bfloat16, torch.float16)


class OutsideAutocast:
    """True where autocast is off."""

    def __init__(self, device_type: str) -> None:
        self._device_type = device_type

    def __bool__(self) -> bool:
        return not torch.is_autocast_enabled(self._device_type)


def spare_casts(model: torch.nn.Module, device_type: str) -> None:
    """Keep LoRA's float32 layers from turning inputs into float32 where autocast turns them back at once. Without
    dropout loss and gradients are the same to the bit: float32 holds every number of 16 bits."""
    for module in model.modules():
        if isinstance(module, Linear) and not module.lora_variant:
            module.cast_input_dtype_enabled = OutsideAutocast(device_type)  # type: ignore[assignment]


def raise_adapters(model: torch.nn.Module, autocast: bool) -> None:
    """Make a PEFT model's trainable weights float32, in place. TRL turns those of a quantised model into bf16, and
    peft leaves trained modules (`modules_to_save`) in the base model's format. Without `autocast` only adapters
    change: other modules would get activations of another format."""
    for module in model.modules():
        if autocast or isinstance(module, BaseTunerLayer):
            for parameter in module.parameters():
                if parameter.requires_grad and parameter.dtype in SIXTEEN_BITS:
                    parameter.data = parameter.data.float()


class WeightCheck:
    """Checks once, by the log-probs of one batch, that vLLM samples from the weights in training. It does not see a
    push that does nothing where vLLM read the same weights from disk: the preflight's stage `step` does. `limit`:
    largest mean absolute difference in nats. `hints`: possible reasons of one."""

    def __init__(self, limit: float, hints: str = "") -> None:
        self._limit = limit
        self._hints = hints
        self.is_done = False
        self.difference: float | None = None  # mean absolute difference in nats, after a check that compared

    def skip(self, reason: str) -> None:
        """Log why there is nothing to compare, and end the check."""
        self.is_done = True
        logger.info(f"off: the check that vLLM samples from the weights in training, because {reason}")

    def check(self, ours: torch.Tensor | None, sampled: torch.Tensor | None, mask: torch.Tensor) -> None:
        """Check the log-probs of a generation batch, shape (B, T); a collective. Raises `WeightSyncError` where they
        are too far apart, or NaN. `None`: vLLM gave none."""
        if ours is None or sampled is None:
            self.skip("these rollouts come without log-probs")
        else:
            self.record(reduce(logp_difference(ours, sampled, mask), "sum"))

    def record(self, sums: torch.Tensor) -> None:
        """Judge the sums of `logp_difference` over all ranks, shape (3,), as `check` does."""
        difference, tokens, missing = sums.tolist()
        if not tokens + missing:
            return
        self.is_done = True
        mean = self.difference = difference / tokens if tokens else 0.0
        if missing:
            raise WeightSyncError(
                f"{missing:.0f} of the first {tokens + missing:.0f} sampled tokens have a log-prob that is no number, "
                "in vLLM or in the trainer. Expected a number for each: weights are broken, or overflow in their "
                f"number format. {self._hints}"
            )
        if not mean <= self._limit:  # infinite too
            raise WeightSyncError(
                f"vLLM's log-probs differ from the trainer's by {mean:.3f} nats on average over the first "
                f"{tokens:.0f} tokens, expected at most {self._limit:g}: it samples from other weights, or in another "
                f"number format, than the ones in training. {self._hints}"
            )
        logger.info(
            f"[Weights] vLLM samples from the weights in training: log-probs differ by {mean:.4f} nats on average "
            f"over {tokens:.0f} tokens"
        )


def logp_difference(ours: torch.Tensor, sampled: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Over the tokens that count, from shapes (B, T): the sum of absolute differences in nats, the number of tokens
    with a difference, and of those without one, because a log-prob is NaN. Shape (3,), float64."""
    difference = (ours.double() - sampled.double()).abs()
    missing = difference.isnan() & mask.bool()
    counted = mask.bool() & ~missing
    return torch.stack((torch.where(counted, difference, 0.0).sum(), counted.sum(), missing.sum())).double()
