"""The buffer of groups in flight: what is launched, which groups a turn trains on, and what a checkpoint keeps
(docs/ARCHITECTURE.md has its contract). A policy prefers groups, on each rank for its own and without a collective;
`choose` keeps the bound of their age."""

import itertools
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any, NamedTuple

from accelerate import PartialState

from salesrl_trl.errors import ConfigError
from salesrl_trl.names import Phase
from salesrl_trl.rollout.in_flight import KeptRollouts, PromptGroup, Rollout, keys_of
from salesrl_trl.rollout.reading_ahead import RolloutSchedule, UpdatesAhead
from salesrl_trl.rollout.rollout_launcher import Launcher
from salesrl_trl.types import Example
from salesrl_trl.update.run_control import highest, on_any_rank

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
        return group.is_uniform or (bool(following) and group.version + self.max_age < following[0])

    def turnover(self, leaving: Sequence[PromptGroup]) -> tuple[float, ...]:
        """Of the groups that leave now: the uniform ones and all, the sum of rewards and how many there are. The share
        of uniform ones moves what `beside` expects."""
        uniform = sum(group.is_uniform for group in leaving)
        rewards = [reward for group in leaving for reward in group.cut(group.rollout.rewards.rewards) if reward]
        values = [reward.value for reward in rewards if reward.value is not None]
        self._uniform_share += SHARE_RATE * (uniform / len(leaving) - self._uniform_share)
        return uniform, len(leaving), sum(values), len(values)


BufferPolicy = InOrder | ByArrival


def choose(
    policy: ByArrival, groups: Sequence[PromptGroup], count: int, following: Sequence[int]
) -> list[PromptGroup]:
    """The `count` groups that a turn trains on, in order; none while one of them is not scored. Turns still to come
    begin at the optimizer steps `following`."""
    scored = [(group, group.is_scored) for group in groups]  # before anything else: the next may be in by then
    candidates = [(group, is_in) for group, is_in in scored if policy.may_train(group)]
    latest, is_in = [group.version + policy.max_age for group, _ in candidates], [is_in for _, is_in in candidates]
    keys = [policy.key(group) if is_in else 0.0 for group, is_in in candidates]
    chosen = first_in(latest, is_in, following, count, keys)
    return [candidates[number][0] for number in sorted(chosen)]


def first_in(
    latest: Sequence[int], is_in: Sequence[bool], following: Sequence[int], count: int,
    keys: Sequence[float] | None = None,
) -> list[int]:  # fmt: skip
    """The `count` groups in flight that are trained on now: those that can't wait, then the first by `keys` that are
    in, by default the oldest. Empty while one of them is not in. `latest`: the last step that may train on each;
    `is_in`: whether it is scored.

    Later batches begin at the steps `following`: u_1 <= u_2 <= ... With c(u) groups for which u is too late, so many
    can't wait: max over j of c(u_j) - (j - 1) * count. So none is ever late. Where each step has a batch, and begins
    one, they are those whose last step this is.
    """
    oldest = sorted(range(len(latest)), key=latest.__getitem__)
    musts = max((sum(last < step for last in latest) - j * count for j, step in enumerate(following)), default=0)
    chosen, others = oldest[: max(musts, 0)], [group for group in oldest[max(musts, 0) :] if is_in[group]]
    chosen = [*chosen, *(others if keys is None else sorted(others, key=keys.__getitem__))][:count]
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


class _Turn(NamedTuple):
    launched: Rollout  # its own rows
    trained: Rollout  # the groups that it trains on


