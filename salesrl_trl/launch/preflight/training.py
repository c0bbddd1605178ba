"""The stage `step`: does the policy load, does vLLM sample from its weights, does it train? It builds the trainer as a
run does, and leaves nothing behind."""

import itertools
import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from salesrl_trl.config import SalesGRPOConfig
from salesrl_trl.launch.checks.outcome import Findings
from salesrl_trl.launch.data.prompts import FittingPrompts
from salesrl_trl.launch.plan import Plan, build_instruments, build_trainer, overlaid
from salesrl_trl.launch.preflight.stage import PreflightStage
from salesrl_trl.names import GPU_PEAK, HOST_MEMORY, STEP_SECONDS, time_of
from salesrl_trl.reward.functions import reward_of
from salesrl_trl.reward.scorer import Scorer
from salesrl_trl.telemetry.device import GIB, forget_peak
from salesrl_trl.telemetry.perf import COMPUTE_PHASES

if TYPE_CHECKING:
    from salesrl_trl.trainer import SalesGRPOTrainer

SPARE = 0.03  # share of a card's memory that should be left at the peak
STEPS = 2  # the first step makes the optimizer's state. The second one holds it from its start, as all later steps do.
GOLDEN = 0.6180339887  # its multiples, without whole parts, are spread evenly over 0 to 1
_ENDS = ("stop", "stop_token_ids", "eos_token_id", "stop_strings")  # they end a completion early


def made_up_reward() -> Scorer:
    """Rewards from no service, all different, so that every group has advantages."""
    numbers = itertools.count(1)

    def made_up(completions: Sequence[object], **_: object) -> list[float]:
        return [next(numbers) * GOLDEN % 1 for _ in completions]

    return reward_of(made_up)


def rehearse(plan: Plan, steps: int = STEPS) -> "SalesGRPOTrainer":
    """Build the run's trainer, with vLLM's engine. The end of `plan.opened` closes it and drops its output folder."""
    folder = plan.opened.enter_context(tempfile.TemporaryDirectory(prefix="salesrl_preflight_"))
    training = plan.config.training
    full_length: dict[str, object] = {} if training.sampler else {"min_new_tokens": training.max_completion_length}
    if training.use_vllm:
        full_length = {"ignore_eos": True}
    kept = {name: value for name, value in (training.generation_kwargs or {}).items() if name not in _ENDS}
    changes = {"output_dir": folder, "max_steps": steps, "generation_kwargs": kept | full_length}
    training = overlaid(training, "rehearsal", changes)
    engine = training.parsed_engine_kwargs()
    if engine.get("load_format") == "auto" and training.vllm_mode == "colocate" and not plan.config.model.load_in_4bit:
        # random weights: only a push that works can make log-probs agree
        training.vllm_engine_kwargs = {**engine, "load_format": "dummy"}
    order = sorted(range(len(plan.train.rows)), key=plan.train.lengths.__getitem__, reverse=True)  # the longest first
    count = training.generation_batch_size // training.num_generations
    rows = plan.train.at(itertools.islice(itertools.cycle(order), count))
    telemetry = replace(plan.config.telemetry, trace_steps="", quick_eval_steps=0)
    config = replace(plan.config, training=training, telemetry=telemetry)
    rehearsal = Plan(config, dtype=plan.dtype)
    rehearsal.reward = replace(plan.reward, tools=())  # they ask services. A completion of full length has no results
    rehearsal.train, rehearsal.held_out = rows, FittingPrompts([], [], [])
    trainer = build_trainer(rehearsal, made_up_reward(), build_instruments(rehearsal.config))
    plan.opened.callback(trainer.finish)
    return trainer


def _make_steps(plan: Plan, findings: Findings) -> None:
    """Optimizer steps on the longest batch: completions of full length to the longest prompts, made-up rewards."""
    training = plan.config.training
    if training.mode != "train":
        findings.skipped = f"`mode` is {training.mode}: no weights are trained"
        return
    trainer = rehearse(plan)
    forget_peak(training.device)
    trainer.train()
    entries = trainer.state.log_history
    first, *_, last = [entry for entry in entries if "loss" in entry]
    report_memory((first, last), training.device, findings)
    findings.figures |= {
        "first_step_s": first[STEP_SECONDS],
        "step_s": last[STEP_SECONDS],
        **{f"{phase}_s": last[time_of(phase)] for phase in COMPUTE_PHASES},
        "logp_difference_nats": trainer.components.policy.weight_check.difference,
        "prompt_tokens": plan.train.longest,
        "completion_tokens": int(last["completions/mean_length"]),
    }
    if last["completions/min_length"] < training.max_completion_length:
        findings.note("completions were shorter than `max_completion_length`: memory and seconds are lower bounds")
    judge_update(first, training, findings)


STEP_STAGE = PreflightStage("step", ("config", "data", "memory"), (_make_steps,))


def judge_update(step: Mapping[str, float], training: SalesGRPOConfig, findings: Findings) -> None:
    """Judge the first step by its log line. One that moves no weight has raised an error."""
    loss, norm = step["loss"], step.get("grad_norm")
    findings.figures |= {"loss": loss, "grad_norm": norm}
    if not math.isfinite(loss) or not (norm is None or math.isfinite(norm)):
        findings.add(
            f"the longest batch has the loss {loss:g} and a gradient of the norm {norm}.",
            "Normal in first steps with `fp16`; set `bf16: true` or float32, and look at `learning_rate`.",
            is_failure=not training.fp16,  # the scale of the loss is halved until there is none
        )
    elif norm == 0:
        findings.fail(
            "no weight has a gradient in a step of the longest batch.", "Look at `loss_type` and what is frozen."
        )


def report_memory(steps: Sequence[Mapping[str, float]], device: torch.device, findings: Findings) -> None:
    """The most memory that the steps took: of the card if there is one, of the process if not."""
    if device.type != "cuda":
        findings.figures["host_gib"] = max(step[HOST_MEMORY] for step in steps)
        return
    free, card = (size / GIB for size in torch.cuda.mem_get_info(device))
    peak = max(step[GPU_PEAK] for step in steps)
    outside = card - free - torch.cuda.memory_reserved(device) / GIB  # CUDA itself, and other processes
    findings.figures |= {"peak_gib": peak, "left_gib": card - outside - peak, "card_gib": card}
    if card - outside - peak < SPARE * card:
        findings.note(
            f"{peak:.1f} GiB were in use at the peak and {outside:.1f} GiB are used outside of PyTorch, of the card's "
            f"{card:.1f} GiB: less than {SPARE:.0%} are to spare.",
            "Lower `vllm_gpu_memory_utilization` or `per_device_train_batch_size`, or set `gradient_checkpointing: "
            "true`.",
        )
