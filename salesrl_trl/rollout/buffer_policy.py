"""Which groups of the buffer a turn trains on. A policy says which it prefers; `choose` keeps the bound of their age.

A policy is asked on each rank for this rank's groups and makes no collective.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from accelerate.logging import get_logger

from salesrl_trl.errors import ConfigError
from salesrl_trl.rollout.in_flight import Group

logger = get_logger(__name__)

RESERVE = 4  # the part of a batch in flight beside what later steps train on, where groups are replaced and may wait
SHARE_RATE = 0.2  # by how much a step moves the share of groups that are expected to have equal rewards


class InOrder:
    """In the order of rows: a turn trains on its own batch. Stock TRL's numbers, to the bit."""

    max_age = 0


class ByArrival:
    """The first groups in flight that are scored, none older than `max_age` optimizer steps. One of your own overrides
    `key`: `SalesGRPOTrainer(buffer_policy=...)`."""

    def __init__(self, max_age: int) -> None:
        self.max_age = max_age

    def key(self, group: Group) -> float:
        """Scored groups are trained on in ascending order of this number, which depends on the group alone: by
        default the oldest first. Called on the thread of rewards too."""
        return group.version

    def may_train(self, group: Group) -> bool:
        """False for a group that `Refilled` replaces."""
        return True


class Turnover(NamedTuple):
    """The groups that leave the buffer in a turn, of one rank."""

    uniform: int
    groups: int
    rewards: float  # their sum
    scored: int  # completions with a reward


class Refilled(ByArrival):
    """By arrival, among groups whose rewards differ. Uniform ones make way for groups of other rows: at most `most`
    times as many as a step trains on. `reserve`: whether groups may wait, so that some are kept beside."""

    def __init__(self, max_age: int, most: int, reserve: bool) -> None:
        super().__init__(max_age)
        self.most = most
        self._reserve = reserve
        self._uniform_share = 0.0  # of groups that left the buffer, the last ones the most

    def may_train(self, group: Group) -> bool:
        return not group.is_uniform

    def beside(self, groups: Sequence[Group], turns: int, count: int) -> int:
        """Groups to generate beside those of the next turn, with these in flight for so many turns before it. Those
        that are not scored count by the share of groups that were uniform so far."""
        informative = [group for group in groups if not group.is_uniform]
        scored = sum(group.is_scored for group in informative)
        target = count * (turns + 1) + (count // RESERVE if self._reserve else 0)
        return to_launch(target, scored, len(informative) - scored, self._uniform_share, self.most) - count

    def missing(self, groups: Sequence[Group], count: int) -> int:
        """Groups to generate at once, where all of these are scored and too few differ."""
        return count - sum(not group.is_uniform for group in groups)

    def drops(self, group: Group, following: Sequence[int]) -> bool:
        """Whether a group leaves the buffer untrained: it is uniform, or too old for the next turn."""
        return group.is_uniform or (bool(following) and group.version + self.max_age < following[0])

    def turnover(self, leaving: Sequence[Group]) -> Turnover:
        """Sums over the groups that leave now. The share of uniform ones moves what `beside` expects."""
        uniform = sum(group.is_uniform for group in leaving)
        rewards = [reward for group in leaving for reward in group.cut(group.rollout.rewards.rewards) if reward]
        values = [reward.value for reward in rewards if reward.value is not None]
        self._uniform_share += SHARE_RATE * (uniform / len(leaving) - self._uniform_share)
        return Turnover(uniform, len(leaving), sum(values), len(values))


BufferPolicy = InOrder | ByArrival


def choose(policy: ByArrival, groups: Sequence[Group], count: int, following: Sequence[int]) -> list[Group]:
    """The `count` groups that a turn trains on, in order; none while one of them is not scored. Turns still to come
    begin at the optimizer steps `following`."""
    scored = [(group, group.is_scored) for group in groups]  # before anything else: the next may be in by then
    candidates = [(group, is_in) for group, is_in in scored if policy.may_train(group)]
    latest, is_in = [group.version + policy.max_age for group, _ in candidates], [is_in for _, is_in in candidates]
    chosen = first_in(latest, is_in, following, count, lambda number: policy.key(candidates[number][0]))
    return [candidates[number][0] for number in sorted(chosen)]


def first_in(
    latest: Sequence[int], is_in: Sequence[bool], following: Sequence[int], count: int,
    key: Callable[[int], float] | None = None,
) -> list[int]:  # fmt: skip
    """The `count` groups in flight that are trained on now: those that can't wait, then the first by `key` that are
    in, by default the oldest. Empty while one of them is not in. `latest`: the last step that may train on each;
    `is_in`: whether it is scored.

    Later batches begin at the steps `following`: u_1 <= u_2 <= ... With c(u) groups for which u is too late, so many
    can't wait: max over j of c(u_j) - (j - 1) * count. So none is ever late. Where each step has a batch, and begins
    one, they are those whose last step this is.
    """
    oldest = sorted(range(len(latest)), key=latest.__getitem__)
    musts = max((sum(last < step for last in latest) - j * count for j, step in enumerate(following)), default=0)
    chosen, others = oldest[: max(musts, 0)], [group for group in oldest[max(musts, 0) :] if is_in[group]]
    chosen = [*chosen, *(others if key is None else sorted(others, key=key))][:count]
    return chosen if len(chosen) == count and all(is_in[group] for group in chosen) else []


def to_launch(target: int, differ: int, out: int, equal_share: float, most: int) -> int:
    """The groups to launch so that `target` of those in flight teach. `differ` are scored and teach. `out` are not
    scored: of these, and of new ones, a share of `1 - equal_share` will, taken as `1 / (1 + most)` at least."""
    return math.ceil((target - differ) / max(1.0 - equal_share, 1 / (1 + most))) - out


def policy_of(
    custom: BufferPolicy | None, *, max_staleness: int, refill_groups: int, most_lookahead: int,
    why_not: Callable[[str], str | None],
) -> BufferPolicy:  # fmt: skip
    """The policy that settings ask for, or a `custom` one. `why_not` gives, by name, the reason why one of them has no
    effect in this run: then groups go in order. Raises `ConfigError` for a custom policy with too low an age."""
    if custom is not None and custom.max_age < most_lookahead:
        raise ConfigError(
            f"`buffer_policy` trains on groups of an age up to {custom.max_age}, and rollouts are up to "
            f"{most_lookahead} steps ahead. Expected a `max_age` of at least as many"
        )
    asked = {"max_staleness": max_staleness > most_lookahead > 0, "refill_groups": refill_groups > 0}
    names = [name for name, is_asked in asked.items() if is_asked] if custom is None else ["buffer_policy"]
    reasons = {name: why_not(name) for name in names}
    for name, reason in reasons.items():
        if reason is not None:
            logger.info(f"`{name}` has no effect here, because {reason}")
    in_force = {name for name, reason in reasons.items() if reason is None}
    if custom is not None:
        return custom if in_force else InOrder()
    may_wait = "max_staleness" in in_force
    max_age = max_staleness if may_wait else most_lookahead
    if "refill_groups" in in_force:
        return Refilled(max_age, refill_groups, reserve=may_wait)
    return ByArrival(max_age) if may_wait else InOrder()
