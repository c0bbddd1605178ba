"""Checks of TRL's and transformers' settings: numbers, sizes that go together, the schedule, sampling.

Owns what would be refused later, or without advice. `training` calls it, `preflight` for evaluations, and the trainer
after an evaluation.
"""

import os
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, cast

import torch
from transformers import get_scheduler
from transformers.trainer_utils import SchedulerType
from trl import GRPOConfig

from salesrl_trl.config.checks import check, load_object, structure
from salesrl_trl.config.ranges import EVERY, RESHAPING, TRAINING, check_ranges
from salesrl_trl.errors import ConfigError, Refusals

if TYPE_CHECKING:
    from salesrl_trl.generation.sampler import Sampler, Upstream

RUN_MODES = ("train", "rollouts", "rewards")
_WITHOUT_UPDATES = "Without updates: `mode: rollouts` generates and scores; `mode: rewards` scores made-up texts."


def check_numbers(args: GRPOConfig) -> None:
    """Raise `ConfigError` unless numbers that neither transformers nor TRL checks lie in their ranges."""
    of_steps = {name: getattr(args, name.replace("_steps", "_strategy")) == "steps" for name in EVERY}
    every, refused = {name: EVERY[name] for name, is_used in of_steps.items() if is_used}, Refusals()
    with refused.of(args, "num_train_epochs"):
        epochs = args.num_train_epochs
        check(epochs != 0, f"`num_train_epochs` is {epochs!r}. Expected a number, more than 0. {_WITHOUT_UPDATES}")
    refused.each(lambda: check_ranges(args, TRAINING | every))
    with refused.of(args, "max_steps"):
        steps = args.max_steps
        check(
            isinstance(steps, int) and (steps == -1 or steps > 0),
            f"`max_steps` is {steps!r}. Expected at least 1, or -1 for as many as `num_train_epochs` says. "
            f"{_WITHOUT_UPDATES}",
        )
    refused.tell()


def check_sizes(args: GRPOConfig) -> None:
    """Raise `ConfigError` unless groups, batches and processes go together."""
    refused, processes = Refusals(), int(os.environ.get("WORLD_SIZE", "1"))  # transformers' number is set later
    with refused.of(args, "num_generations"):
        check(
            args.num_generations >= 2,
            f"`num_generations` is {args.num_generations}. Expected at least 2: GRPO compares a prompt's completions.",
        )
    refused.check(
        lambda: not args.auto_find_batch_size,
        "`auto_find_batch_size` is true, which would take groups apart. Expected false. Set a lower "
        "`per_device_train_batch_size` and more `gradient_accumulation_steps` instead.",
    )
    with refused.of(args, "generation_batch_size"):
        check(
            args.generation_batch_size is None or args.steps_per_generation is None,
            "`generation_batch_size` and `steps_per_generation` are both given. Expected one of them: leave one out.",
        )
    with refused:
        split = args.vllm_tensor_parallel_size
        check(
            not args.use_vllm or args.vllm_mode == "server" or processes % split == 0,
            f"`vllm_tensor_parallel_size` is {split}, and there are {processes} processes. Expected a divisor: each "
            "engine takes the GPUs of so many processes. Launch more, or set it to 1.",
        )
    with refused:
        _check_batch(args, processes)
    with refused:
        if args.eval_strategy != "no":
            check_evaluation(args, processes)
    refused.tell()


