"""What a process holds all the time: weights, states of the optimizer, gradients. In bytes.

Sources, by their releases: TRL 1.16 (`GRPOTrainer.__init__`), PEFT 0.21 (an adapter is float32), DeepSpeed 0.19
(`runtime/zero`, with the sizes of `zero/config.py`), torchao and bitsandbytes (their optimizers' states).
"""

import re

from salesrl_trl.build.memory.setup import Setup, Sharding
from salesrl_trl.build.memory.shape import ModelShape

BUCKET = 500_000_000
"""Numbers of DeepSpeed's `reduce_bucket_size`."""
LIVE = 1_000_000_000
"""Numbers of DeepSpeed's `stage3_max_live_parameters`."""
MOMENTS = {"adamw": 2, "adafactor": 0, "sgd": 0, "adagrad": 1, "rmsprop": 1, "lion": 1, "ademamix": 3}
"""Numbers that an optimizer keeps for a weight, by the begin of its name in transformers. Others count as AdamW."""


def trained(shape: ModelShape, setup: Setup) -> int:
    """Parameters that are trained: the adapters, or all."""
    if not setup.lora:
        return shape.parameters
    assert shape.adapters is not None
    return shape.adapters.parameters


def weights(shape: ModelShape, setup: Setup) -> float:
    """The policy: parameters x bytes of a number. ZeRO-3 and FSDP divide them by the processes.

    - bitsandbytes quantizes the linear layers: 1 byte, or 4 bits and a 32-bit scale for each 64 numbers.
    - Adapters are float32 (PEFT's `autocast_adapter_dtype`), under DeepSpeed 16 bits.
    """
    base: float = shape.parameters * setup.weight_bytes
    if setup.quantized_bits is not None:
        each = 1.0 if setup.quantized_bits == 8 else 0.5 + 4 / 64
        base += shape.linear * (each - setup.weight_bytes)
    if setup.lora:
        base += trained(shape, setup) * (2 if setup.sharding.is_zero and setup.autocast else 4)
    if setup.sharding.splits_weights:
        return 0.0 if setup.offloads_weights else base / setup.processes
    return base


def reference(shape: ModelShape, setup: Setup) -> float:
    """A second model of the policy's number format (`GRPOTrainer.__init__`), split as the policy is."""
    return weights(shape, setup) if setup.has_reference and not setup.lora else 0.0


def masters(shape: ModelShape, setup: Setup) -> float:
    """DeepSpeed's float32 copies of the trained 16-bit weights, divided by the processes."""
    if not (setup.sharding.is_zero and setup.autocast) or setup.offloads_optimizer:
        return 0.0
    return trained(shape, setup) * 4 / setup.processes


def optimizer_states(shape: ModelShape, setup: Setup) -> float:
    """Moments in float32; those of PyTorch's AdamW on a bf16 weight in bf16. ZeRO and FSDP split them.

    Optimizers of 8 and 4 bits (torchao, bitsandbytes) have a scale for each 256 numbers of two moments.
    """
    if setup.offloads_optimizer:
        return 0.0
    each = moment_bytes(setup.optim, 4 if setup.lora or setup.sharding.is_zero else setup.weight_bytes)
    return trained(shape, setup) * each / (1 if setup.sharding is Sharding.NONE else setup.processes)


def moment_bytes(optim: str, weight_bytes: int) -> float:
    """Bytes that an optimizer, by its name in transformers, keeps for a weight of so many bytes."""
    moments = MOMENTS.get(optim.removeprefix("paged_").split("_")[0], 2)
    if few := re.search(r"([48])bit", optim):
        return moments * int(few[1]) / 8 + 2 * 4 / 256
    return moments * (weight_bytes if optim.startswith("adamw_torch") else 4.0)


def gradients(shape: ModelShape, setup: Setup) -> float:
    """In the number format of the trained weights: one for each.

    - DDP has them a second time, in its buckets (`gradient_as_bucket_view` is off).
    - ZeRO-2 and 3 keep a process's part in 16 bits, FSDP in float32.
    """
    number, count = setup.weight_bytes if not setup.lora else 4, trained(shape, setup)
    if setup.sharding.is_zero and setup.autocast:
        number = 2
    if setup.sharding in (Sharding.NONE, Sharding.ZERO1):
        return float(count * number * (2 if setup.processes > 1 and setup.sharding is Sharding.NONE else 1))
    return count * number / setup.processes


def communication(shape: ModelShape, setup: Setup) -> float:
    """Buckets in which gradients travel, and weights that a process gathers: at most DeepSpeed's default sizes.

    FSDP gathers two blocks and the embeddings, in 16 bits.
    """
    if setup.sharding is Sharding.FSDP:
        heads = shape.embedding * (1 if shape.is_tied else 2)
        return 2.0 * (2 * (shape.linear + shape.experts) / shape.layers + heads)
    if not setup.sharding.is_zero:
        return 0.0
    gathered = min(LIVE, shape.parameters) if setup.sharding is Sharding.ZERO3 else 0
    return setup.compute_bytes * (min(BUCKET, trained(shape, setup)) + gathered)


def optimizer_work(shape: ModelShape, setup: Setup) -> float:
    """Memory of the step itself.

    - The fused AdamW (transformers' default) needs none, `adamw_torch` a float32 copy of the weights (`foreach`).
    - DeepSpeed has its part of the gradients in float32 (`step` of `stage_1_and_2.py`).
    - torchao works on one weight at a time, in float32: both moments, the weight and its gradient.
    """
    count = trained(shape, setup)
    if setup.sharding.is_zero:
        return 0.0 if setup.offloads_optimizer else 4 * count / setup.processes
    if setup.optim in ("adamw_torch_8bit", "adamw_torch_4bit"):
        return 16.0 * min(count, shape.embedding)
    return 4.0 * count if setup.optim == "adamw_torch" else 0.0