@dataclass(eq=False, kw_only=True)
class Buffer:
    """Groups from the launch of their turn until a turn trains on them. Counts of steps come with each call:
    micro-steps as TRL counts them, and optimizer steps done."""

    launcher: Launcher
    turns: RolloutSchedule
    updates: UpdatesAhead  # has the rows that may replace others
    policy: BufferPolicy = field(default_factory=InOrder)
    seed: int = 0  # of the rows that replace others
    _kept: dict[int, KeptRollouts] = field(default_factory=dict)
    _count: int = 0  # groups of a turn
    _refilled: int = 0  # groups in place of others since a step last took its own
    _taken: dict[int, _Turn] = field(default_factory=dict)  # in the step under way
    _behind: list[Rollout] = field(default_factory=list)  # whose turn is over, with groups that are left

    def restart(self, micro_step: int, update: int, has_batch: bool, kept: Mapping[int, KeptRollouts]) -> None:
        """A run begins after these micro-steps and optimizer steps, with nothing in flight. `has_batch`: a generation
        batch is there to go on with. `kept`: from `in_flight` of an earlier start."""
        self._kept = {micro_step + after: rollouts for after, rollouts in kept.items()}
        self.turns.restart(micro_step, update, has_batch)

    def cancel(self) -> None:
        flying = [*self._behind, *(turn.launched for turn in self._taken.values()), *self.turns.restart(0, 0, False)]
        self._kept, self._taken, self._behind, self._refilled = {}, {}, [], 0
        for rollout in flying:
            if rollout.handle is not None and rollout.sampled is None:
                rollout.handle.give_up()
        self.launcher.reward_loop.give_up()

    def begin_step(self) -> None:
        """What the step before took is trained on."""
        self._taken = {}

    def launch_due(self, micro_step: int, update: int) -> None:
        """Generate the turns that may be generated by now, with groups in place of others beside them."""
        for window in self.turns.due(micro_step, update):
            self._count = len(window.inputs) // self.launcher.trl.group()
            kept = self._kept.pop(window.first, None)
            if kept is not None:
                window.rollout = self._restored(kept, window.inputs, update)
                continue
            inputs = [*window.inputs]
            if isinstance(self.policy, ByArrival) and self.turns.lookahead:
                launched = self.turns.launched().values()
                groups = [group for rollout in (*self._behind, *launched) for group in rollout.groups_left]
                inputs += self._drawn(self.policy.beside(groups, len(launched), self._count), update)
            window.rollout = self.launch(inputs, update)

    def launch(self, inputs: list[Example], update: int) -> Rollout:
        """Generate for a step to train on, or begin to. `update`: optimizer steps that the weights have taken."""
        return self.launcher.launch(inputs, update, ahead=bool(self.turns.lookahead), needs_logps=self._needs_logps)

    def take(self, inputs: list[Example], micro_step: int, update: int) -> Rollout:
        """The groups that the turn of these inputs trains on, as many as it has: those that the policy chooses."""
        rollout = self.turns.take(micro_step, inputs)
        rollout = self.launch(inputs, update) if rollout is None else rollout
        self._taken[micro_step] = _Turn(rollout, rollout)
        self.launcher.collect(rollout)
        if isinstance(self.policy, InOrder):
            return rollout
        self._count = len(inputs) // rollout.group
        trained = self._chosen(self.policy, rollout, update)
        self._taken[micro_step] = _Turn(rollout, trained)
        return trained

    def in_flight(self, micro_step: int, update: int) -> dict[int, KeptRollouts]:
        """The completions of each turn that was launched before this step and not trained on by its end, by the
        micro-steps until it is first trained on. Of a step that is undone nothing counts."""
        taken = {first: turn for first, turn in self._taken.items() if first >= micro_step}
        launched = self.turns.launched()
        turns = {first: turn.launched for first, turn in taken.items()} | launched
        turns = {first: rollout for first, rollout in turns.items() if rollout.newest < update}
        if isinstance(self.policy, InOrder):
            return {
                first - micro_step: KeptRollouts(
                    rows=keys_of(rollout.inputs), steps=rollout.steps, sampled=rollout.sampled,
                    behaviour_logps=rollout.behaviour_logps,
                )
                for first, rollout in turns.items()
                if rollout.sampled is not None
            }  # fmt: skip
        flying = [*self._behind, *(turn.trained for turn in taken.values()), *launched.values()]
        groups = [group for rollout in flying for group in rollout.groups_left if group.version < update]
        oldest = iter(sorted(groups, key=attrgetter("version")))
        kept = {}
        for number, (first, rollout) in enumerate(turns.items(), start=1):  # the last one keeps what is left
            batch = [*itertools.islice(oldest, self._count if number < len(turns) else None)]
            batch = batch or [PromptGroup(rollout, range(0))]
            kept[first - micro_step] = KeptRollouts.of(batch, rollout.sampled)
        return kept

    @property
    def chooses(self) -> bool:
        """Whether a step trains on groups of several turns, once they are scored, and each rank on its own."""
        return isinstance(self.policy, ByArrival)

    @property
    def _needs_logps(self) -> bool:
        """Whether a later policy may train on what is launched now, or on its groups beside those of such a launch."""
        return bool(self.turns.lookahead or self.policy.max_age)

    def _restored(self, kept: KeptRollouts, inputs: list[Example], update: int) -> Rollout:
        """A turn of an earlier start; a collective. Where a rank lacks its completions, all generate again."""
        group, device, chooses = self.launcher.trl.group(), PartialState().device, self.chooses
        if (kept.inputs or not kept.rows) and (chooses or len(kept.inputs) == len(inputs)):
            inputs = kept.inputs
        sampled = kept.sampled if kept.rows == keys_of(inputs) else None
        if sampled is not None and sampled.logprobs is None and chooses:
            sampled = sampled if (kept.behaviour_logps is not None) is self._needs_logps else None
        if not on_any_rank(sampled is None, device) and sampled is not None:
            return self.launcher.restore(kept, inputs, sampled, update)
        size = highest(max(len(inputs), group), device)  # the ranks may have other numbers left
        return self.launch([*inputs, *self._at_random((size - len(inputs)) // group, update)], update)

    def _chosen(self, policy: ByArrival, head: Rollout, update: int) -> Rollout:
        """The groups that are trained on in the turn of `head`. Waits until they are scored; a collective."""
        # 1. the groups in flight. A server has generated all that was asked for before this step
        flying, waits = [*self._behind, head], len(head.rewards.waits)
        for rollout in self.turns.launched().values():
            if rollout.newest < update:
                self.launcher.collect(rollout)
            flying += [rollout] if rollout.sampled is not None else []
        # 2. wait for those that are trained on. Where too few are worth it, others are generated
        following = self.turns.updates
        while True:
            groups = [group for rollout in flying for group in rollout.groups_left]
            self._wait(policy, flying, groups, following)
            chosen = choose(policy, groups, self._count, following)
            is_short = not chosen and not self.launcher.reward_loop.stopped
            rows = self._drawn(policy.missing(groups, self._count) if is_short else 0, update)
            if not rows:
                break
            further = self.launch(rows, update)
            self._behind.append(further)
            flying.append(further)
            self.launcher.collect(further)
            if head.sampled is not None and further.sampled is not None:
                head.sampled = replace(head.sampled, tokens=head.sampled.tokens + further.sampled.tokens)
        chosen = chosen or self._best(groups)
        # 3. they leave the buffer, with those that nobody will train on
        leaving = [group for group in groups if group in chosen or policy.drops(group, following)]
        completions = KeptRollouts.of(chosen, head.sampled)
        of_batches = [(group.rollout.rewards, group.places) for group in chosen]
        rows = [batch.rows[place] for batch, places in of_batches for place in places]
        rewards = self.launcher.reward_loop.begin(rows, head.group)
        rewards.take(of_batches, head.rewards.waits[waits:])
        trained = Rollout(
            inputs=completions.inputs, rewards=rewards, steps=completions.steps, is_trained_on=True, group=head.group,
            sampled=completions.sampled, behaviour_logps=completions.behaviour_logps,
        )  # fmt: skip
        if isinstance(policy, Refilled):
            trained.turnover = (self._refilled, 1 / PartialState().num_processes, *policy.turnover(leaving))
        for group in leaving:
            group.rollout.left.remove(group.places)
        self.launcher.reward_loop.give_up([rollout.rewards for rollout in flying if not rollout.left])
        self._behind = [rollout for rollout in (*self._behind, head) if rollout.left]
        self._refilled = 0
        return trained

    def _wait(
        self, policy: ByArrival, flying: Sequence[Rollout], groups: Sequence[PromptGroup], following: Sequence[int]
    ) -> None:
        """Wait until the policy has chosen, or all groups are scored, on every rank; a collective."""
        error: Exception | None = None

        def is_decided() -> bool:
            nonlocal error
            try:
                return bool(choose(policy, groups, self._count, following)) or all(group.is_scored for group in groups)
            except Exception as failure:
                error = failure
                return True

        with self.launcher.timeline.phase(Phase.REWARD_WAIT):
            self.launcher.reward_loop.wait([rollout.rewards for rollout in flying], is_decided)
            # ranks wait for each other here, and not in a phase of the trainer's own work
            if on_any_rank(error is not None, PartialState().device):
                name = type(policy).__name__
                raise ConfigError(f"the policy {name} failed to choose groups. Expected a number of `key`") from error

    def _best(self, groups: Sequence[PromptGroup]) -> list[PromptGroup]:
        """As many groups as a turn has, where too few differ: uniform ones too, and those as few as possible."""
        best = sorted(groups, key=attrgetter("is_uniform"))[: self._count]
        return [group for group in groups if group in best]

    def _drawn(self, groups: int, update: int) -> list[Example]:
        """Rows at random for so many groups in place of others, on all ranks for as many as the one with the most
        needs, within the bound of a step. A collective, where the policy replaces groups."""
        if not self.policy.refill_limit:
            return []
        bound = self.policy.refill_limit * self._count - self._refilled
        groups = min(highest(max(groups, 0), PartialState().device), bound)
        drawn = self._at_random(groups, update)
        self._refilled += groups
        return drawn

    def _at_random(self, groups: int, update: int) -> list[Example]:
        loader: Any = self.updates.dataloader
        draw = random.Random(f"{self.seed} {PartialState().process_index} {update} {self._refilled}")
        drawn = [loader.dataset[draw.randrange(len(loader.dataset))] for _ in range(groups)]
        inputs: list[Example] = [dict(row) for row in drawn for _ in range(self.launcher.trl.group())]
        self.launcher.prepare(inputs)
        return inputs
