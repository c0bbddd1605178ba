"""Rollouts are launched when the schedule lets them, and each completion's reward starts when it is finished."""

from types import MappingProxyType, SimpleNamespace

import pytest
import torch
from accelerate import PartialState

from salesrl_trl.checkpoint.keeper import Keeper
from salesrl_trl.data.branches import Branches
from salesrl_trl.errors import ConfigError
from salesrl_trl.generation.sampler import Ready, Sampled
from salesrl_trl.record.recorder import batch_of
from salesrl_trl.reward.stage_times import StageTimes
from salesrl_trl.rollout.buffer_policy import ByArrival, InOrder
from salesrl_trl.rollout.in_flight import KeptRollouts
from salesrl_trl.rollout.pipeline import Pipeline
from salesrl_trl.rollout.rollout_launcher import Launcher
from salesrl_trl.rollout.rollout_scoring import CompletedBatch
from salesrl_trl.telemetry.timeline import Timeline
from salesrl_trl.types import Reward


def sampled(prompts, logprobs=None):
    texts = [f"answer to {prompt}" for prompt in prompts]
    return Sampled(
        generated=([], [[1]] * len(prompts), None, texts, logprobs, {}, None, []), metrics={"m": [1.0]}, tokens=3
    )


class Loop:
    def __init__(self):
        self.started, self.references, self.given_up = [], [], 0

    def begin(self, rows, group, origin):
        return tuple(example["row"] for example in rows)

    def start(self, batch, place, text, token_ids, row=None, failed=None):
        self.started.append((batch, place, text))

    def start_all(self, batch, completions, token_ids, rows):
        self.started += [(batch, place, text) for place, text in enumerate(completions)]

    def prepare(self, rows):
        self.references.append([example["row"] for example in rows])

    def give_up(self):
        self.given_up += 1


class Now:
    """Generates in `start`, and reports the first completion before the others."""

    def __init__(self):
        self.asked = []

    def start(self, prompts, finished, *, ahead):
        self.asked.append((list(prompts), ahead))
        finished(0, [7])
        return Ready(sampled(prompts))


class Later:
    """Generates when the result is asked for."""

    is_ready = False

    def __init__(self, logprobs=((0.0,),)):
        self.logprobs, self.handles, self.collected = logprobs, [], 0

    def start(self, prompts, finished, *, ahead):
        self.handles.append(
            SimpleNamespace(is_ready=False, result=lambda: self.collect(prompts), give_up=self.give_up)
        )
        self.given_up = 0
        return self.handles[-1]

    def collect(self, prompts):
        self.collected += 1
        return sampled(prompts, self.logprobs)

    def give_up(self):
        self.given_up += 1


def examples(batch):
    return [{"prompt": f"p{batch}", "row": batch}]


def pipeline(sampler, lookahead=0, behaviour=lambda sampled: torch.zeros(1, 1), kept=MappingProxyType({}), start=0):
    launcher = Launcher(
        sampler=sampler, reward_loop=Loop(), timeline=Timeline(), decode=str, behaviour_logps=behaviour,
        record_span=pytest.fail,
    )  # fmt: skip
    made = Pipeline(launcher, window=1, lookahead=lookahead)
    made.restart(0, start, False, kept)
    updates = iter([([examples(batch)], None) for batch in range(start, start + 4)])
    pull = lambda _: next(updates, ([], None))  # noqa: E731
    made.next_update(0, iter(()), pull, 4)
    return made


def test_without_lookahead_only_the_batch_in_training_is_generated():
    sampler = Now()
    made = pipeline(sampler)
    made.launch_due(0, 0)
    assert sampler.asked == [(["p0"], False)]
    assert made.buffer.launcher.reward_loop.references == [
        [0],
        [1],
    ]  # the references of the next step are asked for already


def test_with_lookahead_later_batches_are_generated_too():
    sampler = Now()
    pipeline(sampler, lookahead=2).launch_due(0, 0)
    assert sampler.asked == [(["p0"], True), (["p1"], True), (["p2"], True)]


def test_a_completion_is_scored_from_the_moment_it_is_finished():
    made = pipeline(Now())
    made.launch_due(0, 0)
    assert made.buffer.launcher.reward_loop.started == [
        ((0,), 0, "[7]"),
        ((0,), 0, "answer to p0"),
    ]  # reported, then with the whole batch


def test_a_rollout_of_the_background_is_collected_when_it_is_trained_on():
    sampler = Later()
    made = pipeline(sampler, lookahead=1)
    made.launch_due(0, 0)
    assert sampler.collected == 0
    inputs = made._turns._windows[0].inputs
    rollout = made.buffer.take(inputs, 0, 0)
    assert sampler.collected == 1
    assert rollout.sampled.completions == ["answer to p0"]
    assert rollout.drain_metrics() == ({"m": [1.0]}, 3)
    assert rollout.drain_metrics() == ({}, 0)  # once, however often TRL goes over the batch


