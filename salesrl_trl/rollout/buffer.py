"""The buffer of groups in flight: launches, the choice of groups to train on, and checkpointing. Its contract is in
docs/background/architecture.md. A buffer policy ranks groups, on each rank separately and without collectives;
`choose` enforces the staleness bound."""

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

RESERVE = 4  # divisor of a batch's size for the spare groups in flight, if groups are replaced and may wait
SHARE_RATE = 0.2  # step size of the moving average of the share of zero-variance groups


class InOrder:
    """In row order: each turn trains on its own batch. Bitwise equal to stock TRL."""

    max_age = refill_limit = 0


class ByArrival:
    """The first scored groups in flight, none older than `max_age` optimizer steps. Override `key` for your own
    policy: `SalesGRPOTrainer(buffer_policy=...)`."""

    refill_limit = 0  # replacement groups a step may generate for each group it trains on

    def __init__(self, max_age: int) -> None:
        self.max_age = max_age

    def key(self, group: PromptGroup) -> float:
        """Scored groups train in ascending order of this number, which must depend only on the group; by default the
        oldest first. Also called on the rewards' thread."""
        return group.version

    def may_train(self, group: PromptGroup) -> bool:
        return True

    def drops(self, group: PromptGroup, following: Sequence[int]) -> bool:
        """Whether a group leaves the buffer untrained. Later turns begin at the optimizer steps `following`."""
        return False

    def beside(self, groups: Sequence[PromptGroup], turns: int, count: int) -> int:
        """Groups to generate in addition to the `count` of a new turn, given these in flight for `turns` earlier
        turns."""
        return 0

    def missing(self, groups: Sequence[PromptGroup], count: int) -> int:
        """Groups to generate immediately if all of these are scored and a turn cannot train on `count` of them."""
        return 0


