"""The rewards of a batch while they come in: completions are scored when a test answers them. Time is virtual."""

import asyncio
import contextlib
import logging
import time
from functools import partial

import pytest

from salesrl_trl.reward.batch import RewardBatch, completion_text, wait_for
from salesrl_trl.reward.scorer import Scorer
from salesrl_trl.service.event_loop import CANCEL_GRACE_S, remaining_s
from salesrl_trl.timing import overlap
from salesrl_trl.types import Outcome, Reward


def fail(error):
    raise error


class Answered(Scorer):
    """Scores a completion when the test answers it; the value is that answer."""

    def __init__(self, deadline_s=60.0):
        super().__init__(deadline_s)
        self.asked, self.cancelled, self.left_s = [], [], []
        self._answers = {}

    def answer(self, text, value):
        self._of(text).set_result(value)

    def _of(self, text):
        if text not in self._answers:
            self._answers[text] = asyncio.get_running_loop().create_future()
        return self._answers[text]

    async def score(self, sample, stages):
        self.asked.append((sample.row["row"], sample.text))
        self.left_s.append(remaining_s())
        try:
            value = await stages.timed(asyncio.shield(self._of(sample.text)), "judge")
            if isinstance(value, Exception):
                fail(value)
            return Reward(outcome=Outcome.OK, value=value, seconds=stages.seconds)
        except asyncio.CancelledError:
            self.cancelled.append(sample.text)
            raise


class Stubborn(Answered):
    """Goes on when it is cancelled, until `let_go`, and then has a reward all the same, or raises `error`."""

    def __init__(self, deadline_s, error=None):
        super().__init__(deadline_s)
        self.ended, self.is_let_go = [], False
        self._error = error

    async def score(self, sample, stages):
        try:
            return await super().score(sample, stages)
        except asyncio.CancelledError:
            while not self.is_let_go:
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.sleep(0.01)
            self.ended.append(sample.text)
            if self._error is not None:
                raise self._error from None
            return Reward(outcome=Outcome.OK, value=9.0)


async def has_ended(reward):
    reward.is_let_go = True
    while not reward.ended:
        await asyncio.sleep(0.01)
    await turns()


async def turns(count=5):
    """Let all else on the loop that can go on do so."""
    for _ in range(count):
        await asyncio.sleep(0)


async def begun(*texts, reward=None):
    """A reward, and a batch of it in which these texts are under way; `None` for one that is not there yet."""
    reward = reward or Answered()
    batch = RewardBatch(reward, [{"row": number} for number in range(len(texts))])
    for place, text in enumerate(texts):
        if text is not None:
            batch.start(place, text)
    await turns()
    return reward, batch


def values(batch):
    return [it and (it.reason if it.value is None else it.value) for it in batch.rewards]


async def test_a_completion_is_scored_from_its_start_while_others_are_not_there_yet():
    reward, batch = await begun(None, "b")
    assert reward.asked == [(1, "b")]
    reward.answer("b", 0.5)
    await turns()
    assert values(batch) == [None, 0.5]
    assert [batch.is_settled(places) for places in ([1], [0, 1], None)] == [True, False, False]
    batch.start(0, "b")  # an equal text at another place is scored too
    await wait_for([batch], partial(batch.has_settled, [[0, 1]]))
    assert reward.asked == [(1, "b"), (0, "b")]


@pytest.mark.parametrize("again", ["a", [{"role": "assistant", "content": "a"}]], ids=["text", "message"])
async def test_a_text_that_is_started_again_is_not_scored_twice(again):
    reward, batch = await begun("a")
    batch.start(0, again)
    reward.answer("a", 0.5)
    await wait_for([batch], partial(batch.has_settled, [[0]]))
    batch.start(0, again)
    await turns()
    assert reward.asked == [(0, "a")]
    assert values(batch) == [0.5]
    assert completion_text(again) == "a"


