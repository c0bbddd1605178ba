"""TRL's and transformers' settings: additional checks, and the machine's device and dtype."""

import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import torch
from accelerate.utils import str_to_bool
from trl import GRPOConfig

from salesrl_trl.config.checks import RESHAPING, TRAINING, check, check_names, check_ranges, entry_of, load_object
from salesrl_trl.errors import ConfigError
from salesrl_trl.ground.process import cache_dir, installed
from salesrl_trl.update.correction import (
    AHEAD,
    BOUNDED,
    BYPASS,
    NONE,
    NORMALIZED,
    REJECTIONS,
    WEIGHTS,
    CorrectionSettings,
    bounds_of,
)

if TYPE_CHECKING:
    from salesrl_trl.generation.sampler import Sampler, Upstream


RUN_MODES = ("train", "rollouts", "rewards")
_WITHOUT_UPDATES = "Without updates: `mode: rollouts` generates and scores; `mode: rewards` scores made-up texts."
OF_VLLM = "vllm_.*|max_sampling_logp_difference|rollout_correction"  # settings without effect if vLLM is off
CLIPPED = ("grpo", "bnpo", "dr_grpo", "dapo")  # each `loss_type` whose ratio is clipped at 1 + `epsilon_high`


def check_numbers(args: GRPOConfig) -> None:
    """Raise `ConfigError` unless numbers unchecked by transformers and TRL are in range."""
    check_ranges(args, TRAINING)
    check(args.num_train_epochs != 0, f"`num_train_epochs` is 0. Expected a number above 0. {_WITHOUT_UPDATES}")
    expected = f"Expected at least 1, or -1 to use `num_train_epochs`. {_WITHOUT_UPDATES}"
    steps = args.max_steps
    check(isinstance(steps, int) and (steps == -1 or steps > 0), f"`max_steps` is {steps!r}. {expected}")


QUANTIZATIONS = ("fp8_per_channel", "fp8_per_tensor", "fp8_per_block")  # of vLLM, for 16-bit weights at load time


def follow_renames(args: GRPOConfig) -> None:
    """Set the field that transformers 5.24 renamed, and older releases lack, from the former name that TRL has."""
    if getattr(args, "activation_checkpointing", False) is None:
        args.activation_checkpointing = args.gradient_checkpointing
        args.activation_checkpointing_kwargs = args.gradient_checkpointing_kwargs


def reshaped_sampling(args: GRPOConfig) -> list[str]:
    """Settings that change the token distribution from softmax(logits / temperature), e.g. `"`top_p: 0.9`"`."""
    extra = args.generation_kwargs or {}
    values = {name: extra.get(name, getattr(args, name, None)) for name in RESHAPING}
    named = [f"`{name}: {value}`" for name, value in values.items() if value not in (None, *RESHAPING[name])]
    return [*named, "`vllm_structured_outputs_regex`"] if args.vllm_structured_outputs_regex else named


def compares_with_sampler(args: GRPOConfig) -> bool:
    """Whether the loss uses vLLM's own log-probs."""
    corrects = args.vllm_importance_sampling_correction and parsed_correction(args).is_used
    return bool(corrects) or args.off_policy_mask_threshold is not None


def check_sampling(args: GRPOConfig, engine: Mapping[str, object], lookahead: float) -> None:
    """Raise `ConfigError` if the sampler's and the trainer's log-probs are not comparable. `engine`: arguments of
    `vllm.LLM`. `lookahead`: `rollout_lookahead`."""
    corrects = args.vllm_importance_sampling_correction
    check(
        lookahead == 0 or not args.use_vllm or corrects,
        f"`rollout_lookahead` is {lookahead} with `vllm_importance_sampling_correction: false`: rollouts of earlier "
        "weights would not be corrected for. Expected the correction, or a lookahead of 0. Set one of them.",
    )
    can_correct = args.vllm_mode == "colocate" and corrects and not args.use_cpu
    quantization = engine.get("quantization")
    check(  # bitsandbytes is TRL's for `load_in_4bit`
        quantization in (None, "bitsandbytes", *(QUANTIZATIONS if can_correct else ())),
        f"`vllm_engine_kwargs` has the quantization {quantization!r}, so completions come from a slightly different "
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
        f"`vllm_engine_kwargs` has the logprobs_mode {logprobs_mode!r}, with which importance ratios would not be "
        "comparable. Expected 'processed_logprobs': remove it.",
    )
    reshaped = ", ".join(reshaped_sampling(args))
    sequences = corrects and parsed_correction(args).multiplies(mode_of(args))
    if lookahead:
        effect = "does not correct for `rollout_lookahead`"
    else:
        effect = "is wrong, and multiplied over a completion it nearly cancels the loss"
    check(
        not reshaped or not (lookahead or sequences),
        f"completions are sampled with {reshaped}. vLLM's log-probs belong to the reshaped distribution, the "
        f"trainer's to the whole vocabulary, so their ratio {effect}. Expected sampling by `temperature` alone, or "
        "`rollout_lookahead: 0` with `vllm_importance_sampling_correction: false`.",
    )


