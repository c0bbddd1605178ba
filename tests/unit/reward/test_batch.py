"""The rewards of a batch while they come in: completions are scored by a chain whose answers a test gives."""

import asyncio
import contextlib
import logging
import threading
import time

import pytest
from support.virtual_time import play

from salesrl_trl.reward.base import BatchedReward
from salesrl_trl.reward.batch import CANCEL_GRACE_S, completion_text
from salesrl_trl.reward.service.event_loop import remaining_s
from salesrl_trl.reward.stage_times import StageTimes, TimeRange
from salesrl_trl.timing import overlap
from salesrl_trl.types import Outcome, Reward

PATIENCE_S = 20.0
"""Until a test that waits in vain fails."""


def fail(error):
    """Deep in somebody's code."""
    raise error


class Answered(BatchedReward):
    """Scores a completion when the test answers it; the value is that answer."""

    def __init__(self, deadline_s=60.0):
        super().__init__(deadline_s)
        self.asked = []
        self.cancelled = []
        self.left_s = []
        self._answers = {}

    def answer(self, text, value):
        """A number, or an error to raise."""
        self._of(text).set_result(value)

    def _of(self, text):
        if text not in self._answers:
            self._answers[text] = asyncio.get_running_loop().create_future()
        return self._answers[text]

    def row_of(self, example):
        return example["row"]

    async def score(self, sample, stages):
        index, completion = sample.row, sample.text
        self.asked.append((index, completion))
        self.left_s.append(remaining_s())
        try:
            value = await stages.timed(asyncio.shield(self._of(completion)), "judge")
            if isinstance(value, Exception):
                fail(value)
            return Reward(outcome=Outcome.OK, value=value, seconds=stages.seconds)
        except asyncio.CancelledError:
            self.cancelled.append(completion)
            raise


class Stubborn(Answered):
    """Goes on when it is cancelled, until `let_go`, and then has a reward all the same, or raises `error`."""

    def __init__(self, deadline_s, error=None):
        super().__init__(deadline_s)
        self.ended = []
        self._error = error
        self._is_let_go = False

    def let_go(self):
        self._is_let_go = True

    async def score(self, sample, stages):
        completion = sample.text
        try:
            return await super().score(sample, stages)
        except asyncio.CancelledError:
            while not self._is_let_go:
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.sleep(0.01)
            self.ended.append(completion)
            if self._error is not None:
                raise self._error from None
            return Reward(outcome=Outcome.OK, value=9.0)


async def has_ended(reward):
    """Wait until a stubborn completion has."""
    while not reward.ended:
        await asyncio.sleep(0.01)
    await turns()


async def turns(count=5):
    """Let all else on the loop that can go on do so."""
    for _ in range(count):
        await asyncio.sleep(0)


async def begun(*texts, reward=None):
    """A reward, and a batch of it in which these texts are under way."""
    reward = reward or Answered()
    batch = reward.batches.begin(range(len(texts)))
    for place, text in enumerate(texts):
        batch.start(place, text)
    await turns()
    return reward, batch


def told(batch):
    """Value or reason of each reward; `None` for those that are out."""
    return [None if each is None else each.reason if each.value is None else each.value for each in batch.rewards]


def call(reward, completions, row=None, **given):
    """As TRL calls a reward function."""
    rows = list(range(len(completions))) if row is None else row
    return reward(prompts=[None] * len(completions), completions=completions, row=rows, **given)


# A completion


def test_a_completion_is_scored_from_its_start_while_others_are_not_there_yet():
    async def scene():
        reward = Answered()
        batch = reward.batches.begin([7, 8])
        await turns()
        assert reward.asked == []
        batch.start(1, "b")
        await turns()
        assert reward.asked == [(8, "b")]
        reward.answer("b", 0.5)
        await turns()
        assert told(batch) == [None, 0.5]
        assert batch.is_settled([1])
        assert not batch.is_settled([0, 1])
        assert not batch.is_settled()

    play(scene())