@pytest.mark.parametrize("first_is", ["scored", "under way", "stubborn"])
async def test_another_text_takes_the_place_of_the_first_one(first_is):
    reward, batch = await begun("a", reward=Stubborn(60.0) if first_is == "stubborn" else None)
    if first_is == "scored":
        reward.answer("a", 0.5)
        await wait_for([batch], partial(batch.has_settled, [[0]]))
    batch.start(0, "b")
    await turns()
    if first_is == "stubborn":
        await has_ended(reward)
    assert values(batch) == [None]
    assert reward.asked == [(0, "a"), (0, "b")]
    assert reward.cancelled == ([] if first_is == "scored" else ["a"])
    reward.answer("b", 0.25)
    await wait_for([batch], partial(batch.has_settled, [[0]]))
    assert values(batch) == [0.25]
    assert [span.name for span in batch.result().report.spans] == ["judge"]  # of the text that counts


async def test_each_completion_has_a_deadline_of_its_own():
    reward, loop = Answered(deadline_s=2.0), asyncio.get_running_loop()
    began = loop.time()
    _, batch = await begun("a", None, reward=reward)
    await asyncio.sleep(1.5)
    later = loop.time()
    batch.start(1, "b")
    await wait_for([batch], partial(batch.has_settled, [[0]]))
    assert loop.time() - began == pytest.approx(2.0)
    assert values(batch) == ["deadline", None]
    await wait_for([batch], partial(batch.has_settled, [[1]]))
    assert loop.time() - later == pytest.approx(2.0)
    assert [(each.outcome, each.reason) for each in batch.rewards] == [(Outcome.INFRA, "deadline")] * 2
    assert [(span.name, span.failed) for span in batch.result().report.spans] == [("judge", True)] * 2
    assert reward.cancelled == ["a", "b"]
    assert reward.left_s == pytest.approx([2.0, 2.0])


@pytest.mark.parametrize("is_cut_off", [False, True])
@pytest.mark.parametrize("error", [None, ValueError("a customer's words")], ids=["value", "error"])
@pytest.mark.parametrize("ends", ["at once", "never"])
async def test_what_a_late_completion_says_in_the_end_concerns_nobody(caplog, ends, error, is_cut_off):
    caplog.set_level(logging.DEBUG)
    reward, loop = Stubborn(0.1, error), asyncio.get_running_loop()
    reward.is_let_go = ends == "at once"
    began = loop.time()
    _, batch = await begun("a", reward=reward)
    while not reward.cancelled:
        await asyncio.sleep(0.01)
    expected = "deadline"
    if is_cut_off and ends == "never":
        batch.cut_off(expected := "stopped")  # within the grace: it is the last word
    await wait_for([batch], partial(batch.has_settled, [[0]]))
    if not is_cut_off:
        assert loop.time() - began == pytest.approx(0.1 + CANCEL_GRACE_S * (ends == "never"), abs=0.02)
    assert values(batch) == [expected]
    await has_ended(reward)
    await asyncio.sleep(2 * CANCEL_GRACE_S)
    assert values(batch) == [expected]
    assert "customer" not in caplog.text
    assert [each for each in caplog.records if each.levelno >= logging.WARNING] == []


async def test_a_waiter_that_is_cancelled_cancels_the_batch_which_can_be_started_again():
    reward, batch = await begun(*"abc")
    reward.answer("a", 0.5)
    waiting = asyncio.create_task(wait_for([batch], partial(batch.has_settled, [[1, 2]])))
    await turns()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await turns()
    assert reward.cancelled == ["b", "c"]
    assert values(batch) == [0.5, None, None]
    assert not any(stages.under_way for stages in batch.stages)
    batch.start(1, "b")
    reward.answer("b", 0.25)
    await wait_for([batch], partial(batch.has_settled, [[1]]))
    assert values(batch) == [0.5, 0.25, None]