@dataclass(frozen=True, kw_only=True)
class RolloutCorrection:
    """`rollout_correction`, validated."""

    weights: Annotated[str, WEIGHTS] = BOUNDED
    """`bounded` weights are those of `vllm_importance_sampling_mode`. `normalized` ones are divided by their mean over
    the generation batch, which requires a forward pass for old log-probs. `none` only masks. `bypass` makes the loss's
    clipped ratio relative to the sampler instead of the policy at the start of the step (verl's `bypass_mode`)."""
    reject: dict[str, object] = field(default_factory=dict)
    """Thresholds by verl's names: tokens (`token_k1`), or completions by the sum, mean or maximum of their tokens
    (`seq_mean_k1`, the geometric mask), are masked beyond them. k1 requires ratios, `[0.99, 1.01]`; k2 and k3 require
    the largest value in nats."""

    def __post_init__(self) -> None:
        check_names("rollout_correction.reject", self.reject, REJECTIONS)
        self.bounds()

    @property
    def is_used(self) -> bool:
        """Whether the ratio of policy to sampler has an effect."""
        return self.weights != NONE or bool(self.reject)

    def multiplies(self, mode: str) -> bool:
        """Whether ratios of a completion's tokens are combined. `mode` only matters to weights that it bounds."""
        by_mode = self.weights in (BOUNDED, NORMALIZED) and mode.startswith("sequence_")
        return by_mode or any(name.startswith("seq_") for name in self.reject)

    def bounds(self) -> dict[str, tuple[float, float]]:
        return {name: bounds_of(name, threshold) for name, threshold in self.reject.items()}


def mode_of(args: GRPOConfig) -> str:
    """The mode in use. A setting that is not set stays `None`, so that copies with another lookahead choose again."""
    default: str = AHEAD if args.most_lookahead else GRPOConfig.vllm_importance_sampling_mode
    return args.vllm_importance_sampling_mode or default


def clip_of(args: GRPOConfig) -> float | None:
    """`epsilon_high`, or by default, where the loss clips a ratio to the sampler (without vLLM, always), the bound for
    all updates since then, if `epsilon` is for one generation batch's: with 0.2 and 2 batches ahead, 1.2^3 - 1."""
    is_to_sampler = not args.use_vllm or parsed_correction(args).weights == BYPASS
    if args.epsilon_high is None and args.most_lookahead and is_to_sampler and args.loss_type in CLIPPED:
        updates = max(1.0, args.window / args.gradient_accumulation_steps)  # of a generation batch
        return float((1 + args.epsilon) ** (1 + args.most_lookahead / updates) - 1)
    return cast("float | None", args.epsilon_high)


def parsed_correction(args: GRPOConfig) -> RolloutCorrection:
    """`rollout_correction`, or what replaces it by default: with a lookahead, `bypass` if neither the mode nor its
    bounds are set, and the loss clips PPO's ratio."""
    given = (args.rollout_correction, args.vllm_importance_sampling_mode)
    bounds = [f"vllm_importance_sampling_{name}" for name in ("clip_min", "clip_max", "cap")]
    is_clipped = args.loss_type in CLIPPED and args.importance_sampling_level == "token"
    is_default = given == (None, None) and all(getattr(args, name) == getattr(GRPOConfig, name) for name in bounds)
    if is_default and is_clipped and args.most_lookahead:
        return RolloutCorrection(weights=BYPASS)
    return entry_of("rollout_correction", RolloutCorrection, args.rollout_correction)


