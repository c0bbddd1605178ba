"""Rollouts are launched when the schedule lets them, each completion's reward starts when it is finished, and no row
is lost by a step that is undone."""

import math
import random
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from types import MappingProxyType, SimpleNamespace

import pytest
import torch
from accelerate import PartialState

from salesrl_trl.checkpoint.keeper import Keeper
from salesrl_trl.data.branches import Branches
from salesrl_trl.errors import ConfigError
from salesrl_trl.generation.sampler import Ready, Sampled
from salesrl_trl.generation.turns import UNKNOWN
from salesrl_trl.record.recorder import batch_of
from salesrl_trl.reward.batch import RewardBatch
from salesrl_trl.reward.stage_times import StageTimes
from salesrl_trl.rollout.buffer import ByArrival, InOrder, Refilled
from salesrl_trl.rollout.in_flight import KeptRollouts
from salesrl_trl.rollout.pipeline import Pipeline
from salesrl_trl.rollout.rollout_launcher import Launcher
from salesrl_trl.rollout.rollout_scoring import CompletedBatch
from salesrl_trl.telemetry.timeline import Timeline
from salesrl_trl.types import Reward


def sampled(prompts, logprobs=None):
    texts = [f"answer to {prompt}" for prompt in prompts]
    size = len(texts)
    return Sampled(generated=([[0]] * size, [[1]] * size, None, texts, logprobs, {}, None, []), metrics={"m": [1.0]},
                   tokens=3)  # fmt: skip


class Interrupted(BaseException):
    """As a signal's."""


class Rewards:
    """Each completion is scored as it begins, unless the test holds its row back. Those of a row differ."""

    is_settled, is_equal, __len__ = RewardBatch.is_settled, RewardBatch.is_equal, RewardBatch.__len__
    lane = 0

    def __init__(self, rows, pending, started):
        self.rows, self.waits, self.started = rows, [(0.0, 0.0)], started
        values = [None if row["row"] in pending else place % 2 for place, row in enumerate(rows)]
        self.rewards = [None if value is None else SimpleNamespace(value=value) for value in values]

    def start(self, place, text, token_ids=(), row=None, failed=None):
        self.started.append((self.rows[place]["row"], text))
        self.failed = {**getattr(self, "failed", {}), place: failed}

    def start_all(self, completions, token_ids, rows, failed):
        for place, text in enumerate(completions):
            self.start(place, text, failed=failed[place] if failed else None)

    def take(self, parts, waits):
        assert self.rows == [batch.rows[place] for batch, places in parts for place in places]


class Loop:
    stopped, is_interrupted, meanwhile = None, False, None

    def __init__(self):
        self.started, self.references, self.pending, self.open = [], [], set(), []

    def begin(self, rows, group=1, origin=None):
        self.open.append(Rewards(rows, self.pending, self.started))
        return self.open[-1]

    def post(self, function, *arguments):
        function(*arguments)

    def wait(self, batches, is_enough):
        if self.is_interrupted or not is_enough():
            raise Interrupted
        for batch in batches:
            batch.waits.append((0.0, 1.0))

    def prepare(self, rows):
        self.references.append([example["row"] for example in rows])

    def give_up(self, batches=None):
        self.open = [batch for batch in self.open if batches is not None and batch not in batches]


class Now:
    """Generates in `start`, and reports the first completion before the others."""

    def __init__(self, logprobs=None):
        self.logprobs, self.asked = logprobs, []

    def start(self, prompts, finished, *, ahead):
        self.asked.append((list(prompts), ahead))
        finished(0, [7])
        return Ready(sampled(prompts, self.logprobs))


class Later:
    """Generates when the result is asked for."""

    def __init__(self, logprobs=((0.0,),)):
        self.logprobs, self.collected, self.given_up = logprobs, 0, 0

    def start(self, prompts, finished, *, ahead):
        return SimpleNamespace(is_ready=False, result=lambda: self.collect(prompts), give_up=self.give_up_one)

    def collect(self, prompts):
        self.collected += 1
        return sampled(prompts, self.logprobs)

    def give_up_one(self):
        self.given_up += 1


def decoded(ids, *, skip_special_tokens):
    return str(ids)


def examples(*rows, each=1):
    return [{"prompt": f"p{row}", "row": row} for row in rows for _ in range(each)]


