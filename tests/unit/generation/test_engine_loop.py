"""The loop over vLLM in this process: whose turn is whose, what is left for later, and what an error ends."""

import threading
import time
from concurrent.futures import CancelledError

import pytest
from support.engines import LLM, prompts

from salesrl_trl.agents.tool_turns import Conversations, Episodes
from salesrl_trl.agents.tools import ToolCalls
from salesrl_trl.generation.engine_loop import CompletionTasks, EngineLoop, Rounds, TurnLoop


@pytest.fixture
def llm():
    return LLM()


@pytest.fixture
def loop(llm):
    return EngineLoop(llm)


def begun(loop, *steps, ahead=False, most=None, finished=None):
    """A batch of completions that take so many steps, and the places of those that are finished, as they come."""
    told = []
    if most is not None:
        loop.most_unfinished = most
    batch = CompletionTasks(len(steps), loop, finished or (lambda place, ids: told.append(place)))
    batch.begin(prompts(*steps), ["params"] * len(steps))
    loop.run(batch, ahead=ahead)
    return batch, told


def numbers(batch):
    return [turn.ids[0] for turn in batch.results()]


def test_a_completion_is_told_of_in_the_step_that_finishes_it(llm, loop):
    steps, told = [], []
    step, loop._step = loop._step, lambda: (told.append("step"), steps.append(1), step())[2]
    batch, _ = begun(loop, 3, 3, 2, finished=lambda *finished: told.append(finished))
    assert told == ["step", "step", (2, [2]), "step", (0, [0]), (1, [1])]
    assert numbers(batch) == [0, 1, 2]
    assert [params for _, params in llm.llm_engine.asked] == ["params"] * 3


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_under_tensor_parallelism_all_are_generated_and_the_own_ones_told_of(llm, loop, rank):
    told = {}
    batch = CompletionTasks(2, loop, told.__setitem__)
    batch.begin(prompts(1, 2, 3, 3, 2, 1), ["params"] * 6, first=2 * rank)
    loop.run(batch)
    assert told == {0: [2 * rank], 1: [2 * rank + 1]} and numbers(batch) == [2 * rank, 2 * rank + 1]
    assert not llm.llm_engine.left


def test_a_batch_is_left_when_few_are_unfinished_and_finished_beside_the_next(llm, loop):
    first, told = begun(loop, 9, 1, 2, 8, ahead=True, most=2)
    assert told == [1, 2] and llm.llm_engine.left == {"0": 7, "3": 6}
    second, told_second = begun(loop, 1, 3, 5, 7, ahead=True)  # two in all may be left
    assert told == [1, 2, 3] and told_second == [0, 1, 2] and set(llm.llm_engine.left) == {"0", "7"}
    for batch, ids in ((first, [0, 1, 2, 3]), (second, [4, 5, 6, 7])):
        loop.run(batch)
        assert numbers(batch) == ids
    assert told_second == [0, 1, 2, 3]


def test_a_small_batch_does_not_wait_for_what_a_large_one_has_left(llm, loop):
    begun(loop, 1, 9, 1, 9, ahead=True, most=2)
    small, _ = begun(loop, 2, 1)
    assert numbers(small) == [4, 5] and set(llm.llm_engine.left) == {"1", "3"}


def test_without_a_limit_nothing_is_left_in_the_engine(llm, loop):
    batch, told = begun(loop, 3, 1, ahead=True)
    assert batch.is_over and told == [1, 0] and not llm.llm_engine.left


def test_a_generation_of_somebody_else_goes_on_beside_and_sees_its_own_outputs_alone(llm, loop):
    batch, told = begun(loop, 1, 3, ahead=True, most=1)
    outputs = llm.generate(prompts(4, 1), "others")
    assert [output.request_id for output in outputs] == ["3", "2"]
    assert told == [0, 1] and numbers(batch) == [0, 1]


def test_prefixes_of_older_weights_are_kept_apart_where_the_cache_can_t_be_emptied(llm, loop):
    with loop.pushing():
        assert llm.reset_prefix_cache() == "reset"
    begun(loop, 1, 9, ahead=True, most=1)
    with loop.pushing():
        assert llm.reset_prefix_cache() is False
    begun(loop, 1, 9, ahead=True, most=2)
    with loop.pushing():
        assert llm.reset_prefix_cache() is False
    begun(loop, 1)
    assert llm.reset_prefix_cache() == "reset"
    assert llm.llm_engine.salts == {"0": None, "1": None, "2": "1", "3": "1", "4": "2"}


def test_a_batch_that_is_cancelled_leaves_the_engine_to_the_others(llm, loop):
    kept, _ = begun(loop, 1, 6, ahead=True, most=2)
    dropped, told = begun(loop, 1, 1, 1, 9, ahead=True)
    dropped.cancel()
    loop.run(dropped)
    with pytest.raises(CancelledError):
        dropped.results()
    assert set(llm.llm_engine.left) == {"1"} and told == [0, 1, 2]
    loop.run(kept)
    assert numbers(kept) == [0, 1]


