"""Which micro-batches are ready while rewards are pending."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from salesrl_trl.rollout.buffer import first_in, to_launch
from salesrl_trl.rollout.in_flight import ScoredGroups, parts

WANTED = 0.5


def batch_of(size, name="first"):
    """What TRL makes of a generation batch, told apart by `name`."""
    return {
        "completion_ids": torch.arange(size * 3).view(size, 3),
        "advantages": torch.arange(size) + (0 if name == "first" else 100),
        "num_items_in_batch": torch.tensor(7),
        "name": name,
    }


def settled(*ranks):
    """Shape (world size, B): `settled("110", "111")`."""
    return torch.tensor([[mark == "1" for mark in rank] for rank in ranks])


def look(waiting, marks, scored=0.9, name="first"):
    waiting.record(settled(marks), 0, scored, WANTED)
    waiting.release(batch_of(len(marks), name))
    return taken(waiting)


def taken(waiting):
    found = []
    while waiting.has_next:
        found.append(waiting.next()["advantages"].tolist())
    return found


def test_a_part_is_ready_when_all_of_it_is_settled():
    waiting = ScoredGroups(8, micro_batch=2, group=4)
    assert look(waiting, "11101111") == [[4, 5], [6, 7]]
    assert waiting.remaining == [range(4)]
    assert not waiting.complete
    assert not waiting.is_empty


def test_nothing_is_ready_before_so_much_is_scored_that_the_batch_can_not_be_skipped():
    waiting = ScoredGroups(4, micro_batch=1, group=1)
    assert look(waiting, "1100", 0.25) == []  # one of them could not be scored
    assert waiting.remaining == parts(4, 1, 1)
    assert look(waiting, "1110", 0.5) == [[0], [1], [2]]


def test_when_all_is_settled_all_is_released_however_little_was_scored():
    waiting = ScoredGroups(4, micro_batch=2, group=2)
    assert look(waiting, "1111", 0.25) == [[0, 1], [2, 3]]
    assert waiting.complete
    assert waiting.is_empty


def test_with_several_ranks_what_is_settled_on_a_rank_is_ready_there():
    one, other = ScoredGroups(6, micro_batch=2, group=2), ScoredGroups(6, micro_batch=2, group=2)
    for rows, first, second in (
        (("111100", "110011"), [[0, 1], [2, 3]], [[0, 1], [4, 5]]),
        (("111111", "110011"), [[4, 5]], []),  # complete on one rank, and not on the other
        (("111111", "111111"), [], [[2, 3]]),
    ):
        for rank, (waiting, wanted) in enumerate(((one, first), (other, second))):
            waiting.record(settled(*rows), rank, 0.9, WANTED)
            waiting.release(batch_of(6))
            assert taken(waiting) == wanted
            assert waiting.complete == ("0" not in "".join(rows))
    assert one.is_empty
    assert other.is_empty


@pytest.mark.parametrize(
    ("rows", "scored", "waited"),
    [
        (("0011", "1100"), 0.5, [[0], [1]]),  # for groups of its own
        (("00111111", "11000000"), 0.6, [[0], [1, 2, 3]]),
        # too little is scored: nobody waits for the last group of the rank that is ahead, and some rank waits
        (("00111111", "00000000"), 0.375, [[], [0, 1, 2, 3]]),
        (("11111111", "00000000", "00000011"), 0.4, [[], [0, 1, 2, 3], []]),
        (("0011", "0011"), 0.4, [[0], [0]]),
        (("1100",), 0.25, [[1]]),  # one of two could not be scored
    ],
)
def test_a_rank_waits_for_groups_of_its_own_and_some_rank_waits_while_too_little_is_scored(rows, scored, waited):
    found = []
    for rank in range(len(rows)):
        waiting = ScoredGroups(len(rows[0]), micro_batch=2, group=2)
        waiting.record(settled(*rows), rank, scored, WANTED)
        found.append([part.start // 2 for part in waiting.pending])
    assert found == waited


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4), st.integers(1, 3), st.randoms(use_true_random=False))
def test_whatever_the_order_of_rewards_every_row_comes_once_with_its_whole_group(
    micro_batch, group, count, ranks, random
):
    size = math.lcm(micro_batch, group) * count
    waiting = ScoredGroups(size, micro_batch, group)
    marks = torch.zeros(ranks, size, dtype=torch.bool)
    order = [(rank, place) for rank in range(ranks) for place in range(size)]
    random.shuffle(order)
    rows, trained = [], []
    for done, (rank, place) in enumerate(order, start=1):
        marks[rank, place] = True
        if random.random() < 0.5 or done == len(order):
            waiting.record(marks, 0, marks.float().mean().item(), WANTED)
            waiting.release(batch_of(size))
            if waiting.complete:
                recorded = waiting.order
            while waiting.has_next and (waiting.complete or random.random() < 0.7):
                each = waiting.next()["advantages"].tolist()
                trained.append((each, len(waiting.following)))
                assert len(each) == micro_batch
                groups = {row // group for row in each}
                assert all(marks[0, each_group * group : (each_group + 1) * group].all() for each_group in groups)
                assert done >= WANTED * len(order)
                rows += each
    assert sorted(rows) == list(range(size))
    assert waiting.is_empty
    # A replay has all rewards at once. It trains in the same order, and knows of as many micro-batches each time.
    replayed, again = ScoredGroups(size, micro_batch, group, recorded), []
    replayed.release(batch_of(size))
    while replayed.has_next:
        again.append((replayed.next()["advantages"].tolist(), len(replayed.following)))
    assert again == trained
    assert replayed.order == recorded


def test_a_micro_batch_has_the_pixels_of_its_own_pictures():
    """Of 4 samples with 0, 1, 2 and 1 pictures, whose grids are 2 and 4 patches large."""
    grids = torch.tensor([[1, 1, 2], [1, 2, 2], [1, 1, 2], [1, 2, 2]])
    of_patch = torch.arange(4).repeat_interleave(grids.prod(-1))
    pictures = {"num_images": [0, 1, 2, 1], "image_grid_thw": grids, "pixel_values": of_patch[:, None].float()}
    waiting = ScoredGroups(4, micro_batch=2, group=2)
    waiting.record(settled("1111"), 0, 1.0, WANTED)
    waiting.release(batch_of(4) | pictures)
    first, second = waiting.next(), waiting.next()
    assert (first["num_images"], second["num_images"]) == ([0, 1], [2, 1])
    assert first["image_grid_thw"].tolist() == [[1, 1, 2]]
    assert second["image_grid_thw"].tolist() == [[1, 2, 2], [1, 1, 2], [1, 2, 2]]
    assert first["pixel_values"].flatten().tolist() == [0, 0]
    assert second["pixel_values"].flatten().tolist() == [1] * 4 + [2] * 2 + [3] * 4


@given(st.data())
def test_a_step_waits_as_long_as_for_groups_of_the_full_age_and_then_the_first_ones(data):
    """Where each step has a batch: against the law in the words of the simulation from which it comes."""
    ahead = data.draw(st.integers(1, 4))
    oldest = ahead + data.draw(st.integers(0, 4))
    count = data.draw(st.integers(1, 3))
    ages = [0] * count + data.draw(
        st.lists(st.integers(1, oldest), min_size=ahead * count, max_size=ahead * count).filter(
            lambda ages: all(ages.count(age) <= count for age in ages)
        )
    )
    ends = data.draw(st.permutations(range(len(ages))))
    musts = [end for age, end in zip(ages, ends, strict=True) if age == oldest]
    others = sorted(end for age, end in zip(ages, ends, strict=True) if age < oldest)
    wanted = max(musts + others[: count - len(musts)])
    latest, following = [oldest - age for age in ages], range(1, ahead + 2)
    for now in range(len(ages)):
        chosen = first_in(latest, [end <= now for end in ends], following, count)
        assert bool(chosen) == (now >= wanted)
        if chosen:
            assert {group for group, age in enumerate(ages) if age == oldest} <= set(chosen)
            assert len(set(chosen)) == count


@given(st.integers(1, 4), st.integers(1, 3), st.integers(0, 3))
def test_where_no_group_may_be_older_than_rollouts_are_ahead_the_order_stays(ahead, count, step):
    launches = [max(batch - ahead, 0) for batch in range(step, step + ahead + 1) for _ in range(count)]
    latest, following = [launch + ahead for launch in launches], range(step + 1, step + ahead + 2)
    assert first_in(latest, [True] * len(latest), following, count) == [*range(count)]


@given(st.integers(1, 64), st.integers(0, 64), st.integers(0, 64), st.floats(0, 1), st.integers(1, 4))
def test_so_many_are_launched_that_enough_teach_by_the_share_so_far(target, differ, out, share, most):
    """Where no group was ever unequal too: no step could train on as many as that asks for."""
    launched = to_launch(target, differ, out, share, most)
    teach = max(1 - share, 1 / (1 + most))
    assert differ + (out + launched) * teach == pytest.approx(target, abs=teach + 1e-6)
    assert launched <= max(target - differ, 0) * (1 + most)
