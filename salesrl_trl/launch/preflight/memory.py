"""The stage `memory`: the number format of the policy's weights, and whether training fits into GPU memory.

16-bit weights are only trained if small updates survive: with DeepSpeed, adapters or stochastic rounding."""

from transformers.training_args import OptimizerNames
from transformers.utils import is_torchao_available

from salesrl_trl.errors import ConfigError
from salesrl_trl.launch import memory_estimate as memory
from salesrl_trl.launch import software
from salesrl_trl.launch.checks.folders import free_gib
from salesrl_trl.launch.checks.model import empty_model
from salesrl_trl.launch.checks.outcome import Findings
from salesrl_trl.launch.memory_estimate import NUMBER_BYTES, STOCHASTIC_OPTIM, Estimate, Setup
from salesrl_trl.launch.plan import Plan
from salesrl_trl.telemetry.device import GIB

MARGIN = 0.1  # an estimate that exceeds the GPU's memory by less than this share is a note, not a failure
STOCHASTIC_ARGS = "bf16_stochastic_round=True"  # of torchao's optimizer
LESS = "Use this GPU's `--preset`, `gradient_checkpointing: true` with `kept_activations_gib: 0`, a smaller batch, "
LESS += "`use_peft: true` or DeepSpeed."


def setup_of(plan: Plan, card_gib: float, prompt_tokens: int | None = None) -> Setup | None:
    """The training setup of a plan, on a GPU of this size. `None` if the architecture is not supported by the
    estimate. Raises `ConfigError` if no layer fits the adapters."""
    training, model = plan.config.training, plan.config.model
    shape = memory.shape_of(empty_model(*plan.config.policy_source), model)
    if shape is None:
        return None
    return Setup(
        training=training, model=model, shape=shape, card_gib=card_gib, dtype=model.dtype, optim=training.optim.value,
        prompt_tokens=plan.train.longest if prompt_tokens is None else prompt_tokens,
    )  # fmt: skip


def check_memory(plan: Plan, findings: Findings) -> None:
    """Choose the number format with a suitable optimizer, and compare the estimate with the GPU's memory."""
    training, model = plan.config.training, plan.config.model
    card, setup = software.card_here(training.device), None
    if model.model_name_or_path is not None and (card is not None or model.use_peft):
        setup = setup_of(plan, 0.0 if card is None else card.gib)
    if training.mode != "train":
        plan.dtype = model.dtype
        findings.skipped = f"nothing is trained in `mode: {training.mode}`"
        return
    if card is None or training.is_sharded:
        setup = None
    note = settle_precision(plan, setup)
    _check_disk(plan, findings)
    findings.notes([note])
    if card is None or setup is None:
        findings.skipped = "only unsharded runs of known models on a GPU are estimated; `step` measures the others"
        return
    estimated = setup.weighed(plan.dtype, training.optim.value)
    if estimated.kept_gib < setup.kept_gib:
        findings.add(f"`kept_activations_gib` is 0 in this run, because {setup.kept_gib:g} would not fit.")
        training.kept_activations_gib = 0.0
    _compare(estimated, card.used_gib, setup, findings)


