"""Judges recorded completions again and compares rewards and advantages."""

import dataclasses
import logging
import math
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import torch

from salesrl_trl.errors import ConfigError, ServiceUnavailable
from salesrl_trl.judged.cache import cache_key
from salesrl_trl.judged.meter import correlation
from salesrl_trl.judged.rag_client import ANSWER, RagBackend
from salesrl_trl.launch.assembly import build_reward
from salesrl_trl.launch.checks.reward import check_judges, read_reward
from salesrl_trl.launch.data.sources import columns_of
from salesrl_trl.launch.reward_config import RewardConfig
from salesrl_trl.launch.services_plan import addresses
from salesrl_trl.record.reader import Recorded
from salesrl_trl.reward.reward_loop import RewardLoop
from salesrl_trl.service.transport import Transport
from salesrl_trl.types import SALES, Action, Answer, Outcome, RequestIds, Reward, SalesRow
from salesrl_trl.update.advantages import hybrid_advantages

logger = logging.getLogger(__name__)

AT_ONCE = 256  # completions started together, within the judge's own limits


def rejudged(
    config: RewardConfig, completions: Sequence[Recorded], rows: Sequence[SalesRow], branches: Sequence[str]
) -> list[Reward]:
    """Rewards of these completions under these settings."""
    parts = read_reward(config, branches)
    check_judges(config, parts)
    places = {row.row_id: place for place, row in enumerate(rows)}
    with addresses(config) as urls, tempfile.TemporaryDirectory() as folder:
        if config.has_chain:
            parts.rag = RecordedRag(completions, {row.row_id: row for row in rows})
        own = Path(folder)  # this command's own budget and answers
        reward = build_reward(config, parts, rows, *urls, output_dir=own)
        if config.judging.mode == "group":
            logger.info("ignoring `judge_mode: group`: each completion is judged again by its own call")
        asked = [{**columns_of(row), "row": place, "prompt": row.prompt} for place, row in enumerate(rows)]
        with closing(RewardLoop(reward)) as reward_loop:
            judged: list[Reward] = []
            for first in range(0, len(completions), AT_ONCE):
                part = completions[first : first + AT_ONCE]
                batch = reward_loop.begin([asked[places[completion.row]] for completion in part])
                judged += reward_loop.result(batch, [completion.text for completion in part]).rewards
    return judged


def of_all_functions(old: Recorded, new: Reward, weights: Sequence[float], packaged: str = SALES) -> Reward:
    """Combine the new built-in reward, named `packaged`, with other functions' recorded values. `weights` are in their
    order."""
    if len(weights) == 1:
        return new
    if old.reward is not None and not old.functions:
        raise ConfigError("the record has values of one reward function. Expected values of all `reward_funcs`.")
    numbers = {**old.functions, packaged: new.value}
    is_known = old.reward is not None or all(value is not None for name, value in numbers.items() if name != packaged)
    if not old.functions or not is_known:  # another function failed, so its value is unknown
        return Reward(outcome=Outcome(old.outcome), value=None, reason=old.reason)
    known = ((weight, value) for weight, value in zip(weights, numbers.values(), strict=True) if value is not None)
    value = None if new.value is None else sum(weight * value for weight, value in known)
    return dataclasses.replace(new, value=value, reference_value=None)


class RecordedRag(RagBackend):
    """Returns recorded answers without requests; its transports' metrics stay 0."""

    identity = "record"

    def __init__(self, completions: Iterable[Recorded], rows: Mapping[str, SalesRow]) -> None:
        self._answers: dict[str, object] = {}
        for completion in completions:
            row = rows[completion.row]
            if completion.action is not None and completion.answer is not None:
                self._answers[_key(row.context, row.ids, completion.action)] = completion.answer
            if completion.reference is not None:
                self._answers[_key(row.context, row.ids, None)] = completion.reference
        self.transports = {
            name: Transport(name, max_concurrency=1, attempt_timeout_s=1.0, max_attempts=1)
            for name in ("rag_8b", "rag_32b")
        }

    async def chat_8b(
        self, context: str, action: Action, score_threshold: float, top_k: int, *, ids: RequestIds
    ) -> Answer:
        return self._answer("rag_8b", _key(context, ids, action.as_dict()))

    async def chat(self, context: str, score_threshold: float, top_k: int, *, ids: RequestIds) -> Answer:
        return self._answer("rag_32b", _key(context, ids, None))

    def _answer(self, service: str, key: str) -> Answer:
        if key not in self._answers:
            raise ServiceUnavailable(f"the record lacks this answer of {service}", code=f"{service}_not_recorded")
        return ANSWER.validate_python(self._answers[key])


