"""The sampling settings: parameters that reshape the distribution of tokens, and a generation engine of the user's."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, cast

from trl import GRPOConfig

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


def reshaped_sampling(args: GRPOConfig) -> list[str]:
    """Settings that make the distribution of tokens another one than softmax(logits / temperature), such as
    `"`top_p: 0.9`"`."""
    extra = args.generation_kwargs or {}
    values = {name: extra.get(name, getattr(args, name, None)) for name in RESHAPING}
    named = [f"`{name}: {value}`" for name, value in values.items() if value not in RESHAPING[name]]
    return named + ["`vllm_structured_outputs_regex`"] * bool(args.vllm_structured_outputs_regex)


def compares_with_sampler(args: GRPOConfig) -> bool:
    """Whether the loss reads vLLM's own log-probs."""
    return bool(args.vllm_importance_sampling_correction) or args.off_policy_mask_threshold is not None


def check_sampling(args: GRPOConfig, engine: Mapping[str, object], lookahead: float) -> None:
    """Raise `ConfigError` where log-probs of the sampler and of the trainer can't be compared. `engine`: arguments of
    `vllm.LLM`. `lookahead`: `rollout_lookahead`."""
    corrects = args.vllm_importance_sampling_correction
    check(
        lookahead == 0 or not args.use_vllm or corrects,
        f"`rollout_lookahead` is {lookahead} with `vllm_importance_sampling_correction: false`: nothing would correct "
        "for rollouts of earlier weights. Expected the correction, or a lookahead of 0. Set one of them.",
    )
    can_correct = args.vllm_mode == "colocate" and corrects and not args.use_cpu
    check_quantization(engine.get("quantization"), can_correct=can_correct)
    temperature = (args.generation_kwargs or {}).get("temperature", args.temperature)
    check(
        temperature == args.temperature,
        f"`generation_kwargs` has the temperature {temperature}, but log-probs are computed at `temperature: "
        f"{args.temperature}`. Expected one temperature: set `temperature` alone.",
    )
    if not args.use_vllm or not compares_with_sampler(args):
        return
    logprobs_mode = engine.get("logprobs_mode", "processed_logprobs")
    check(
        logprobs_mode == "processed_logprobs",
        f"`vllm_engine_kwargs` has the logprobs_mode {logprobs_mode!r}, with which importance ratios would "
        "compare different things. Expected 'processed_logprobs': leave it out.",
    )
    reshaped = ", ".join(reshaped_sampling(args))
    sequences = corrects and args.vllm_importance_sampling_mode.startswith("sequence_")
    if lookahead:
        effect = "does not correct for `rollout_lookahead`"
    else:
        effect = "is wrong, and multiplied over a completion it leaves little of the loss"
    check(
        not reshaped or not (lookahead or sequences),
        f"completions are sampled with {reshaped}. vLLM's log-probs are those of the reshaped distribution, the "
        f"trainer's those of the whole vocabulary, so their ratio {effect}. Expected sampling by `temperature` alone, "
        "or `rollout_lookahead: 0` with `vllm_importance_sampling_correction: false`.",
    )


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
