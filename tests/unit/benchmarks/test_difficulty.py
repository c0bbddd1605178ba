"""Rows by remembered difficulty: the draw by hand, and that what is logged has no bias."""

import random
import statistics
from types import SimpleNamespace

import pytest

from benchmarks.difficulty import FLOOR, REWARD, Difficulty, Draws, Memory, systematic


def test_a_row_is_drawn_as_often_as_its_share_says_rounded():
    draw = random.Random(0)
    for _ in range(50):
        assert sorted(systematic([0.5, 0.25, 0.25], 4, draw)) == [0, 0, 1, 2]
    counts = [systematic([0.4, 0.6], 1, draw)[0] for _ in range(4000)]
    assert statistics.fmean(counts) == pytest.approx(0.6, abs=0.03)


def test_shares_by_hand():
    memory = Memory(["a", "b", "c", "d"], size=2)
    assert memory.shares() == [0.25] * 4
    for row, reward in (("a", 0.0), ("b", 1.0), ("a", 1.0), ("b", 1.0), ("held out", 1.0)):
        memory.hear(row, reward)
    assert memory.calls == 4
    # a: 0.25, the first one known. b: from the mean, 0.25, halfway to 0. The others: the mean, 0.1875
    rest, total = 1 - FLOOR, 0.25 + 0.125 + 2 * 0.1875
    assert memory.shares() == pytest.approx(
        [FLOOR / 4 + rest * each / total for each in (0.25, 0.125, 0.1875, 0.1875)]
    )
    for _ in range(60):
        for row in "abcd":
            memory.note(row, 0.0)
    assert sum(memory.shares()) == pytest.approx(1)


def test_the_logged_reward_has_the_expectation_of_all_rows_whatever_was_remembered():
    rows = [f"row-{number}" for number in range(12)]
    memory, truth = Memory(rows, size=2), {row: number / 11 for number, row in enumerate(rows)}
    for number, row in enumerate(rows):
        memory.note(row, 0.25 * (number > 8))
    like = SimpleNamespace(num_samples=12, batch_size=4, repeat_count=1, mini_repeat_count=2)
    draws, part = Draws(like, memory, rows, seed=1), Difficulty(memory, len(rows))
    logged, drawn = [], []
    for _ in range(700):
        places = [*draws]
        for first in range(0, len(places), 8):
            batch = [rows[place] for place in places[first : first + 8]]
            rollout = SimpleNamespace(is_trained_on=True, group=2, inputs=[{"id": row} for row in batch],
                                      result=SimpleNamespace(values=[truth[row] for row in batch]))  # fmt: skip
            logged.append(part.on_batch(SimpleNamespace(rollout=rollout))[REWARD])
            drawn.append(statistics.fmean(truth[row] for row in batch))
    assert statistics.fmean(logged) == pytest.approx(0.5, abs=0.02)
    assert statistics.fmean(drawn) > 0.6  # what the batch alone would say
    assert not any(memory.drawn.values())
