"""The desk: a reward on an event loop of its own, used from another thread. There is no trainer."""

import threading
import time
from types import SimpleNamespace

import pytest
from support.loopback import ACTION, BAD, VERDICT, action, build_reward, row
from trl.trainer.utils import get_callable_name

from salesrl_trl.reward.desk import RewardDesk
from salesrl_trl.timing import TimingContext
from salesrl_trl.types import Outcome

PATIENCE_S = 20.0


@pytest.fixture
def desk(services):
    desk = RewardDesk(build_reward(services.url, [row(), row("r2", tenant_id="t-02")]))
    yield desk
    desk.close()


def asked_for(services, name, times):
    """Wait until an endpoint was asked so often."""
    ends = time.monotonic() + PATIENCE_S
    while services.calls[name] < times and time.monotonic() < ends:
        time.sleep(0.01)
    assert services.calls[name] == times


def test_a_batch_that_is_waited_for_returns_its_rewards_and_its_report(desk):
    result = desk.result(desk.begin([0, 1]), [ACTION, [{"role": "assistant", "content": BAD}]])
    assert [reward.outcome for reward in result.rewards] == [Outcome.OK, Outcome.INVALID_ACTION]
    assert result.values == [VERDICT["candidate"], -0.25]
    assert result.report.traffic["rag_8b"]["calls"] == 1
    assert {span.name for span in result.report.spans} == {"parse", "rag_8b", "rag_32b", "judge"}
    assert desk.unreported_spans() == []


def test_a_completion_is_scored_from_its_start_and_trls_other_text_is_scored_anew(desk, services):
    batch = desk.begin([0, 0])
    desk.start(batch, 0, ACTION)
    desk.start(batch, 1, action("as it was streamed"))
    desk.wait(batch, [[0, 1]])
    assert services.calls["8b"] == 2
    result = desk.result(batch, [ACTION, BAD])
    assert services.calls["8b"] == 2
    assert [reward.outcome for reward in result.rewards] == [Outcome.OK, Outcome.INVALID_ACTION]


def test_trl_is_answered_with_the_result_at_hand(desk):
    result = desk.result(desk.begin([0]), [BAD])
    [function] = desk.functions
    with desk.answering(result):
        assert function(prompts=[None], completions=[BAD], row=[0]) == [-0.25]
    with pytest.raises(AssertionError, match="inside `answering` alone"):
        function(prompts=[None], completions=[BAD], row=[0])
    assert get_callable_name(function) == "sales"


def test_a_wait_that_is_interrupted_cancels_the_batch(desk, services, monkeypatch):
    services.set("8b", "", delay_s=1.0)
    batch = desk.begin([0])
    desk.start(batch, 0, ACTION)
    asked_for(services, "8b", 1)

    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("concurrent.futures.Future.result", interrupted)
        with pytest.raises(KeyboardInterrupt):
            desk.wait(batch, [[0]])
    ends = time.monotonic() + PATIENCE_S
    while batch.under_way() and time.monotonic() < ends:
        time.sleep(0.01)
    assert batch.under_way() == []
    assert batch.rewards == [None]


def test_what_is_given_up_is_cancelled_and_told_of_no_more(desk, services):
    services.set("8b", "", delay_s=0.5)
    batch = desk.begin([0])
    desk.start(batch, 0, ACTION)
    asked_for(services, "8b", 1)
    assert ("rag_8b", True) in [(span.name, span.failed) for span in desk.unreported_spans()]
    desk.give_up()
    assert desk.result(desk.begin([0]), [BAD]).values == [-0.25]  # the loop has come to it by now
    assert desk.unreported_spans() == []
    assert batch.under_way() == []


def test_after_a_cut_off_all_is_missing_with_its_reason_until_it_goes_on(desk):
    desk.cut_off("stopped")
    result = desk.result(desk.begin([0]), [ACTION])
    assert [(reward.outcome, reward.reason) for reward in result.rewards] == [(Outcome.INFRA, "stopped")]
    desk.resume()
    assert desk.result(desk.begin([0]), [ACTION]).values == [VERDICT["candidate"]]


def test_references_are_fetched_before_their_completions_come(desk, services):
    desk.fetch_references([0, 1])
    asked_for(services, "32b", 2)
    assert desk.result(desk.begin([0]), [ACTION]).report.traffic["rag_32b"]["calls"] == 2
    assert services.calls["32b"] == 2


def test_every_service_answers_a_warm_up(desk):
    assert {name: type(told) for name, told in desk.warm_up().items()} == {
        "rag_8b": float, "rag_32b": float, "judge": float,
    }  # fmt: skip


def test_a_closed_desk_leaves_no_thread_and_may_be_closed_again(services):
    before = set(threading.enumerate())
    desk = RewardDesk(build_reward(services.url, [row()]))
    assert desk.result(desk.begin([0]), [ACTION]).values == [VERDICT["candidate"]]
    desk.close()
    desk.close()
    assert {thread for thread in threading.enumerate() if thread.name == "rewards"} <= before


def test_a_warm_up_that_has_begun_is_not_made_again(desk, services):
    spans = []
    desk.begin_warm_up(TimingContext("warm_up", SimpleNamespace(add=spans.extend)))
    asked_for(services, "judge", 1)
    answers = desk.warm_up()
    assert set(answers) == {"rag_8b", "rag_32b", "judge"}
    assert services.calls["judge"] == 1
    assert [(span.name, span.track) for span in spans] == [("warm_up", "rewards")]
    desk.warm_up()
    assert services.calls["judge"] == 2