def test_a_text_that_is_started_again_is_not_scored_twice():
    async def scene():
        reward = Answered()
        batch = reward.batches.begin([0])
        batch.start(0, "a")
        batch.start(0, "a")
        await turns()
        batch.start(0, "a")
        reward.answer("a", 0.5)
        await batch.settled([[0]])
        batch.start(0, "a")
        await turns()
        assert reward.asked == [(0, "a")]
        assert told(batch) == [0.5]

    play(scene())


def test_equal_texts_at_two_places_are_scored_both():
    async def scene():
        reward, batch = await begun("a", "a")
        assert reward.asked == [(0, "a"), (1, "a")]
        batch.cancel()

    play(scene())


def test_another_text_replaces_the_score_of_the_first_one():
    async def scene():
        reward, batch = await begun("a")
        reward.answer("a", 0.5)
        await batch.settled([[0]])
        batch.start(0, "b")
        assert told(batch) == [None]
        await turns()
        assert reward.asked == [(0, "a"), (0, "b")]
        reward.answer("b", 0.25)
        await batch.settled([[0]])
        assert told(batch) == [0.25]
        assert [span.name for span in batch.report().spans] == ["judge"]  # of the text that counts

    play(scene())


def test_another_text_cancels_the_first_one_under_way():
    async def scene():
        reward, batch = await begun("a")
        batch.start(0, "b")
        await turns()
        assert reward.cancelled == ["a"]
        assert told(batch) == [None]
        reward.answer("b", 0.25)
        await batch.settled([[0]])
        assert told(batch) == [0.25]

    play(scene())


def test_a_first_text_that_does_not_let_itself_be_cancelled_says_nothing_of_the_second():
    async def scene():
        reward, batch = await begun("a", reward=Stubborn(60.0))
        batch.start(0, "b")
        reward.let_go()
        await has_ended(reward)
        assert told(batch) == [None]
        reward.answer("b", 0.25)
        await batch.settled([[0]])
        assert told(batch) == [0.25]

    play(scene())


def test_the_text_of_a_completion_is_read_from_trls_conversational_form_too():
    assert completion_text("a") == "a"
    assert completion_text([{"role": "assistant", "content": "b"}]) == "b"


# Time


def test_each_completion_has_a_deadline_of_its_own():
    async def scene():
        reward, loop = Answered(deadline_s=2.0), asyncio.get_running_loop()
        batch = reward.batches.begin([0, 1])
        began = loop.time()
        batch.start(0, "a")
        await asyncio.sleep(1.5)
        later = loop.time()
        batch.start(1, "b")
        await batch.settled([[0]])
        assert loop.time() - began == pytest.approx(2.0)
        assert told(batch) == ["deadline", None]
        await batch.settled([[1]])
        assert loop.time() - later == pytest.approx(2.0)
        assert told(batch) == ["deadline", "deadline"]
        assert [each.outcome for each in batch.rewards] == [Outcome.INFRA] * 2
        assert reward.cancelled == ["a", "b"]
        assert reward.left_s == pytest.approx([2.0, 2.0])

    play(scene())


def test_what_is_late_has_the_seconds_of_the_stage_that_it_was_in_and_a_failed_span(spans_in_virtual_time):
    async def scene():
        reward = Answered(deadline_s=0.2)
        batch = reward.batches.begin([0])
        batch.start(0, "a")
        await batch.settled([[0]])
        assert batch.rewards[0].seconds["judge"] == pytest.approx(0.2)
        assert [(span.name, span.failed) for span in batch.report().spans] == [("judge", True)]

    play(scene())


def test_what_was_in_time_stays_as_it_is():
    async def scene():
        reward = Answered(deadline_s=0.1)
        batch = reward.batches.begin([0])
        batch.start(0, "a")
        reward.answer("a", 0.5)
        await batch.settled([[0]])
        await asyncio.sleep(0.3)
        assert told(batch) == [0.5]

    play(scene())


def test_a_late_completion_that_answers_after_all_is_late():
    async def scene():
        reward, loop = Stubborn(0.1), asyncio.get_running_loop()
        reward.let_go()
        batch = reward.batches.begin([0])
        began = loop.time()
        batch.start(0, "a")
        await batch.settled([[0]])
        assert loop.time() - began == pytest.approx(0.1)  # which does not wait for the grace to pass
        assert reward.ended == ["a"]
        assert told(batch) == ["deadline"]

    play(scene())


