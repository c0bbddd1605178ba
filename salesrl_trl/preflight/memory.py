"""The stage `memory`: whether training fits the card, and the number format of the policy's weights.

`gpu_memory` makes the same estimate for `scripts/check_gpu_memory.py`.
"""

import math
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from transformers.training_args import OptimizerNames
from transformers.utils import is_torchao_available

from salesrl_trl.build.checks.folders import free_gib
from salesrl_trl.build.checks.model import empty_model
from salesrl_trl.build.memory.cards import Card, card_here, used_gib, users
from salesrl_trl.build.memory.estimate import Estimate, advice, estimate, moment_bytes
from salesrl_trl.build.memory.setup import NUMBER_BYTES, Setup, Sharding, setup_of
from salesrl_trl.build.memory.shape import ModelShape, UnknownShape, adapters_of, model_shape, parameter_count
from salesrl_trl.build.plan import Plan
from salesrl_trl.build.precision import STOCHASTIC_ARGS, STOCHASTIC_OPTIM, Precision, choose_precision
from salesrl_trl.preflight.stage import Findings
from salesrl_trl.telemetry.device import GIB

MARGIN = 0.1
"""An estimate that is above the card's memory by less than this share is a note, and no failure."""


@dataclass
class Scales:
    """Weigh a plan's training on a card. The plan names a model."""

    plan: Plan
    card_gib: float
    prompt_tokens: int | None = None
    """Tokens of a prompt; `None` for those of the longest training row."""
    sharding: Sharding | None = None
    processes: int | None = None
    """In place of those of the launch."""

    @property
    def source(self) -> tuple[str, str | None, bool]:
        """Name, revision and `trust_remote_code` of the model."""
        config = self.plan.config
        assert config.model.model_name_or_path is not None
        return config.model.model_name_or_path, config.model.model_revision, config.training.trust_remote_code

    @cached_property
    def shape(self) -> ModelShape:
        """The policy's figures, with adapters if they are trained. Raises `ConfigError` if these have no place."""
        plain, lora = model_shape(*self.source), self.plan.config.model
        return replace(plain, adapters=adapters_of(empty_model(*self.source), lora)) if lora.use_peft else plain

    def setup(self, dtype: str | None, optim: str | None = None) -> Setup:
        config = self.plan.config
        tokens = self.plan.train.longest if self.prompt_tokens is None else self.prompt_tokens
        return setup_of(
            config.training, config.model, self.shape, tokens,
            dtype=dtype, optim=optim, sharding=self.sharding, processes=self.processes,
        )  # fmt: skip

    def weigh(self, dtype: str | None, optim: str | None = None) -> Estimate:
        """The estimate for weights of a number format, and an optimizer by its name in transformers."""
        return estimate(self.shape, self.setup(dtype, optim), self.card_gib)


class MemoryStage:
    """Chooses the number format. For 16-bit weights it sets the optimizer that suits them."""

    name = "memory"
    needs: tuple[str, ...] = ("config", "data")

    def run(self, plan: Plan) -> Findings:
        training, model, findings = plan.config.training, plan.config.model, Findings()
        card, scales = card_here(training.device), None
        unknown = "this run is on the CPU" if card is None else "the packaged small policy fits every card"
        if model.model_name_or_path is not None and (card is not None or model.use_peft):
            weighed = Scales(plan, math.inf if card is None else card.gib)
            try:
                _ = weighed.shape  # raises where an adapter has no place
                scales = None if card is None else weighed
            except UnknownShape as error:
                unknown = f"no estimate: {error}"
        if training.mode != "train":
            plan.dtype = model.dtype
            return Findings(skipped=f"nothing is trained in `mode: {training.mode}`")
        chosen = settle_precision(plan, scales)
        _check_disk(plan, findings)
        if chosen.note is not None:
            findings.note(chosen.note)
        if scales is None or card is None:
            findings.skipped = unknown
        else:
            plan.estimate = scales.weigh(plan.dtype)
            _compare(scales, plan.estimate, findings)
            _compare_with_others(card, plan.estimate, findings)
        return findings


