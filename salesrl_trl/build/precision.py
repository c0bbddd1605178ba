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

from salesrl_trl.build.memory.estimate import Weigh
from salesrl_trl.errors import ConfigError

SIXTEEN_BITS = ("bfloat16", "float16")
STOCHASTIC_OPTIM = "adamw_torch_8bit"
STOCHASTIC_ARGS = "bf16_stochastic_round=True"
"""transformers' names for torchao's optimizer and its argument."""
PLAIN_ADAMW = ("adamw_torch", "adamw_torch_fused")
"""The default optimizers, which may be replaced. Any other one is the user's choice."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Precision:
    """Number format and rounding of the policy's weights."""

    dtype: str | None
    """Number format of the loaded weights: `"float32"`, or the settings' own."""
    stochastic_rounding: bool = False
    """Whether to use the optimizer `STOCHASTIC_OPTIM` with `STOCHASTIC_ARGS`."""
    note: str | None = None
    """Line for the banner."""


def choose_precision(
    *,
    dtype: str | None,
    autocast: bool,
    keeps_masters: bool,
    adapters_only: bool,
    optim: str,
    optim_args: str | None,
    weigh: Weigh | None,
    has_torchao: bool,
) -> Precision:
    """The number format of the weights, and whether the optimizer rounds stochastically.

    `dtype`: the setting: `"float32"`, `"bfloat16"` or `"float16"`; `"auto"` or `None` for the checkpoint's format.
    `autocast`: whether the forward pass computes in 16 bits (`bf16` or `fp16`). `keeps_masters`: whether DeepSpeed
    trains. It keeps float32 copies of 16-bit weights if it computes in 16 bits. `adapters_only`: whether LoRA adapters
    are trained. `weigh`: the memory for a number format and an optimizer; `None` if it does not matter or is not
    known.

    Raises:
        `ConfigError`: float32 does not fit, and no other way to train every weight is available.
    """
    if dtype == "float32" or adapters_only or (keeps_masters and autocast):
        return Precision(dtype=dtype)
    if optim in (STOCHASTIC_OPTIM, "adamw_torch_4bit") and STOCHASTIC_ARGS in (optim_args or "").replace(" ", ""):
        return Precision(dtype=dtype)
    asked = f"`dtype: {dtype}`" if dtype in SIXTEEN_BITS else "16-bit weights"
    computing = "computed in 16 bits" if autocast else "computed in float32 too"
    exact = None if weigh is None or optim not in PLAIN_ADAMW else weigh("float32", optim)
    if weigh is None or exact is None or exact.fits:
        return Precision(
            dtype="float32",
            note=f"weights are trained in float32 and {computing}: {asked} would lose small updates",
        )
    rounded = weigh("bfloat16", STOCHASTIC_OPTIM)
    lack = (
        f"full fine-tuning in float32 takes about {exact.needed_gib:.0f} GiB, generation included, and the card has "
        f"{exact.card_gib:.0f}"
    )
    if has_torchao and dtype != "float16" and rounded.fits:
        return Precision(
            dtype="bfloat16",
            stochastic_rounding=True,
            note="weights are trained in bf16 with stochastic rounding (torchao's 8-bit AdamW, about "
            f"{rounded.needed_gib:.0f} GiB), which keeps small updates on average: {lack}",
        )
    remedies = ["LoRA (`use_peft: true`)", "DeepSpeed over several GPUs (accelerate_configs/full.yaml)"]
    if rounded.fits:
        rounding = "`pip install torchao`, whose AdamW rounds stochastically"
        remedies.append(rounding if not has_torchao else "`dtype: bfloat16`, for which torchao rounds stochastically")
    raise ConfigError(
        f"{lack}; in 16 bits plain AdamW would lose nearly every update. Expected one of: {'; '.join(remedies)}; or "
        "`dtype: float32`, which is tried without this estimate. `scripts/check_gpu_memory.py` shows every part, and "
        "settings that take less."
    )