class Run:
    """Steps of a run with a turn of `groups` prompts each, as the trainer makes them."""

    def __init__(
        self, sampler, lookahead=0, behaviour=lambda sampled: torch.zeros(1, 1), kept=MappingProxyType({}), start=0,
        policy=None, groups=1, each=1,
    ):  # fmt: skip
        self.loop, self.step, self._first, self.rows = Loop(), start, start, []
        launcher = Launcher(
            sampler=sampler, reward_loop=self.loop, timeline=Timeline(), decoder=SimpleNamespace(decode=decoded),
            trl=SimpleNamespace(
                group=lambda: each, reward_arguments=dict, behaviour_logps=behaviour, go_on=lambda: None
            ),
        )  # fmt: skip
        self.pipeline = Pipeline(launcher, window=1, lookahead=lookahead)
        self.buffer = self.pipeline.buffer
        self.buffer.policy = policy or InOrder()
        self.pipeline.restart(0, start, False, kept)
        turns = [examples(*range(groups * turn, groups * (turn + 1)), each=each) for turn in range(start, 20)]
        self.pipeline.updates.dataloader = SimpleNamespace(dataset=[row for turn in turns for row in turn])
        self._updates = iter([([turn], None) for turn in turns])

    def read(self):
        return self.pipeline.next_update(0, iter(()), lambda _: next(self._updates, ([], None)), 20 - self.step)[0][0]

    def begin(self):
        inputs = self.read()
        self.pipeline.launch_due(self.step - self._first, self.step)
        return inputs

    def make(self, steps=1):
        for _ in range(steps):
            rollout = self.buffer.take(self.begin(), self.step - self._first, self.step)
            self.rows += dict.fromkeys(row["row"] for row in rollout.inputs)
            self.step += 1
        return rollout

    def kept(self, step):
        return self.buffer.in_flight(step - self._first, step)


@pytest.mark.parametrize(("lookahead", "asked"), [(0, ["p0"]), (2, ["p0", "p1", "p2"])])
def test_the_batch_in_training_and_those_of_the_lookahead_are_generated(lookahead, asked):
    run = Run(sampler := Now(), lookahead)
    run.begin()
    assert sampler.asked == [([prompt], lookahead > 0) for prompt in asked]
    assert run.loop.references == [[row] for row in range(lookahead + 2)]  # those of the next step are asked for too


def test_a_completion_is_scored_from_the_moment_it_is_finished():
    run = Run(Now())
    run.begin()
    assert run.loop.started == [(0, "[7]"), (0, "answer to p0")]  # reported, then with the whole batch


def versioned(*versions, mask=None):
    """A rollout of the completions' reported versions, launched after five steps."""
    size = max(len(versions), 2)
    made = replace(sampled(["p"] * size), versions=versions)
    made = replace(made, generated=(*made.generated[:2], mask, *made.generated[3:]))
    run = Run(SimpleNamespace(start=lambda *_, ahead: Ready(made)))
    return run.buffer.launch(examples(*range(size)), 5)


def test_the_age_of_a_completion_is_that_of_its_tokens_where_the_engine_reports_it():
    # sampled at step 5, and a push after 7 steps; the second one began after the push
    rollout = versioned([5, 5, 5, 7], [7, 7], [], None)
    assert rollout.ages(8) == [(2.5, 3), (1, 1), (3, 3), (3, 3)]  # the last two: no tokens, not reported
    assert rollout.steps == [5] * 4  # what bounds staleness counts from the launch
    assert versioned().ages(8) == [(3, 3)] * 2


def test_tokens_of_others_have_no_age():
    rollout = versioned([5, 0, 0, 7], [0, 6], mask=[[1, 0, 0, 1], [0, 1]])
    assert rollout.ages(8) == [(2, 3), (2, 2)]
    assert rollout.rewards.failed == {0: None, 1: None}


def test_a_completion_of_unknown_weights_is_unscored_and_has_no_age():
    rollout = versioned([5, UNKNOWN], [5, 5])
    assert rollout.rewards.failed == {0: "unknown_weights", 1: None}
    (mean, oldest), known = rollout.ages(8)
    assert math.isnan(mean) and math.isnan(oldest) and known == (3, 3)


def test_versions_stay_with_groups_that_train_together_and_with_checkpoints(tmp_path):
    given = iter([[5, UNKNOWN], [6, 7]])
    start = SimpleNamespace(start=lambda prompts, *_, ahead: Ready(
        replace(sampled(prompts, [[0.0]]), versions=[next(given)])))  # fmt: skip
    run = Run(start, lookahead=1, policy=ByArrival(4))
    run.begin()
    groups = [group for rollout in run.pipeline.turns.launched().values() for group in rollout.groups_left]
    kept = KeptRollouts.of(groups, groups[0].rollout.sampled)
    assert kept.sampled.versions == [[5, UNKNOWN], [6, 7]]
    saves, loads = (keeper(tmp_path, [1], run.buffer) for _ in range(2))
    run.buffer.in_flight = lambda *_: {0: kept}
    saves.add_parts(tmp_path, 1, 1, [])
    loads.load_parts(tmp_path, 1)
    assert loads.drain_rollouts()[0].sampled.versions == [[5, UNKNOWN], [6, 7]]