def settle_correction(args: GRPOConfig) -> list[str]:
    """Check the correction. Returns log lines about what a lookahead changes of it, unless the user has set that."""
    is_chosen, corrects = args.vllm_importance_sampling_mode is None, args.vllm_importance_sampling_correction
    correction, is_given = parsed_correction(args), args.rollout_correction is not None
    check(
        corrects or not is_given or correction == RolloutCorrection(),
        "`rollout_correction` is set with `vllm_importance_sampling_correction: false`, which disables it. Keep one.",
    )
    notes = list[str]()
    if is_chosen and args.most_lookahead and args.use_vllm and corrects:
        if correction.weights in (BOUNDED, NORMALIZED):
            reason = "TRL's default, sequence_mask, drops a whole completion whose ratio is beyond the bounds"
            notes.append(f"`vllm_importance_sampling_mode`: {AHEAD} with a lookahead, because {reason}")
        elif not is_given:
            found = "`rollout_correction`: with a lookahead, the clipped ratio is relative to the sampler"
            notes.append(f"{found}, because importance weights made a language model's reward dip")
    if args.epsilon_high is None and (chosen := clip_of(args)):
        notes.append(f"`epsilon_high`: {chosen:.2f}, as the ratio to the sampler spans all updates of the lookahead")
    return notes


def correction_of(args: GRPOConfig) -> CorrectionSettings:
    given = parsed_correction(args)
    return CorrectionSettings(
        mode=mode_of(args),
        low=args.vllm_importance_sampling_clip_min,
        high=args.vllm_importance_sampling_clip_max,
        weights=given.weights,
        reject=given.bounds(),
    )


def load_sampler(path: str | None) -> "Callable[[Upstream], Sampler] | None":
    """The class named by the setting `sampler`, if any. Raises `ConfigError` if it lacks a method."""
    if path is None:
        return None
    sampler, expected = load_object(path, "sampler"), "`salesrl_trl.generation.sampler.Sampler`"
    has_methods = all(callable(getattr(sampler, name, None)) for name in ("start", "greedily"))
    check(has_methods, f"`sampler` is {path!r}. Expected a class with the methods of {expected}.")
    return cast("Callable[[Upstream], Sampler]", sampler)


def keep_folders(trackers: Iterable[str]) -> list[str]:
    """Disable trackers' uploads of whole folders. Returns a log line for each that was enabled."""
    names = ("WANDB_LOG_MODEL", "COMET_LOG_ASSETS", "HF_MLFLOW_LOG_ARTIFACTS", "HF_DAGSHUB_LOG_ARTIFACTS",
             "CLEARML_LOG_MODEL", "HF_DVCLIVE_LOG_MODEL")  # fmt: skip
    asked = {"CLEARML_LOG_MODEL": "true"} if "clearml" in trackers else {}  # its default
    on = [name for name in names if (asked | os.environ).get(name, "false").lower() not in ("false", "0", "")]
    os.environ |= dict.fromkeys(on, "false")
    reason = "it would also upload prompts and completions in flight; `push_to_hub` does not"
    return [f"off: {name}: {reason}" for name in on]


_OLDEST_WITH_BF16 = (8, 0)
"""CUDA compute capability of Ampere. Older GPUs emulate bf16, which is slower than float32."""


