"""The attention of the policy's training passes: whether the named implementation is there, and which one `auto` is.

Owns this choice. transformers has the implementations. vLLM chooses its own.
"""

import difflib
from collections.abc import Callable
from typing import NamedTuple

import torch
from transformers import PretrainedConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import is_flash_attn_2_available, is_flash_attn_3_available

from salesrl_trl.build.checks.model import model_class
from salesrl_trl.errors import ConfigError

AUTO = "auto"
"""A value of `attn_implementation`: FlashAttention where it can be used, else SDPA."""
INSTALLER = "scripts/install_flash_attn.sh"


class _Flash(NamedTuple):
    is_installed: Callable[[], bool]
    oldest: tuple[int, int]
    """CUDA compute capability."""
    newest: tuple[int, int]


FLASH = {
    "flash_attention_3": _Flash(is_flash_attn_3_available, (9, 0), (9, 9)),  # made for Hopper
    "flash_attention_2": _Flash(is_flash_attn_2_available, (8, 0), (99, 9)),
}
"""FlashAttention's names in transformers, the fastest first."""


def choose_attention(
    asked: str | None, device: torch.device, *, in_16_bits: bool, model: PretrainedConfig | None
) -> tuple[str | None, str | None]:
    """The implementation for `from_pretrained`, and a line for the banner.

    Args:
        asked (`str`, *optional*):
            The setting `attn_implementation`. `None` leaves the choice to transformers.
        device (`torch.device`):
            The device of training.
        in_16_bits (`bool`):
            Whether the forward pass computes in 16 bits.
        model (`PretrainedConfig`, *optional*):
            The model's configuration. `None` for the small policy, which has every implementation.

    Raises:
        `ConfigError`: there is no such implementation, or it can't be used here.
    """
    if asked is None:
        return None, None
    if asked != AUTO:
        _check_name(asked)
        fault = _fault(asked, device, in_16_bits, model) if asked in FLASH else None
        if fault is not None:
            raise ConfigError(
                f"`attn_implementation` is {asked}, but {fault}. Expected an implementation that works here. Set "
                f"`attn_implementation: {AUTO}`, or sdpa."
            )
        return asked, f"attention: {asked}"
    faults = {name: _fault(name, device, in_16_bits, model) for name in FLASH}
    for name, fault in faults.items():
        if fault is None:
            return name, f"attention: {name}"
    chosen = "sdpa" if _has(model, "_supports_sdpa") else None  # transformers then takes eager
    return chosen, f"attention: {chosen or 'eager'}; {faults['flash_attention_2']}"


def _check_name(asked: str) -> None:
    names = [AUTO, "eager", *(each for each in ALL_ATTENTION_FUNCTIONS.valid_keys() if "|" not in each)]
    if asked in names or "/" in asked:  # a kernel of the hub
        return
    near = difflib.get_close_matches(asked, names, 1)
    guess = f" Did you mean {near[0]}?" if near else ""
    raise ConfigError(
        f"`attn_implementation` is {asked!r}. Expected one of: {', '.join(sorted(names))}; or a kernel of the hub, as "
        f"ORGANISATION/NAME.{guess}"
    )


def _fault(name: str, device: torch.device, in_16_bits: bool, model: PretrainedConfig | None) -> str | None:
    """The reason why this FlashAttention can't be used."""
    flash = FLASH[name]
    if device.type != "cuda":
        return "FlashAttention needs a GPU, and this run is on the CPU"
    if not in_16_bits:
        return "FlashAttention computes in 16 bits, and this run in float32"
    capability = torch.cuda.get_device_capability(device)
    if not flash.oldest <= capability <= flash.newest:
        return f"{name} is not made for this card (compute capability {capability[0]}.{capability[1]})"
    if not flash.is_installed():
        return f"{name} is not installed ({INSTALLER} installs it)"
    if not _has(model, "_supports_flash_attn"):
        return "this model has no FlashAttention"
    return None


def _has(model: PretrainedConfig | None, feature: str) -> bool:
    if model is None:
        return True
    kind = model_class(model)._model_mapping.get(type(model), None)
    return bool(getattr(kind, feature, False))