def _check_batch(args: GRPOConfig, processes: int) -> None:
    """Raise `ConfigError` unless a generation batch holds whole micro-batches and whole groups."""
    steps = args.steps_per_generation or args.gradient_accumulation_steps
    micro_batch = args.per_device_train_batch_size * processes
    made = f"{args.per_device_train_batch_size} per device x {processes} processes"
    if args.generation_batch_size is None:
        batch, made = micro_batch * steps, f"{made} x {steps} steps"
    else:
        batch = args.generation_batch_size
        check(
            batch % micro_batch == 0,
            f"`generation_batch_size` is {batch}, no multiple of a micro-batch of {micro_batch} ({made}). "
            f"Expected whole micro-batches: {max(batch // micro_batch, 1) * micro_batch}, for example.",
        )
    check(
        batch % args.num_generations == 0,
        f"a generation batch holds {batch} completions ({made}), which `num_generations` {args.num_generations} "
        "does not divide. Expected whole groups. Change `per_device_train_batch_size`, "
        "`gradient_accumulation_steps` or `num_generations`.",
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


def check_mode(mode: str) -> None:
    """Refuse several processes for rewards."""
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    check(
        mode != "rewards" or processes == 1,
        f"`mode: rewards` was launched with {processes} processes, and needs no GPU. Expected one: launch with "
        "`python recipes/RECIPE.py --mode rewards`.",
    )


ADAPTIVE = ("reduce_lr_on_plateau", "greedy")
"""Schedules that move the learning rate by a figure of evaluations."""


def settle_schedule(args: GRPOConfig) -> None:
    """Let an adaptive schedule follow the reward of evaluations, unless the settings name another figure.

    Raises `ConfigError` if the schedule can't be built from its arguments, or there are no evaluations to follow.
    """
    try:
        name = SchedulerType(args.lr_scheduler_type).value
    except ValueError:
        names = ", ".join(kind.value for kind in SchedulerType)
        raise ConfigError(f"`lr_scheduler_type` is {args.lr_scheduler_type!r}. Expected one of: {names}.") from None
    kwargs: dict[str, object] = structure("lr_scheduler_kwargs", args.lr_scheduler_kwargs or {}, dict)
    if name in ADAPTIVE:
        check(
            getattr(args.eval_strategy, "value", args.eval_strategy) != "no",
            f"`lr_scheduler_type: {name}` moves the learning rate by a figure of evaluations, and `eval_strategy` is "
            "no. Expected evaluations during training. Set `eval_strategy: steps` and `eval_steps`.",
        )
        args.metric_for_best_model = f"eval_{(args.metric_for_best_model or 'reward').removeprefix('eval_')}"
        if args.greater_is_better is None:
            args.greater_is_better = not args.metric_for_best_model.endswith("loss")
        kwargs.setdefault("mode", "max" if args.greater_is_better else "min")
    args.lr_scheduler_kwargs = kwargs or None
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=args.learning_rate)
    try:
        get_scheduler(name, optimizer, 0, 1, kwargs)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"`lr_scheduler_type: {name}` with `lr_scheduler_kwargs: {kwargs}` can't be built: {error}. Expected the "
            "arguments of transformers' schedule of this name. Correct `lr_scheduler_kwargs`."
        ) from error


def follow(figures: Mapping[str, float | None], args: GRPOConfig, schedule: Any) -> None:
    """Let an adaptive schedule see an evaluation. One in which nothing could be scored moves nothing. `schedule` is
    `None` before the first step. Raises `ConfigError` where evaluations have no such figure."""
    if SchedulerType(args.lr_scheduler_type).value not in ADAPTIVE:
        return
    name = args.metric_for_best_model
    check(
        name in figures,
        f"`metric_for_best_model` is {name}, which evaluations do not have. Expected one of: "
        f"{', '.join(sorted(figures))}.",
    )
    value = figures[name]
    if schedule is not None and value is not None:
        schedule.step(value)


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


def load_sampler(path: str | None) -> "Callable[[Upstream], Sampler] | None":
    """The class that the setting `sampler` names, if any. Raises `ConfigError` if it lacks a method."""
    if path is None:
        return None
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


def keep_folders(trackers: Iterable[str]) -> list[str]:
    """Switch off the uploads of whole folders by trackers that are to begin. Returns a line for each that was on."""
    names = ("WANDB_LOG_MODEL", "COMET_LOG_ASSETS", "HF_MLFLOW_LOG_ARTIFACTS", "HF_DAGSHUB_LOG_ARTIFACTS",
             "CLEARML_LOG_MODEL", "HF_DVCLIVE_LOG_MODEL")  # fmt: skip
    asked = {"CLEARML_LOG_MODEL": "true"} if "clearml" in trackers else {}  # its default
    on = [name for name in names if (asked | os.environ).get(name, "false").lower() not in ("false", "0", "")]
    os.environ |= dict.fromkeys(on, "false")
    return [f"off: {name}: it uploads prompts and completions under way too; `push_to_hub` does not" for name in on]
