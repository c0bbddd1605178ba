"""Rollouts in flight, launched early and collected late: the generation, and each completion's reward from the moment
the completion is finished. `reading_ahead` decides when one may be launched; TRL uses completions and rewards."""

import itertools
import random
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from operator import itemgetter
from typing import Any, cast

import torch
from accelerate import PartialState
from accelerate.logging import get_logger
from torch.nn.functional import pad
from trl.data_utils import is_conversational, prepare_multimodal_messages

from salesrl_trl.errors import ConfigError
from salesrl_trl.generation.sampler import Finished, Handle, Ready, Sampled, Sampler
from salesrl_trl.names import Phase
from salesrl_trl.reward.batch import BatchResult, Completion, Origin, RewardBatch
from salesrl_trl.reward.reward_loop import RewardLoop
from salesrl_trl.rollout.groups import ScoredGroups, first_in, parts, to_launch
from salesrl_trl.rollout.reading_ahead import MicroBatches, RolloutSchedule, Update, UpdatesAhead, begun_ahead
from salesrl_trl.telemetry.timeline import Timeline
from salesrl_trl.timing import Span
from salesrl_trl.types import Example
from salesrl_trl.update.ranks import highest

logger = get_logger(__name__)

RESERVE = 4  # the part of a batch in flight beside what later steps train on, where groups are replaced and may wait
SHARE_RATE = 0.2  # by how much a step moves the share of groups that are expected to have equal rewards
MOST_AHEAD = 1024
"""Completions of an evaluation that wait for their turn, in a process. Their tokens and texts take some 100 MB."""


@dataclass(eq=False, kw_only=True, slots=True)
class Rollout:
    """Completions of one generation batch, from the moment they are asked for until they have been trained on; or
    groups of several that are trained on together."""

    inputs: list[Example]  # B rows
    rewards: RewardBatch
    steps: list[int]  # of each completion, the optimizer steps that the weights had taken which sampled it
    is_trained_on: bool
    handle: Handle | None = None  # the generation. `None` where TRL generates inside its own scoring.
    sampled: Sampled | None = None
    behaviour_logps: torch.Tensor | None = None
    """Log-probs of the policy that sampled, shape (B, C), where the sampler gives none and they are needed."""
    logps: dict[bool, torch.Tensor] = field(default_factory=dict)
    """Log-probs that TRL has computed, shape (B, C), by whether they are the reference's. Unchanged while the batch is
    repeated."""
    is_corrected_at_step: bool = False
    """Whether the pass that trains gives the old log-probs. `logps` then has NaN for them."""
    groups: ScoredGroups | None = None  # set while the batch is trained on part by part
    result: BatchResult | None = None
    completions: Sequence[Completion] = ()
    """The completions as TRL has them, B of them, once it has asked for their rewards."""
    scored: torch.Tensor | None = None
    """Table of `encode` with the rewards of all ranks so far: shape (world size x B, columns), on the CPU."""
    reports: torch.Tensor = field(default_factory=lambda: torch.zeros(0))
    """Table of `encode_report` of all ranks, once all rewards are in."""
    failed: torch.Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.bool))
    """Which completions of all ranks have no reward so far: shape (world size x B,), bool."""
    is_in_parts: bool = False  # whether TRL has gone over the batch before all rewards were in
    group: int = 1  # completions of a prompt. They are neighbours.
    is_reported: bool = False
    turnover: tuple[float, ...] = ()
    """Of the step that trains on these groups, where equal ones are replaced, sums and counts over ranks: groups in
    place of others and 1, groups of equal rewards and those that left flight, their rewards and how many."""
    left: list[range] = field(init=False)  # the groups that nobody has trained on yet

    def __post_init__(self) -> None:
        self.left = parts(len(self.inputs), 1, self.group)

    @classmethod
    def joined(cls, groups: "Groups", head: "Rollout", rewards: RewardBatch) -> "Rollout":
        """Groups at these places of several rollouts. The figures of generation are those of `head`."""
        of_groups = [(rollout, slice(places.start, places.stop)) for rollout, places in groups]
        logps = [each.behaviour_logps[own] for each, own in of_groups if each.behaviour_logps is not None]
        width = max((logp.size(1) for logp in logps), default=0)  # each is padded as its batch was
        sampled = [(rollout.sampled, places) for rollout, places in groups if rollout.sampled is not None]
        return cls(
            inputs=[row for rollout, own in of_groups for row in rollout.inputs[own]],
            rewards=rewards,
            steps=[step for rollout, own in of_groups for step in rollout.steps[own]],
            is_trained_on=True,
            sampled=Sampled.joined(sampled, head.sampled) if head.sampled and len(sampled) == len(groups) else None,
            behaviour_logps=torch.cat([pad(logp, (0, width - logp.size(1))) for logp in logps]) if logps else None,
            group=head.group,
        )

    @property
    def mode(self) -> str:
        return "train" if self.is_trained_on else "eval"

    @property
    def is_complete(self) -> bool:
        """Whether TRL has gone over the batch with all rewards in."""
        return self.groups is None or self.groups.complete

    def drain_metrics(self) -> tuple[Mapping[str, list[float]], int]:
        """TRL's figures of the generation, and its tokens on all ranks: once, then nothing."""
        if self.sampled is None or self.is_reported:
            return {}, 0
        self.is_reported = True
        return self.sampled.metrics, self.sampled.tokens