def test_one_that_ignores_its_cancellation_is_left_behind_after_the_grace():
    async def scene():
        reward, loop = Stubborn(0.1), asyncio.get_running_loop()
        batch = reward.batches.begin([0])
        began = loop.time()
        batch.start(0, "a")
        await batch.settled([[0]])
        assert loop.time() - began == pytest.approx(0.1 + CANCEL_GRACE_S)
        assert reward.cancelled == ["a"]
        assert reward.ended == []
        assert told(batch) == ["deadline"]
        reward.let_go()
        await has_ended(reward)
        assert told(batch) == ["deadline"]  # whatever it says in the end

    play(scene())


def test_a_cut_off_within_the_grace_is_the_last_word():
    async def scene():
        reward = Stubborn(0.1)
        batch = reward.batches.begin([0])
        batch.start(0, "a")
        while not reward.cancelled:
            await asyncio.sleep(0.01)
        assert told(batch) == [None]
        reward.batches.cut_off("stopped")
        await asyncio.sleep(2 * CANCEL_GRACE_S)
        reward.let_go()
        await has_ended(reward)
        assert told(batch) == ["stopped"]

    play(scene())


def test_the_grace_of_a_text_that_was_late_says_nothing_of_the_next_text_at_its_place():
    async def scene():
        reward, loop = Answered(deadline_s=1.5 * CANCEL_GRACE_S), asyncio.get_running_loop()
        batch = reward.batches.begin([0])
        batch.start(0, "as it was streamed")
        await batch.settled([[0]])
        assert told(batch) == ["deadline"]
        began = loop.time()
        batch.start(0, "as it is")
        assert told(batch) == [None]
        await batch.settled([[0]])
        assert loop.time() - began == pytest.approx(1.5 * CANCEL_GRACE_S)  # it had the whole of its own time
        assert told(batch) == ["deadline"]
        assert [completion for _, completion in reward.asked] == reward.cancelled == ["as it was streamed", "as it is"]

    play(scene())


@pytest.mark.parametrize("is_cut_off", [False, True])
def test_an_error_after_the_deadline_concerns_nobody_and_its_words_are_not_told(caplog, is_cut_off):
    async def scene():
        reward = Stubborn(0.1, ValueError("a customer's words"))
        batch = reward.batches.begin([0])
        batch.start(0, "a")
        while not reward.cancelled:
            await asyncio.sleep(0.01)
        if is_cut_off:
            batch.cut_off("stopped")
        reward.let_go()
        await has_ended(reward)
        assert told(batch) == ["stopped" if is_cut_off else "deadline"]
        await asyncio.sleep(2 * CANCEL_GRACE_S)  # until the grace is over too
        assert told(batch) == ["stopped" if is_cut_off else "deadline"]
        del batch

    with caplog.at_level(logging.DEBUG):
        play(scene())
    assert "customer" not in caplog.text
    assert [each for each in caplog.records if each.levelno >= logging.WARNING] == []


# Waiting


def test_waiting_ends_with_the_first_whole_group():
    async def scene():
        reward, batch = await begun(*"abcd")
        waiting = asyncio.create_task(batch.settled([range(2), range(2, 4)]))
        for text in "ac":
            reward.answer(text, 0.5)
            await turns()
            assert not waiting.done()
        reward.answer("d", 0.5)
        await waiting
        assert told(batch) == [0.5, None, 0.5, 0.5]
        await batch.settled([range(2), range(2, 4)])  # one of them is in
        rest = asyncio.create_task(batch.settled([range(2)]))
        await turns()
        assert not rest.done()
        reward.answer("b", 0.5)
        await rest

    play(scene())


def test_there_is_nothing_to_wait_for_where_no_group_is_out():
    async def scene():
        batch = Answered().batches.begin([0])
        await batch.settled([])
        await batch.settled([[]])

    play(scene())


def test_a_waiter_that_is_cancelled_cancels_the_batch():
    async def scene():
        reward, batch = await begun(*"abc")
        reward.answer("a", 0.5)
        waiting = asyncio.create_task(batch.settled([[1, 2]]))
        await turns()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await turns()
        assert reward.cancelled == ["b", "c"]
        assert told(batch) == [0.5, None, None]
        assert batch.under_way() == []

    play(scene())