def settle(use_cpu: bool, bf16: bool | None, fp16: bool) -> tuple[bool, bool, bool, list[str]]:
    """Resolve device and precision on this machine: `use_cpu`, `bf16`, `fp16`, and log lines about differences from
    TRL. Without a GPU, always use the CPU. A `bf16` of `None` is TRL's default, bf16 unless `fp16` is set; it becomes
    float32 where bf16 is slow, while `True` is kept.

    The result also replaces the precision in the environment variables set by `accelerate launch`, for accelerate and
    DeepSpeed. Raises `ConfigError` if FSDP is misconfigured, or `fp16` is set on a CPU.
    """
    on_cpu = use_cpu or _is_on("ACCELERATE_USE_CPU") or not torch.accelerator.is_available()
    if has_fsdp():
        _check_fsdp(on_cpu)
    expected = "where accelerate does not support it. Expected a GPU, or float32: remove `fp16`."
    check(not (on_cpu and fp16), f"`fp16` is true, but this run is on a CPU, {expected}")
    notes, is_bf16 = list[str](), not fp16 if bf16 is None else bf16
    if is_bf16 and bf16 is None and (on_cpu or _emulates_bf16()):
        is_bf16 = False
        notes.append("precision: float32, as TRL's default bf16 is slow on this device; `bf16: true` keeps bf16")
    if on_cpu and _is_on("ACCELERATE_USE_DEEPSPEED"):
        import deepspeed.ops  # an optional dependency

        # without this entry DeepSpeed would try to compile all operators, not just the one it needs
        vars(deepspeed.ops)["__compatible_ops__"] = {"deepspeed_shm_comm": False}
    if "ACCELERATE_MIXED_PRECISION" in os.environ:
        os.environ["ACCELERATE_MIXED_PRECISION"] = "bf16" if is_bf16 else "fp16" if fp16 else "no"
    if fields := os.environ.get("ACCELERATE_CONFIG_DS_FIELDS"):
        # with `mixed_precision` in this list, DeepSpeed only accepts the file's precision
        kept = [name for name in fields.split(",") if name != "mixed_precision"]
        os.environ["ACCELERATE_CONFIG_DS_FIELDS"] = ",".join(kept)
    return on_cpu, is_bf16, fp16, notes


def _is_on(variable: str) -> bool:
    return bool(str_to_bool(os.environ.get(variable, "false")))


def _emulates_bf16() -> bool:
    """For NVIDIA GPUs; transformers checks other vendors'."""
    is_nvidia = torch.cuda.is_available() and torch.version.hip is None
    return is_nvidia and torch.cuda.get_device_capability(int(os.environ.get("LOCAL_RANK", "0"))) < _OLDEST_WITH_BF16


def has_fsdp() -> bool:
    return _is_on("ACCELERATE_USE_FSDP")


def _check_fsdp(on_cpu: bool) -> None:
    effect = "and would silently train full copies. Expected GPUs, or accelerate_configs/zero3.yaml."
    check(not on_cpu, f"the accelerate configuration enables FSDP, but this run is on a CPU, {effect}")
    found = "the accelerate configuration has `fsdp_cpu_ram_efficient_loading: true`"
    effect = "only one process loads weights, and the others' reference policies have none"
    expected = "Expected false, as in accelerate_configs/fsdp2.yaml."
    check(not _is_on("FSDP_CPU_RAM_EFFICIENT_LOADING"), f"{found}: {effect}. {expected}")


COMPILERS = {
    "VLLM_CACHE_ROOT": "vllm",  # the engine's torch.compile results, model class info, autotuning
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TRITON_CACHE_DIR": "triton",
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
    "CUDA_CACHE_PATH": "cuda",
}
"""Environment variables for the folders of compiled code, with the subfolders assigned to them. Read on first use."""


def compile_folder(setting: str | None) -> Path | None:
    """The folder of `compile_cache_dir` for the installed versions; `None` without the setting."""
    if not setting:
        return None
    base = cache_dir() / "compiled" if setting == "auto" else Path(setting).expanduser().absolute()
    return base / f"vllm-{installed('vllm')}_torch-{installed('torch')}"


def compile_into(folder: Path) -> None:
    """Make all compilers of this process and its children cache there. Raises `ConfigError` if it is not writable."""
    folders = {name: folder / subfolder for name, subfolder in COMPILERS.items()}
    with suppress(OSError):
        for each in folders.values():
            each.mkdir(parents=True, exist_ok=True)
    if not all(each.is_dir() and os.access(each, os.W_OK) for each in folders.values()):
        remedy = "Name another folder, or remove the setting, so that each library uses its own cache."
        raise ConfigError(f"`compile_cache_dir` resolves to {folder}, which is not writable. {remedy}")
    os.environ |= {name: str(each) for name, each in folders.items()}
