"""Which generation batches come and when: a trainer's loop is played through without a model."""

import itertools
import math
from types import SimpleNamespace
from unittest.mock import MagicMock

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from salesrl_trl.rollout.in_flight import parts
from salesrl_trl.rollout.reading_ahead import RolloutSchedule, UpdatesAhead


def prompts(count, epoch=0):
    """Micro-batches of an epoch, each an object of its own."""
    return [[f"epoch {epoch}", number] for number in range(count)]


def add(schedule, updates, size):
    """Add so many optimizer steps of `size` micro-batches; returns what was told of each."""
    return [schedule.add(prompts(size, epoch=update)) for update in range(updates)]


def take(size):
    """As transformers takes one optimizer step's micro-batches, with what it counted."""

    def pull(iterator):
        batches = [batch for _, batch in zip(range(size), iterator, strict=False)]
        return batches, len(batches)

    return pull


def test_a_rollout_is_taken_once_by_its_micro_step_and_its_own_inputs():
    schedule = RolloutSchedule(1, window=2)
    inputs = prompts(4)
    for window in schedule.add(inputs):
        window.rollout = f"rollout {window.first}"
    assert schedule.take(1, inputs[1]) is None  # none begins there
    assert schedule.take(2, inputs[0]) is None  # another one's
    assert schedule.take(2, list(inputs[2])) is None  # equal, and not the same
    assert schedule.take(2, inputs[2]) == "rollout 2"
    assert schedule.take(2, inputs[2]) is None


def micro_batches(lengths):
    return [[(number, index) for index in range(length)] for number, length in enumerate(lengths)]


def test_the_iterator_of_an_epoch_that_is_pulled_from_already_is_left_aside():
    updates, pull = UpdatesAhead(1, lambda batches: None), take(1)
    updates.dataloader = [["c"], ["d"]]

    def ask(epoch, iterator, left):
        return updates.next(epoch, iterator, pull, left)[0]

    first = iter([["a"], ["b"]])
    assert [ask(0, first, 4), ask(0, first, 3)] == [[["a"]], [["b"]]]
    other = iter([["x"], ["y"]])
    assert [ask(1, other, 2), ask(1, other, 1)] == [[["c"]], [["d"]]]
    assert next(other) == ["x"]


def train(lengths, size, window, lookahead, references_ahead, max_updates, start=(0, 0), has_batch=False):
    """The trainer's loop: pull an optimizer step, launch what is due before each micro-step, take where a generation
    batch begins."""
    # windows, launched: micro-step and optimizer step at which a generation batch was wanted, and launched
    game = SimpleNamespace(windows=[], launched=[], launched_inputs=[], taken=[], wanted=[], batches=[])
    epochs = micro_batches(lengths)
    schedule = RolloutSchedule(lookahead, window)
    updates = UpdatesAhead(lookahead + references_ahead, schedule.add)
    updates.dataloader = MagicMock(__iter__=lambda _: ([batch] for batch in epochs[updates.epoch]))
    micro_step, update = start
    schedule.restart(micro_step, update, has_batch)
    last = update + min(sum(-(-length // size) for length in lengths), max_updates)
    buffered = has_batch

    for epoch, length in enumerate(lengths):
        iterator = ([batch] for batch in epochs[epoch])
        for _ in range(-(-length // size)):
            if update == last:
                return game
            batches, _ = updates.next(epoch, iterator, take(size), last - update)
            for inputs in batches:
                for due in schedule.due(micro_step, update):
                    game.launched.append((micro_step, update))
                    game.launched_inputs.append(due.inputs)
                    due.rollout = ("rollout of", *due.inputs)
                if micro_step % window == 0 or not buffered:
                    game.windows.append((micro_step, update))
                    game.wanted.append(("rollout of", *inputs))
                    game.taken.append(schedule.take(micro_step, inputs))
                    buffered = True
                game.batches.append(inputs)
                micro_step += 1
            update += 1
    return game


runs = {
    "lengths": st.lists(st.integers(1, 9), min_size=1, max_size=4),
    "size": st.integers(1, 4),
    "window": st.integers(1, 9),
    "lookahead": st.integers(0, 4),
    "references_ahead": st.booleans(),
    "max_updates": st.integers(1, 20),
    "start": st.tuples(st.integers(0, 20), st.integers(0, 20)),
    "has_batch": st.booleans(),
}


@given(**runs)
def test_every_batch_is_launched_once_as_early_as_may_be_and_is_there_when_it_is_wanted(lookahead, **run):
    game = train(lookahead=lookahead, **run)
    assert game.taken == game.wanted
    assert [("rollout of", *inputs) for inputs in game.launched_inputs] == game.wanted
    for (micro_step, update), (launch_step, launch_update) in zip(game.windows, game.launched, strict=True):
        assert launch_step <= micro_step
        assert launch_update == max(update - lookahead, run["start"][1])
        assert lookahead or launch_step == micro_step


@given(**runs)
def test_lookahead_changes_neither_what_is_trained_on_nor_where_batches_begin(lookahead, **run):
    ahead, plain = train(lookahead=lookahead, **run), train(lookahead=0, **{**run, "references_ahead": False})
    assert (ahead.batches, ahead.windows, ahead.wanted) == (plain.batches, plain.windows, plain.wanted)
    every = list(itertools.chain(*micro_batches(run["lengths"])))
    assert plain.batches == [[batch] for batch in every[: len(plain.batches)]]  # each micro-batch once


@given(st.integers(1, 64), st.integers(1, 8), st.integers(1, 8))
def test_parts_are_the_smallest_of_whole_groups_and_micro_batches_and_hold_every_place_once(size, micro_batch, group):
    divided, smallest = parts(size, micro_batch, group), math.lcm(micro_batch, group)
    assert [place for part in divided for place in part] == list(range(size))
    assert {len(part) for part in divided} == {smallest if size % smallest == 0 else size}


def test_torch_draws_for_an_epoch_that_was_begun_ahead_when_its_first_step_is_handed_out_and_not_before():
    """As a dataloader draws that begins then. What it draws ahead leaves the generator as it was."""
    updates, states = UpdatesAhead(2, lambda batches: None), [torch.get_rng_state()]
    updates.dataloader = DataLoader([["c"], ["d"]], batch_size=None)
    first = iter([["a"], ["b"]])
    for epoch, left in ((0, 4), (0, 3), (1, 2), (1, 1)):
        updates.next(epoch, first if epoch == 0 else iter([]), take(1), left)
        states.append(torch.get_rng_state())
    moved = [not torch.equal(before, after) for before, after in itertools.pairwise(states)]
    assert moved == [False, False, True, False]
    torch.set_rng_state(states[0])
    iter(updates.dataloader)
    assert torch.equal(torch.get_rng_state(), states[-1])
