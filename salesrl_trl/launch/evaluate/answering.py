"""The answers of a policy to the held-out rows, and their rewards, by the run's own trainer.

Owns the order of the answers and their seeds. Refuses to generate and to score: the trainer's components do. Called by
`launch.evaluate.__main__`.
"""

import contextlib
import gc
import logging
from collections.abc import Container, Iterator, Sequence
from pathlib import Path

import torch
from peft import PeftModel
from transformers import set_seed

from salesrl_trl.demo.services.launcher import EmbeddedServices
from salesrl_trl.ground.process import collect_seldom, keep_freed_memory
from salesrl_trl.launch.assembly import open_reward
from salesrl_trl.launch.evaluate.findings import (
    GREEDY,
    LABELS,
    EvaluationFindings,
    Mode,
    Scored,
    findings_of,
    modes,
)
from salesrl_trl.launch.evaluate.policies import EvaluatedPolicy
from salesrl_trl.launch.plan import Plan, build_instruments, build_trainer, load_policy
from salesrl_trl.names import Phase, StartUp
from salesrl_trl.reward.reward_loop import RewardLoop, warm_up
from salesrl_trl.telemetry.instruments import Instruments
from salesrl_trl.trainer import SalesGRPOTrainer
from salesrl_trl.types import Example

logger = logging.getLogger(__name__)

GRAPH_POOL = "_global_graph_pool"  # vLLM's name of that pool
CHECKED = 4  # answers by which vLLM's weights are compared with the policy's


def findings_of_all(
    plans: Sequence[Plan], policies: Sequence[EvaluatedPolicy], services: EmbeddedServices, samples: int
) -> EvaluationFindings:
    """Let one policy after the other answer. The reward is opened once, so that equal calls are made once."""
    plan, wanted = plans[0], modes(samples)
    config, training = plan.config, plan.config.training
    collect_seldom()
    if training.device.type == "cpu":
        keep_freed_memory()
    with contextlib.ExitStack() as stack:
        instruments = stack.enter_context(contextlib.closing(build_instruments(config)))
        instruments.start(True)
        opened = open_reward(config.reward, training, plan.rows, plan.reward, services)
        reward_loop = stack.enter_context(contextlib.closing(RewardLoop(stack.enter_context(opened))))
        places = reward_loop.reward.names.places.items()
        logger.info("[Evaluate] " + "; ".join(f"{name}: {place}" for name, place in places))
        if config.reward.warm_up_services:
            with instruments.timeline.phase(StartUp.WARM_UP):
                warm_up(reward_loop)
        answers = [
            answers_of(plan_of_policy, policy.adapter, reward_loop, instruments, wanted, f"{label} ({policy.name})")
            for plan_of_policy, policy, label in zip(plans, policies, LABELS, strict=False)
        ]
    names = [policy.name for policy in policies]
    least = training.min_valid_reward_fraction
    return findings_of(names, plan.held_out.rows, training.branches, wanted, answers, seed=training.seed, least=least)


def answers_of(
    plan: Plan, adapter: Path | None, reward_loop: RewardLoop, instruments: Instruments, wanted: Sequence[Mode],
    label: str,
) -> list[list[Scored]]:  # fmt: skip
    """A policy's answers to the plan's held-out rows, by mode; those of a row are neighbours."""
    plan.policy = load_policy(plan.config, plan.dtype)
    if adapter is not None:
        plan.policy = PeftModel.from_pretrained(plan.policy, adapter)
    trainer = build_trainer(plan, reward_loop, instruments)
    trainer.model.eval()
    try:
        with instruments.timeline.phase(Phase.EVALUATION):
            if trainer.args.use_vllm:
                trainer.components.check_sampler(plan.held_out.prompts[:1] * CHECKED)
            ends = {*trainer.eos_token_ids, plan.tokenizer.pad_token_id}
            return [_answers(trainer, mode, ends, label) for mode in wanted]
    finally:
        trainer.components.pipeline.forget()
        instruments.details.clear()  # they hold the trainer. A late end of its engine would end the next one's groups
        plan.policy = None
        del trainer
        _free()


def _answers(trainer: SalesGRPOTrainer, mode: Mode, ends: Container[int], label: str) -> list[Scored]:
    args, components = trainer.args, trainer.components
    rows = [row for row in trainer.eval_dataset for _ in range(mode.samples)]
    # vLLM makes its own batches: it gets as many at once as in training, which the services' limits are made for
    size = max(args.per_device_eval_batch_size, args.generation_batch_size if args.use_vllm else 0)
    size = max(size // mode.samples, 1) * mode.samples  # whole groups
    # a model that is not in training has no autocast of its own, and vLLM needs none
    computing = contextlib.nullcontext if args.use_vllm else trainer.accelerator.autocast
    scored: list[Scored] = []

    def batches() -> Iterator[list[Example]]:
        for number, first in enumerate(range(0, len(rows), size)):
            set_seed(args.seed + number)  # the same for every policy, however much the one before has drawn
            yield rows[first : first + size]

    with components.sampler.greedily() if mode.name == GREEDY else contextlib.nullcontext(), computing():
        for batch in components.pipeline.evaluations(batches(), 0, mode.samples):
            rollout, _ = components.scoring.evaluate(batch, 0, mode.samples)
            assert rollout.sampled is not None and rollout.result is not None
            scored += [
                Scored(reward, len(ids), not ids or ids[-1] not in ends)
                for ids, reward in zip(rollout.sampled.completion_ids, rollout.result.rewards, strict=True)
            ]
            logger.info(f"[Evaluate] {label} {mode.name}: {len(scored)} of {len(rows)} answers")
    return scored


def _free() -> None:
    """Give the memory of a policy and of its engine back. vLLM hides what is there when its engine has started from
    the garbage collector. It keeps one memory pool for the CUDA graphs of all engines of a process: without the
    graphs of the engine before, the next one would fail to capture into it."""
    gc.unfreeze()
    gc.collect()
    if not torch.cuda.is_available():
        return
    torch.cuda.empty_cache()
    from vllm.platforms import current_platform

    setattr(type(current_platform), GRAPH_POOL, None)