async def test_a_batch_reports_when_it_was_waited_for_and_from_when_to_when_it_took(spans_in_virtual_time):
    started = time.perf_counter()
    reward, batch = await begun("a", "b")
    await asyncio.sleep(2.0)  # the trainer is at something else
    reward.answer("a", 0.5)
    await asyncio.sleep(3.0)
    waiting = asyncio.create_task(wait_for([batch], partial(batch.has_settled, [[0, 1]])))
    await asyncio.sleep(4.0)
    reward.answer("b", 0.5)
    await waiting
    span, report = (batch.began, max(batch.ended)), batch.result().report
    assert [moment - started for moment in (*span, *report.waits[0])] == pytest.approx([0.0, 9.0, 5.0, 9.0])
    assert overlap(span, report.waits[0]) == pytest.approx(4.0)
    assert report.judge_seconds == pytest.approx(9.0)
    assert [each.ended - started for each in report.spans] == pytest.approx([2.0, 9.0])


async def test_a_cut_off_settles_what_is_out_and_all_that_is_started_later():
    reward, batch = await begun("a", "b", None)
    reward.answer("a", 0.5)
    waiting = asyncio.create_task(wait_for([batch], partial(batch.has_settled, [range(3)])))
    await turns()
    batch.cut_off("stopped")
    await waiting
    await turns()
    assert values(batch) == [0.5, "stopped", "stopped"]
    assert reward.cancelled == ["b"]
    batch.start_all("abc")  # the same text at the first place: its score stands
    await turns()
    assert values(batch) == [0.5, "stopped", "stopped"]
    batch.start(0, "other")
    assert values(batch) == ["stopped"] * 3
    assert reward.asked == [(0, "a"), (1, "b")]


async def test_an_error_in_a_rewards_code_is_a_missing_reward_and_logged_once_by_its_place_without_its_message(caplog):
    class Faulty(Answered):
        async def score(self, sample, stages):
            if sample.text == "here":
                raise KeyError("a customer's words")
            return await super().score(sample, stages)

    caplog.set_level(logging.DEBUG)
    reward, texts = Faulty(), ["a", "b", "c", "d", "here"]
    asking = asyncio.create_task(reward.score_all([{"row": 0}] * 5, texts))
    await turns()
    for text, error in zip("abc", (ValueError, ValueError, KeyError), strict=True):
        reward.answer(text, error("a customer's words"))
    reward.answer("d", 0.5)
    rewards = (await asking).rewards
    assert [it.reason for it in rewards] == [
        "raised_ValueError", "raised_ValueError", "raised_KeyError", "", "raised_KeyError",
    ]  # fmt: skip
    assert [it.outcome for it in rewards] == [Outcome.INFRA] * 3 + [Outcome.OK, Outcome.INFRA]
    lines = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    raised = ("the reward raised KeyError", "the reward raised KeyError", "the reward raised ValueError")
    assert sorted(line.split(" at ")[0] for line in lines) == [*raised]
    assert len(set(lines)) == 3  # one kind at two places
    assert sum(f"test_batch.py:{fail.__code__.co_firstlineno + 1};" in line for line in lines) == 2
    assert "customer" not in caplog.text


async def test_called_as_trl_calls_it_a_reward_starts_all_and_waits_for_all():
    reward, logged = Answered(), []
    completions = ["a", [{"role": "assistant", "content": "b"}]]
    asking = asyncio.create_task(reward(prompts=[None] * 2, completions=completions, row=[5, 3]))
    await turns()
    assert reward.asked == [(5, "a"), (3, "b")]
    reward.answer("b", 0.25)
    await turns()
    assert not asking.done()
    reward.answer("a", 0.5)
    assert await asking == [0.5, 0.25]
    assert await reward(prompts=[], completions=[], row=[], log_extra=logged.append, log_metric=None) == []
    with pytest.raises(ValueError, match="shorter"):
        await reward.score_all([{"row": 0}] * 2, ["a"])
