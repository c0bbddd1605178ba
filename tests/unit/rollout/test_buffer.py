"""What the buffer keeps in a checkpoint, and what it gives up: no row is lost by a step that is undone."""

from collections import Counter
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from salesrl_trl.generation.sampler import Ready, Sampled
from salesrl_trl.reward.batch import RewardBatch
from salesrl_trl.rollout.buffer_policy import ByArrival, InOrder, Refilled
from salesrl_trl.rollout.pipeline import Pipeline
from salesrl_trl.rollout.rollout_launcher import Launcher
from salesrl_trl.telemetry.timeline import Timeline

GROUPS, EACH = 2, 2  # groups of a turn, completions of a group


class Rewards:
    """Each completion is scored by its row, unless the test holds it back."""

    is_settled, is_equal, __len__ = RewardBatch.is_settled, RewardBatch.is_equal, RewardBatch.__len__
    lane = 0

    def __init__(self, rows, pending):
        self.rows, self.waits = rows, [(0.0, 0.0)]
        values = [None if row["row"] in pending else place % EACH for place, row in enumerate(rows)]
        self.rewards = [None if value is None else SimpleNamespace(value=value) for value in values]


class Interrupted(BaseException):
    """As a signal's."""


class Loop:
    stopped, is_interrupted = None, False

    def __init__(self):
        self.pending, self.open = set(), []

    def begin(self, rows, group=1, origin=None):
        self.open.append(Rewards(rows, self.pending))
        return self.open[-1]

    def wait(self, batches, is_enough):
        if self.is_interrupted or not is_enough():
            raise Interrupted
        for batch in batches:
            batch.waits.append((0.0, 1.0))

    def take(self, parts, group, waits):
        return self.begin([batch.rows[place] for batch, places in parts for place in places])

    def give_up(self, batches=None):
        self.open = [batch for batch in self.open if batches is not None and batch not in batches]

    def prepare(self, rows): ...
    def start_all(self, *_): ...


class Engine:
    def __init__(self):
        self.asked = []

    def start(self, prompts, finished, *, ahead):
        self.asked += prompts
        size = len(prompts)
        texts = [f"answer to {prompt}" for prompt in prompts]
        logps = [[0.0]] * size
        return Ready(Sampled(generated=([[0]] * size, [[1]] * size, None, texts, logps, {}, None, [])))


class Run:
    """Steps of a run with a turn each, as the trainer makes them."""

    def __init__(self, policy, lookahead=2, step=0, kept=None):
        self.loop, self.engine, self.step = Loop(), Engine(), step
        launcher = Launcher(
            sampler=self.engine, reward_loop=self.loop, timeline=Timeline(), decode=str, record_span=pytest.fail,
            behaviour_logps=pytest.fail, group=lambda: EACH,
        )  # fmt: skip
        self.pipeline = Pipeline(launcher, window=1, lookahead=lookahead)
        self.buffer, self.rows = self.pipeline.buffer, []
        self.buffer.policy = policy
        turns = [[[{"prompt": f"p{row}", "row": row} for row in range(GROUPS * turn, GROUPS * (turn + 1))
                   for _ in range(EACH)]] for turn in range(step, 20)]  # fmt: skip
        self.buffer.restart(0, step, False, kept or {})
        self.pipeline.updates.dataloader = SimpleNamespace(dataset=[row for [turn] in turns for row in turn])
        self._updates, self._first = iter([(turn, None) for turn in turns]), step

    def make(self, steps):
        for _ in range(steps):
            pull = lambda _: next(self._updates, ([], None))  # noqa: E731
            [inputs], _ = self.pipeline.next_update(0, iter(()), pull, 20 - self.step)
            at = self.step - self._first
            self.pipeline.launch_due(at, self.step)
            self.rows += [row["row"] for row in self.buffer.take(inputs, at, self.step).inputs[::EACH]]
            self.step += 1
        return self

    def kept(self):
        return self.buffer.in_flight(self.step - self._first, self.step)


POLICIES = {
    "in order": InOrder,
    "by arrival": lambda: ByArrival(4),
    "refilled": lambda: Refilled(4, 1, reserve=True),
}


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
@pytest.mark.parametrize("lookahead", [0, 2])
@pytest.mark.parametrize("undone", [None, "while it waits", "with its groups taken"])
def test_a_resumed_run_trains_on_each_row_once_though_its_last_step_was_undone(policy, lookahead, undone):
    first = Run(policy(), lookahead)
    first.loop.pending = {3} if lookahead else set()  # goes on to wait
    first.make(2 if first.buffer.chooses else 1)
    done, step = [*first.rows], first.step
    if undone is not None:
        first.loop.is_interrupted = undone == "while it waits"
        with pytest.raises(Interrupted) if first.loop.is_interrupted and first.buffer.chooses else nullcontext():
            first.make(1)
        first.step = step
    second = Run(policy(), lookahead, step, first.kept()).make(8)
    times = Counter(done + second.rows)
    assert all(times[row] for row in range(GROUPS * 7))
    assert isinstance(second.buffer.policy, Refilled) or max(times.values()) == 1
    first.pipeline.forget()
    assert first.loop.open == []


def test_a_generation_under_way_is_given_up_wherever_its_turn_is():
    class Handle:
        is_ready, given_up = False, 0

        def result(self):
            raise Interrupted

        def give_up(self):
            Handle.given_up += 1

    run = Run(ByArrival(4))
    run.engine.start = lambda *_, **__: Handle()
    with pytest.raises(Interrupted):
        run.make(1)
    run.pipeline.forget()
    assert Handle.given_up == 3  # that of the turn whose completions were waited for, too
