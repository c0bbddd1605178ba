"""Simulates a run's load on its services: its reward pipeline scores batches of made-up completions."""

import contextlib
import itertools
import json
import logging
import random
import tempfile
from collections import Counter
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING

from salesrl_trl.errors import ConfigError
from salesrl_trl.launch.assembly import build_reward
from salesrl_trl.launch.checks.outcome import Findings
from salesrl_trl.reward.reward_loop import RewardLoop
from salesrl_trl.types import DEFAULT_FORMAT, SalesRow

if TYPE_CHECKING:
    from salesrl_trl.launch.plan import Plan

logger = logging.getLogger(__name__)

INVALID = ("", "{}", "I would ask for the price first.", '{"rewritten_query": 7}')


def made_up(row: SalesRow, rng: random.Random) -> str:
    """A completion: an action from excerpts of the row's conversation, or sometimes an invalid one."""
    if rng.random() < 0.2:  # as from a policy that knows the format
        return rng.choice(INVALID)
    texts = [message.content[:300] for message in row.conversation]
    action = {name: f"{rng.choice(texts)} {rng.randrange(1000)}" for name in DEFAULT_FORMAT.fields}
    return json.dumps(action, ensure_ascii=False)


def score_made_up(plan: "Plan", findings: Findings) -> None:
    """Score `plan.load` batches, and report the rates and failures that a run would see."""
    config, training, fields = plan.config.reward, plan.config.training, plan.config.reward.rag_service.action_format
    if not config.has_chain or config.asks_nobody or fields.fields != DEFAULT_FORMAT.fields:
        raise ConfigError("made-up completions do not support `reward_funcs`, `replay` and `rag.action_fields`.")
    rows, rng, group = plan.train_rows, random.Random(training.seed), training.num_generations
    order = itertools.cycle(rng.sample(range(len(rows)), len(rows)))
    seconds, scored, lost = list[float](), list[float](), Counter[str]()
    with tempfile.TemporaryDirectory() as folder:  # cached answers would reduce the load
        reward = build_reward(config, plan.reward, rows, *plan.addresses, output_dir=Path(folder))
        with contextlib.closing(RewardLoop(reward)) as reward_loop:
            if config.warm_up_services and (unusable := reward.names.unusable(reward_loop.warm_up())):
                raise unusable[0]
            for number in range(1, plan.load + 1):
                prompts = list(itertools.islice(order, max(training.generation_batch_size // group, 1)))
                batch = [row for row in prompts for _ in range(group)]
                begun = reward_loop.begin([{"row": row} for row in batch], group)
                result = reward_loop.result(begun, [made_up(rows[row], rng) for row in batch])
                values = [value for value in result.values if value is not None]
                seconds.append(result.report.seconds)
                scored.append(len(values) / len(batch))
                lost.update(f"{each.outcome.value}:{each.reason}" for each in result.rewards if each.value is None)
                mean = f", mean reward {fmean(values):.2f}" if values else ""
                logger.info(f"[Load {number}/{plan.load}] {seconds[-1]:.2f} s, scored {scored[-1]:.0%}{mean}")
    findings.figures |= {"step_p50_s": median(seconds), "step_max_s": max(seconds), "least_scored": min(scored)}
    least = training.min_valid_reward_fraction
    if skipped := sum(share < least for share in scored):
        reasons = ", ".join(f"{name} {count}" for name, count in lost.most_common())
        worst = f"at worst {min(scored):.0%} were scored ({reasons})"
        text = f"Training would skip {skipped} of {plan.load} steps; {worst}."
        findings.fail(text, f"Fix the services or lower the concurrency: `min_valid_reward_fraction` is {least:.0%}.")
