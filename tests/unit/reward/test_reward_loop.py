"""The reward loop: a reward on an event loop of its own, used from another thread. There is no trainer."""

import threading
import time
from functools import partial
from types import SimpleNamespace

import pytest
from support.engines import LLM, prompts
from support.loopback import ACTION, BAD, VERDICT, action, build_reward, examples, row
from support.seconds import until
from trl.trainer.utils import get_callable_name

from salesrl_trl.generation.engine_loop import CompletionTasks, EngineLoop
from salesrl_trl.ground.process import patched
from salesrl_trl.reward.reward_loop import RewardLoop
from salesrl_trl.service.flights import FALLEN
from salesrl_trl.types import Outcome
from salesrl_trl.wiring.trl_generation import TRLEngine

PATIENCE_S = 20.0


@pytest.fixture
def loop(services):
    loop = RewardLoop(build_reward(services.url, [row(), row("r2", tenant_id="t-02")]))
    yield loop
    loop.close()


def begin(loop, *indices):
    return loop.begin(examples(indices))


def test_completions_of_two_batches_took_what_each_took_in_its_own(loop):
    batches, took = [], []
    for place in (0, 1):
        batch = begin(loop, place)
        batches.append((batch, range(1)))
        took.append(loop.result(batch, [ACTION]).report)
        time.sleep(0.3)
    taken = begin(loop, 0, 1)
    taken.take(batches, [(time.perf_counter(),) * 2])
    report = loop.result(taken, [ACTION, ACTION]).report
    assert report.judge_seconds == max(own.judge_seconds for own in took) > 0
    assert report.seconds == pytest.approx(max(own.seconds for own in took))


def test_trl_is_answered_with_the_result_at_hand(loop):
    result = loop.result(begin(loop, 0), [BAD])
    [function] = loop.functions
    with patched(loop, "answer", result):
        assert function(prompts=[None], completions=[BAD], row=[0]) == [-0.25]
    with pytest.raises(AssertionError, match="without an `answer`"):
        function(prompts=[None], completions=[BAD], row=[0])
    assert get_callable_name(function) == "sales"


def test_a_waiting_person_reads_of_the_oldest_batch_until_it_is_given_up(loop, services):
    FALLEN.clear()  # of services of other tests
    services.set("8b", "", delay_s=0.5)
    none = "no reward is under way on this rank"
    assert (loop.status(), loop.status("vLLM generates")) == (none, "vLLM generates")
    older, newer = begin(loop, 0, 0), begin(loop, 0)
    loop.post(newer.start, 0, action("another"))
    until(lambda: loop.status("vLLM generates") == "1 in rag_8b (of 1 completions)")
    loop.post(older.start_all, [ACTION, BAD])
    until(lambda: loop.status() == "1 in rag_8b (of 2 completions)")
    loop.wait([older], older.is_settled)
    loop.give_up()
    assert loop.result(begin(loop, 0), [BAD]).values == [-0.25]  # the loop has come to it by now
    assert loop.status() == none
    assert not any(stages.under_way for stages in (*older.stages, *newer.stages))


def test_after_a_cut_off_all_is_missing_with_its_reason_until_it_goes_on(loop, services):
    early = begin(loop, 0)
    loop.cut_off("stopped")
    for batch in (early, begin(loop, 0)):
        result = loop.result(batch, [ACTION])
        assert [(reward.outcome, reward.reason) for reward in result.rewards] == [(Outcome.INFRA, "stopped")]
    loop.prepare(examples([0]))
    assert services.calls.total() == 0
    loop.stopped = None
    assert loop.result(begin(loop, 0), [ACTION]).values == [VERDICT["candidate"]]


def test_a_cut_off_concerns_no_batch_that_begins_after_it(loop):
    """A machine under load may let the loop's thread wait until the next run has begun."""
    busy = threading.Event()
    loop.post(busy.wait)
    loop.cut_off("stopped")
    loop.stopped = None
    batch = begin(loop, 0)
    busy.set()
    for each in (batch, begin(loop, 0)):
        assert loop.result(each, [ACTION]).values == [VERDICT["candidate"]]


@pytest.mark.parametrize("left", [3, 10**9])
@pytest.mark.parametrize("is_last", [False, True])
def test_while_rewards_are_waited_for_the_engine_goes_on_with_what_was_left(loop, services, left, is_last):
    services.judge_by(lambda *_: time.sleep(0.2) or VERDICT)
    engine = EngineLoop(LLM())
    engine.most_unfinished = 1
    tasks = CompletionTasks(1, engine, lambda *_: None)
    tasks.begin(prompts(left), ["params"])
    engine.run(tasks, ahead=True)
    loop.meanwhile = partial(TRLEngine.resume_until, SimpleNamespace(loop=engine))
    batch = begin(loop, 0)
    if is_last:
        assert loop.result(batch, [ACTION]).values == [VERDICT["candidate"]]
    else:
        loop.post(batch.start, 0, ACTION)
        loop.wait([batch], batch.is_settled)
    assert batch.is_settled()
    assert sum(until - began for began, until in batch.waits) >= 0.15  # of 0.2 s, whatever the engine does meanwhile
    assert tasks.is_over is (left == 3)
    assert tasks.is_over or engine._llm.llm_engine.left["0"] < left - 10


def test_a_closed_loop_leaves_no_thread_and_no_call_and_may_be_closed_again(services):
    before = set(threading.enumerate())
    services.set("32b", "", delay_s=PATIENCE_S)
    loop = RewardLoop(build_reward(services.url, [row()]))
    loop.prepare(examples([0]))
    loop.post(begin(loop, 0).start, 0, ACTION)
    until(lambda: services.calls["32b"])
    loop.close()
    loop.close()
    assert {thread for thread in threading.enumerate() if thread.name in ("rewards", "reward calls")} <= before


def test_a_warm_up_that_has_begun_is_not_made_again(loop, services):
    spans = []
    loop.begin_warm_up(SimpleNamespace(add=spans.extend))
    until(lambda: services.calls["judge"])
    assert {name: type(answer) for name, answer in loop.warm_up().items()} == {
        "rag_8b": float, "rag_32b": float, "judge": float,
    }  # fmt: skip
    assert services.calls["judge"] == 1
    assert [(span.name, span.track) for span in spans] == [("warm_up", "rewards")]
    loop.warm_up()
    assert services.calls["judge"] == 2