class Refilled(ByArrival):
    """By arrival, among informative groups. Zero-variance groups are replaced by groups of other rows, at most
    `refill_limit` per group that a step trains on. `reserve`: whether to keep spare groups that may wait."""

    def __init__(self, max_age: int, refill_limit: int, reserve: bool) -> None:
        super().__init__(max_age)
        self.refill_limit = refill_limit
        self._reserve = reserve
        self._uniform_share = 0.0  # moving average over groups that left the buffer

    def may_train(self, group: PromptGroup) -> bool:
        return not group.is_uniform

    def beside(self, groups: Sequence[PromptGroup], turns: int, count: int) -> int:
        """Unscored groups count by the share of informative groups so far."""
        informative = [group for group in groups if not group.is_uniform]
        scored = sum(group.is_scored for group in informative)
        target = count * (turns + 1) + (count // RESERVE if self._reserve else 0)
        return to_launch(target, scored, len(informative) - scored, self._uniform_share, self.refill_limit) - count

    def missing(self, groups: Sequence[PromptGroup], count: int) -> int:
        return count - sum(not group.is_uniform for group in groups)

    def drops(self, group: PromptGroup, following: Sequence[int]) -> bool:
        return group.is_uniform or (bool(following) and group.version + self.max_age < following[0])

    def turnover(self, leaving: Sequence[PromptGroup]) -> tuple[float, ...]:
        """Counts for the leaving groups: uniform, all, sum of rewards and number of rewards. Updates the share of
        uniform groups expected by `beside`."""
        uniform = sum(group.is_uniform for group in leaving)
        rewards = [reward for group in leaving for reward in group.cut(group.rollout.rewards.rewards) if reward]
        values = [reward.value for reward in rewards if reward.value is not None]
        self._uniform_share += SHARE_RATE * (uniform / len(leaving) - self._uniform_share)
        return uniform, len(leaving), sum(values), len(values)


BufferPolicy = InOrder | ByArrival


def choose(
    policy: ByArrival, groups: Sequence[PromptGroup], count: int, following: Sequence[int]
) -> list[PromptGroup]:
    """The `count` groups that a turn trains on, in order; empty while one of them is unscored. Later turns begin at
    the optimizer steps `following`."""
    scored = [(group, group.is_scored) for group in groups]  # read once, as more may arrive meanwhile
    candidates = [(group, is_in) for group, is_in in scored if policy.may_train(group)]
    latest, is_in = [group.version + policy.max_age for group, _ in candidates], [is_in for _, is_in in candidates]
    keys = [policy.key(group) if is_in else 0.0 for group, is_in in candidates]
    chosen = first_in(latest, is_in, following, count, keys)
    return [candidates[number][0] for number in sorted(chosen)]


def first_in(
    latest: Sequence[int], is_in: Sequence[bool], following: Sequence[int], count: int,
    keys: Sequence[float] | None = None,
) -> list[int]:  # fmt: skip
    """The `count` groups in flight to train on now: those that cannot wait, then the first scored ones by `keys`, by
    default the oldest. Empty while one of them is unscored. `latest`: the last step that may train on each; `is_in`:
    whether it is scored.

    Later batches begin at the steps `following`: u_1 <= u_2 <= ... With c(u) groups for which u is too late, max over
    j of c(u_j) - (j - 1) * count cannot wait, so none is ever late. If each step has and begins a batch, these are the
    groups whose last step this is.
    """
    oldest = sorted(range(len(latest)), key=latest.__getitem__)
    musts = max((sum(last < step for last in latest) - j * count for j, step in enumerate(following)), default=0)
    chosen, others = oldest[: max(musts, 0)], [group for group in oldest[max(musts, 0) :] if is_in[group]]
    chosen = [*chosen, *(others if keys is None else sorted(others, key=keys.__getitem__))][:count]
    return chosen if len(chosen) == count and all(is_in[group] for group in chosen) else []


def to_launch(target: int, differ: int, out: int, equal_share: float, most: int) -> int:
    """The groups to launch so that `target` of those in flight are informative. `differ` are scored and informative;
    of the `out` unscored and of new ones, a share of `1 - equal_share` will be, assumed to be at least `1 / (1 +
    most)`."""
    return math.ceil((target - differ) / max(1.0 - equal_share, 1 / (1 + most))) - out


def policy_of(most_lookahead: int, max_staleness: int = 0, refill_groups: int = 0) -> BufferPolicy:
    """The buffer policy for these settings; 0 for an ineffective one."""
    if refill_groups:
        return Refilled(max_staleness or most_lookahead, refill_groups, reserve=max_staleness > 0)
    return ByArrival(max_staleness) if max_staleness else InOrder()


class _Turn(NamedTuple):
    launched: Rollout  # its own rows
    trained: Rollout  # the groups it trains on


@dataclass(eq=False, kw_only=True)
class Buffer:
    """Groups from the launch of their turn until they are trained on. Each call passes the step counts: TRL's
    micro-steps, and optimizer steps done."""

    launcher: Launcher
    turns: RolloutSchedule
    updates: UpdatesAhead  # provides replacement rows
    policy: BufferPolicy = field(default_factory=InOrder)
    seed: int = 0  # for drawing replacement rows
    _kept: dict[int, KeptRollouts] = field(default_factory=dict)
    _count: int = 0  # groups of a turn
    _refilled: int = 0  # replacement groups since the last step took its own
    _taken: dict[int, _Turn] = field(default_factory=dict)  # in the current step
    _behind: list[Rollout] = field(default_factory=list)  # whose turn is over, with remaining groups

    def restart(self, micro_step: int, update: int, has_batch: bool, kept: Mapping[int, KeptRollouts]) -> None:
        """Start a run after these micro-steps and optimizer steps, with nothing in flight. `has_batch`: a generation
        batch is in progress. `kept`: from `in_flight` of an earlier start."""
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
        """The groups taken by the previous step have been trained on."""
        self._taken = {}

    def launch_due(self, micro_step: int, update: int) -> None:
        """Generate the turns that are due, along with replacement groups."""
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
        """Generate, or begin to, for a step to train on. `update`: optimizer steps the weights have taken."""
        return self.launcher.launch(inputs, update, ahead=bool(self.turns.lookahead), needs_logps=self.needs_logps)

    def take(self, inputs: list[Example], micro_step: int, update: int) -> Rollout:
        """The groups that the turn of these inputs trains on: as many as it has, chosen by the buffer policy."""
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
        """The completions of each turn launched before this step and not yet trained on at its end, by the micro-steps
        until they are first trained on. An undone step does not count."""
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
        for number, (first, rollout) in enumerate(turns.items(), start=1):  # the last one keeps the remainder
            batch = [*itertools.islice(oldest, self._count if number < len(turns) else None)]
            batch = batch or [PromptGroup(rollout, range(0))]
            kept[first - micro_step] = KeptRollouts.of(batch, rollout.sampled)
        return kept

    @property
    def chooses(self) -> bool:
        """Whether a step trains on scored groups of several turns, chosen by each rank separately."""
        return isinstance(self.policy, ByArrival)

    @property
    def needs_logps(self) -> bool:
        """Whether a later policy may train on this launch, or on its groups together with such a launch's."""
        return bool(self.turns.lookahead or self.policy.max_age)

    def _restored(self, kept: KeptRollouts, inputs: list[Example], update: int) -> Rollout:
        """A turn from an earlier start; a collective. If any rank lacks its completions, all generate again."""
        group, device, chooses = self.launcher.trl.group(), PartialState().device, self.chooses
        if (kept.inputs or not kept.rows) and (chooses or len(kept.inputs) == len(inputs)):
            inputs = kept.inputs
        sampled = kept.sampled if kept.rows == keys_of(inputs) else None
        if sampled is not None and sampled.logprobs is None and chooses:
            sampled = sampled if (kept.behaviour_logps is not None) is self.needs_logps else None
        if not on_any_rank(sampled is None, device) and sampled is not None:
            return self.launcher.restore(kept, inputs, sampled, update)
        size = highest(max(len(inputs), group), device)  # ranks may have different numbers left
        return self.launch([*inputs, *self._at_random((size - len(inputs)) // group, update)], update)

    def _chosen(self, policy: ByArrival, head: Rollout, update: int) -> Rollout:
        """The groups to train on in the turn of `head`. Waits until they are scored; a collective."""
        # 1. the groups in flight. With `partial_rollouts` and without replacements, an engine need not have finished
        # them: later turns are then unseen too, so that none trains so early that another grows too old
        flying, waits = [*self._behind, head], len(head.rewards.waits)
        leaves = self.launcher.reward_loop.meanwhile is not None and not policy.refill_limit
        for rollout in self.turns.launched().values():
            if rollout.sampled is None and rollout.newest < update:
                is_whole = len(rollout.ended) == len(rollout.inputs)
                if leaves and on_any_rank(not is_whole, PartialState().device):
                    break
                self.launcher.collect(rollout)
            flying += [rollout] if rollout.sampled is not None else []
        # 2. wait for the groups to train on; generate more if too few are informative
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
        # 3. they leave the buffer, along with groups that will never be trained on
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
        """Wait until every rank's policy has chosen, or all groups are scored; a collective."""
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
            # ranks synchronise here rather than in a phase of the trainer's own work
            if on_any_rank(error is not None, PartialState().device):
                name = type(policy).__name__
                raise ConfigError(f"the buffer policy {name} failed. Expected `key` to return a number") from error

    def _best(self, groups: Sequence[PromptGroup]) -> list[PromptGroup]:
        """As many groups as a turn has when too few are informative, with as few uniform ones as possible."""
        best = sorted(groups, key=attrgetter("is_uniform"))[: self._count]
        return [group for group in groups if group in best]

    def _drawn(self, groups: int, update: int) -> list[Example]:
        """Random rows for this many replacement groups: on all ranks as many as any rank needs, within the step's
        limit. A collective if the policy replaces groups."""
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
