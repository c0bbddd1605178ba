"""Whether the first steps of a run move the weights. `launch.preflight.memory` chooses their number format."""

import logging
from collections.abc import Iterator, Mapping
from typing import cast

import torch
from accelerate.utils import DistributedType
from torch.utils.hooks import RemovableHandle
from transformers import TrainerControl, TrainerState, TrainingArguments

from salesrl_trl.errors import ConfigError
from salesrl_trl.names import CHANGED_SHARE
from salesrl_trl.update.weights import SIXTEEN_BITS, log_on_main
from salesrl_trl.wiring.part import Part, PartContext

SAMPLED = 2**20
"""Weights in the sample of a process. The share is exact to 0.1 %, and the cost is small beside a step."""
LEAST_GRADIENT = 1e-8
"""A gradient is rounding noise below it, for example of a KL of 0. AdamW's `eps`: less moves no weight by its rate."""
LEAST_SHARE = 0.5
"""Share of changed weights in the first step that moves the policy, below which a run warns. Float32 weights reach
0.99 and more; in 16 bits most updates are lost to the number format."""
REMEDY = (
    "Updates are lost to the weights' number format, or are far too small. Train float32 weights (`bf16: true` "
    "computes in bf16 all the same), LoRA, or with an optimizer that rounds stochastically, or raise the rate."
)


class _Sample:
    """Every n-th element of a tensor that the optimizer changes. Only those with a gradient count: the embedding of a
    token that did not occur can't move."""

    def __init__(self, parameter: torch.Tensor, stride: int) -> None:
        self._parameter, self._stride = parameter, stride
        self._before = self._picked(parameter).clone()
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        self._had_gradient = self._picked(gradient).abs() > LEAST_GRADIENT

    def counts(self) -> torch.Tensor:
        """The number of elements that changed, and of elements that had a gradient. Shape (2,), float64."""
        changed = (self._picked(self._parameter) != self._before) & self._had_gradient
        return torch.stack((changed.sum(), self._had_gradient.sum())).double()

    def _picked(self, tensor: torch.Tensor) -> torch.Tensor:
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor  # FSDP keeps a shard of each
        return local.detach().flatten()[:: self._stride]


class WeightChange(Part):
    """Logs the share of the weights that the first step of a run changed. Raises `ConfigError` where a run can change
    none, or its first step has changed none.

    Samples the tensors of the innermost optimizer: the parameters, or DeepSpeed's float32 copies, in the first step
    with a gradient and a learning rate above 0. The share covers all ranks."""

    def connect(self, run: PartContext) -> None:
        self._accelerator, self._log = run.trl.accelerator, run.trl.log
        self._samples: dict[int, _Sample] = {}
        self._rate = 0.0
        self._optimizer: torch.optim.Optimizer | None = None
        self._hook: RemovableHandle | None = None
        self._unlogged: float | None = None  # a share, until TRL's own entry of a step is before it

    def on_train_begin(
        self, args: TrainingArguments, *_: object, model: torch.nn.Module, optimizer: object = None, **__: object
    ) -> None:
        self.on_train_end()  # a run before may have ended by an error
        self._unlogged = None
        while hasattr(optimizer, "optimizer"):  # the wrappers of accelerate and DeepSpeed
            optimizer = optimizer.optimizer
        innermost = self._optimizer = cast(torch.optim.Optimizer, optimizer)
        self._check_trainable(model, innermost)
        low = [weight for weight in _parameters(innermost) if weight.dtype in SIXTEEN_BITS]
        if low and not _rounds_stochastically(innermost):
            count, kind = sum(weight.numel() for weight in low), str(low[0].dtype).removeprefix("torch.")
            log_on_main(
                logging.WARNING,
                f"[Weights] {count / 1e6:.1f} M trainable weights are in {kind}, and {type(innermost).__name__} "
                f"writes its updates back in it, at a learning rate of {args.learning_rate:g}. {REMEDY}",
            )
        self._hook = innermost.register_step_pre_hook(self._before_step)

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Sample the weights. DeepSpeed steps on one group of parameters after another, several times in a step."""
        self._rate = max(float(group["lr"]) for group in optimizer.param_groups)
        if self._rate == 0.0:
            return
        parameters = list(_parameters(optimizer))
        stride = max(1, sum(weight.numel() for weight in parameters) // SAMPLED)
        for weight in parameters:
            if weight.grad is not None and id(weight) not in self._samples:
                self._samples[id(weight)] = _Sample(weight, stride)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        if self._hook is None:
            return
        total = torch.zeros(2, dtype=torch.float64, device=self._accelerator.device)
        for sample in self._samples.values():
            total += sample.counts().to(total.device)
        self._samples = {}
        changed, counted = self._accelerator.reduce(total, reduction="sum").tolist()
        if counted:  # else the learning rate is 0, or the batch was skipped
            self.on_train_end()
            self._unlogged = changed / counted
            self._tell_share(self._unlogged, state.global_step, is_full=2 * self._rate >= args.learning_rate)

    def on_log(self, *_: object, logs: Mapping[str, object], **__: object) -> None:
        if "loss" in logs and self._unlogged is not None:
            share, self._unlogged = self._unlogged, None
            self._log({CHANGED_SHARE: share})

    def on_train_end(self, *_: object, **__: object) -> None:
        if self._hook is not None:
            self._hook.remove()
        self._hook, self._samples = None, {}

    def _check_trainable(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        trainable = {id(weight) for weight in model.parameters() if weight.requires_grad}
        if not trainable:
            raise ConfigError(
                "no weight of the policy is trainable (`requires_grad`): training would change nothing. Expected "
                "some. Load an adapter by `PeftModel.from_pretrained(..., is_trainable=True)`, or unfreeze weights."
            )
        is_whole = self._accelerator.distributed_type not in (DistributedType.DEEPSPEED, DistributedType.FSDP)
        if is_whole and trainable.isdisjoint(map(id, _parameters(optimizer))):  # others have copies, or shards
            raise ConfigError(
                f"the optimizer ({type(optimizer).__name__}) has none of the policy's trainable weights: training "
                "would change nothing. Expected them. Build it from the model that the trainer gets."
            )
        if not max((group.get("initial_lr", group["lr"]) for group in optimizer.param_groups), default=0):
            log_on_main(logging.WARNING, "[Weights] the learning rate is 0: this run changes no weight")

    def _tell_share(self, share: float, step: int, *, is_full: bool) -> None:
        line = (
            f"[Weights] {100 * share:.1f} % of the trainable weights that had a gradient changed in step {step}, at a "
        )
        line += f"learning rate of {self._rate:.3g}"
        if _rounds_stochastically(self._optimizer):
            line += "; it rounds stochastically, so that weights move by the right amount on average"
        elif not share and is_full:  # and not in a warm-up, or at the end of a run that goes on
            raise ConfigError(f"{line}. Expected that they move. {REMEDY}")
        elif share < LEAST_SHARE:
            log_on_main(logging.WARNING, f"{line}: fewer than {100 * LEAST_SHARE:g} % of them. {REMEDY}")
            return
        log_on_main(logging.INFO, line)


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    return (weight for group in optimizer.param_groups for weight in group["params"])


def _rounds_stochastically(optimizer: object) -> bool:
    return bool(getattr(optimizer, "bf16_stochastic_round", False))  # an optimizer of torchao
