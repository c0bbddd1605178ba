"""The stages `model`, `engine` and `step`: does the policy load, does vLLM sample from its weights, does it train?

Each uses the code of the run: `launch.building` loads the policy and builds the trainer, whose own check compares
log-probs, and whose own steps are made. `runner` lists the stages. Nothing is kept.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, cast

import torch

from salesrl_trl.config import SalesGRPOConfig
from salesrl_trl.ground.patched import patched
from salesrl_trl.launch.checks.model import empty_model, linear_layers, put_adapter
from salesrl_trl.launch.checks.outcome import Findings
from salesrl_trl.launch.memory_estimate import SCORING, STOCHASTIC_OPTIM
from salesrl_trl.launch.plan import Plan, load_policy
from salesrl_trl.launch.preflight.stage import PreflightStage
from salesrl_trl.names import CHANGED_SHARE, GPU_PEAK, HOST_MEMORY, STEP_SECONDS, time_of
from salesrl_trl.parts.weight_change import LEAST_SHARE
from salesrl_trl.telemetry.device import GIB, forget_peak
from salesrl_trl.telemetry.perf import COMPUTE_PHASES
from salesrl_trl.timing import TimingContext

if TYPE_CHECKING:
    from salesrl_trl.launch.preflight.rehearsal import Rehearsal

SHORT = 32  # tokens of the forward pass of the stage `model`, and of the completions of the stage `engine`
SPARE = 0.03  # share of a card's memory that should be left at the peak
LATER = (
    "DeepSpeed or FSDP places the policy when training begins: the stage `step` makes its first forward pass, pushes "
    "its weights and compares log-probs"
)
NO_POLICY = "`mode` is rewards: no policy is loaded"


def _count_weights(plan: Plan, findings: Findings) -> None:
    """Count the weights, and those that are trained, of the model without its weights."""
    config, lora = plan.config, plan.config.model
    if config.training.mode == "rewards":
        findings.skipped = NO_POLICY
        return
    empty = empty_model(*config.policy_source)
    findings.figures["parameters_m"] = sum(weight.numel() for weight in empty.parameters()) / 1e6
    trained: torch.nn.Module = empty
    if lora.use_peft:
        layers = linear_layers(empty)
        trained = adapted = put_adapter(empty, lora)
        used = {name.rpartition(".")[2] for name in adapted.targeted_module_names}
        wanted = lora.lora_target_modules
        names = [wanted] if isinstance(wanted, str) else wanted or []
        if missing := [name for name in names if name.isidentifier() and name not in used]:
            findings.note(
                f"`lora_target_modules` names {', '.join(missing)}, which the model does not have.",
                f"Its linear layers are {layers}. Correct the names.",
            )
    numbers = sum(weight.numel() for weight in trained.parameters() if weight.requires_grad)
    findings.figures["trained_m"] = numbers / 1e6


def _load_policy(plan: Plan, findings: Findings) -> None:
    """The policy loads, and a forward pass as training makes it gives numbers."""
    training = plan.config.training
    with TimingContext("load") as loading:
        policy = plan.policy = load_policy(plan.config, plan.dtype)
    findings.figures |= {
        "load_s": loading.cost_time,
        "dtype": str(policy.dtype).removeprefix("torch."),
        "attention": policy.config._attn_implementation,
    }
    if training.is_sharded:
        findings.note(LATER)
        return
    with TimingContext("forward") as forward:
        if not getattr(policy, "is_quantized", False):  # such a one is on its device
            policy.to(training.device)
        text = plan.train.rows[0].context
        ids = plan.tokenizer(text, return_tensors="pt", truncation=True, max_length=SHORT)["input_ids"]  # (1, T)
        computing, in_16_bits = torch.bfloat16 if training.bf16 else torch.float16, training.bf16 or training.fp16
        with torch.no_grad(), torch.autocast(training.device.type, computing, enabled=in_16_bits):
            logits = policy(ids.to(policy.device)).logits  # (1, T, V)
        unusable = int((~logits.isfinite()).sum())
    findings.figures["forward_s"] = forward.cost_time
    if unusable:
        findings.fail(
            f"{unusable} of the policy's logits for the first prompt are no numbers, with weights in "
            f"{policy.dtype}. Expected a number for each: weights are broken, or overflow in their format.",
            "Load the model again, or set `bf16: true` in place of `fp16`, or `dtype: float32`.",
        )


def _try_engine(plan: Plan, findings: Findings) -> None:
    """vLLM starts as in the run, gets the weights once and generates. The trainer's check judges the log-probs."""
    training = plan.config.training
    if training.mode == "rewards":
        findings.skipped = NO_POLICY
        return
    if not training.use_vllm:
        instead = f"`sampler` {training.sampler}" if training.sampler else "transformers"
        findings.skipped = f"`use_vllm` is false: {instead} generates, with the trainer's own model"
        return
    with TimingContext("start") as starting:
        rehearsal = _rehearsal_of(plan)
    findings.figures["start_s"] = starting.cost_time
    if training.vllm_mode == "server":
        findings.note("vLLM is a server: its start is not tried, and it has the policy's weights from now on")
    if training.is_sharded:
        findings.note(LATER)
        return
    engine, components = rehearsal.trainer.vllm_generation, rehearsal.trainer.components
    pushing, generating = TimingContext("push"), TimingContext("generation")

    def push(stock: Callable[[], None] = engine.sync_weights) -> None:
        with pushing:
            stock()
            if training.device.type == "cuda":
                torch.cuda.synchronize(training.device)

    with (
        patched(engine, "sync_weights", push),
        patched(engine, "generate", generating(engine.generate)),
        patched(engine, "max_completion_length", min(SHORT, training.max_completion_length)),
    ):
        sampled = components.check_sampler([rehearsal.shortest] * training.num_generations)
    findings.figures |= {
        "weight_push_s": pushing.cost_time,
        "generation_s": generating.cost_time,
        "tokens": sum(map(len, sampled.completion_ids)),
        "logp_difference_nats": components.policy.weight_check.difference,
    }