def settle_precision(plan: Plan, scales: Scales | None) -> Precision:
    """Choose the number format of the weights and set the optimizer that it needs.

    Raises `ConfigError` if all weights are to be trained, and no number format fits.
    """
    model, training = plan.config.model, plan.config.training
    trains_all_weights = not (model.use_peft or training.is_sharded)
    chosen = choose_precision(
        dtype=model.dtype,
        autocast=training.bf16 or training.fp16,
        keeps_masters=training.deepspeed_plugin is not None,
        adapters_only=model.use_peft,
        optim=training.optim.value,
        optim_args=training.optim_args,
        weigh=scales.weigh if scales is not None and trains_all_weights else None,
        has_torchao=is_torchao_available(),
    )
    if chosen.stochastic_rounding:
        training.optim, training.optim_args = OptimizerNames(STOCHASTIC_OPTIM), STOCHASTIC_ARGS
    plan.dtype = chosen.dtype
    return chosen


def _check_disk(plan: Plan, findings: Findings) -> None:
    """Hold the checkpoints of a run that trains all weights against the free disk of the output folder.

    A checkpoint has the weights in the format of training, and the optimizer's states: AdamW's moments in float32, and
    DeepSpeed's float32 copies of 16-bit weights beside them.
    """
    model, training = plan.config.model, plan.config.training
    if model.model_name_or_path is None or model.use_peft or training.save_strategy == "no":
        return
    parameters = parameter_count(model.model_name_or_path, model.model_revision, training.trust_remote_code)
    own = getattr(plan.model_config, "dtype", None) or torch.float32
    copies = 4 if training.deepspeed_plugin is not None and (training.bf16 or training.fp16) else 0
    number = 2 if copies else NUMBER_BYTES.get(plan.dtype or "auto", own.itemsize)
    states = copies + moment_bytes(training.optim.value, 4 if copies else number)
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


def _compare(scales: Scales, estimated: Estimate, findings: Findings) -> None:
    """Note or fail where the estimate is above the card."""
    peak, card = estimated.peak, estimated.card_gib
    figures = {**peak.parts, "needed": estimated.needed_gib, "card": card}
    findings.figures |= {f"{part.replace(' ', '_')}_gib": round(gib, 2) for part, gib in figures.items()}
    if estimated.fits:
        return
    text = f"training takes about {estimated.needed_gib:.1f} GiB ({peak.name}), and the card has {card:.1f}."
    setup, model = scales.setup(scales.plan.dtype), scales.plan.config.model
    if setup.engine is not None and not estimated.starts_engine:
        text = (
            f"vLLM's share of the card has room for {estimated.sequences:.1f} completions of full length beside the "
            f"weights, of `vllm_max_model_length` {setup.engine.length} tokens. Expected at least 1: vLLM would not "
            "start."
        )
    remedy = f"What takes less, the cheapest first: {'; '.join(advice(estimated, setup))}. "
    remedy += "`scripts/check_gpu_memory.py` shows all, and which `--preset` fits."
    if estimated.starts_engine and estimated.needed_gib <= (1 + MARGIN) * card:
        findings.note(f"{text} The run may still fit: the estimate is good to {MARGIN:.0%}.", remedy)
    elif estimated.starts_engine and model.dtype == "float32" and not model.use_peft:
        findings.note(f"{text} It is tried all the same, because `dtype` is float32.", remedy)
    else:
        findings.fail(text, remedy)


def _compare_with_others(card: Card, estimated: Estimate, findings: Findings) -> None:
    """Fail where training would fit, but other processes use the card."""
    used = used_gib(card)
    if used is None:
        return
    findings.figures["used_gib"] = round(used, 2)
    if estimated.fits and used + estimated.needed_gib > (1 + MARGIN) * card.gib:
        findings.fail(
            f"training takes about {estimated.needed_gib:.1f} GiB of the card's {card.gib:.1f}, and {used:.1f} are in "
            f"use now, by {users(card) or 'processes that the driver does not name here'}.",
            "End them, or choose another card by CUDA_VISIBLE_DEVICES.",
        )
