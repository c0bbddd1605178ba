"""The stage `memory`: the number format of the policy's weights, and whether training fits the card.

AdamW's updates at a learning rate of 1e-6 are mostly smaller than half the distance between two bf16 numbers. So
weights in training have 16 bits only where something keeps what is lost: DeepSpeed's float32 copies, or LoRA's float32
adapters. In full fine-tuning they are float32 with 16-bit autocast if memory is enough, or else bf16 with stochastic
rounding, by torchao's 8-bit AdamW.
"""

from collections.abc import Callable
from dataclasses import replace

from transformers.training_args import OptimizerNames
from transformers.utils import is_torchao_available

from salesrl_trl.errors import ConfigError
from salesrl_trl.launch import memory_estimate as memory
from salesrl_trl.launch import software
from salesrl_trl.launch.checks.folders import free_gib
from salesrl_trl.launch.checks.model import empty_model
from salesrl_trl.launch.checks.outcome import Findings
from salesrl_trl.launch.memory_estimate import NUMBER_BYTES, STOCHASTIC_OPTIM, Estimate, ModelShape, Setup
from salesrl_trl.launch.plan import Plan
from salesrl_trl.telemetry.device import GIB

MARGIN = 0.1  # an estimate that is above the card's memory by less than this share is a note, and no failure
STOCHASTIC_ARGS = "bf16_stochastic_round=True"  # of torchao's optimizer
LESS = (
    "Take a `--preset` of this card, `gradient_checkpointing: true`, a smaller `per_device_train_batch_size`, LoRA "
    "(`use_peft: true`) or DeepSpeed over several cards."
)
Weigh = Callable[[str, str], Estimate]  # from a number format of weights and an optimizer's name in transformers


def policy_shape(plan: Plan) -> ModelShape | None:
    """The policy's figures, with adapters if they are trained. Raises `ConfigError` if these have no place."""
    return memory.shape_of(empty_model(*plan.config.policy_source), plan.config.model)


def weigher(setup: Setup, card_gib: float) -> Weigh:
    """Weighs the setup with another number format and another optimizer."""
    return lambda dtype, optim: memory.estimate(replace(setup, dtype=dtype, optim=optim), card_gib)


def check_memory(plan: Plan, findings: Findings) -> None:
    """Choose the number format, with an optimizer that suits it, and compare the estimate with the card."""
    training, model = plan.config.training, plan.config.model
    card, shape = software.card_here(training.device), None
    if model.model_name_or_path is not None and (card is not None or model.use_peft):
        shape = policy_shape(plan)
    if training.mode != "train":
        plan.dtype = model.dtype
        findings.skipped = f"nothing is trained in `mode: {training.mode}`"
        return
    setup = None
    if shape is not None and card is not None and not training.is_sharded:
        setup = Setup(
            training=training, model=model, shape=shape, prompt_tokens=plan.train.longest, dtype=model.dtype,
            optim=training.optim.value,
        )  # fmt: skip
    note = settle_precision(plan, None if setup is None or card is None else weigher(setup, card.gib))
    _check_disk(plan, findings)
    findings.notes([note])
    if setup is None or card is None:
        findings.skipped = "there is no estimate for this model and these processes; the stage `step` measures"
        return
    plan.estimate = memory.estimate(replace(setup, dtype=plan.dtype, optim=training.optim.value), card.gib)
    _compare(plan.estimate, model.dtype == "float32" and not model.use_peft, findings)
    used, needed = card.used_gib(), plan.estimate.needed_gib
    findings.figures["used_gib"] = used
    if used is not None and plan.estimate.fits and used + needed > (1 + MARGIN) * card.gib:
        findings.fail(
            f"training takes about {needed:.1f} GiB of the card's {card.gib:.1f}, and {used:.1f} are in use now, by "
            f"{card.users() or 'processes that the driver does not name here'}.",
            "End them, or choose another card by CUDA_VISIBLE_DEVICES.",
        )


