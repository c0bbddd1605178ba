"""The stage `step`: does the policy load, does vLLM sample from its weights, does it train? Builds the trainer as a
run does, in a temporary folder."""

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

SPARE = 0.03  # share of GPU memory that should be free at the peak
STEPS = 2  # the first step creates the optimizer state; the second starts with it, like all later steps
GOLDEN = 0.6180339887  # the fractional parts of its multiples are spread evenly over [0, 1)
_ENDS = ("stop", "stop_token_ids", "eos_token_id", "stop_strings")  # settings that end a completion early


def made_up_reward() -> Scorer:
    """Distinct rewards without a service, so that every group has advantages."""
    numbers = itertools.count(1)

    def made_up(completions: Sequence[object], **_: object) -> list[float]:
        return [next(numbers) * GOLDEN % 1 for _ in completions]

    return reward_of(made_up)


def rehearse(plan: Plan, steps: int = STEPS) -> "SalesGRPOTrainer":
    """Build the run's trainer, with vLLM's engine. Closing `plan.opened` also closes it and removes its output
    folder."""
    folder = plan.opened.enter_context(tempfile.TemporaryDirectory(prefix="salesrl_preflight_"))
    training = plan.config.training
    full_length: dict[str, object] = {} if training.sampler else {"min_new_tokens": training.max_completion_length}
    if training.use_vllm:
        full_length = {"ignore_eos": True}
    kept = {name: value for name, value in (training.generation_kwargs or {}).items() if name not in _ENDS}
    changes = {"output_dir": folder, "max_steps": steps, "generation_kwargs": kept | full_length}
    training = overlaid(training, "rehearsal", changes | {"reward_process": False})  # the made-up reward can't be sent
    engine = training.parsed_engine_kwargs()
    if engine.get("load_format") == "auto" and training.vllm_mode == "colocate" and not plan.config.model.load_in_4bit:
        # random weights: log-probs only agree if the push works
        training.vllm_engine_kwargs = {**engine, "load_format": "dummy"}
    order = sorted(range(len(plan.train.rows)), key=plan.train.lengths.__getitem__, reverse=True)  # the longest first
    count = training.generation_batch_size // training.num_generations
    rows = plan.train.at(itertools.islice(itertools.cycle(order), count))
    telemetry = replace(plan.config.telemetry, trace_steps="", quick_eval_steps=0)
    config = replace(plan.config, training=training, telemetry=telemetry)
    rehearsal = Plan(config, dtype=plan.dtype)
    # tools call services, and full-length completions lack their results
    rehearsal.reward = replace(plan.reward, tool_paths=(), partner=None)
    rehearsal.train, rehearsal.held_out = rows, FittingPrompts([], [], [])
    trainer = build_trainer(rehearsal, made_up_reward(), build_instruments(rehearsal.config))
    plan.opened.callback(trainer.finish)
    return trainer


def _make_steps(plan: Plan, findings: Findings) -> None:
    """Run optimizer steps on the longest batch: the longest prompts with full-length completions and made-up
    rewards."""
    training = plan.config.training
    if training.mode != "train":
        findings.skipped = f"`mode` is {training.mode}, which does not train"
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
        findings.add("completions were shorter than `max_completion_length`, so memory and seconds are lower bounds")
    judge_update(first, training, findings)


STEP_STAGE = PreflightStage("step", ("config", "data", "memory"), (_make_steps,))


def judge_update(step: Mapping[str, float], training: SalesGRPOConfig, findings: Findings) -> None:
    """Check the first step's log line. A step that moves no weight has already raised an error."""
    loss, norm = step["loss"], step.get("grad_norm")
    findings.figures |= {"loss": loss, "grad_norm": norm}
    if not math.isfinite(loss) or not (norm is None or math.isfinite(norm)):
        text = f"the longest batch has the loss {loss:g} and the gradient norm {norm}."
        remedy = "Normal in first steps with `fp16`; set `bf16: true` or float32, and check `learning_rate`."
        findings.add(text, remedy, is_failure=not training.fp16)  # which lowers the loss scale until it fits
    elif norm == 0:
        findings.fail("the longest batch has zero gradients.", "Check `loss_type` and the frozen weights.")


def report_memory(steps: Sequence[Mapping[str, float]], device: torch.device, findings: Findings) -> None:
    """Report the steps' peak memory: of the GPU if there is one, else of the process."""
    if device.type != "cuda":
        findings.figures["host_gib"] = max(step[HOST_MEMORY] for step in steps)
        return
    free, card = (size / GIB for size in torch.cuda.mem_get_info(device))
    peak = max(step[GPU_PEAK] for step in steps)
    outside = card - free - torch.cuda.memory_reserved(device) / GIB  # CUDA itself, and other processes
    findings.figures |= {"peak_gib": peak, "left_gib": card - outside - peak, "card_gib": card}
    if card - outside - peak < SPARE * card:
        text = f"the peak of {peak:.1f} GiB, and {outside:.1f} GiB outside of PyTorch, leave less than {SPARE:.0%} of "
        remedy = "Set `gradient_checkpointing: true`, or lower `kept_activations_gib`, the batch or vLLM's share."
        findings.add(f"{text}the GPU's {card:.1f} GiB.", remedy)
