"""Checks of TRL's and transformers' settings that these do not make: numbers, sampling, trackers' uploads."""

import os
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, cast

from trl import GRPOConfig

from salesrl_trl.config.checks import check, load_object
from salesrl_trl.config.ranges import RESHAPING, TRAINING, check_ranges

if TYPE_CHECKING:
    from salesrl_trl.generation.sampler import Sampler, Upstream

RUN_MODES = ("train", "rollouts", "rewards")
_WITHOUT_UPDATES = "Without updates: `mode: rollouts` generates and scores; `mode: rewards` scores made-up texts."


def check_numbers(args: GRPOConfig) -> None:
    """Raise `ConfigError` unless numbers that neither transformers nor TRL checks lie in their ranges."""
    check_ranges(args, TRAINING)
    check(args.num_train_epochs != 0, f"`num_train_epochs` is 0. Expected a number, more than 0. {_WITHOUT_UPDATES}")
    steps = args.max_steps
    check(
        isinstance(steps, int) and (steps == -1 or steps > 0),
        f"`max_steps` is {steps!r}. Expected at least 1, or -1 for as many as `num_train_epochs` says. "
        f"{_WITHOUT_UPDATES}",
    )


def check_evaluation(args: GRPOConfig, processes: int) -> None:
    """Raise `ConfigError` unless an evaluation's batch holds whole groups."""
    batch, group = args.per_device_eval_batch_size * processes, args.num_generations_eval or args.num_generations
    check(
        batch % group == 0,
        f"an evaluation's batch holds {batch} completions ({args.per_device_eval_batch_size} per device x "
        f"{processes} processes), which `num_generations_eval` {group} does not divide. Expected whole groups. "
        "Change `per_device_eval_batch_size` or `num_generations_eval`.",
    )


ADAPTIVE = ("reduce_lr_on_plateau", "greedy")
"""Schedules that move the learning rate by a figure of evaluations, and take a reward for a loss."""
QUANTIZATIONS = ("fp8_per_channel", "fp8_per_tensor", "fp8_per_block")
"""Formats that vLLM makes of 16-bit weights while it reads them."""


def reshaped_sampling(args: GRPOConfig) -> list[str]:
    """Settings that make the distribution of tokens another one than softmax(logits / temperature), such as
    `"`top_p: 0.9`"`."""
    extra = args.generation_kwargs or {}
    values = {name: extra.get(name, getattr(args, name, None)) for name in RESHAPING}
    named = [f"`{name}: {value}`" for name, value in values.items() if value not in (None, *RESHAPING[name])]
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
    quantization = engine.get("quantization")
    check(  # bitsandbytes is TRL's for `load_in_4bit`
        quantization in (None, "bitsandbytes", *(QUANTIZATIONS if can_correct else ())),
        f"`vllm_engine_kwargs` has the quantization {quantization!r}, so completions are those of a slightly other "
        "policy. Expected none; or on a GPU, with `vllm_mode: colocate` and `vllm_importance_sampling_correction: "
        f"true`, one of: {', '.join(QUANTIZATIONS)}.",
    )
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


def load_sampler(path: str | None) -> "Callable[[Upstream], Sampler] | None":
    """The class that the setting `sampler` names, if any. Raises `ConfigError` if it lacks a method."""
    if path is None:
        return None
    sampler = load_object(path, "sampler")
    check(
        all(callable(getattr(sampler, name, None)) for name in ("start", "greedily")),
        f"`sampler` is {path!r}. Expected a class with the methods of `salesrl_trl.generation.sampler.Sampler`.",
    )
    return cast("Callable[[Upstream], Sampler]", sampler)


def keep_folders(trackers: Iterable[str]) -> list[str]:
    """Switch off the uploads of whole folders by trackers that are to begin. Returns a line for each that was on."""
    names = ("WANDB_LOG_MODEL", "COMET_LOG_ASSETS", "HF_MLFLOW_LOG_ARTIFACTS", "HF_DAGSHUB_LOG_ARTIFACTS",
             "CLEARML_LOG_MODEL", "HF_DVCLIVE_LOG_MODEL")  # fmt: skip
    asked = {"CLEARML_LOG_MODEL": "true"} if "clearml" in trackers else {}  # its default
    on = [name for name in names if (asked | os.environ).get(name, "false").lower() not in ("false", "0", "")]
    os.environ |= dict.fromkeys(on, "false")
    return [f"off: {name}: it uploads prompts and completions under way too; `push_to_hub` does not" for name in on]