def settle_precision(plan: Plan, setup: Setup | None) -> str | None:
    """Choose the number format of the weights, and the optimizer that it needs. `setup` is required for an estimate.

    Returns a line for the banner if the weights differ from the settings. Raises `ConfigError` if nothing fits.
    """
    model, training = plan.config.model, plan.config.training
    dtype, optim, optim_args = model.dtype, training.optim.value, (training.optim_args or "").replace(" ", "")
    autocast, by_deepspeed = training.bf16 or training.fp16, training.deepspeed_plugin is not None
    rounds = optim in (STOCHASTIC_OPTIM, "adamw_torch_4bit") and STOCHASTIC_ARGS in optim_args
    plan.dtype = dtype
    if dtype == "float32" or model.use_peft or (by_deepspeed and autocast) or rounds:
        return None
    is_default = optim in ("adamw_torch", "adamw_torch_fused")  # may be replaced
    exact = setup.weighed("float32", optim) if setup is not None and is_default else None
    if setup is None or exact is None or exact.fits:
        plan.dtype = "float32"
        computing = ", with forward and backward passes in 16 bits" if autocast else ""
        setting = f"`dtype: {dtype}`" if dtype in ("bfloat16", "float16") else "16-bit weights"
        return f"weights are trained in float32{computing}: {setting} would lose small updates"
    rounded = setup.weighed("bfloat16", STOCHASTIC_OPTIM)
    sizes = f"about {exact.needed_gib:.0f} GiB including generation, and the GPU has {exact.card_gib:.0f}"
    lack = f"full fine-tuning in float32 needs {sizes}"
    if is_torchao_available() and dtype != "float16" and rounded.fits:
        plan.dtype, training.optim, training.optim_args = "bfloat16", OptimizerNames(STOCHASTIC_OPTIM), STOCHASTIC_ARGS
        optimizer = f"torchao's 8-bit AdamW, about {rounded.needed_gib:.0f} GiB"
        return f"weights are trained in bf16 with stochastic rounding ({optimizer}), which is unbiased: {lack}"
    rounding = "`dtype: bfloat16` with torchao (`pip install torchao`), " if rounded.fits else ""
    remedies = f"{rounding}LoRA (`use_peft: true`), DeepSpeed (accelerate_configs/full.yaml), or `dtype: float32`"
    effect = "plain AdamW on 16-bit weights would lose nearly every update"
    raise ConfigError(f"{lack}; {effect}. Set one of: {remedies} to ignore this estimate.")


def _check_disk(plan: Plan, findings: Findings) -> None:
    """Compare the size of a full fine-tuning checkpoint with the free disk space: weights in the training format,
    optimizer moments, and DeepSpeed's float32 copies of 16-bit weights."""
    model, training = plan.config.model, plan.config.training
    if model.model_name_or_path is None or model.use_peft or training.save_strategy == "no":
        return
    in_16_bits = training.deepspeed_plugin is not None and (training.bf16 or training.fp16)
    number = 2 if in_16_bits else NUMBER_BYTES.get(plan.dtype or "auto", 4)
    states = (4 if in_16_bits else 0) + memory.moment_bytes(training.optim.value, 4 if in_16_bits else number)
    each = number + (0 if training.save_only_model else states)
    checkpoint, free = each * memory.parameter_count(*plan.config.policy_source) / GIB, free_gib(training.output_dir)
    findings.figures["checkpoint_gib"] = checkpoint
    if free < 2 * checkpoint:  # the previous one is kept until the new one is complete
        text = f"A checkpoint needs about {checkpoint:.1f} GiB, but `output_dir` has only {free:.1f} GiB of free disk."
        remedy = "Use an `output_dir` on a larger disk, or set `save_only_model: true`."
        findings.add(text, remedy, is_failure=free < checkpoint)


def _compare(estimated: Estimate, used_gib: float, setup: Setup, findings: Findings) -> None:
    """Note or fail if the estimate exceeds the GPU's memory."""
    card, needed = estimated.card_gib, estimated.needed_gib
    figures = {**estimated.peak.parts, "needed": needed, "card": card, "used": used_gib}
    findings.figures |= {f"{part.replace(' ', '_')}_gib": round(gib, 2) for part, gib in figures.items()}
    if not estimated.starts_engine:
        text = "vLLM's memory share does not fit the weights and one completion of full length: it would not start."
        findings.fail(text, f"Raise `vllm_gpu_memory_utilization`. {LESS}")
    elif not estimated.fits:
        is_tried = setup.model.dtype == "float32" and not setup.lora  # despite the estimate
        text = f"training needs about {needed:.1f} GiB ({estimated.peak.name}, ±{MARGIN:.0%}); the GPU has {card:.1f}."
        findings.add(text, LESS, is_failure=needed > (1 + MARGIN) * card and not is_tried)
    elif used_gib + needed > (1 + MARGIN) * card:
        text = f"training needs about {needed:.1f} of the GPU's {card:.1f} GiB, but {used_gib:.1f} are already in use."
        findings.fail(text, "Stop the processes that `nvidia-smi` lists, or set CUDA_VISIBLE_DEVICES to another GPU.")
