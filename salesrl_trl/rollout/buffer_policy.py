"""Which groups of the buffer a turn trains on. A policy says which it prefers; `choose` keeps the bound of their age.

A policy is asked on each rank for this rank's groups and makes no collective.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from salesrl_trl.rollout.in_flight import PromptGroup

RESERVE = 4  # the part of a batch in flight beside what later steps train on, where groups are replaced and may wait
SHARE_RATE = 0.2  # by how much a step moves the share of groups that are expected to have equal rewards


class InOrder:
    """In the order of rows: a turn trains on its own batch. Stock TRL's numbers, to the bit."""

    max_age = refill_limit = 0


class ByArrival:
    """The first groups in flight that are scored, none older than `max_age` optimizer steps. One of your own overrides
    `key`: `SalesGRPOTrainer(buffer_policy=...)`."""

    refill_limit = 0  # groups that a step may generate in place of others, for each one that it trains on

    def __init__(self, max_age: int) -> None:
        self.max_age = max_age

    def key(self, group: PromptGroup) -> float:
        """Scored groups are trained on in ascending order of this number, which depends on the group alone: by
        default the oldest first. Called on the thread of rewards too."""
        return group.version

    def may_train(self, group: PromptGroup) -> bool:
        return True

    def drops(self, group: PromptGroup, following: Sequence[int]) -> bool:
        """Whether a group leaves the buffer untrained. Turns to come begin at the optimizer steps `following`."""
        return False

    def beside(self, groups: Sequence[PromptGroup], turns: int, count: int) -> int:
        """Groups to generate beside the `count` of a new turn, with these in flight for so many turns before it."""
        return 0

    def missing(self, groups: Sequence[PromptGroup], count: int) -> int:
        """Groups to generate at once, where all of these are scored and a turn can't train on `count` of them."""
        return 0


class Turnover(NamedTuple):
    """The groups that leave the buffer in a turn, of one rank."""

    uniform: int
    groups: int
    rewards: float  # their sum
    scored: int  # completions with a reward


class Refilled(ByArrival):
    """By arrival, among groups whose rewards differ. Uniform ones make way for groups of other rows: at most
    `refill_limit` for each group that a step trains on. `reserve`: whether to keep some beside, which may wait."""

    def __init__(self, max_age: int, refill_limit: int, reserve: bool) -> None:
        super().__init__(max_age)
        self.refill_limit = refill_limit
        self._reserve = reserve
        self._uniform_share = 0.0  # of groups that left the buffer, the last ones the most

    def may_train(self, group: PromptGroup) -> bool:
        return not group.is_uniform

    def beside(self, groups: Sequence[PromptGroup], turns: int, count: int) -> int:
        """Those that are not scored count by the share of groups that were uniform so far."""
        informative = [group for group in groups if not group.is_uniform]
        scored = sum(group.is_scored for group in informative)
        target = count * (turns + 1) + (count // RESERVE if self._reserve else 0)
        return to_launch(target, scored, len(informative) - scored, self._uniform_share, self.refill_limit) - count

    def missing(self, groups: Sequence[PromptGroup], count: int) -> int:
        return count - sum(not group.is_uniform for group in groups)

    def drops(self, group: PromptGroup, following: Sequence[int]) -> bool:
        """A uniform one, or one that is too old for the next turn."""
        return group.is_uniform or (bool(following) and group.version + self.max_age < following[0])

    def turnover(self, leaving: Sequence[PromptGroup]) -> Turnover:
        """Sums over the groups that leave now. The share of uniform ones moves what `beside` expects."""
        uniform = sum(group.is_uniform for group in leaving)
        rewards = [reward for group in leaving for reward in group.cut(group.rollout.rewards.rewards) if reward]
        values = [reward.value for reward in rewards if reward.value is not None]
        self._uniform_share += SHARE_RATE * (uniform / len(leaving) - self._uniform_share)
        return Turnover(uniform, len(leaving), sum(values), len(values))


BufferPolicy = InOrder | ByArrival


def choose(
    policy: ByArrival, groups: Sequence[PromptGroup], count: int, following: Sequence[int]
) -> list[PromptGroup]:
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


def policy_of(most_lookahead: int, max_staleness: int = 0, refill_groups: int = 0) -> BufferPolicy:
    """The policy of these settings, 0 for one that has no effect."""
    if refill_groups:
        return Refilled(max_staleness or most_lookahead, refill_groups, reserve=max_staleness > 0)
    return ByArrival(max_staleness) if max_staleness else InOrder()
