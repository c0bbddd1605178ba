"""The start-up banner for scripts, and its lines about training, which `launch.banner` shares."""

import logging
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import PreTrainedModel

from salesrl_trl.checkpoint.keeper import agreed
from salesrl_trl.config import SalesGRPOConfig
from salesrl_trl.config.training import FIXED
from salesrl_trl.ground.own_code import code
from salesrl_trl.ground.versions import packages
from salesrl_trl.kl.law import KLTarget
from salesrl_trl.names import RECORD_FOLDER, REPORT_PAGE_FILE
from salesrl_trl.service.breaker import SharedBudget
from salesrl_trl.types import ALL
from salesrl_trl.update.correction import BYPASS
from salesrl_trl.wiring.part import Part, PartContext

logger = logging.getLogger(__name__)

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")  # fields of transformers' configurations
TOGETHER = "the completions of a prompt are scored in one call"
Line = tuple[str, str]  # an aspect of the run, and its description


def shown(lines: Sequence[Line]) -> list[str]:
    return [f"[Run] {name:<12} {text}" for name, text in lines]


class Banner(Part):
    """Logs a summary of the run, unless a recipe already has."""

    def connect(self, run: PartContext) -> None:
        self._run = run

    def begin(self, resumed: str | None, run_id: str) -> None:
        agreed(self._log)  # may fail, as reading a damaged spending account raises
        warning = experts_warning(self._run.trl.model(), self._run.args)
        if warning is not None and not self._run.args.process_index:
            logger.warning(warning)

    def _log(self) -> None:
        run, args = self._run, self._run.args
        if args.is_introduced or args.process_index:
            return
        args.is_introduced = True
        reward, policy = run.reward_loop.reward, run.pipeline.buffer.policy
        staleness, refill = policy.max_age, policy.refill_limit
        report = f"{args.output_dir}/{REPORT_PAGE_FILE} at the end; until then: salesrl report {args.output_dir}"
        if "tensorboard" not in args.report_to:
            report = 'off: it requires TensorBoard\'s files (report_to="tensorboard" writes them)'
        lines = shown(
            [
                *(("reward", f"{name}: {place}") for name, place in reward.names.places.items()),
                *([("reward", TOGETHER)] if reward.names.judges_groups else []),
                *(("tool", name) for name in run.trl.tool_names),
                *training_lines(args, staleness, refill, run.partial_rollouts),
                ("budget", budget_text(reward.budget)),
                ("version", f"salesrl_trl {code()}"),
                record_line(args),
                *hub_lines(args),
                ("report", report),
                ("output", args.output_dir),
            ]
        )
        for line in lines:
            logger.info(line)
        for package in packages():
            if not package.is_met:
                logger.warning(f"{package.finding} Other versions are untested and may fail or train wrongly.")


def experts_warning(model: PreTrainedModel, args: SalesGRPOConfig) -> str | None:
    """What differs between vLLM's and the trainer's routing in a mixture of experts; `None` for other models, without
    vLLM, or in float32, where experts agree. The numbers are in benchmarks/log/2026-11-29-mixtures-of-experts.md."""
    text, in_16_bits = model.config.get_text_config(), args.bf16 or args.fp16 or model.dtype != torch.float32
    if not (args.use_vllm and in_16_bits and any(getattr(text, name, None) for name in EXPERTS)):
        return None
    remedy = "Use `vllm_importance_sampling_mode: token_truncate`, which limits single tokens."
    if not args.vllm_importance_sampling_correction:
        remedy = "Set `vllm_importance_sampling_correction: true`."
    elif args.correction is not None and args.correction.weights == BYPASS:
        remedy = "The loss clips the ratio of these tokens."
    elif args.correction is not None and args.correction.mode == "token_truncate":
        remedy = "The correction limits the weight of these tokens (`token_truncate`)."
    return (
        "[Weights] the policy is a mixture of experts in 16 bits. vLLM and the trainer round differently, so some "
        "tokens go to other experts: in small random models 4 to 8 % of all choices, and log-probs differed 2 to 3 "
        f"times as much as a dense model's. `sampling/sampling_logp_difference/mean` shows this run's. {remedy}"
    )