def test_a_rollout_of_the_background_is_collected_when_it_is_trained_on():
    run = Run(sampler := Later(), lookahead=1)
    inputs = run.begin()
    assert sampler.collected == 0
    rollout = run.buffer.take(inputs, 0, 0)
    assert sampler.collected == 1
    assert rollout.sampled.completions == ["answer to p0"]
    assert rollout.drain_metrics() == ({"m": [1.0]}, 3)
    assert rollout.drain_metrics() == ({}, 0)  # once, however often TRL goes over the batch


def test_completions_of_earlier_weights_need_log_probs():
    with pytest.raises(ConfigError, match="returned no log-probs"):
        Run(Later(logprobs=None), lookahead=1).make()
    seen = []
    Run(Now(), lookahead=1, behaviour=lambda each: seen.append(each) or torch.ones(1, 1)).begin()
    assert len(seen) == 2  # of a sampler that generates at once they are computed at once


def keeper(folder, sizes, buffer):
    args = SimpleNamespace(
        output_dir=str(folder), process_index=0, local_process_index=0, should_save=False, save_rollouts=True,
        window=1, arrangement=sizes, device=torch.device("cpu"),
    )  # fmt: skip
    made = Keeper(args, None, SimpleNamespace(is_skipping=False))
    made.buffer = buffer
    return made


def test_rollouts_in_flight_go_into_a_checkpoint_and_are_generated_no_more(tmp_path):
    first = Run(Now(), lookahead=2)
    first.make()
    assert list(first.kept(1)) == [0, 1]  # the first batch was trained on
    first.make()
    # a step is undone: what it trains on comes again, and what it launched is no part of the checkpoint before it
    assert list(first.kept(1)) == [0, 1]
    saves, loads, differs = (keeper(tmp_path, sizes, first.buffer) for sizes in ([1, 2], [1, 2], [1, 3]))
    saves.add_parts(tmp_path, 1, 1, [])
    assert loads.load_parts(tmp_path, 1) is differs.load_parts(tmp_path, 1) is None
    assert differs.drain_rollouts() == {}  # other batch sizes

    second = Run(sampler := Now(), lookahead=2, kept=loads.drain_rollouts(), start=1)
    rollout = second.make()
    assert sampler.asked == [(["p3"], True)]  # the others go on, and their rewards are asked for
    assert second.loop.started[:2] == [(1, "answer to p1"), (2, "answer to p2")]
    assert (rollout.steps, rollout.drain_metrics()) == ([0], ({"m": [1.0]}, 3))
    assert torch.equal(rollout.behaviour_logps, torch.zeros(1, 1))


def test_a_kept_rollout_of_other_rows_is_not_used():
    kept = KeptRollouts(rows=[7], steps=[0], sampled=sampled(["p7"]), behaviour_logps=None)
    Run(sampler := Now(), kept={0: kept}).begin()
    assert sampler.asked == [(["p0"], False)]


def test_groups_that_later_steps_train_on_have_log_probs_whatever_the_lookahead_is_now():
    """Of a run that moves it, and of one that goes on with another one."""
    seen = []
    run = Run(Now(), 1, lambda each: seen.append(each) or torch.ones(1, 1), policy=ByArrival(4))
    run.pipeline.turns.lookahead = 0
    assert run.buffer.launch(examples(1), 0).behaviour_logps is not None
    run.buffer.policy = InOrder()
    assert run.buffer.launch(examples(1), 0).behaviour_logps is None and len(seen) == 1
    for logps, again in ((None, True), (torch.zeros(1, 1), False)):
        kept = KeptRollouts(rows=[0], steps=[0], sampled=sampled(["p0"]), behaviour_logps=logps)
        Run(sampler := Now(), lookahead=1, kept={0: kept}, policy=ByArrival(4)).begin()
        assert ((["p0"], True) in sampler.asked) is again


def test_an_evaluation_waits_for_its_completions_whatever_the_lookahead():
    rollout = Run(sampler := Later(), lookahead=2).pipeline.evaluate(examples(9), 5)
    assert sampler.collected == 1
    assert (rollout.mode, rollout.steps) == ("eval", [5])


def test_what_nobody_will_train_on_is_given_up_wherever_its_turn_is():
    def interrupted(prompts):
        raise Interrupted

    run = Run(sampler := Later(), lookahead=1)
    sampler.collect = interrupted
    with pytest.raises(Interrupted):
        run.make()
    run.pipeline.forget()
    assert sampler.given_up == 2
    assert run.loop.open == []