def _key(context: str, ids: RequestIds, action: Mapping[str, str] | None) -> str:
    return cache_key(context, ids.as_dict(), None if action is None else dict(action))


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoreChange:
    """The change in one branch, or overall."""

    branch: str
    completions: int
    scored_before: int
    scored_after: int
    mean_before: float
    mean_after: float  # mean reward of completions scored both times
    reward_correlation: float  # of these rewards, in [-1, 1]; NaN if all are equal
    advantage_correlation: float
    sign_flips: float
    """Share of advantages that changed sign, i.e. encouraged completions would have been discouraged or vice versa."""


def advantages(
    completions: Sequence[Recorded],
    rewards: Sequence[float | None],
    references: Sequence[float | None],
    scale: str,
    weight: float = 0.0,
) -> list[float | None]:
    """Advantages as computed in training by `hybrid_advantages`; `None` for unscored completions. Ranks share steps,
    batches and groups. `references` are the rewards of reference answers, `scale` is TRL's `scale_rewards` as text,
    and `weight` is the setting `hybrid_reference_weight`."""
    batches: dict[tuple[int, int], dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for place, completion in enumerate(completions):
        batches[completion.step, completion.batch][completion.prompt_group].append(place)
    result: list[float | None] = [None] * len(completions)
    for groups in batches.values():
        size = max(map(len, groups.values()))
        table = torch.full((2, len(groups), size), math.nan, dtype=torch.float64)  # NaN pads absent places
        for number, places in enumerate(groups.values()):
            for kind, column in enumerate((rewards, references)):
                for at, place in enumerate(places):
                    if (value := column[place]) is not None:
                        table[kind, number, at] = value
        own, of_references = table.flatten(1)
        made, _ = hybrid_advantages(own, of_references, size, weight, scale)
        for places, row in zip(groups.values(), made.view(len(groups), size).tolist(), strict=True):
            for place, advantage in zip(places, row, strict=False):
                result[place] = None if rewards[place] is None else advantage
    return result


def changes(
    completions: Sequence[Recorded], new: Sequence[Reward], scale: str, weight: float = 0.0
) -> list[ScoreChange]:
    """How `new` rewards change recorded completions, by branch and finally overall."""
    before = [completion.reward for completion in completions]
    after = [reward.value for reward in new]
    made_before = advantages(completions, before, [c.reference_reward for c in completions], scale, weight)
    made_after = advantages(completions, after, [reward.reference_value for reward in new], scale, weight)
    columns = [*zip(before, after, made_before, made_after, strict=True)]
    branches = [completion.branch for completion in completions]
    parts = {
        name: [row for branch, row in zip(branches, columns, strict=True) if branch == name]
        for name in sorted(set(branches))
    }
    if len(parts) > 1:
        parts["all"] = columns
    return [_change(name, rows) for name, rows in parts.items()]


def _change(branch: str, rows: Sequence[tuple[float | None, ...]]) -> ScoreChange:
    """The change in rows of (reward before, after, advantage before, after)."""
    both = [[value for value in row if value is not None] for row in rows]
    scored_twice = [row for row in both if len(row) == 4]
    before, after, made_before, made_after = [list(c) for c in zip(*scored_twice, strict=True)] or [[], [], [], []]
    return ScoreChange(
        branch=branch,
        completions=len(rows),
        scored_before=sum(row[0] is not None for row in rows),
        scored_after=sum(row[1] is not None for row in rows),
        mean_before=_mean(before),
        mean_after=_mean(after),
        reward_correlation=correlation(before, after),
        advantage_correlation=correlation(made_before, made_after),
        sign_flips=_mean([float(first * second < 0) for first, second in zip(made_before, made_after, strict=True)]),
    )


def _mean(numbers: Sequence[float]) -> float:
    return statistics.fmean(numbers) if numbers else math.nan
