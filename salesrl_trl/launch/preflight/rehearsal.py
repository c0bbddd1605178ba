"""Optimizer steps by the run's own trainer that leave nothing behind.

Owns the settings in which they differ from a run, the choice of the longest prompts, and the made-up rewards.
"""

import itertools
import tempfile
from dataclasses import dataclass, replace

from salesrl_trl.config import SalesGRPOConfig
from salesrl_trl.launch.data.lengths import FittingPrompts
from salesrl_trl.launch.plan import Plan, build_instruments, build_trainer, overlaid
from salesrl_trl.reward.batch import Sample
from salesrl_trl.reward.scorer import Scorer
from salesrl_trl.reward.stage_times import StageTimes
from salesrl_trl.trainer import SalesGRPOTrainer
from salesrl_trl.types import Prompt, Reward

STEPS = 2  # the first step makes the optimizer's state. The second one holds it from its start, as all later steps do.
GOLDEN = 0.6180339887  # its multiples, without whole parts, are spread evenly over 0 to 1
_ENDS = ("stop", "stop_token_ids", "eos_token_id", "stop_strings")  # they end a completion early


class MadeUpReward(Scorer):
    """Rewards from no service, all different, so that every group has advantages."""

    def __init__(self) -> None:
        super().__init__()
        self._count = itertools.count(1)

    async def score(self, sample: Sample, stages: StageTimes) -> Reward:
        return Reward.scored(next(self._count) * GOLDEN % 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Rehearsal:
    """The run's trainer, with the longest prompts of the run."""

    trainer: SalesGRPOTrainer
    prompt_tokens: int  # of the longest prompt
    shortest: Prompt


def rehearse(plan: Plan, steps: int = STEPS) -> Rehearsal:
    """Build the run's trainer, with vLLM's engine. The end of `plan.opened` closes it and drops its output folder."""
    folder = plan.opened.enter_context(tempfile.TemporaryDirectory(prefix="salesrl_preflight_"))
    training = rehearsed(plan.config.training, folder, steps)
    engine = training.parsed_engine_kwargs()
    if engine.get("load_format") == "auto" and training.vllm_mode == "colocate" and not plan.config.model.load_in_4bit:
        # random weights: only a push that works can make log-probs agree
        training.vllm_engine_kwargs = {**engine, "load_format": "dummy"}
    rows = longest(plan.train, training.generation_batch_size // training.num_generations)
    telemetry = replace(plan.config.telemetry, trace_steps="", quick_eval_steps=0)
    config = replace(plan.config, training=training, telemetry=telemetry)
    rehearsal = Plan(config, dtype=plan.dtype, policy=plan.policy)
    rehearsal.reward = replace(plan.reward, tools=())  # they ask services. A completion of full length has no results
    rehearsal.train, rehearsal.held_out = rows, FittingPrompts([], [], [])
    trainer = build_trainer(rehearsal, MadeUpReward(), build_instruments(rehearsal.config))
    plan.opened.callback(trainer.finish)
    shortest = rows.prompts[rows.lengths.index(min(rows.lengths))]
    return Rehearsal(trainer=trainer, prompt_tokens=rows.longest, shortest=shortest)


def rehearsed(training: SalesGRPOConfig, output_dir: str, steps: int) -> SalesGRPOConfig:
    """The run's settings of training, for some steps with completions of full length that write no checkpoint."""
    full_length: dict[str, object] = {} if training.sampler else {"min_new_tokens": training.max_completion_length}
    if training.use_vllm:
        full_length = {"ignore_eos": True}
    kept = {name: value for name, value in (training.generation_kwargs or {}).items() if name not in _ENDS}
    changes = {"output_dir": output_dir, "max_steps": steps, "generation_kwargs": kept | full_length}
    return overlaid(training, "rehearsal", changes)


def longest(rows: FittingPrompts, count: int) -> FittingPrompts:
    """So many rows with the longest prompts, from the longest on. Rows come again if there are too few."""
    order = sorted(range(len(rows.rows)), key=lambda place: -rows.lengths[place])
    return rows.at(itertools.islice(itertools.cycle(order), count))
