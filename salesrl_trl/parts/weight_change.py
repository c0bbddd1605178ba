"""Checks that a run's first steps change the weights. `launch.preflight.memory` chooses their number format."""

from collections.abc import Iterator
from typing import cast

import torch
from accelerate.logging import get_logger
from accelerate.utils import DistributedType
from torch.utils.hooks import RemovableHandle
from transformers import TrainerState, TrainingArguments

from salesrl_trl.errors import ConfigError
from salesrl_trl.update.weights import SIXTEEN_BITS
from salesrl_trl.wiring.part import Part, PartContext

logger = get_logger(__name__)

SAMPLED = 2**12
"""Number of weights compared per tensor."""
LEAST_GRADIENT = 1e-8
"""Smaller gradients are rounding noise, e.g. of a KL of 0. Equals AdamW's `eps`, below which updates shrink."""
REMEDY = (
    "The weights' number format loses the updates, or they are far too small. Train float32 weights (`bf16: true` "
    "still computes in bf16), LoRA, or use an optimizer with stochastic rounding, or raise the learning rate."
)


class WeightChange(Part):
    """Raises `ConfigError` if a run can't change any weight, or its first step has not.

    Compares tensors of the innermost optimizer, which are the parameters or DeepSpeed's float32 copies, before and
    after the first step with a gradient and at least half of the learning rate. All ranks decide jointly."""

    def connect(self, run: PartContext) -> None:
        self._accelerator = run.trl.accelerator
        self._samples: dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}
        self._hook: RemovableHandle | None = None

    def on_train_begin(
        self, args: TrainingArguments, *_: object, model: torch.nn.Module, optimizer: object = None, **__: object
    ) -> None:
        self.on_train_end()  # an earlier run may have failed
        while hasattr(optimizer, "optimizer"):  # the wrappers of accelerate and DeepSpeed
            optimizer = optimizer.optimizer
        innermost = cast(torch.optim.Optimizer, optimizer)
        self._check_trainable(model, innermost)
        if getattr(innermost, "bf16_stochastic_round", False):  # of torchao: updates are right on average
            return
        low = [weight for weight in _parameters(innermost) if weight.dtype in SIXTEEN_BITS]
        if low:
            count, kind = sum(weight.numel() for weight in low), str(low[0].dtype).removeprefix("torch.")
            logger.warning(
                f"[Weights] {count / 1e6:.1f} M trainable weights are in {kind}, to which {type(innermost).__name__} "
                f"rounds its updates, at a learning rate of {args.learning_rate:g}. {REMEDY}",
            )
        self._full_rate, self._rate = args.learning_rate, 0.0
        self._hook = innermost.register_step_pre_hook(self._before_step)

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """DeepSpeed calls this once per parameter group, several times in a step."""
        self._rate = max(float(group["lr"]) for group in optimizer.param_groups)
        if self._rate == 0.0 or 2 * self._rate < self._full_rate:  # a warm-up, or the end of a resumed run
            return
        for weight in _parameters(optimizer):
            if weight.grad is not None and id(weight) not in self._samples:
                had_gradient = _picked(weight.grad).abs() > LEAST_GRADIENT
                self._samples[id(weight)] = (weight, had_gradient, _picked(weight).clone())

    def on_step_end(self, _: object, state: TrainerState, *__: object, **___: object) -> None:
        if self._hook is None or 2 * self._rate < self._full_rate:
            return
        total = torch.zeros(2, dtype=torch.float64, device=self._accelerator.device)
        for weight, had_gradient, before in self._samples.values():
            changed = (_picked(weight) != before) & had_gradient
            total += torch.stack((changed.sum(), had_gradient.sum())).to(total)
        self._samples = {}
        moved, counted = self._accelerator.reduce(total, reduction="sum").tolist()
        if counted:  # otherwise the learning rate is low, or the batch was skipped
            self.on_train_end()
            if not moved:
                raise ConfigError(
                    f"no trainable weight with a gradient changed in step {state.global_step}, at a learning rate of "
                    f"{self._rate:.3g}. {REMEDY}"
                )

    def on_train_end(self, *_: object, **__: object) -> None:
        if self._hook is not None:
            self._hook.remove()
        self._hook, self._samples = None, {}

    def _check_trainable(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        trainable = {id(weight) for weight in model.parameters() if weight.requires_grad}
        if not trainable:
            raise ConfigError(
                "no weight of the policy is trainable (`requires_grad`), so training would change nothing. Load an "
                "adapter with `PeftModel.from_pretrained(..., is_trainable=True)`, or unfreeze weights."
            )
        is_whole = self._accelerator.distributed_type not in (DistributedType.DEEPSPEED, DistributedType.FSDP)
        if is_whole and trainable.isdisjoint(map(id, _parameters(optimizer))):  # others have copies, or shards
            raise ConfigError(
                f"the optimizer ({type(optimizer).__name__}) holds none of the policy's trainable weights: training "
                "would change nothing. Build it from the model passed to the trainer."
            )
        if not max((group.get("initial_lr", group["lr"]) for group in optimizer.param_groups), default=0):
            logger.warning("[Weights] the learning rate is 0: this run doesn't change any weight")


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    return (weight for group in optimizer.param_groups for weight in group["params"])


def _picked(tensor: torch.Tensor) -> torch.Tensor:
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor  # an FSDP shard
    return local.detach().flatten()[:: max(1, local.numel() // SAMPLED)]
