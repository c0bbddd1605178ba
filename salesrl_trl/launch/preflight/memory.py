"""The stage `memory`: the number format of the policy's weights, and whether training fits the card.

AdamW's updates at a learning rate of 1e-6 are mostly smaller than half the distance between two bf16 numbers. So
weights in training have 16 bits only where something keeps what is lost: DeepSpeed's float32 copies, or LoRA's float32
adapters. In full fine-tuning they are float32 with 16-bit autocast if memory is enough, or else bf16 with stochastic
rounding, by torchao's 8-bit AdamW. `scripts/check_gpu_memory.py` shows the same estimate as a table.
"""

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from transformers.training_args import OptimizerNames
from transformers.utils import is_torchao_available

from salesrl_trl.errors import ConfigError
from salesrl_trl.launch import memory_estimate as memory
from salesrl_trl.launch import memory_shape as shapes
from salesrl_trl.launch import software
from salesrl_trl.launch.checks.folders import free_gib
from salesrl_trl.launch.checks.model import empty_model
from salesrl_trl.launch.checks.outcome import Findings
from salesrl_trl.launch.memory_estimate import NUMBER_BYTES, STOCHASTIC_OPTIM, Estimate, Setup, setup_of
from salesrl_trl.launch.memory_shape import ModelShape
from salesrl_trl.launch.plan import Plan
from salesrl_trl.telemetry.device import GIB

MARGIN = 0.1  # an estimate that is above the card's memory by less than this share is a note, and no failure
STOCHASTIC_ARGS = "bf16_stochastic_round=True"  # of torchao's optimizer
PLAIN_ADAMW = ("adamw_torch", "adamw_torch_fused")  # defaults, which may be replaced
Weigh = Callable[[str, str], Estimate]  # from a number format of weights and an optimizer's name in transformers


def policy_shape(plan: Plan) -> ModelShape:
    """The policy's figures, with adapters if they are trained. Raises `ConfigError` if these have no place."""
    config = plan.config
    plain = shapes.model_shape(*config.policy_source)
    if not config.model.use_peft:
        return plain
    return shapes.with_adapters(plain, empty_model(*config.policy_source), config.model)


def weigher(setup: Setup, card_gib: float) -> Weigh:
    """Weighs the setup with another number format and another optimizer."""
    return lambda dtype, optim: memory.estimate(replace(setup, dtype=dtype, optim=optim), card_gib)


