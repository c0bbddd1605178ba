"""Several reward functions as one reward: their weighted sum. As in TRL, a function that returns `None` does not apply
and is skipped. If a function fails, the completion stays unscored, whereas TRL's sum would count 0."""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain, count
from typing import TypeAlias

from salesrl_trl.errors import ConfigError, ServiceError
from salesrl_trl.reward.batch import BatchReport, Sample
from salesrl_trl.reward.scorer import AT_ONCE, DEADLINE_S, METER, Per, RewardNames, Scorer
from salesrl_trl.reward.stage_times import StageTimes
from salesrl_trl.types import JUDGE, NOT_APPLICABLE, Example, Outcome, Reward

Apart: TypeAlias = Callable[[Scorer], Scorer]  # `remote.RemoteReward`


class MixedReward(Scorer):
    """Combines several weighted rewards. Without any rewards, every completion scores 0.

    `are_all`: whether TRL runs no further ones, such as reward models or environment rewards. If it does, a completion
    to which none of these rewards applies still counts as scored.
    """

    def __init__(self, rewards: Sequence[Scorer], weights: Sequence[float], are_all: bool = True) -> None:
        super().__init__(max((reward.deadline_s for reward in rewards), default=DEADLINE_S))
        self._rewards = tuple(rewards)
        if budgets := [reward.budget for reward in rewards if reward.budget is not None]:  # they share one account
            self.budget = budgets[0].joined(budgets)
        self._are_all = are_all
        self._names = _names_of_all([reward.names for reward in rewards])
        self._weights = dict(zip(self.names.functions, weights, strict=True))
        self._components = {name: reward.names.components for name, reward in zip(self._weights, rewards, strict=True)}

    async def prepare(self, rows: Iterable[Example]) -> None:
        rows = list(rows)
        await asyncio.gather(*(reward.prepare(rows) for reward in self._rewards))

    async def score(self, sample: Sample, stages: StageTimes) -> Reward:
        if METER in sample.row:  # for the drift monitor: the judge alone
            return await next(one for one in self._rewards if one.names.meter is not None).score(sample, stages)
        scoring = [asyncio.ensure_future(reward.score(sample, stages)) for reward in self._rewards]
        try:
            rewards = await asyncio.gather(*scoring)
        finally:
            for task in scoring:  # if one of them raised
                task.cancel()
        return self._together(dict(zip(self.names.functions, rewards, strict=True)))

    def _together(self, rewards: Mapping[str, Reward]) -> Reward:
        numbers = {name: reward.value for name, reward in rewards.items()}
        given = {name: number for name, number in numbers.items() if number is not None}
        failed = [reward for reward in rewards.values() if reward.value is None and reward.reason != NOT_APPLICABLE]
        invalid = [reward for reward in rewards.values() if reward.outcome is Outcome.INVALID_ACTION]
        value: float | None = sum(self._weights[name] * number for name, number in given.items())
        outcome, reason = Outcome.OK, ""
        if failed or (rewards and not given and self._are_all):
            first = failed[0] if failed else next(iter(rewards.values()))
            outcome, reason, value = first.outcome, first.reason, None
        elif invalid:
            outcome, reason = invalid[0].outcome, invalid[0].reason
        components = {
            name if name in self._components[function] else f"{function}/{name}": part
            for function, reward in rewards.items()
            for name, part in reward.components.items()
        }
        return Reward(
            outcome=outcome, value=value, reason=reason, components=components, by_function=numbers,
            columns={name: column for reward in rewards.values() for name, column in reward.columns.items()},
            metrics=tuple(metric for reward in rewards.values() for metric in reward.metrics),
            breach=next((reward.breach for reward in failed if reward.breach), ""),
        )  # fmt: skip

    async def warm_up(self) -> dict[str, float | ServiceError]:
        answers = await asyncio.gather(*(reward.warm_up() for reward in self._rewards))
        return {name: result for results in answers for name, result in results.items()}

    async def drain(self) -> BatchReport:
        reports = [await reward.drain() for reward in self._rewards]
        traffic: dict[str, Counter[str]] = {}
        hits = Counter[str]()
        for report in reports:
            hits.update(report.cache_hits)
            for service, counts in report.traffic.items():
                traffic.setdefault(service, Counter()).update(counts)
        return BatchReport(
            usage={name: usage for report in reports for name, usage in report.usage.items()},
            traffic=traffic, cache_hits=hits, judged_singly=sum(report.judged_singly for report in reports),
            records=[record for report in reports for record in report.records],
            calls=[call for report in reports for call in report.calls],
        )  # fmt: skip

    async def aclose(self) -> None:
        for reward in self._rewards:
            await reward.aclose()


def _names_of_all(every: Sequence[RewardNames]) -> RewardNames:
    functions: dict[str, str] = {}
    for names in every:
        if len(names.functions) != 1:
            raise ConfigError("a combined reward can't be mixed with others. Pass its functions individually instead.")
        [logged_as] = names.functions.values()
        numbered = chain([logged_as], (f"{logged_as}_{number}" for number in count(2)))
        functions[next(name for name in numbered if name not in functions)] = logged_as
    judged = [{name for name in names.functions if name.startswith(JUDGE)} for names in every]  # verdict names
    taken = Counter(name for names, own in zip(every, judged, strict=True) for name in {*names.components, *own})
    if twice := sorted({name for names in every for name in names.components if taken[name] > 1}):
        text = f"several rewards are named {', '.join(twice)}. Use at most one built-in judge, and unique names."
        raise ConfigError(text)
    columns = frozenset(column for names in every for column in names.columns or ())
    kinds = ("needs", "providers", "components", "stages", "services", "required")
    return RewardNames(
        functions=functions,
        together=max((names.together for names in every), key=list(Per).index, default=Per.COMPLETION),
        columns=None if any(names.columns is None for names in every) else columns,
        at_once=min((names.at_once for names in every), default=AT_ONCE),
        places={name: place for names in every for name, place in names.places.items()},
        judges_groups=any(names.judges_groups for names in every),
        meter=next((names.meter for names in every if names.meter is not None), None),
        **{kind: tuple(dict.fromkeys(entry for names in every for entry in getattr(names, kind))) for kind in kinds},
    )


def combined(
    rewards: Sequence[Scorer], weights: Sequence[float], apart: Apart | None, *, are_all: bool = True
) -> Scorer:
    """Combine several rewards; a single one is kept. `apart` moves it to its own process, unless part of it is."""
    if any(reward.is_played for reward in rewards) and (len(rewards) > 1 or not are_all or apart is not None):
        raise ConfigError(
            "a function with `@per_episode` can't be combined with other rewards or with `reward_process`. Use it "
            "alone, with `reward_process: false`: it plays the whole episode in the trainer's process and returns the "
            "reward. Call the other functions inside it."
        )
    reward = rewards[0] if len(rewards) == 1 and are_all else MixedReward(rewards, weights, are_all)
    return reward if apart is None or any(part.is_apart for part in rewards) else apart(reward)