def _make_steps(plan: Plan, findings: Findings) -> None:
    """Optimizer steps on the longest batch: completions of full length to the longest prompts, made-up rewards."""
    training = plan.config.training
    if training.mode != "train":
        findings.skipped = f"`mode` is {training.mode}: no weights are trained"
        return
    rehearsal = _rehearsal_of(plan)
    trainer = rehearsal.trainer
    forget_peak(training.device)
    trainer.train()
    entries = trainer.state.log_history
    first, *_, last = [entry for entry in entries if "loss" in entry]
    report_memory((first, last), training.device, findings)
    if plan.estimate is not None:  # these steps have no evaluation
        moments = [moment.tensors_gib for moment in plan.estimate.moments if moment.name != SCORING]
        findings.figures["estimated_gib"] = max(moments)
    findings.figures |= {
        "first_step_s": first[STEP_SECONDS],
        "step_s": last[STEP_SECONDS],
        **{f"{phase}_s": last[time_of(phase)] for phase in COMPUTE_PHASES},
        "logp_difference_nats": trainer.components.policy.weight_check.difference,
        "prompt_tokens": rehearsal.prompt_tokens,
        "completion_tokens": int(last["completions/mean_length"]),
    }
    if last["completions/min_length"] < training.max_completion_length:
        findings.note(
            f"completions of {last['completions/mean_length']:.0f} tokens on average came, not of "
            f"`max_completion_length` {training.max_completion_length}: memory and seconds are lower bounds"
        )
    changed = next((entry[CHANGED_SHARE] for entry in entries if CHANGED_SHARE in entry), None)
    judge_update(first, changed, training, findings)


MODEL_STAGE = PreflightStage("model", ("config", "data", "memory"), (_count_weights, _load_policy))
ENGINE_STAGE = PreflightStage("engine", ("config", "data", "memory", "model"), (_try_engine,))
STEP_STAGE = PreflightStage("step", ("config", "data", "memory", "model", "engine"), (_make_steps,))


def _rehearsal_of(plan: Plan) -> "Rehearsal":
    """The trainer that the stages `engine` and `step` share. Built when it is first asked for."""
    if plan.rehearsal is None:
        from salesrl_trl.launch.preflight.rehearsal import rehearse

        plan.rehearsal = rehearse(plan)
    return cast("Rehearsal", plan.rehearsal)


def judge_update(
    step: Mapping[str, float], changed: float | None, training: SalesGRPOConfig, findings: Findings
) -> None:
    """Judge the first step, by its log line and the share of the weights with a gradient that it changed, if any."""
    loss, norm = step["loss"], step.get("grad_norm")
    findings.figures |= {"loss": loss, "grad_norm": norm, "changed_share": changed}
    if not math.isfinite(loss) or not (norm is None or math.isfinite(norm)):
        got = f"the longest batch has the loss {loss:g} and a gradient of the norm {norm}. Expected numbers."
        if training.fp16:  # the scale of the loss is halved until there is none
            findings.note(got, "Normal with `fp16` in first steps, which are left out; `bf16: true` has none.")
            return
        remedy = "Set `bf16: true` or float32, and look for a `learning_rate` or `max_grad_norm` out of the usual."
        findings.fail(got, remedy)
    elif not changed:
        got = "no weight had a gradient" if changed is None else "no weight with a gradient changed"
        findings.fail(
            f"{got} in a step of the longest batch, at a learning rate of {training.learning_rate:g}. Expected that "
            "weights move.",
            "Train float32 weights or an adapter, and look at `learning_rate`, `loss_type` and what is frozen.",
        )
    elif changed < LEAST_SHARE and training.optim != STOCHASTIC_OPTIM:
        findings.note(
            f"the step changed {100 * changed:.1f} % of the weights that had a gradient, at a learning rate of "
            f"{training.learning_rate:g}. Expected {100 * LEAST_SHARE:g} %.",
            "Train float32 weights, or raise the learning rate.",
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
            f"{card:.1f} GiB. Expected {100 * SPARE:g} % to spare: freed memory is in pieces after some steps.",
            "Lower `vllm_gpu_memory_utilization` or `per_device_train_batch_size`, or set `gradient_checkpointing: "
            "true`.",
        )