def test_a_batch_that_was_cancelled_can_be_started_again():
    async def scene():
        reward, batch = await begun("a")
        batch.cancel()
        batch.start(0, "a")
        await turns()
        reward.answer("a", 0.5)
        await batch.settled([[0]])
        assert told(batch) == [0.5]
        assert reward.asked == [(0, "a")] * 2

    play(scene())


def test_a_batch_tells_when_it_was_waited_for_and_from_when_to_when_it_took(spans_in_virtual_time):
    async def scene():
        reward = Answered()
        batch = reward.batches.begin([0, 1])
        started = time.perf_counter()
        batch.start(0, "a")
        batch.start(1, "b")
        await asyncio.sleep(2.0)  # the trainer is at something else
        reward.answer("a", 0.5)
        await asyncio.sleep(3.0)
        waiting = asyncio.create_task(batch.settled([[0, 1]]))
        await asyncio.sleep(4.0)
        reward.answer("b", 0.5)
        await waiting
        span = (batch.times.first, batch.times.last)
        assert [moment - started for moment in (*span, *batch.waits[0])] == pytest.approx([0.0, 9.0, 5.0, 9.0])
        assert overlap(span, batch.waits[0]) == pytest.approx(4.0)
        assert batch.report().judge_seconds == pytest.approx(9.0)
        assert [each.ended - started for each in batch.report().spans] == pytest.approx([2.0, 9.0])
        await batch.settled([[0, 1]])
        assert len(batch.waits) == 2  # and the second took nothing of it
        assert overlap(span, batch.waits[1]) == 0.0

    play(scene())


def test_a_time_range_is_from_the_first_start_to_the_last_end():
    times = TimeRange()
    assert times.seconds == 0.0
    for started, ended in ((7.0, 8.0), (5.0, 9.0), (6.0, 7.0)):
        times.include(started, ended)
    assert (times.first, times.last, times.seconds) == (5.0, 9.0, 4.0)


def test_a_stage_that_raises_is_failed_and_one_that_goes_on_is_under_way():
    async def scene():
        stages, out = StageTimes("reward 3"), asyncio.get_running_loop().create_future()

        async def fails():
            raise KeyError

        with pytest.raises(KeyError):
            await stages.timed(fails(), "rag_8b")
        waiting = asyncio.create_task(stages.timed(out, "rag_32b"))
        await turns()
        assert stages.under_way == ["rag_32b"]
        seen = [(span.name, span.track, span.failed) for span in stages.so_far()]
        assert seen == [("rag_8b", "reward 3", True), ("rag_32b", "reward 3 reference", True)]
        assert set(stages.seconds) == {"rag_8b"}
        out.set_result("answer")
        assert await waiting == "answer"
        assert stages.under_way == []
        assert [(span.name, span.failed) for span in stages.spans] == [("rag_8b", True), ("rag_32b", False)]

    play(scene())


# Giving up


def test_a_cut_off_settles_what_is_out_and_all_that_is_started_later():
    async def scene():
        reward = Answered()
        batch = reward.batches.begin(range(3))
        batch.start(0, "a")
        batch.start(1, "b")
        await turns()
        reward.answer("a", 0.5)
        waiting = asyncio.create_task(batch.settled([range(3)]))
        await turns()
        reward.batches.cut_off("stopped")
        await waiting
        await turns()
        assert told(batch) == [0.5, "stopped", "stopped"]
        assert reward.cancelled == ["b"]
        batch.start(2, "c")
        batch.start(1, "b")
        batch.start(0, "a")  # the same text: its score stands
        await turns()
        assert told(batch) == [0.5, "stopped", "stopped"]
        batch.start(0, "other")
        assert told(batch) == ["stopped"] * 3
        assert reward.asked == [(0, "a"), (1, "b")]

    play(scene())