def check_memory(plan: Plan, findings: Findings) -> None:
    """Choose the number format, with an optimizer that suits it, and compare the estimate with the card."""
    training, model = plan.config.training, plan.config.model
    card, shape, setup = software.card_here(training.device), None, None
    unknown = "this run is on the CPU" if card is None else "the packaged small policy fits every card"
    if model.model_name_or_path is not None and (card is not None or model.use_peft):
        try:
            shape = policy_shape(plan)  # raises where an adapter has no place
        except shapes.UnknownShape as error:
            unknown = f"no estimate: {error}"
    if training.mode != "train":
        plan.dtype = model.dtype
        findings.skipped = f"nothing is trained in `mode: {training.mode}`"
        return
    if shape is not None and card is not None:
        setup = setup_of(training, model, shape, plan.train.longest, dtype=model.dtype)
    note = settle_precision(plan, None if setup is None or card is None else weigher(setup, card.gib))
    _check_disk(plan, findings)
    findings.notes([note])
    if setup is None or card is None:
        findings.skipped = unknown
        return
    setup = replace(setup, dtype=plan.dtype, optim=training.optim.value)
    plan.estimate = estimated = memory.estimate(setup, card.gib)
    _compare(setup, estimated, findings)
    if (used := card.used_gib()) is None:
        return
    findings.figures["used_gib"] = round(used, 2)
    if estimated.fits and used + estimated.needed_gib > (1 + MARGIN) * card.gib:
        findings.fail(
            f"training takes about {estimated.needed_gib:.1f} GiB of the card's {card.gib:.1f}, and {used:.1f} are in "
            f"use now, by {card.users() or 'processes that the driver does not name here'}.",
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
    is_weighed = weigh is not None and not training.is_sharded and optim in PLAIN_ADAMW
    exact = weigh("float32", optim) if weigh is not None and is_weighed else None
    if weigh is None or exact is None or exact.fits:
        plan.dtype = "float32"
        computing = "computed in 16 bits" if autocast else "computed in float32 too"
        setting = f"`dtype: {dtype}`" if dtype in ("bfloat16", "float16") else "16-bit weights"
        return f"weights are trained in float32 and {computing}: {setting} would lose small updates"
    rounded, has_torchao = weigh("bfloat16", STOCHASTIC_OPTIM), is_torchao_available()
    lack = (
        f"full fine-tuning in float32 takes about {exact.needed_gib:.0f} GiB, generation included, and the card has "
        f"{exact.card_gib:.0f}"
    )
    if has_torchao and dtype != "float16" and rounded.fits:
        plan.dtype, training.optim, training.optim_args = "bfloat16", OptimizerNames(STOCHASTIC_OPTIM), STOCHASTIC_ARGS
        return (
            "weights are trained in bf16 with stochastic rounding (torchao's 8-bit AdamW, about "
            f"{rounded.needed_gib:.0f} GiB), which keeps small updates on average: {lack}"
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


def _check_disk(plan: Plan, findings: Findings) -> None:
    """Hold the checkpoints of a run that trains all weights against the free disk: the weights in training's format,
    the optimizer's moments, and DeepSpeed's float32 copies of 16-bit weights."""
    model, training = plan.config.model, plan.config.training
    if model.model_name_or_path is None or model.use_peft or training.save_strategy == "no":
        return
    parameters = shapes.parameter_count(model.model_name_or_path, model.model_revision, training.trust_remote_code)
    own = getattr(plan.model_config, "dtype", None) or torch.float32
    copies = 4 if training.deepspeed_plugin is not None and (training.bf16 or training.fp16) else 0
    number = 2 if copies else NUMBER_BYTES.get(plan.dtype or "auto", own.itemsize)
    states = copies + memory.moment_bytes(training.optim.value, 4 if copies else number)
    weights = number * parameters / GIB
    checkpoint = weights + (0.0 if training.save_only_model else states * parameters / GIB)
    interval, steps = training.save_steps, training.max_steps
    interval = math.ceil(interval * steps) if 0 < interval < 1 else interval  # a share of the steps
    saved = int(steps // interval) if 0 < interval <= steps else 1
    kept = min(saved, training.save_total_limit + 1) if training.save_total_limit else saved
    needed = kept * checkpoint + weights * (1 + bool(plan.config.telemetry.quick_eval_steps))
    free = free_gib(training.output_dir)
    findings.figures |= {"checkpoint_gib": checkpoint, "disk_needed_gib": needed}
    if free < needed:
        findings.add(
            f"A checkpoint takes about {checkpoint:.1f} GiB, and {kept} of them with the policies of the end and of "
            f"the best evaluation {needed:.1f}. `output_dir` {training.output_dir} has {free:.1f} GiB of free disk.",
            "Name an `output_dir` on a larger disk, keep fewer (`save_total_limit`, one more is there while it "
            "saves), or keep weights alone (`save_only_model: true`).",
            is_failure=free < checkpoint,
        )


def _compare(setup: Setup, estimated: Estimate, findings: Findings) -> None:
    """Note or fail where the estimate is above the card."""
    card = estimated.card_gib
    figures = {**estimated.peak.parts, "needed": estimated.needed_gib, "card": card}
    findings.figures |= {f"{part.replace(' ', '_')}_gib": round(gib, 2) for part, gib in figures.items()}
    if estimated.fits:
        return
    model = setup.model
    remedy = f"What takes less: {'; '.join(memory.advice(setup, card))}. "
    remedy += "`scripts/check_gpu_memory.py` shows all, and which `--preset` fits."
    if not estimated.starts_engine:
        findings.fail(
            f"vLLM's share of the card has room for {estimated.sequences:.1f} completions of full length beside the "
            f"weights, of `vllm_max_model_length` {memory.engine_length(setup)} tokens. Expected at least 1: vLLM "
            "would not start.",
            remedy,
        )
        return
    text = f"training takes about {estimated.needed_gib:.1f} GiB ({estimated.peak.name}), and the card has {card:.1f}."
    if estimated.needed_gib <= (1 + MARGIN) * card:
        findings.note(f"{text} The run may still fit: the estimate is good to {MARGIN:.0%}.", remedy)
    elif model.dtype == "float32" and not model.use_peft:
        findings.note(f"{text} It is tried all the same, because `dtype` is float32.", remedy)
    else:
        findings.fail(text, remedy)
