"""Conversations over an engine that answers turns by a rule."""

import threading
import time

import pytest

from salesrl_trl.generation.conversations import AskedTurns, Conversations


def three_turns(place, first, ask):
    """All that a conversation has sampled: two turns more, each on the ids so far and a tool's result of 0."""
    ids, seen = [place, *first[0]], [first[0]]
    for _ in range(2):
        own, _ = ask(place, [*ids, 0])
        ids += [0, *own]
        seen.append(own)
    return seen


def test_each_conversation_gets_the_turns_that_were_made_of_its_own_ids():
    batch = Conversations(50, three_turns, AskedTurns())
    for place in range(50):
        batch.begin(place, ([place * 1000], None))
    while not batch.is_over:
        batch.wait(lambda: batch.is_over or len(batch.turns) > 0)
        for turn in reversed(batch.turns.take()):  # in another order than asked for
            turn.answer.set_result(([turn.ids[0] * 1000 + len(turn.ids)], None))
    assert batch.results() == [[[place * 1000], [place * 1000 + 3], [place * 1000 + 5]] for place in range(50)]


def test_an_error_in_a_conversation_ends_the_batch_and_is_raised():
    def talk(place, first, ask):
        if place == 1:
            raise ZeroDivisionError
        return ask(place, [])

    batch = Conversations(2, talk, AskedTurns())
    batch.begin(0, ([1], None))
    batch.begin(1, ([1], None))
    assert batch.wait(lambda: batch.is_over, 10)
    with pytest.raises(ZeroDivisionError):
        batch.results()


def test_conversations_that_are_given_up_end_and_leave_no_turn_behind():
    turns, before = AskedTurns(), threading.active_count()
    mine, other = (Conversations(2, three_turns, turns) for _ in range(2))
    for batch in (mine, other):
        for place in range(2):
            batch.begin(place, ([place], None))
    assert mine.wait(lambda: len(turns) == 4, 10)
    taken = turns.take()  # by an engine
    mine.give_up()
    for turn in taken:
        if turn.batch is other:
            turn.answer.set_result(([1], None))
    assert other.wait(lambda: len(turns) == 2, 10)  # the other batch goes on
    other.give_up()
    end = time.monotonic() + 10
    while threading.active_count() > before and time.monotonic() < end:
        time.sleep(0.01)
    assert threading.active_count() == before
    assert len(turns) == 0


def test_a_conversation_that_nobody_wants_ends_when_it_asks():
    tool, before = threading.Event(), threading.active_count()

    def talk(place, first, ask):
        assert tool.wait(10)
        ask(place, [])
        pytest.fail("it goes on")

    batch = Conversations(1, talk, AskedTurns())
    batch.begin(0, ([1], None))
    assert not batch.is_over
    batch.give_up()
    tool.set()
    end = time.monotonic() + 10
    while threading.active_count() > before and time.monotonic() < end:
        time.sleep(0.01)
    assert threading.active_count() == before
    assert len(batch.turns) == 0
