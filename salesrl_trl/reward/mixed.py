"""Several reward functions as one reward: the number of each, and the one that they make together.

    value = sum over functions f of w_f * f

A function that returns `None` does not apply to the completion: the sum is without it, as in TRL. A function that
fails leaves the completion without a number. TRL's sum would count the missing one as 0, so that a completion whose
judge timed out were the worst of its group.

Owns this rule. Owns no service: each function has its own.
"""

import asyncio
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain, count
from typing import Any

from salesrl_trl.errors import ConfigError, ServiceError
from salesrl_trl.reward.base import DEADLINE_S, BatchedReward, RewardNames
from salesrl_trl.reward.batch import NOTHING_SCORED, BatchReport, RewardBatch, Sample
from salesrl_trl.reward.judge.judge_interface import ProviderUsage
from salesrl_trl.reward.remote import RemoteReward
from salesrl_trl.reward.stage_times import StageTimes
from salesrl_trl.timing import Span
from salesrl_trl.types import NOT_APPLICABLE, Example, Outcome, Reward


class MixedReward(BatchedReward):
    """Several rewards as one.

    Args:
        rewards (`Sequence[BatchedReward]`):
            The rewards. None at all makes 0 for every completion.
        weights (`Sequence[float]`):
            The weight of each.
        are_all (`bool`, *optional*, defaults to `True`):
            Whether there are no others. Beside reward models and those of environments, which TRL runs, a completion
            to which none of these applies still has a number.
    """

    def __init__(self, rewards: Sequence[BatchedReward], weights: Sequence[float], are_all: bool = True) -> None:
        super().__init__(max((reward.deadline_s for reward in rewards), default=DEADLINE_S))
        self._rewards = tuple(rewards)
        self.budget = next((reward.budget for reward in rewards if reward.budget is not None), None)
        self._are_all = are_all
        self._names: dict[str, str] = {}
        for reward in rewards:
            if len(reward.function_names) != 1:
                raise ConfigError("a reward of several functions is given beside others. Expected the functions.")
            [logged_as] = reward.function_names.values()
            numbered = chain([logged_as], (f"{logged_as}_{number}" for number in count(2)))
            self._names[next(name for name in numbered if name not in self._names)] = logged_as
        self._weights = dict(zip(self._names, weights, strict=True))

    @property
    def function_names(self) -> dict[str, str]:
        return self._names

    @property
    def names(self) -> RewardNames:
        every = [reward.names for reward in self._rewards]
        return RewardNames(
            **{
                kind: tuple(dict.fromkeys(name for names in every for name in getattr(names, kind)))
                for kind in ("providers", "components", "stages", "services")
            },
            places={name: place for names in every for name, place in names.places.items()},
        )

    def unit(self, group: int, size: int) -> int:
        return max((reward.unit(group, size) for reward in self._rewards), default=1)

    def row_of(self, example: Example) -> tuple[Any, ...]:
        """What each of the rewards keeps."""
        return tuple(reward.row_of(example) for reward in self._rewards)

    def row_id(self, row: tuple[Any, ...]) -> str:
        """The name that the first of them has for it."""
        return self._rewards[0].row_id(row[0]) if row else super().row_id(row)

    def check_columns(self, columns: Sequence[str]) -> None:
        for reward in self._rewards:
            reward.check_columns(columns)

    def fetch_references(self, rows: Iterable[tuple[Any, ...]]) -> None:
        if not self.batches.is_stopped:
            for reward, own in zip(self._rewards, zip(*rows, strict=True), strict=False):
                reward.fetch_references(own)

    async def score(self, sample: Sample, stages: StageTimes) -> Reward:
        scoring = [
            asyncio.ensure_future(reward.score(replace(sample, row=row), stages))
            for reward, row in zip(self._rewards, sample.row, strict=True)
        ]
        try:
            rewards = await asyncio.gather(*scoring)
        finally:
            for each in scoring:  # after an error of one of them
                each.cancel()
        return self._together(dict(zip(self._names, rewards, strict=True)), stages.seconds)

    def _together(self, rewards: Mapping[str, Reward], seconds: Mapping[str, float]) -> Reward:
        numbers = {name: reward.value for name, reward in rewards.items()}
        known = {name: number for name, number in numbers.items() if number is not None}
        failed = [each for each in rewards.values() if each.value is None and each.reason != NOT_APPLICABLE]
        invalid = [each for each in rewards.values() if each.outcome is Outcome.INVALID_ACTION]
        value: float | None = sum(self._weights[name] * number for name, number in known.items())
        outcome, reason = Outcome.OK, ""
        if failed or (rewards and not known and self._are_all):
            first = failed[0] if failed else next(iter(rewards.values()))
            outcome, reason, value = first.outcome, first.reason, None
        elif invalid:
            outcome, reason = invalid[0].outcome, invalid[0].reason
        return Reward(
            outcome=outcome,
            value=value,
            reason=reason,
            components={name: part for each in rewards.values() for name, part in each.components.items()},
            seconds=dict(seconds),
            by_function=numbers,
            columns={name: column for each in rewards.values() for name, column in each.columns.items()},
            metrics=tuple(metric for each in rewards.values() for metric in each.metrics),
        )

    async def warm_up(self) -> dict[str, float | ServiceError]:
        """As `BatchedReward.warm_up`, of all at once."""
        every = await asyncio.gather(*(reward.warm_up() for reward in self._rewards))
        return {name: found for each in every for name, found in each.items()}

    def unusable(self, warm_up: Mapping[str, float | ServiceError]) -> list[ServiceError]:
        return [error for reward in self._rewards for error in reward.unusable(warm_up)]

    async def drained(self, report: BatchReport) -> BatchReport:
        """The report, with what the services of all did. Functions of one name are counted together."""
        every = [await reward.drained(NOTHING_SCORED) for reward in self._rewards]
        usage: dict[str, ProviderUsage] = {name: each for one in every for name, each in one.usage.items()}
        traffic: dict[str, Counter[str]] = {}
        for one in every:
            for service, counts in one.traffic.items():
                traffic.setdefault(service, Counter()).update(counts)
        return replace(
            report,
            usage=usage,
            traffic=traffic,
            records=[record for one in every for record in one.records],
            calls=[call for one in every for call in one.calls],
            cache_hits={name: sum(one.cache_hits[name] for one in every) for name in NOTHING_SCORED.cache_hits},
        )

    def under_way(self, batch: RewardBatch) -> list[str]:
        return [*batch.under_way(), *(stage for reward in self._remote for stage in reward.under_way(batch))]

    def unreported_spans(self) -> list[Span]:
        remote = [span for reward in self._remote for span in reward.unreported_spans()]
        return [*super().unreported_spans(), *remote]

    @property
    def _remote(self) -> list[RemoteReward]:
        return [reward for reward in self._rewards if isinstance(reward, RemoteReward)]

    async def aclose(self) -> None:
        """Cancel what is in flight, and close what belongs to each of the rewards."""
        await super().aclose()
        for reward in self._rewards:
            await reward.aclose()


def combined(
    rewards: Sequence[BatchedReward], weights: Sequence[float], in_a_process: bool | None, *, are_all: bool = True
) -> BatchedReward:
    """One reward of several, or the only one.

    Args:
        rewards (`Sequence[BatchedReward]`):
            The rewards.
        weights (`Sequence[float]`):
            The weight of each.
        in_a_process (`bool`, *optional*):
            Whether it runs in a process of its own, if none of them does.
        are_all (`bool`, *optional*, defaults to `True`):
            As in `MixedReward`.
    """
    reward = rewards[0] if len(rewards) == 1 and are_all else MixedReward(rewards, weights, are_all)
    goes = in_a_process and not any(isinstance(each, RemoteReward) for each in rewards)
    return RemoteReward(reward) if goes else reward
