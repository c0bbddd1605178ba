"""The sampling settings: parameters that reshape the distribution of tokens, and a generation engine of the user's."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, cast

from salesrl_trl.config.checks import check, load_object

if TYPE_CHECKING:
    from salesrl_trl.generation.sampler import Sampler, Upstream

QUANTIZATIONS = ("fp8_per_channel", "fp8_per_tensor", "fp8_per_block")
"""Formats that vLLM makes of 16-bit weights while it reads them."""

RESHAPING: dict[str, tuple[object, ...]] = {
    "top_p": (None, 1),
    "top_k": (None, 0, -1),
    "min_p": (None, 0),
    "repetition_penalty": (None, 1),
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    "min_tokens": (None, 0),
    "logit_bias": (None, {}),
    "bad_words": (None, []),
    "allowed_token_ids": (None, []),
    "structured_outputs": (None,),
}
"""Sampling parameters that reshape the distribution of tokens, and the values with which they do not."""


def reshaping(parameters: Mapping[str, object]) -> list[str]:
    """The parameters that reshape the distribution, such as `"`top_p: 0.9`"`."""
    return [f"`{name}: {value}`" for name, value in parameters.items() if value not in RESHAPING[name]]


def load_sampler(path: str) -> "Callable[[Upstream], Sampler]":
    """The class that the setting `sampler` names.

    Raises:
        `ConfigError`: there is no such class, or it lacks a method.
    """
    sampler = load_object(path, "sampler")
    lacking = [name for name in ("start", "greedily") if not callable(getattr(sampler, name, None))]
    check(
        not lacking,
        f"`sampler` is {path!r}, which has no {' and no '.join(f'`{name}`' for name in lacking)}. "
        "Expected a class with the methods of `salesrl_trl.generation.sampler.Sampler`.",
    )
    return cast("Callable[[Upstream], Sampler]", sampler)


def check_quantization(quantization: object, *, can_correct: bool) -> None:
    """Refuse a quantised engine without a GPU of this process, or without the correction for its distribution."""
    if quantization in (None, "bitsandbytes"):  # the latter is TRL's for `load_in_4bit`
        return
    expected = ", ".join(QUANTIZATIONS)
    check(
        quantization in QUANTIZATIONS,
        f"`vllm_engine_kwargs` has the quantization {quantization!r}. Expected one of: {expected}.",
    )
    check(
        can_correct,
        f"`vllm_engine_kwargs` has the quantization {quantization!r}, so completions are those of a slightly other "
        "policy. Expected none, or a GPU with `vllm_mode: colocate` and `vllm_importance_sampling_correction: true`.",
    )
