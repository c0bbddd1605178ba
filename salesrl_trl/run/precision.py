"""The number format that the policy's weights are trained in.

Owns this decision, from plain figures. At a learning rate of 1e-6, AdamW's update of nearly every weight is smaller
than half the distance between two neighbouring bf16 numbers. Written back in bf16 it is lost. So weights in training
have 16 bits only if something else keeps the lost part:

    DeepSpeed (ZeRO)       keeps float32 copies of its own             as the settings say
    LoRA                   the adapters are float32, the rest is fixed as the settings say
    full fine-tuning       float32 weights, 16-bit autocast            if memory is enough
                           bf16 weights, stochastic rounding           if not, by torchao's 8-bit AdamW
"""

from dataclasses import dataclass

from salesrl_trl.errors import ConfigError

SIXTEEN_BITS = ("bfloat16", "float16")
STOCHASTIC_OPTIM = "adamw_torch_8bit"
STOCHASTIC_ARGS = "bf16_stochastic_round=True"
"""transformers' names for torchao's optimizer and its argument."""
PLAIN_ADAMW = ("adamw_torch", "adamw_torch_fused")
"""The default optimizers, which may be replaced. Any other one is the user's choice."""
FLOAT32_BYTES = 16
"""Bytes per parameter: weight, gradient and AdamW's two moments, 4 bytes each."""
STOCHASTIC_BYTES = 6
"""Bytes per parameter: weight and gradient of 2 bytes, AdamW's two moments of 1 byte."""
RESERVED_GIB = 6.0
"""For activations, with gradient checkpointing, and for CUDA: the least that a 0.5B and a 7B policy took."""
GIB = 2**30


@dataclass(frozen=True, kw_only=True, slots=True)
class Precision:
    """Number format and rounding of the policy's weights."""

    dtype: str | None
    """Number format of the loaded weights: `"float32"`, or the settings' own."""
    stochastic_rounding: bool = False
    """Whether to use the optimizer `STOCHASTIC_OPTIM` with `STOCHASTIC_ARGS`."""
    note: str | None = None
    """Line for the banner."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Room:
    """The figures that decide.

    Full fine-tuning in float32 fits where

        parameters * (16 bytes, and 4 for each of: a reference model, DDP) + 6 GiB <= memory * (1 - share of vLLM)
    """

    parameters: int
    """Parameters of the policy."""
    memory_gib: float
    """Memory of the card that a process trains on."""
    vllm_share: float
    """vLLM's share of that memory; 0 if vLLM is not in the trainer's process."""
    has_reference: bool
    """Whether there is a reference model of the same size and number format."""
    is_replicated: bool = False
    """Whether other processes train copies of it. DDP then has all gradients a second time, in its buckets."""

    @property
    def free_gib(self) -> float:
        """Memory without vLLM's share, in GiB."""
        return self.memory_gib * (1 - self.vllm_share)

    def needed_gib(self, bytes_each: int, number_bytes: int) -> float:
        """Memory in GiB, for `bytes_each` per parameter in training and `number_bytes` per number."""
        each = bytes_each + (self.has_reference + self.is_replicated) * number_bytes
        return self.parameters * each / GIB + RESERVED_GIB


def choose_precision(
    *,
    dtype: str | None,
    autocast: bool,
    keeps_masters: bool,
    adapters_only: bool,
    optim: str,
    optim_args: str | None,
    room: Room | None,
    has_torchao: bool,
) -> Precision:
    """The number format of the weights, and whether the optimizer rounds stochastically.

    Args:
        dtype (`str`, *optional*):
            The setting: `"float32"`, `"bfloat16"` or `"float16"`; `"auto"` or `None` for the checkpoint's format.
        autocast (`bool`):
            Whether the forward pass computes in 16 bits (`bf16` or `fp16`).
        keeps_masters (`bool`):
            Whether DeepSpeed trains. It keeps float32 copies of 16-bit weights if it computes in 16 bits.
        adapters_only (`bool`):
            Whether LoRA adapters are trained.
        optim (`str`), optim_args (`str`, *optional*):
            The settings.
        room (`Room`, *optional*):
            The figures of memory; `None` if they do not matter or are not known.
        has_torchao (`bool`):
            Whether torchao is installed.

    Raises:
        `ConfigError`: float32 does not fit, and no other way to train every weight is available.
    """
    if dtype == "float32" or adapters_only or (keeps_masters and autocast):
        return Precision(dtype=dtype)
    if optim in (STOCHASTIC_OPTIM, "adamw_torch_4bit") and STOCHASTIC_ARGS in (optim_args or "").replace(" ", ""):
        return Precision(dtype=dtype)
    asked = f"`dtype: {dtype}`" if dtype in SIXTEEN_BITS else "16-bit weights"
    computing = "computed in 16 bits" if autocast else "computed in float32 too"
    if room is None or optim not in PLAIN_ADAMW or room.needed_gib(FLOAT32_BYTES, 4) <= room.free_gib:
        return Precision(
            dtype="float32",
            note=f"weights are trained in float32 and {computing}: {asked} would lose updates as small as these",
        )
    needed, instead = room.needed_gib(FLOAT32_BYTES, 4), room.needed_gib(STOCHASTIC_BYTES, 2)
    lack = (
        f"full fine-tuning of {room.parameters / 1e9:.1f} B weights in float32 takes about {needed:.0f} GiB, and "
        f"{room.free_gib:.0f} GiB of the card's {room.memory_gib:.0f} are there beside vLLM"
    )
    if has_torchao and dtype != "float16" and instead <= room.free_gib:
        return Precision(
            dtype="bfloat16",
            stochastic_rounding=True,
            note=f"weights are trained in bf16 with stochastic rounding (torchao's 8-bit AdamW, about {instead:.0f} "
            f"GiB), where an update that bf16 can't hold is taken with its own probability: {lack}",
        )
    remedies = ["LoRA (`use_peft: true`)", "DeepSpeed over several GPUs (accelerate_configs/full.yaml)"]
    if instead <= room.free_gib:
        rounding = "`pip install torchao`, whose AdamW rounds stochastically"
        remedies.append(rounding if not has_torchao else "`dtype: bfloat16`, for which torchao rounds stochastically")
    if room.vllm_share:
        remedies.append("a smaller `vllm_gpu_memory_utilization`, or `vllm_mode: server`")
    raise ConfigError(
        f"{lack}; in 16 bits plain AdamW would lose nearly every update. Expected one of: {'; '.join(remedies)}; or "
        "`dtype: float32`, which is tried without this estimate."
    )