def test_a_cut_off_holds_for_batches_under_way_and_for_later_ones():
    async def scene():
        reward = Answered()
        early = [reward.batches.begin([0]), reward.batches.begin([1])]
        early[1].start(0, "b")
        await turns()
        reward.batches.cut_off("stopped")
        assert [told(batch) for batch in early] == [["stopped"], ["stopped"]]
        later = reward.batches.begin([2, 3])
        assert told(later) == ["stopped", "stopped"]
        later.start(0, "c")
        await later.settled([[0, 1]])
        assert told(later) == ["stopped", "stopped"]
        assert [each.reason for each in (await reward.score_all([0, 1], ["d", "e"])).rewards] == ["stopped", "stopped"]
        assert reward.asked == [(1, "b")]

    play(scene())


def test_a_batch_that_nobody_waits_for_is_cancelled_and_not_told_of():
    async def scene():
        reward = Answered()
        batch, other = reward.batches.begin([0]), reward.batches.begin([1])
        batch.start(0, "a")
        other.start(0, "b")
        await turns()
        reward.batches.give_up(batch)
        await turns()
        assert reward.cancelled == ["a"]
        assert reward.batches.status() == "of 1 completions 1 in judge"
        assert [span.track for span in reward.unreported_spans()] == ["reward 0 ahead 1"]
        other.cancel()

    play(scene())


# Faults in code


def test_an_error_in_the_chain_is_a_missing_reward_and_told_once_by_its_place_without_its_message(caplog):
    async def scene():
        reward = Answered()
        asking = asyncio.create_task(reward.score_all(range(4), ["a", "b", "c", "d"]))
        await turns()
        reward.answer("a", ValueError("a customer's words"))
        reward.answer("b", ValueError("a customer's words"))
        reward.answer("c", KeyError("a customer's words"))
        reward.answer("d", 0.5)
        rewards = (await asking).rewards
        assert [each.reason for each in rewards] == [
            "raised_ValueError",
            "raised_ValueError",
            "raised_KeyError",
            "",
        ]
        assert [each.outcome for each in rewards] == [Outcome.INFRA] * 3 + [Outcome.OK]

    with caplog.at_level(logging.DEBUG):
        play(scene())
    lines = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    line = fail.__code__.co_firstlineno + 2
    assert [each.split(" at ")[0] for each in lines] == ["the reward raised ValueError", "the reward raised KeyError"]
    assert all(f"test_batch.py:{line};" in each for each in lines), lines
    assert "customer" not in caplog.text


def test_an_error_of_the_same_kind_at_another_place_is_told_of_too(caplog):
    class Faulty(Answered):
        async def score(self, sample, stages):
            if sample.text == "a":
                raise KeyError("a customer's words")
            fail(KeyError("a customer's words"))

    async def scene():
        assert await call(Faulty(60.0), ["a", "a", "b", "b"]) == [None] * 4

    with caplog.at_level(logging.DEBUG):
        play(scene())
    lines = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(lines) == len(set(lines)) == 2
    assert "customer" not in caplog.text


def test_a_chain_that_is_cancelled_by_somebody_else_is_missing():
    async def scene():
        reward, batch = await begun("a")
        reward._answers["a"].cancel()
        await batch.settled([[0]])
        assert told(batch) == ["cancelled"]

    play(scene())


def test_an_error_after_the_completion_was_given_up_concerns_nobody(caplog):
    async def scene():
        reward, batch = await begun("a", reward=Stubborn(60.0, ValueError("a customer's words")))
        batch.cancel()
        reward.let_go()
        await has_ended(reward)

    play(scene())
    assert caplog.text == ""


# The reward function


def test_called_by_itself_it_starts_all_and_waits_for_all():
    async def scene():
        reward = Answered()
        asking = asyncio.create_task(call(reward, ["a", [{"role": "assistant", "content": "b"}]], row=[5, 3]))
        await turns()
        assert reward.asked == [(5, "a"), (3, "b")]
        reward.answer("b", 0.25)
        await turns()
        assert not asking.done()
        reward.answer("a", 0.5)
        assert await asking == [0.5, 0.25]

    play(scene())