@pytest.mark.parametrize("error", [RuntimeError("out of memory"), KeyboardInterrupt()], ids=["error", "interruption"])
def test_a_step_that_fails_ends_all_that_is_under_way_and_nothing_else(llm, loop, error):
    batches = [begun(loop, 1, 6, ahead=True, most=9)[0] for _ in range(2)]
    llm.llm_engine.fails = error
    with pytest.raises(type(error)):
        loop.run(batches[0])
    for batch in batches:
        with pytest.raises(RuntimeError if isinstance(error, Exception) else CancelledError):
            batch.results()
    assert not loop.under_way and not llm.llm_engine.left
    llm.llm_engine.fails = None
    with loop.pushing():
        assert llm.reset_prefix_cache() == "reset"
    assert numbers(begun(loop, 2)[0]) == [4]


def test_a_prompt_that_the_engine_refuses_is_the_error_of_its_own_batch(llm, loop):
    kept, _ = begun(loop, 1, 6, ahead=True, most=1)
    batch = CompletionTasks(3, loop, lambda *_: None)
    batch.begin([*prompts(1), {"prompt_token_ids": []}, *prompts(1)], ["params"] * 3)
    loop.run(batch)
    with pytest.raises(ValueError, match="the prompt is empty"):
        batch.results()
    assert set(loop.under_way) == set(llm.llm_engine.left) == {"1"}
    loop.run(kept)
    assert numbers(kept) == [0, 1]


def test_an_error_of_who_is_told_ends_its_batch_and_loses_no_output_of_another(llm, loop):
    def raising(*_):
        raise ZeroDivisionError

    other, told = begun(loop, 4, 4, ahead=True, most=2)
    loop.most_unfinished = 4
    batch = CompletionTasks(2, loop, raising)
    batch.begin(prompts(4, 9), ["params"] * 2)
    loop.run(batch)
    with pytest.raises(ZeroDivisionError):
        batch.results()
    loop.run(other)
    assert told == [0, 1] and not llm.llm_engine.left


def test_turns_of_conversations_join_a_generation_and_are_sampled_as_their_own_batch_is(llm, loop):
    later = threading.Event()

    def training(place, first, ask):
        ask([1])
        assert later.wait(10)
        return ask([2])

    def greedy(place, first, ask):
        later.set()
        return ask([3])

    batches = []
    for name, talk, ahead in (("training", training, True), ("greedy", greedy, False)):
        batch = Episodes(1, loop, talk, ToolCalls(()))
        batch.begin(prompts(9), [name])
        loop.run(batch, ahead=ahead)
        batches.append(batch)
    for batch in batches:
        loop.run(batch)
        assert len(batch.results()) == 1
    assert sorted(llm.llm_engine.asked) == [([1], "training"), ([2], "training"), ([3], "greedy")]


def test_between_two_generations_what_was_asked_for_is_generated_and_waited_for_is_nothing(llm, loop):
    asks, goes_on = threading.Event(), threading.Event()

    def talk(place, first, ask):
        assert goes_on.wait(10)
        asks.set()
        return ask([2]).ids

    batch = Conversations(1, loop, talk, ToolCalls(()))
    batch.begin(prompts(1), ["params"])
    loop.run(batch, ahead=True)
    loop.resume()
    assert not batch.is_over and len(llm.llm_engine.asked) == 1
    goes_on.set()
    assert asks.wait(10)
    with loop.changed:
        assert loop.changed.wait_for(lambda: loop._waiting, 10)
    loop.resume()
    with loop.changed:
        assert loop.changed.wait_for(lambda: batch.is_over, 10)
    assert batch.results() == [[1]]


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


def conversing(kind, size, loop, talk):
    batch = kind(size, loop, talk, ToolCalls(()))
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
    batch = conversing(Conversations, 50, loop, three_turns)
    loop.run(batch)
    assert batch.results() == [[[place * 1000 + 1], [place * 1000 + 3], [place * 1000 + 5]] for place in range(50)]
    assert rounds == [50, 50, 50]  # turns are generated together


def test_ranks_that_generate_together_make_as_many_rounds():
    asked, others = [], iter([2, 1, 1, 0])  # another rank asks for three turns

    def generate(prompts, *more):
        asked.append(len(prompts))
        return by_rule(prompts, *more)

    loop = Rounds(generate, lambda mine: max(mine, next(others)))
    batch = conversing(Episodes, 2, loop, lambda place, first, ask: ask([place]))
    loop.run(batch)
    assert asked == [2, 1, 1]
    assert [turn.ids for turn in batch.results()] == [[1], [1001]]


def test_an_error_in_a_conversation_ends_the_batch_and_is_raised():
    def talk(place, first, ask):
        if place == 1:
            raise ZeroDivisionError
        return ask([place])

    loop = Rounds(by_rule, int)
    batch = conversing(Conversations, 2, loop, talk)
    loop.run(batch)
    with pytest.raises(ZeroDivisionError):
        batch.results()


def test_conversations_that_are_cancelled_end_and_leave_no_turn_behind():
    loop, before = TurnLoop(), threading.active_count()

    def are_asked(count):
        with loop.changed:
            assert loop.changed.wait_for(lambda: sum(map(len, loop._waiting)) == count, 10)

    mine, other = (conversing(Episodes, 2, loop, lambda place, first, ask: [ask([1]), ask([2])]) for _ in range(2))
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
    tool, before, calls = threading.Event(), threading.active_count(), ToolCalls(())

    def talk(place, first, ask):
        assert tool.wait(10)
        ask([])
        pytest.fail("it goes on")

    batch = Episodes(1, TurnLoop(), talk, calls)
    batch.begin([], [None])
    assert not batch.is_over
    batch.cancel()
    tool.set()
    threads_end(before)
    assert calls.stopped == "given_up"
