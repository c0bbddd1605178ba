"""The number of steps that a run chooses to be ahead, on a simulated trainer and in a real one."""

import asyncio
import itertools
import math
import random
from types import SimpleNamespace

import pytest
from datasets import Dataset
from support.scripted import settings, steps_of

from salesrl_trl import SalesGRPOConfig, SalesGRPOTrainer, per_completion
from salesrl_trl.names import REWARD_EXPOSED, REWARD_SECONDS, STALENESS_MAX, STEP_SECONDS
from salesrl_trl.parts.lookahead import LookaheadPart

COMPUTE_S, GENERATION_S = 2.2, 0.7


def control_of(first, most):
    part = LookaheadPart()
    args = SimpleNamespace(rollout_lookahead=first, most_lookahead=most)
    part.connect(SimpleNamespace(args=args, least_lookahead=0, pipeline=None))
    return part


class Simulated:
    """A trainer in simulated time: each step generates what is due, waits for its own batch, and computes."""

    def __init__(self, control, rewards_s):
        self.control, self.rewards_s = control, rewards_s
        self.now, self.launched, self.numbers, self.waits = 0.0, {}, [], []

    def steps(self, count):
        for step in range(len(self.numbers), len(self.numbers) + count):
            for batch in range(step, step + self.control.number + 1):
                if batch not in self.launched:
                    self.now += GENERATION_S
                    seconds = self.rewards_s(batch)
                    self.launched[batch] = (self.now + seconds, seconds)
            end, seconds = self.launched.pop(step)
            waited = max(end - self.now, 0.0)
            self.now += waited + COMPUTE_S - GENERATION_S
            self.numbers.append(self.control.number)
            self.waits.append(waited)
            self.control.next({STEP_SECONDS: waited + COMPUTE_S, REWARD_EXPOSED: waited, REWARD_SECONDS: seconds})
        return self


def slow(median, sigma=0.25, seed=0):
    draw = random.Random(seed)
    return lambda batch: median * math.exp(sigma * draw.gauss(0, 1))


@pytest.mark.parametrize(
    ("rewards_s", "numbers"),
    [(lambda batch: 0.05, {0}), (slow(2.0), {1, 2}), (slow(9.0), {6, 7, 8}), (slow(100.0), {8})],
    ids=["instant", "2 s", "9 s", "more than may be"],
)
def test_the_number_is_the_least_with_which_training_hardly_waits(rewards_s, numbers):
    run = Simulated(control_of(0, 8), rewards_s).steps(120)
    assert set(run.numbers[60:]) <= numbers
    assert sum(run.waits[60:]) < 0.06 * 60 * COMPUTE_S or run.numbers[-1] == 8


def test_a_service_that_becomes_slower_or_quicker_is_followed():
    control = control_of(0, 8)
    run = Simulated(control, slow(3.0)).steps(60)
    before = control.number
    run.rewards_s = slow(9.0)
    run.steps(60)
    assert control.number > before
    run.rewards_s = slow(0.05)
    run.steps(120)
    assert control.number == 0


def test_a_number_that_was_too_small_is_not_tried_over_and_over():
    run = Simulated(control_of(0, 8), slow(9.0, sigma=0.1)).steps(400)
    moves = sum(one != other for one, other in itertools.pairwise(run.numbers))
    assert moves <= 6


def test_without_figures_nothing_moves():
    control = control_of(2, 4)
    for _ in range(20):
        assert control.next({STEP_SECONDS: 2.0}) == 2
        assert control.next({STEP_SECONDS: 2.0, REWARD_EXPOSED: math.nan, REWARD_SECONDS: math.nan}) == 2


@pytest.mark.slow
def test_a_trainer_finds_the_number_for_its_service_and_says_so(tiny, tmp_path, caplog):
    @per_completion
    async def late(completion):
        await asyncio.sleep(0.8)
        return float(len(str(completion)) % 5)

    rows = Dataset.from_list([{"prompt": [{"role": "user", "content": f"What is {place}?"}]} for place in range(8)])
    args = SalesGRPOConfig(**settings(
        tmp_path / "run", beta=0.0, max_steps=24, max_rollout_lookahead=4, max_completion_length=8,
        max_staleness=6, refill_groups=1,
    ))  # fmt: skip
    trainer = SalesGRPOTrainer(str(tiny), [late], args, rows)
    with caplog.at_level("INFO"):
        trainer.train()
    ahead = trainer.components.pipeline.turns.lookahead
    trainer.finish()
    assert 1 <= ahead <= 4
    assert max(entry[STALENESS_MAX] for entry in steps_of(trainer)) <= 6
    assert f"-> {ahead} steps: a batch's rewards take" in caplog.text
    first, last = (
        sum(entry[REWARD_EXPOSED] for entry in part) for part in (steps_of(trainer)[1:4], steps_of(trainer)[-3:])
    )
    assert last < first
