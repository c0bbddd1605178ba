"""Conversations over transformers' rounds, and over an engine that answers turns by a rule."""

import threading
import time

import pytest

from salesrl_trl.agents.tool_turns import Conversations, Episodes
from salesrl_trl.generation.engine_loop import Rounds, TurnLoop


def three_turns(place, first, ask):
    """All that a conversation has sampled: two turns more, each on the ids so far and a tool's result of 0."""
    ids, seen = [place, *first.ids], [first.ids]
    for _ in range(2):
        turn = ask([*ids, 0])
        ids += [0, *turn.ids]
        seen.append(turn.ids)
    return seen


def by_rule(prompts, images, fields, group):
    assert (images, fields, group) == (None, {}, 1)
    return [[ids[0] * 1000 + len(ids)] for ids in prompts], None


def begun(kind, size, loop, talk):
    batch = kind(size, loop, talk, lambda: None)
    batch.begin([{"prompt_token_ids": [place]} for place in range(size)], [None] * size)
    return batch


def threads_end(before):
    end = time.monotonic() + 10
    while threading.active_count() > before and time.monotonic() < end:
        time.sleep(0.01)
    assert threading.active_count() <= before  # threads of earlier tests may end meanwhile


def test_each_conversation_gets_the_turns_that_were_made_of_its_own_ids():
    rounds = []
    loop = Rounds(lambda prompts, *more: (rounds.append(len(prompts)), by_rule(prompts, *more))[1], int)
    batch = begun(Conversations, 50, loop, three_turns)
    loop.run(batch)
    assert batch.results() == [[[place * 1000 + 1], [place * 1000 + 3], [place * 1000 + 5]] for place in range(50)]
    assert rounds == [50, 50, 50]  # turns are generated together


def test_ranks_that_generate_together_make_as_many_rounds():
    asked, others = [], iter([2, 1, 1, 0])  # another rank asks for three turns

    def generate(prompts, *more):
        asked.append(len(prompts))
        return by_rule(prompts, *more)

    loop = Rounds(generate, lambda mine: max(mine, next(others)))
    batch = begun(Episodes, 2, loop, lambda place, first, ask: ask([place]))
    loop.run(batch)
    assert asked == [2, 1, 1]
    assert [turn.ids for turn in batch.results()] == [[1], [1001]]


def test_an_error_in_a_conversation_ends_the_batch_and_is_raised():
    def talk(place, first, ask):
        if place == 1:
            raise ZeroDivisionError
        return ask([place])

    loop = Rounds(by_rule, int)
    batch = begun(Conversations, 2, loop, talk)
    loop.run(batch)
    with pytest.raises(ZeroDivisionError):
        batch.results()


def test_conversations_that_are_cancelled_end_and_leave_no_turn_behind():
    loop, before = TurnLoop(), threading.active_count()

    def are_asked(count):
        with loop.changed:
            assert loop.changed.wait_for(lambda: sum(map(len, loop._waiting)) == count, 10)

    mine, other = (begun(Episodes, 2, loop, lambda place, first, ask: [ask([1]), ask([2])]) for _ in range(2))
    are_asked(4)
    mine.cancel()
    are_asked(2)
    for group in loop._take():
        for task in group:
            assert task.batch is other
            task.answer.set_result(task.prompt)
    are_asked(2)  # the other batch goes on
    other.cancel()
    threads_end(before)
    assert not any(loop._waiting)


def test_a_conversation_that_nobody_wants_ends_when_it_asks():
    tool, before, ended = threading.Event(), threading.active_count(), []

    def talk(place, first, ask):
        assert tool.wait(10)
        ask([])
        pytest.fail("it goes on")

    batch = Episodes(1, TurnLoop(), talk, lambda: ended.append("calls"))
    batch.begin([], [None])
    assert not batch.is_over
    batch.cancel()
    tool.set()
    threads_end(before)
    assert ended == ["calls"]