def test_called_for_a_batch_under_way_it_starts_only_what_is_not_started():
    async def scene():
        reward = Answered()
        batch = reward.batches.begin([0, 1, 2])
        batch.start(0, "a")
        batch.start(1, "b, as it was streamed")
        await turns()
        reward.answer("a", 0.5)
        await turns()
        asking = asyncio.create_task(reward.result(batch, ["a", "b", "c"]))
        await turns()
        assert reward.asked == [(0, "a"), (1, "b, as it was streamed"), (1, "b"), (2, "c")]
        reward.answer("b", 0.25)
        reward.answer("c", 0.75)
        assert (await asking).values == [0.5, 0.25, 0.75]

    play(scene())


def test_a_call_with_another_number_of_completions_than_expected_is_an_error():
    async def scene():
        reward = Answered()
        batch = reward.batches.begin([0, 1])
        with pytest.raises(ValueError, match="shorter"):
            await reward.result(batch, ["a"])
        batch.cancel()

    play(scene())


def test_a_batch_of_nothing_is_scored():
    async def scene():
        reward = Answered()
        assert await call(reward, []) == []
        assert (await reward.score_all([], [])).rewards == ()

    play(scene())


# What is told


def test_a_person_is_told_of_the_oldest_batch_and_how_many_are_behind_it():
    async def scene():
        reward = Answered()
        assert reward.batches.status() == "none is being scored"
        first, second, third = (reward.batches.begin([0, 1]) for _ in range(3))
        first.start(0, "a")
        first.start(1, "b")
        second.start(0, "c")
        await turns()
        assert reward.batches.status() == "of 2 completions 2 in judge; 2 more batches in flight"
        reward.answer("a", 0.5)
        await turns()
        assert reward.batches.status() == "of 2 completions 1 in judge; 2 more batches in flight"
        reward.answer("b", 0.5)
        await turns()
        assert reward.batches.status() == "this rank's are scored, another's may be out; 2 more batches in flight"
        await reward.result(first, ["a", "b"])
        assert reward.batches.status() == "of 2 completions 1 in judge; 1 more batches in flight"
        reward.batches.give_up(second)
        reward.batches.give_up(third)
        assert reward.batches.status() == "none is being scored"

    play(scene())


def test_a_person_is_not_told_that_what_nobody_has_started_is_scored():
    reward = Answered()
    reward.batches.begin([0])
    assert reward.batches.status() == "none is being scored yet"
    reward.batches.begin([0])
    assert reward.batches.status() == "none is being scored yet; 1 more batches in flight"


def test_spans_of_batches_that_were_not_reported_on_are_those_of_all_and_open_ones_are_failed():
    async def scene():
        reward = Answered()
        first, second = reward.batches.begin([0]), reward.batches.begin([1, 2])
        first.start(0, "a")
        second.start(1, "b")
        await turns()
        reward.answer("a", 0.5)
        await turns()
        seen = [(span.name, span.track, span.failed) for span in reward.unreported_spans()]
        assert seen == [("judge", "reward 0", False), ("judge", "reward 1 ahead 1", True)]
        assert second.report().spans == []
        await reward.result(first, ["a"])
        assert [span.track for span in reward.unreported_spans()] == ["reward 1 ahead 1"]
        second.cancel()

    play(scene())


# Threads


def test_completions_may_be_started_and_waited_for_from_another_thread():
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        reward = Answered()
        batches = [reward.batches.begin([0, 1]), reward.batches.begin([2, 3])]
        for number, batch in enumerate(batches):
            for place in range(2):
                loop.call_soon_threadsafe(batch.start, place, f"{number}{place}")
        waiting = asyncio.run_coroutine_threadsafe(batches[0].settled([[0, 1]]), loop)
        for text in ("00", "10", "11"):
            loop.call_soon_threadsafe(reward.answer, text, 0.5)
        assert not waiting.done()
        loop.call_soon_threadsafe(reward.answer, "01", 0.25)
        waiting.result(PATIENCE_S)
        assert [told(batch) for batch in batches] == [[0.5, 0.25], [0.5, 0.5]]
        result = asyncio.run_coroutine_threadsafe(reward.result(batches[1], ["10", "11"]), loop).result(PATIENCE_S)
        assert result.values == [0.5, 0.5]
        assert list(reward.batches) == [batches[0]]
        assert reward.asked == [(0, "00"), (1, "01"), (2, "10"), (3, "11")]
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