def test_completions_of_earlier_weights_need_log_probs():
    made = pipeline(Later(logprobs=None), lookahead=1)
    made.launch_due(0, 0)
    with pytest.raises(ConfigError, match="gives no log-probs"):
        made.buffer.take(made._turns._windows[0].inputs, 0, 0)
    seen = []
    made = pipeline(Now(), lookahead=1, behaviour=lambda each: seen.append(each) or torch.ones(1, 1))
    made.launch_due(0, 0)
    assert len(seen) == 2  # of a sampler that generates at once they are computed at once


def keeper(folder, sizes, in_flight):
    args = SimpleNamespace(
        output_dir=str(folder), process_index=0, local_process_index=0, should_save=False, save_rollouts=True,
        window=1, arrangement=sizes, device=torch.device("cpu"),
    )  # fmt: skip
    return Keeper(args, None, None, lambda: False, in_flight)


def test_rollouts_in_flight_go_into_a_checkpoint_and_are_generated_no_more(tmp_path):
    first = pipeline(Now(), lookahead=2)
    first.launch_due(0, 0)
    taken = first._turns._windows[0].inputs
    first.buffer.take(taken, 0, 0)
    assert list(first.buffer.in_flight(1, 1)) == [0, 1]  # the first batch was trained on
    first.next_update(0, iter(()), lambda _: ([examples(3)], None), 3)
    first.launch_due(1, 1)
    # a step is undone: what it trains on comes again, and what it launched is no part of the checkpoint before it
    first.buffer.take(first._turns._windows[0].inputs, 1, 1)
    assert list(first.buffer.in_flight(1, 1)) == [0, 1]
    saves, loads, differs = (keeper(tmp_path, sizes, first.buffer.in_flight) for sizes in ([1, 2], [1, 2], [1, 3]))
    saves.add_parts(tmp_path, 1, 1, [])
    assert loads.load_parts(tmp_path, 1) is differs.load_parts(tmp_path, 1) is None
    kept = loads.drain_rollouts()
    assert differs.drain_rollouts() == {}  # other batch sizes

    sampler = Now()
    second = pipeline(sampler, lookahead=2, kept=kept, start=1)
    second.launch_due(0, 1)
    assert sampler.asked == [(["p3"], True)]  # the others go on, and their rewards are asked for
    assert second.buffer.launcher.reward_loop.started[:2] == [((1,), 0, "answer to p1"), ((2,), 0, "answer to p2")]
    rollout = second.buffer.take(second._turns._windows[0].inputs, 0, 1)
    assert (rollout.steps, rollout.drain_metrics()) == ([0], ({"m": [1.0]}, 3))
    assert torch.equal(rollout.behaviour_logps, torch.zeros(1, 1))


def test_a_kept_rollout_of_other_rows_is_not_used():
    sampler, kept = Now(), KeptRollouts(rows=[7], steps=[0], sampled=sampled(["p7"]), behaviour_logps=None)
    pipeline(sampler, kept={0: kept}).launch_due(0, 0)
    assert sampler.asked == [(["p0"], False)]


def test_groups_that_later_steps_train_on_have_log_probs_whatever_the_lookahead_is_now():
    """Of a run that moves it, and of one that goes on with another one."""
    seen = []
    made = pipeline(Now(), lookahead=1, behaviour=lambda each: seen.append(each) or torch.ones(1, 1))
    made.buffer.policy = ByArrival(4)
    made.move_lookahead(0)
    assert made.buffer.launch(examples(1), 0).behaviour_logps is not None
    made.buffer.policy = InOrder()
    assert made.buffer.launch(examples(1), 0).behaviour_logps is None and len(seen) == 1
    for logps, again in ((None, True), (torch.zeros(1, 1), False)):
        sampler, kept = Now(), KeptRollouts(rows=[0], steps=[0], sampled=sampled(["p0"]), behaviour_logps=logps)
        made = pipeline(sampler, lookahead=1, kept={0: kept})
        made.buffer.policy = ByArrival(4)
        made.launch_due(0, 0)
        assert ((["p0"], True) in sampler.asked) is again


def test_an_evaluation_waits_for_its_completions_whatever_the_lookahead():
    sampler = Later()
    rollout = pipeline(sampler, lookahead=2).evaluate(examples(9), 5)
    assert sampler.collected == 1
    assert (rollout.mode, rollout.steps) == ("eval", [5])


def test_what_nobody_will_train_on_is_given_up():
    sampler = Later()
    made = pipeline(sampler, lookahead=1)
    made.launch_due(0, 0)
    before = made.buffer.launcher.reward_loop.given_up
    made.forget()
    assert sampler.given_up == 2
    assert made.buffer.launcher.reward_loop.given_up == before + 1


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
    found = batch_of(CompletedBatch(rollout=rollout, advantages=None, update=5), Branches(("only",), "branch"))
    assert [entry.prompt_group for entry in found.entries] == groups
    assert (found.step, found.number) == (6, 3)
    assert [entry.staleness for entry in found.entries] == [1, 2] * 3