Groups = Sequence[tuple[Rollout, range]]  # each at these places of its rollout


@dataclass(frozen=True, kw_only=True, slots=True)
class KeptRollouts:
    """A rollout of an earlier start of the run."""

    rows: list[int]  # the row of each of the B completions, by the numbers of `keys_of`
    steps: list[int]
    sampled: Sampled | None  # `None` for completions that are not there, or not kept
    behaviour_logps: torch.Tensor | None
    inputs: list[Example] = field(default_factory=list)  # the rows, where groups go by themselves; perhaps none


@dataclass(eq=False, kw_only=True)
class Pipeline:
    """Launches rollouts and starts their rewards. Counts of steps come with each call: micro-steps as TRL counts them,
    and optimizer steps done."""

    sampler: Sampler
    reward_loop: RewardLoop
    timeline: Timeline
    decode: Callable[[Sequence[int]], str]
    """From a completion's token ids to its text. Called from the thread in which the sampler reports."""
    window: int  # micro-steps between two generation batches
    lookahead: int  # optimizer steps that rollouts may be ahead now
    behaviour_logps: Callable[[Sampled], torch.Tensor]
    """Log-probs of completions under the current policy, where the sampler gives none."""
    record_span: Callable[[Span], None]  # gets times of a generation that went on beside training
    group: Callable[[], int] = lambda: 1  # completions of a prompt at the moment, in training or in an evaluation
    reward_arguments: Callable[[], Mapping[str, object]] = dict
    """What reward functions may ask for beside a row's columns (`reward.scorer.TRL_ARGUMENTS`)."""
    inside_trl: bool = False
    """Whether generation begins inside TRL's scoring: for prompts from an environment, and tools in whole batches."""
    play: Callable[[Sequence[Example], Finished, bool], Handle] | None = None
    """Plays an episode with each row, in place of a completion of the sampler's."""
    go_on: Callable[[], None] = lambda: None
    """Generates the next turns of conversations that are out."""
    most_lookahead: int = 0
    """Optimizer steps that they may be ahead at any time, where `lookahead` moves."""
    max_staleness: int = 0
    """Above `most_lookahead`: groups are trained on as they come in, at most so many optimizer steps late."""
    refill_groups: int = 0
    """Above 0: groups of equal rewards are replaced, in a step at most so many times as many as it trains on."""
    seed: int = 0  # of the rows that replace others
    dataloader: Iterable[object] = ()  # what training goes through once, and then perhaps once more
    _kept: dict[int, KeptRollouts] = field(default_factory=dict)
    _count: int = 0  # groups of a generation batch
    _refilled: int = 0  # groups in place of others since a step last took its own
    _equal_share: float = 0.0  # of groups that left flight, the last ones the most
    _was_short: bool = False  # whether a step had to train on groups of equal rewards
    _taken: dict[int, Rollout] = field(default_factory=dict)  # in the step under way
    _behind: list[Rollout] = field(default_factory=list)  # whose turn is over, with groups that are left
    _evaluated: list[Rollout] = field(default_factory=list)  # begun, and not taken yet

    def __post_init__(self) -> None:
        self._schedule: RolloutSchedule[Rollout] = RolloutSchedule(self.lookahead, self.window)
        # The 32B answers of a step are asked for one step earlier.
        self.updates = UpdatesAhead(max(self.lookahead, self.most_lookahead) + 1)

    def move_lookahead(self, lookahead: int) -> None:
        """From the next step on, in the midst of a run. What is in flight stays in flight."""
        self.lookahead = self._schedule.lookahead = lookahead

    def restart(self, micro_step: int, update: int, has_batch: bool, kept: Mapping[int, KeptRollouts]) -> None:
        """A run begins after these micro-steps and optimizer steps. `has_batch`: a generation batch is there to go on
        with. `kept`: from `in_flight` of an earlier start."""
        self.forget()
        self._kept = {micro_step + after: rollouts for after, rollouts in kept.items()}
        self._schedule.restart(micro_step, update, has_batch)

    def forget(self) -> None:
        """Give up everything in flight, with the batch of an interrupted step."""
        self.updates.restart()
        self.dataloader, self._kept, self._taken, self._evaluated, self._behind = (), {}, {}, [], []
        self._refilled = 0
        for rollout in self._schedule.restart(0, 0, False):
            if rollout.handle is not None:
                rollout.handle.give_up()
        self.reward_loop.give_up()

    def next_update(
        self, epoch: int, iterator: Iterator[object], pull: Callable[[Iterator[object]], Update], steps_left: int
    ) -> Update:
        """The micro-batches of the next optimizer step. Those of later steps are read too (`UpdatesAhead.next`): their
        generation batches are scheduled, and their reference answers asked for."""

        self._taken = {}

        def record(micro_batches: MicroBatches) -> None:
            for window in self._schedule.add(micro_batches):
                self.reward_loop.prepare(self._rows(window.inputs))

        def following() -> Iterator[object]:
            # Torch's generator stays as it is: a dataloader draws from it when it begins, and `draw` makes that draw
            # when the epoch begins. So samples are those without a lookahead.
            with torch.random.fork_rng(devices=[]):
                micro_batches = iter(self.dataloader)
                first = list(itertools.islice(micro_batches, 1))
            return itertools.chain(first, micro_batches)

        def draw() -> None:
            torch.empty((), dtype=torch.int64).random_()  # with it `DataLoader` seeds its workers

        return self.updates.next(epoch, iterator, following, pull, steps_left, record, draw)

    def launch_due(self, micro_step: int, update: int) -> None:
        """Generate what may be generated by now, and start its rewards. Completions of an earlier start of the run are
        kept; their rewards start anew, from the cache."""
        if self.inside_trl:
            return
        if self.lookahead and any(each.sampled is None for each in self._schedule.launched().values()):
            with self.timeline.phase(Phase.GENERATION):
                self.go_on()
        for window in self._schedule.due(micro_step, update):
            kept, inputs = self._kept.pop(window.first, None), window.inputs
            if kept is None:
                window.rollout = self.launch([*inputs, *self._in_place_of_equal(inputs, update)], update)
                continue
            if (kept.inputs or not kept.rows) and (self.goes_by_groups or len(kept.inputs) == len(inputs)):
                inputs = kept.inputs
            sampled = kept.sampled if kept.rows == keys_of(inputs) else None
            if sampled is not None and sampled.logprobs is None and self.goes_by_groups:
                sampled = sampled if (kept.behaviour_logps is not None) is self._needs_logps else None
            # all ranks generate as many again: they may have other numbers left
            most = highest(max(len(inputs), self.group()) * (sampled is None), PartialState().device)
            if sampled is None:
                further = self._at_random((most - len(inputs)) // self.group(), update)
                window.rollout = self.launch([*inputs, *further], update)
                continue
            rollout = window.rollout = self._begun(inputs, max(kept.steps, default=update), is_trained_on=True)
            rollout.handle, rollout.behaviour_logps = Ready(sampled), kept.behaviour_logps
            rollout.steps = kept.steps
            self._record(rollout, sampled)

    def in_flight(self, micro_step: int, update: int) -> dict[int, KeptRollouts]:
        """The rollouts with completions that were launched before the end of this step and not trained on then, by the
        micro-steps until they are first trained on: a run that goes on counts them anew in each epoch."""
        taken = {first: rollout for first, rollout in self._taken.items() if first >= micro_step}
        flying = taken | self._schedule.launched()
        if self.goes_by_groups:
            flying = self._packed(flying, update)
        return {
            first - micro_step: KeptRollouts(
                rows=keys_of(rollout.inputs),
                steps=rollout.steps,
                sampled=rollout.sampled,
                behaviour_logps=rollout.behaviour_logps,
                inputs=rollout.inputs if self.goes_by_groups else [],
            )
            for first, rollout in flying.items()
            if self.goes_by_groups or (rollout.sampled is not None and max(rollout.steps) < update)
        }

    def take(self, inputs: list[Example], micro_step: int, update: int) -> Rollout:
        """The rollout of these inputs, with all its completions. It is generated now, if it was not before. With
        `goes_by_groups`, the first groups that are in take its place."""
        rollout = self._schedule.take(micro_step, inputs)
        if rollout is None:
            rollout = self.launch(inputs, update)
        self._taken[micro_step] = rollout
        self._collect(rollout)
        if self.goes_by_groups:
            self._count = len(inputs) // rollout.group
            rollout = self._taken[micro_step] = self._first_in(rollout, update)
        return rollout

    @property
    def goes_by_groups(self) -> bool:
        """Whether a step trains on the first groups that are in, and each rank on its own."""
        return self.max_staleness > self.most_lookahead or bool(self.refill_groups)

    @property
    def _needs_logps(self) -> bool:
        """Whether a later policy may train on a rollout, or its groups beside those of such rollouts."""
        return bool(self.lookahead or (self.goes_by_groups and self.most_lookahead))

    def _first_in(self, head: Rollout, update: int) -> Rollout:
        """The groups that are trained on in the turn of `head`. Waits until they are in."""
        # 1. the groups in flight. A server has generated all that was asked for before this step
        flying, waits = [*self._behind, head], len(head.rewards.waits)
        for rollout in self._schedule.launched().values():
            if max(rollout.steps, default=-1) < update:
                self._collect(rollout)  # a collective: on all ranks alike
            flying += [rollout] if rollout.sampled is not None else []
        # 2. wait for those that are trained on. Where too few have rewards that differ, others are generated
        while True:
            groups = [(rollout, places) for rollout in flying for places in rollout.left]
            with self.timeline.phase(Phase.REWARD_WAIT):
                batches = [rollout.rewards for rollout in flying]
                self.reward_loop.wait(batches, partial(self._is_decided, groups))
                PartialState().wait_for_everyone()  # not in a phase of the trainer's own work
            chosen, differ = self._chosen(groups)
            rows = self._drawn(0 if chosen or self.reward_loop.stopped else self._count - len(differ), update)
            if not rows:
                break
            further = self.launch(rows, update)
            self._collect(further)
            if head.sampled is not None and further.sampled is not None:
                head.sampled = replace(head.sampled, tokens=head.sampled.tokens + further.sampled.tokens)
            self._behind.append(further)
            flying.append(further)
        if not chosen:
            if not self._was_short and not self.reward_loop.stopped:
                self._was_short = True
                logger.warning(
                    f"so many groups have equal rewards that a step trains on some: it has generated {self._refilled} "
                    "in place of others. Expected fewer: set `refill_groups` higher, or leave such rows out"
                )
            equal = [number for number in range(len(groups)) if number not in differ]
            chosen = [*differ, *equal][: self._count]
        # 3. they leave their rollouts. With `refill_groups` so do equal ones, and those too old for the next step
        picked, rewards, turnover = [groups[number] for number in sorted(chosen)], [], [0.0, 0.0]
        following = min(self._schedule.updates, default=update)
        for number, (rollout, places) in enumerate(groups):
            is_late = self.refill_groups and self._latest(rollout, places) < following
            if number in chosen or number not in differ or is_late:
                turnover[0] += number not in differ
                turnover[1] += 1
                rewards += [reward.value for reward in rollout.rewards.rewards[places.start : places.stop] if reward]
                rollout.left.remove(places)
        own = [(rollout.rewards, places) for rollout, places in picked]
        joined = self.reward_loop.joined(own, head.group, head.rewards.waits[waits:])
        self.reward_loop.give_up([rollout.rewards for rollout in flying if not rollout.left])
        self._behind = [rollout for rollout in (*self._behind, head) if rollout.left]
        scored = [value for value in rewards if value is not None]
        self._equal_share += SHARE_RATE * (turnover[0] / turnover[1] - self._equal_share)
        head = Rollout.joined(picked, head, joined)
        head.turnover = (self._refilled, 1 / PartialState().num_processes, *turnover, sum(scored), len(scored))
        self._refilled = 0
        return head

    def _latest(self, rollout: Rollout, places: range) -> int:
        """The last optimizer step that may train on a group."""
        return rollout.steps[places.start] + max(self.max_staleness, self.most_lookahead)

    def _chosen(self, groups: Groups) -> tuple[list[int], list[int]]:
        """Numbers of the groups that are trained on now, none while one is out, and of all not known to be equal."""
        differ = [
            number
            for number, (rollout, places) in enumerate(groups)
            if not self.refill_groups or not rollout.rewards.is_equal(places)
        ]
        latest = [self._latest(*groups[number]) for number in differ]
        is_in = [groups[number][0].rewards.is_settled(groups[number][1]) for number in differ]
        return [differ[own] for own in first_in(latest, is_in, self._schedule.updates, self._count)], differ

    def _is_decided(self, groups: Groups) -> bool:
        return bool(self._chosen(groups)[0]) or all(rollout.rewards.is_settled(places) for rollout, places in groups)

    def _in_place_of_equal(self, inputs: Sequence[Example], update: int) -> list[Example]:
        """Rows for a batch to launch beside its own: as many groups as will be missing in flight. Those that are not
        scored count by the share of groups that were equal so far."""
        self._count = count = len(inputs) // self.group()
        if not self.refill_groups or not self.lookahead:
            return []
        launched = self._schedule.launched().values()
        flying = [(rollout, places) for rollout in (*self._behind, *launched) for places in rollout.left]
        differ = self._chosen(flying)[1]
        known = sum(flying[number][0].rewards.is_settled(flying[number][1]) for number in differ)
        target = count * (len(launched) + 1) + count // RESERVE * (self.max_staleness > self.most_lookahead)
        wanted = to_launch(target, known, len(differ) - known, self._equal_share, self.refill_groups)
        return self._drawn(wanted - count, update)

    def _drawn(self, groups: int, update: int) -> list[Example]:
        """Rows at random for so many groups, on all ranks for as many as the one with the most needs, within the bound
        of a step. A collective."""
        if not self.refill_groups:
            return []
        bound = self.refill_groups * self._count - self._refilled
        groups = min(highest(max(groups, 0), PartialState().device), bound)
        drawn = self._at_random(groups, update)
        self._refilled += groups
        return drawn

    def _at_random(self, groups: int, update: int) -> list[Example]:
        """Rows of this rank's own, for so many groups."""
        rows = cast(Any, self.dataloader).dataset if groups > 0 else ()
        draw = random.Random(f"{self.seed} {PartialState().process_index} {update} {self._refilled}")
        drawn = [rows[draw.randrange(len(rows))] for _ in range(groups)]
        inputs: list[Example] = [dict(row) for row in drawn for _ in range(self.group())]
        self.reward_loop.prepare(self._rows(inputs))
        return inputs

    def _packed(self, flying: Mapping[int, Rollout], update: int) -> dict[int, Rollout]:
        """The groups in flight that were launched before this step, the oldest first, in batches; one may be empty."""
        rollouts = [*self._behind, *flying.values()]
        groups = [(each.steps[places.start], (each, places)) for each in rollouts for places in each.left]
        queue = iter([group for step, group in sorted(groups, key=itemgetter(0)) if step < update])
        packed = {}
        for number, (first, head) in enumerate(sorted(flying.items()), start=1):
            pack = [*itertools.islice(queue, self._count if number < len(flying) else None)]
            packed[first] = Rollout.joined(pack or [(head, range(0))], head, head.rewards)
        return packed

    def _collect(self, rollout: Rollout) -> None:
        """Wait for the completions of a rollout, if they are generated in the background."""
        if rollout.sampled is not None or rollout.handle is None:
            return
        with self.timeline.phase(Phase.GENERATION):
            sampled = rollout.handle.result()
        self._record(rollout, sampled)
        if sampled.logprobs is None:
            raise ConfigError(
                "completions were generated ahead of training, and the sampler gives no log-probs of them. Expected "
                "log-probs, or a sampler that generates in `start`. Mend the sampler, or set `rollout_lookahead: 0`."
            )

    def launch(self, inputs: list[Example], update: int) -> Rollout:
        """Generate for a step to train on, or begin to. `update`: optimizer steps that the weights have taken."""
        rollout = self._begun(inputs, update, is_trained_on=True)
        self._generate(rollout, ahead=bool(self.lookahead))
        if rollout.sampled is not None and rollout.sampled.logprobs is None and self._needs_logps:
            rollout.behaviour_logps = self.behaviour_logps(rollout.sampled)
        return rollout

    def evaluate(self, inputs: list[Example], update: int, group: int | None = None) -> Rollout:
        """The rollout of these inputs for an evaluation. It is generated now, if it was not ahead (`evaluations`).
        `group`: completions of a prompt, by default the trainer's number."""
        for rollout in self._evaluated:
            if rollout.inputs is inputs:
                self._evaluated.remove(rollout)
                return rollout
        self.reward_loop.prepare(self._rows(inputs))
        rollout = self._begun(inputs, update, is_trained_on=False, group=group)
        self._generate(rollout, ahead=False)
        return rollout

    def evaluations(
        self, batches: Iterable[list[Example]], update: int, group: int | None = None
    ) -> Iterator[list[Example]]:
        """The batches of an evaluation, each to be handed to `evaluate`, generated in their order. Those behind are
        generated before the rewards of one are waited for: twice as many as the reward takes at once, so that it has
        something to do meanwhile. Batches that TRL generates inside its own scoring wait for their turn."""

        def begin(inputs: list[Example]) -> None:
            if self.inside_trl:
                return
            rollout = self.evaluate(inputs, update, group)
            if rollout.sampled is not None:  # pictures are read anew when log-probs are computed
                rollout.sampled = replace(rollout.sampled, vision={})
            self._evaluated.append(rollout)

        def most(inputs: list[Example]) -> int:
            names, size = self.reward_loop.reward.names, len(inputs)
            at_once = names.at_once * names.together.size(group or self.group(), size)
            return 1 if self.inside_trl else max(min(2 * at_once, MOST_AHEAD) // size, 1)

        try:
            yield from begun_ahead(batches, begin, most)
        finally:  # of an evaluation that was left: nobody will ask for them
            self.reward_loop.give_up([rollout.rewards for rollout in self._evaluated])
            self._evaluated = []

    def generate_inside(
        self, rollout: Rollout, prompts: Sequence[object], environments: Sequence[object] | None
    ) -> None:
        """Generate inside TRL's scoring: the prompts as it uses them, and each one's environment."""
        rows = [{**example, "prompt": prompt} for example, prompt in zip(rollout.inputs, prompts, strict=True)]
        if environments is not None:
            rows = [{**row, "environments": own} for row, own in zip(rows, environments, strict=True)]
        with self.timeline.phase(Phase.GENERATION):
            sampled = self.sampler.start(prompts, self._starts(rollout, rows), ahead=False).result()
        self._record(rollout, sampled, rows)

    def _begun(self, inputs: list[Example], step: int, *, is_trained_on: bool, group: int | None = None) -> Rollout:
        group, steps = group or self.group(), [step] * len(inputs)
        origin = Origin(rows=inputs, mode="train" if is_trained_on else "eval", step=step)
        rewards = self.reward_loop.begin(self._rows(inputs), group, origin)
        return Rollout(inputs=inputs, rewards=rewards, steps=steps, is_trained_on=is_trained_on, group=group)

    def _generate(self, rollout: Rollout, *, ahead: bool) -> None:
        if self.inside_trl:
            return
        inputs = rollout.inputs
        with self.timeline.phase(Phase.GENERATION):
            starts = self._starts(rollout)
            if self.play is None:
                handle = rollout.handle = self.sampler.start(prompts_of(inputs), starts, ahead=ahead)
            else:
                handle = rollout.handle = self.play(inputs, starts, ahead)
            sampled = handle.result() if handle.is_ready or not ahead else None
        if sampled is not None:
            self._record(rollout, sampled)

    def _starts(self, rollout: Rollout, rows: Sequence[Example] = ()) -> Finished:
        """What starts the reward of a completion that is finished. `rows`: the batch's, with more in them."""
        in_messages = is_conversational({"prompt": prompts_of(rows or rollout.inputs)[0]})
        made = self._rows(rows) if rows else None

        def finished(
            place: int,
            token_ids: Sequence[int],
            messages: Sequence[Any] | None = None,
            failed: str | None = None,
            columns: Mapping[str, Any] | None = None,
        ) -> None:
            completion: Completion
            if messages is not None:
                completion = messages
            else:
                text = self.decode(token_ids)
                completion = [{"role": "assistant", "content": text}] if in_messages else text
            row = None if made is None else made[place]
            if columns is not None:
                row = {**rollout.rewards.rows[place], **columns}
            self.reward_loop.start(rollout.rewards, place, completion, token_ids, row, failed)

        return finished

    def _record(self, rollout: Rollout, sampled: Sampled, rows: Sequence[Example] = ()) -> None:
        """Keep the completions, and start the rewards that have not. `rows`: the batch's, with more in them."""
        rollout.sampled = sampled
        for span in sampled.spans:
            lane = rollout.rewards.lane
            self.record_span(replace(span, track=f"{span.track} ahead {lane}") if lane else span)
        extra: Mapping[str, Any] = sampled.generated[5] or {}  # from a `rollout_func`
        if extra:
            rows = [
                {**row, **{name: value[place] if isinstance(value, list) else value for name, value in extra.items()}}
                for place, row in enumerate(rows or rollout.inputs)
            ]
        made = self._rows(rows) if rows else ()
        self.reward_loop.start_all(rollout.rewards, sampled.completions, sampled.completion_ids, made)

    def _rows(self, rows: Sequence[Example]) -> list[Example]:
        """The rows with their pictures in the prompts, and with what functions may ask for beside columns."""
        further = self.reward_arguments()
        return [{**row, "prompt": prompt, **further} for row, prompt in zip(rows, prompts_of(rows), strict=True)]


def keys_of(inputs: Sequence[Example]) -> list[int]:
    """A number for each row by which it is known again."""
    return [
        example["row"] if isinstance(example.get("row"), int) else zlib.crc32(repr(example["prompt"]).encode())
        for example in inputs
    ]


def prompts_of(inputs: Sequence[Example]) -> list[object]:
    """The prompts, with their pictures where TRL puts them: before the first user message."""
    pictures = [_pictures(example) for example in inputs]
    prompts = [example.get("prompt") for example in inputs]  # an environment may have them
    if not any(pictures):
        return prompts
    return [prepare_multimodal_messages(prompt, own) for prompt, own in zip(prompts, pictures, strict=True)]


def _pictures(example: Example) -> list[Any] | None:
    """The pictures of a row: TRL takes a column `images`, or one picture in a column `image`."""
    if "images" in example:
        return example["images"]  # type: ignore[no-any-return]
    return None if example.get("image") is None else [example["image"]]