def settle_precision(plan: Plan, weigh: Weigh | None) -> str | None:
    """Choose the number format of the weights, and the optimizer that it needs. `weigh`: if the memory is known.

    Returns a line for the banner, if the weights are not as the settings say. Raises `ConfigError` if none fits.
    """
    model, training = plan.config.model, plan.config.training
    dtype, optim, optim_args = model.dtype, training.optim.value, (training.optim_args or "").replace(" ", "")
    autocast, by_deepspeed = training.bf16 or training.fp16, training.deepspeed_plugin is not None
    rounds = optim in (STOCHASTIC_OPTIM, "adamw_torch_4bit") and STOCHASTIC_ARGS in optim_args
    plan.dtype = dtype
    if dtype == "float32" or model.use_peft or (by_deepspeed and autocast) or rounds:
        return None
    is_default = optim in ("adamw_torch", "adamw_torch_fused")  # which may be replaced
    exact = weigh("float32", optim) if weigh is not None and is_default and not training.is_sharded else None
    if weigh is None or exact is None or exact.fits:
        plan.dtype = "float32"
        computing = "computed in 16 bits" if autocast else "computed in float32 too"
        setting = f"`dtype: {dtype}`" if dtype in ("bfloat16", "float16") else "16-bit weights"
        return f"weights are trained in float32 and {computing}: {setting} would lose small updates"
    rounded = weigh("bfloat16", STOCHASTIC_OPTIM)
    lack = (
        f"full fine-tuning in float32 takes about {exact.needed_gib:.0f} GiB, generation included, and the card has "
        f"{exact.card_gib:.0f}"
    )
    if is_torchao_available() and dtype != "float16" and rounded.fits:
        plan.dtype, training.optim, training.optim_args = "bfloat16", OptimizerNames(STOCHASTIC_OPTIM), STOCHASTIC_ARGS
        return (
            "weights are trained in bf16 with stochastic rounding (torchao's 8-bit AdamW, about "
            f"{rounded.needed_gib:.0f} GiB), which keeps small updates on average: {lack}"
        )
    rounding = "`dtype: bfloat16` with torchao (`pip install torchao`), " if rounded.fits else ""
    raise ConfigError(
        f"{lack}; in 16 bits plain AdamW would lose nearly every update. Set one of: {rounding}LoRA (`use_peft: "
        "true`), DeepSpeed over several GPUs (accelerate_configs/full.yaml), or `dtype: float32`, which is tried "
        "without this estimate."
    )


def _check_disk(plan: Plan, findings: Findings) -> None:
    """Hold a checkpoint of a run that trains all weights against the free disk: the weights in training's format, the
    optimizer's moments, and DeepSpeed's float32 copies of 16-bit weights."""
    model, training = plan.config.model, plan.config.training
    if model.model_name_or_path is None or model.use_peft or training.save_strategy == "no":
        return
    in_16_bits = training.deepspeed_plugin is not None and (training.bf16 or training.fp16)
    number = 2 if in_16_bits else NUMBER_BYTES.get(plan.dtype or "auto", 4)
    states = 4 * in_16_bits + memory.moment_bytes(training.optim.value, 4 if in_16_bits else number)
    each = number + (0 if training.save_only_model else states)
    checkpoint, free = each * memory.parameter_count(*plan.config.policy_source) / GIB, free_gib(training.output_dir)
    findings.figures["checkpoint_gib"] = checkpoint
    if free < 2 * checkpoint:  # the one before stays until it is whole
        findings.add(
            f"A checkpoint takes about {checkpoint:.1f} GiB, and `output_dir` {training.output_dir} has {free:.1f} "
            "GiB of free disk.",
            "Name an `output_dir` on a larger disk, or set `save_only_model: true`.",
            is_failure=free < checkpoint,
        )


def _compare(estimated: Estimate, is_tried: bool, findings: Findings) -> None:
    """Note or fail where the estimate is above the card. `is_tried`: in spite of it."""
    card, needed = estimated.card_gib, estimated.needed_gib
    figures = {**estimated.peak.parts, "needed": needed, "card": card}
    findings.figures |= {f"{part.replace(' ', '_')}_gib": round(gib, 2) for part, gib in figures.items()}
    if not estimated.starts_engine:
        findings.fail("vLLM's share of the card has no room for one completion of full length beside the weights: it "
                      "would not start.", f"Raise `vllm_gpu_memory_utilization`. {LESS}")  # fmt: skip
    elif not estimated.fits:
        findings.add(
            f"training takes about {needed:.1f} GiB ({estimated.peak.name}), and the card has {card:.1f}; the "
            f"estimate is good to {MARGIN:.0%}.",
            LESS,
            is_failure=needed > (1 + MARGIN) * card and not is_tried,
        )