POLICIES = {"in order": InOrder, "by arrival": lambda: ByArrival(4), "refilled": lambda: Refilled(4, 1, reserve=True)}


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
@pytest.mark.parametrize("lookahead", [0, 2])
@pytest.mark.parametrize("undone", [None, "while it waits", "with its groups taken"])
def test_a_resumed_run_trains_on_each_row_once_though_its_last_step_was_undone(policy, lookahead, undone):
    sizes = {"groups": 2, "each": 2}
    first = Run(Now(), lookahead, policy=policy(), **sizes)
    first.loop.pending = {3} if lookahead else set()  # goes on to wait
    first.make(2 if first.buffer.chooses else 1)
    done, step = [*first.rows], first.step
    if undone is not None:
        first.loop.is_interrupted = undone == "while it waits"
        with pytest.raises(Interrupted) if first.loop.is_interrupted and first.buffer.chooses else nullcontext():
            first.make()
    second = Run(Now(), lookahead, policy=policy(), kept=first.kept(step), start=step, **sizes)
    second.make(8)
    times = Counter(done + second.rows)
    assert all(times[row] for row in range(2 * 7))
    assert isinstance(second.buffer.policy, Refilled) or max(times.values()) == 1
    first.pipeline.forget()
    assert first.loop.open == []


class Ending(Later):
    """Batches end by themselves some steps after their launch, or when their result is asked for before."""

    def __init__(self, draw):
        super().__init__([[0.0], [0.0]])
        self.draw, self.running, self.cut_short = draw, {}, []

    def start(self, prompts, finished, *, ahead):
        self.running[prompts[0]] = (self.draw.choice((0, 0, 1, 8)), len(prompts), finished)
        return super().start(prompts, finished, ahead=ahead)

    def end(self, names):
        for name in names:
            _, size, finished = self.running.pop(name)
            for place in range(size):
                finished(place, [7])

    def pass_step(self):
        self.running = {name: (left - 1, *task) for name, (left, *task) in self.running.items()}
        self.end([name for name, (left, *_) in self.running.items() if left <= 0])

    def collect(self, prompts):
        if prompts[0] in self.running:
            self.cut_short.append(prompts[0])
            self.end(prompts[:1])
        return super().collect(prompts)


@pytest.mark.parametrize("lookahead", [2, 8])
def test_with_staleness_a_step_waits_for_its_own_completions_alone_and_no_group_grows_too_old(lookahead, monkeypatch):
    def wait(batches, is_enough):
        """As services that answer in any order until enough are in."""
        places = [(batch, place) for batch in batches for place, one in enumerate(batch.rewards) if one is None]
        draw.shuffle(places)
        while not is_enough():
            batch, place = places.pop()
            batch.rewards[place] = SimpleNamespace(value=0.0)

    for seed in range(10):
        draw, oldest = random.Random(seed), 0
        run = Run(sampler := Ending(draw), lookahead, policy=ByArrival(lookahead + 1), groups=2)
        monkeypatch.setattr(run.loop, "wait", wait)
        run.loop.meanwhile = wait  # completions may be left unfinished
        while run.step < 20:
            run.loop.pending = {row for row in range(40) if draw.random() < 0.6}
            sampler.cut_short.clear()
            rollout = run.make()
            assert sampler.cut_short in ([], [f"p{2 * run.step - 2}"])  # that of this turn
            oldest = max(oldest, run.step - 1 - min(rollout.steps))
            sampler.pass_step()
        assert oldest == lookahead + 1
        assert sorted(run.rows) == list(range(40))


GROUP, EACH = 4, 6
"""Completions of a prompt, and of a rank: the second prompt's lie on two ranks."""


@pytest.mark.parametrize(("rank", "groups"), [(0, [0, 0, 0, 0, 1, 1]), (1, [1, 1, 2, 2, 2, 2])])
def test_a_group_has_one_number_on_all_ranks(rank, groups, monkeypatch):
    monkeypatch.setattr(PartialState(), "process_index", rank)
    rewards = SimpleNamespace(stages=[StageTimes("reward")] * EACH, number=3)
    result = SimpleNamespace(rewards=[Reward.scored(0.5)] * EACH, report=SimpleNamespace(calls=()))
    rollout = SimpleNamespace(
        inputs=[{"prompt": "p"}] * EACH, completions=["c"] * EACH, rewards=rewards, result=result, sampled=None,
        group=GROUP, is_trained_on=True, mode="train", steps=[4, 3] * 3, groups=None,
    )  # fmt: skip
    found = batch_of(CompletedBatch(rollout=rollout, advantages=None, update=5), Branches(("only",)))
    assert [entry.prompt_group for entry in found.entries] == groups
    assert (found.step, found.number) == (6, 3)
    assert [entry.staleness for entry in found.entries] == [1, 2] * 3
