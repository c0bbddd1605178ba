"""A run's load on its services: made-up completions, scored by its reward chain, batch after batch."""

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

TEXT_CHARS = 300  # longest text of a made-up action
INVALID = ("", "{}", "I would ask for the price first.", '{"rewritten_query": 7}')
INVALID_SHARE = 0.2  # about as many as from a policy that knows the format


def made_up(row: SalesRow, rng: random.Random) -> str:
    """A completion: an action of excerpts of the row's conversation, or now and then one that is invalid."""
    if rng.random() < INVALID_SHARE:
        return rng.choice(INVALID)
    texts = [message.content[:TEXT_CHARS] for message in row.conversation]
    action = {name: f"{rng.choice(texts)} {rng.randrange(1000)}" for name in DEFAULT_FORMAT.fields}
    return json.dumps(action, ensure_ascii=False)


def score_made_up(plan: "Plan", findings: Findings) -> None:
    """Score as many batches as `plan.load` says, and report what a run with these services would find."""
    config, training, fields = plan.config.reward, plan.config.training, plan.config.reward.rag_service.action_format
    if not config.has_chain or config.asks_nobody or fields.fields != DEFAULT_FORMAT.fields:
        raise ConfigError(
            "made-up completions are actions of the usual fields for the packaged chain. Leave out `reward_funcs` and "
            "`rag.action_fields`."
        )
    rows, rng, group = plan.train_rows, random.Random(training.seed), training.num_generations
    order = itertools.cycle(rng.sample(range(len(rows)), len(rows)))
    seconds, scored, lost = list[float](), list[float](), Counter[str]()
    with tempfile.TemporaryDirectory() as folder:  # answers of an earlier run would take load off the services
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
        findings.fail(
            f"Training would skip {skipped} of {plan.load} steps: the worst had {min(scored):.0%} of its completions "
            f"scored ({', '.join(f'{name} {count}' for name, count in lost.most_common())}).",
            f"`min_valid_reward_fraction` needs {least:.0%}: mend the services, or ask them for less at once.",
        )