def budget_text(budget: SharedBudget | None) -> str:
    if budget is None:
        return "off: requests are not counted (to count a function's calls, give its `Transport` a `Budget` quota)"
    return budget.in_words()


def training_lines(args: SalesGRPOConfig, staleness: int, refill: int, partial: float) -> list[Line]:
    """The steps, rollouts and branches. `staleness`, `refill`, `partial`: `max_staleness`, `refill_groups` and
    `partial_rollouts`, 0 if they don't apply."""
    targets = args.kl_targets()
    return [
        ("step", _step(args)),
        ("rollouts", _rollouts(args, staleness, refill, partial)),
        *(("branch", _branch(name, targets.get(name), args)) for name in args.branches),
    ]


def record_line(args: SalesGRPOConfig) -> tuple[str, str]:
    if not args.record:
        return "record", "off: completions are not kept (record: true keeps them, with customers' texts)"
    gib, clean, _ = args.parsed_record()
    filtered = f", filtered by {clean.__module__}.{clean.__qualname__}" if clean else ", with customers' texts"
    folder = Path(args.output_dir) / RECORD_FOLDER
    return "record", f"{folder}: every completion{filtered}, up to {gib:g} GiB a process"


def hub_lines(args: SalesGRPOConfig) -> list[Line]:
    """What is pushed to the hub, and to which repository."""
    kind = f"({'private' if args.hub_private_repo else 'public'}, if new)"
    optimizer = ", optimizer" if "checkpoint" in args.hub_strategy else ""
    place = args.hub_model_id or Path(args.output_dir).resolve().name
    what = f"weights, tokenizer, configuration and model card{optimizer} ({args.hub_strategy.value})"
    tables = f"{args.log_completions_hub_repo} {kind} gets prompts and completions (log_completions_hub_repo)"
    wanted = {f"{place} {kind} gets {what}": args.push_to_hub, tables: args.log_completions_hub_repo}
    return [("hub", text) for text, is_on in wanted.items() if is_on]


def _step(training: SalesGRPOConfig) -> str:
    batch, accumulated = training.per_device_train_batch_size, training.gradient_accumulation_steps
    size = batch * accumulated * training.world_size
    processes = f" x {training.world_size} processes" if training.world_size > 1 else ""
    length = f"{training.max_steps} steps" if training.max_steps > 0 else f"{training.num_train_epochs:g} epochs"
    return (
        f"{size / training.num_generations:g} prompts x {training.num_generations} completions = {size} completions "
        f"({batch} a micro-batch x {accumulated} accumulated{processes}); {length}, learning rate "
        f"{training.learning_rate:g}"
    )


def _rollouts(training: SalesGRPOConfig, staleness: int, refill: int, partial: float) -> str:
    engine = "a vLLM server" if training.vllm_mode == "server" else "vLLM in the training process"
    if not training.use_vllm:
        engine = training.sampler or "transformers"
    limit = training.vllm_max_model_length if training.use_vllm else None
    room = f" in {limit} with the prompt" if limit else ""
    ahead = training.most_lookahead
    parts = (
        f"{engine}, up to {training.max_completion_length} new tokens{room}",
        f"temperature {training.temperature:g}",
        f"generated up to {ahead} steps ahead" if ahead else "on-policy (rollout_lookahead 0)",
        f"groups in the order in which they are scored, up to {staleness} steps old" if staleness > ahead > 0 else "",
        "zero-variance groups replaced" if refill else "",
        f"up to {partial:.0%} of a batch unfinished" if partial else "",
    )
    return ", ".join(filter(None, parts))


def _branch(name: str, target: KLTarget | None, training: SalesGRPOConfig) -> str:
    if target is None:
        return "all rows: no KL" if name == ALL else f"{name}: no KL"
    if not target.has_band:
        return f"{name}: coefficient {target.beta:g}, fixed"
    path = training.kl_settings.law
    law = ", coefficient fixed" if path == FIXED else f", moved by {path}" if path else ""
    return f"{name}: coefficient {target.beta:g}, KL band {target.low:g} to {target.high:g} nats per token{law}"
