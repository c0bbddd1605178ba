"""The reward chain in a child process, over real HTTP: it reports what the chain itself reports, and a child that ends
costs what it had in hand and nothing else.

Where a test does not look at the process itself, the child is a thread that does the same: it starts at once.
"""

import asyncio
import gc
import json
import logging
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from support import deadly
from support.loopback import ACTION, ANSWER, VERDICT, Services, action, build_reward, chat_completion, row

from salesrl_trl.build import assembly
from salesrl_trl.config import RewardConfig
from salesrl_trl.data.sources import load_rows
from salesrl_trl.errors import ConfigError
from salesrl_trl.ground.process import NO_ACCELERATOR
from salesrl_trl.reward import worker
from salesrl_trl.reward.batch import NOTHING_SCORED
from salesrl_trl.reward.mixed import MixedReward
from salesrl_trl.reward.remote import LAST_WORD_S, RemoteReward
from salesrl_trl.reward.service.account import Limit, read_account
from salesrl_trl.reward.service.budget import Budget
from salesrl_trl.types import DEFAULT_BRANCHES, Outcome

PATIENCE_S = 30.0
"""Until a test that waits in vain fails."""
LONG_S = 600.0
"""A deadline that nobody reaches."""
SECRETS = (b"rag-secret", b"judge-secret")
PARENT = """
import asyncio, sys
from salesrl_trl.reward.batch import NOTHING_SCORED
from salesrl_trl.reward.remote import RemoteReward
from support.loopback import ACTION, build_reward, row

async def main():
    reward = RemoteReward(build_reward(sys.argv[1], [row()]))
    await reward.warm_up()
    (child,) = reward._children._made.values()
    print(child._process.pid, flush=True)
    await reward(prompts=[None], completions=[ACTION], row=[0])

asyncio.run(main())
"""


class Hanging(Services):
    """Services of which those in `hangs` answer when they are let go."""

    def __init__(self, server):
        super().__init__(server)
        self.hangs = set()
        self.let_go = threading.Event()

    def _respond(self, name, request):
        response = super()._respond(name, request)
        if name in self.hangs:
            self.let_go.wait(PATIENCE_S)
        return response


@pytest.fixture
def services(httpserver):
    services = Hanging(httpserver)
    yield services
    services.let_go.set()


class InThread:
    """Takes the place of `subprocess.Popen` in `remote`: a thread with an event loop of its own."""

    def __init__(self, command, *, pass_fds, **_):
        descriptor = os.dup(pass_fds[0])  # the caller closes the other one, as it does after a fork
        self._thread = threading.Thread(target=lambda: asyncio.run(worker.serve(descriptor)))
        self._thread.start()

    def poll(self):
        return None if self._thread.is_alive() else 0

    def wait(self):
        self._thread.join()
        return 0


@pytest.fixture
def loop():
    """An event loop in a thread of its own, as a trainer has it. Its complaints are errors."""
    told = []
    gc.freeze()
    loop = asyncio.new_event_loop()
    loop.set_exception_handler(lambda loop, context: told.append(context["message"]))
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield loop
    gc.collect()
    gc.unfreeze()
    asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop).result(PATIENCE_S)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()
    assert told == []


@pytest.fixture
def go(loop):
    """Run a coroutine on that loop; `go.soon` returns its future."""

    def soon(coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, loop)

    def now(coroutine):
        return soon(coroutine).result(PATIENCE_S)

    now.soon = soon
    return now


@pytest.fixture
def remote(remote_process, monkeypatch):
    """As `remote_process`, but that the child is a thread."""
    monkeypatch.setattr("salesrl_trl.reward.remote.subprocess", SimpleNamespace(Popen=InThread, DEVNULL=None))
    return remote_process


@pytest.fixture
def remote_process(services, go):
    """A chain in a child process: `remote_process(rows, **settings of build_reward)`."""
    built = []

    def build(rows=None, chain=None, **settings):
        built.append(RemoteReward(chain or build_reward(services.url, rows or [row()], **settings)))
        return built[-1]

    yield build
    services.let_go.set()
    for reward in built:
        go(reward.aclose())


def score(reward, completions, indices=None):
    """The values, as TRL gets them."""
    rows = [0] * len(completions) if indices is None else indices
    return reward(prompts=[None] * len(completions), completions=completions, row=rows)


def result_of(reward, completions, indices=None):
    """Rewards and report."""
    return reward.score_all([0] * len(completions) if indices is None else indices, completions)


async def in_hand(reward):
    """The completions that the child says it scores."""
    return await reward._child().ask("in_hand")


def child_of(reward):
    (child,) = reward._children._made.values()
    return child


def process_of(reward):
    """The child that was started last."""
    return child_of(reward)._process


def until(condition):
    """Wait for something that another thread or process does."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def is_gone(pid):
    """Whether a process has ended, reaped or not."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def own_words(caplog):
    """The messages that the package has logged."""
    return [each.getMessage() for each in caplog.records if each.name.startswith("salesrl_trl")]


def reasons(result):
    return [each.reason for each in result.rewards]


# The same as in this process


def answers_by_query(request):
    """An 8B endpoint to which each query is another case."""
    query = request.json["rewritten_query"]
    if query == "refused":
        return 400, {}
    if query == "down":
        return 500, {}
    if query == "hollow":
        return 200, {**ANSWER, "answer": ":", "passages": []}
    return 200, {**ANSWER, "answer": f"About {query}."}


def judge_by_answer(request):
    """A judge to which each answer is another case."""
    words = request.json["messages"][1]["content"]
    if "About unjudgeable." in words:
        return 200, chat_completion("I can't judge this.")
    if "About overlooked." in words:
        return 500, {}
    usage = {"prompt_tokens": 70, "completion_tokens": 7, "total_tokens": 77}
    verdict = {**VERDICT, "candidate": len(words) % 100 / 100}
    return 200, {**chat_completion(json.dumps(verdict)), "usage": usage}


QUERIES = ("price", "refused", "schedule", "down", "hollow", "unjudgeable", "overlooked", "a longer question", "price")
MIXED = [*(action(query=query) for query in QUERIES), "hello", [{"role": "assistant", "content": ACTION}]]
ROWS_OF_MIXED = [0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0]


def told_by(report):
    """The parts of a report that hold no time and do not depend on which of two calls was faster, such as whether a
    failed completion already had its row's reference."""
    spans = sorted((span.track, span.name, span.failed) for span in report.spans if span.name != "rag_32b")
    records = sorted((record.score, record.chars) for record in report.records)
    hits = {name: count for name, count in report.cache_hits.items() if name != "references"}
    return spans, records, dict(report.usage), {n: dict(t) for n, t in report.traffic.items()}, hits


def test_rewards_and_reports_are_those_of_the_chain_in_this_process(services, remote_process, go):
    services.functions |= {"8b": answers_by_query, "judge": judge_by_answer}
    rows = [row("r1", message_id="m1"), row("r2", "hallucination", message_id="m2")]
    weights = {"fairness": {"judge": 0.5, "margin": 0.25, "retrieval": 0.25}}
    settings = {"weights": weights}
    here, there = build_reward(services.url, rows, **settings), remote_process(rows, **settings)
    assert there.__name__ == here.__name__
    assert there.names == here.names
    assert [there.row_of({"row": index}) for index in range(2)] == [0, 1]
    outcomes = set()
    for completions, indices in ((MIXED, ROWS_OF_MIXED), ([action(query="another"), MIXED[0], "x"], [0, 0, 1])):
        local, distant = (go(result_of(each, completions, indices)) for each in (here, there))
        for one, other in zip(local.rewards, distant.rewards, strict=True):
            assert set(one.seconds) == set(other.seconds)
            assert all(0.0 <= seconds < PATIENCE_S for seconds in other.seconds.values())
            for name in ("outcome", "value", "reason", "components", "reference_value"):
                assert getattr(one, name) == getattr(other, name), name
        one, other = local.report, distant.report
        assert told_by(one) == told_by(other)
        ((began, ended),) = other.waits
        assert began <= ended
        for span in other.spans:  # by one clock, in both processes
            assert other.started <= span.started <= span.ended <= other.started + other.seconds
        assert 0.0 < other.judge_seconds <= other.seconds
        outcomes |= {each.outcome for each in distant.rewards}
    assert outcomes == set(Outcome)
    go(here.aclose())


def test_what_a_report_tells_is_told_once(services, remote, go):
    services.functions["judge"] = judge_by_answer
    reward = remote()
    first = go(result_of(reward, [ACTION, ACTION, action(query="another"), "hello"])).report
    second = go(result_of(reward, [])).report
    assert (first.traffic["rag_8b"]["calls"], first.traffic["rag_32b"]["calls"]) == (2, 1)
    assert first.traffic["judge"]["calls"] == len(first.records) == first.usage["judge"].verdicts == 2
    assert first.usage["judge"].prompt_tokens == 140
    assert first.cache_hits == {"answers": 2, "references": 2}
    assert len(first.spans) == 3 * 4 + 1
    assert len(first.waits) == 1
    assert set(second.traffic) == set(first.traffic)
    assert all(not count for each in second.traffic.values() for name, count in each.items() if name != "slots")
    assert second.usage["judge"].verdicts == 0
    assert second.cache_hits == {"answers": 0, "references": 0}
    assert [*second.records, *second.spans] == []
    assert second.seconds == 0.0


def test_a_report_before_anything_was_asked_names_every_service(remote, go):
    report = go(result_of(remote(), [])).report
    assert set(report.traffic) == {"rag_8b", "rag_32b", "judge"}
    assert report.seconds == 0.0


def test_the_warm_up_asks_every_service_once_and_is_not_part_of_a_report(services, remote, go):
    reward = remote()
    told = go(reward.warm_up())
    assert set(told) == {"rag_8b", "rag_32b", "judge"}
    assert all(0 < seconds < PATIENCE_S for seconds in told.values())
    assert reward.unusable(told) == []
    assert services.calls == {"8b": 1, "32b": 1, "judge": 1}
    assert go(result_of(reward, [])).report.traffic["rag_8b"]["calls"] == 0


@pytest.mark.parametrize(
    ("broken", "unusable", "place"),
    [
        ("8b", ["rag_8b_http_500"], "(rag_8b: at {url})"),
        ("32b", [], "(rag_32b: at {url})"),
        ("judge", ["judge_http_500"], "(judge: model judge-1 at {url}/v1)"),
    ],
)
def test_after_the_warm_up_it_is_known_what_can_not_be_done_without_and_where(
    services, remote, go, broken, unusable, place
):
    services.set(broken, {}, status=500)
    reward = remote()
    told = go(reward.warm_up())
    assert [error.code for error in reward.unusable(told)] == unusable
    failed = told["judge" if broken == "judge" else f"rag_{broken}"]
    assert str(failed).endswith(place.format(url=services.url))


def test_references_that_are_fetched_ahead_are_asked_once_and_are_no_saved_call(services, remote, go, loop):
    reward = remote([row("r1", message_id="m1"), row("r2", message_id="m2")])
    loop.call_soon_threadsafe(reward.fetch_references, [0, 0, 1])
    until(lambda: services.calls["32b"] == 2)
    result = go(result_of(reward, [action(query=f"q{index}") for index in range(4)], [0, 0, 0, 1]))
    assert services.calls == {"32b": 2, "8b": 4, "judge": 4}
    assert result.report.cache_hits == {"answers": 0, "references": 2}  # the second and the third of row 0


def test_many_completions_at_once_get_each_their_own_reward(services, remote, go):
    services.judge_by(lambda system, user: {**VERDICT, "candidate": int(user.split("number ")[1][:3]) / 1000})
    reward = remote(limits={"initial_concurrency": 64, "max_concurrency": 64})
    values = go(score(reward, [action(query=f"number {place:03}") for place in range(64)]))
    assert values == [place / 1000 for place in range(64)]


# Time, and what is told while it passes


def test_a_completion_that_passes_its_deadline_is_missing_and_the_child_goes_no_further_with_it(services, remote, go):
    services.hangs.add("8b")
    reward = remote(deadline_s=LONG_S, timeout_s=LONG_S)  # the child alone would go on
    services.let_go.set()
    go(reward.warm_up())
    services.let_go.clear()
    services.asked["judge"].clear()
    reward.deadline_s = 1.0
    late = go(result_of(reward, [ACTION, "hello"]))
    assert reasons(late) == ["deadline", "not_json"]
    assert late.rewards[0].outcome is Outcome.INFRA
    assert 0.5 < late.rewards[0].seconds["rag_8b"] < PATIENCE_S
    told = {(span.track, span.name): span.failed for span in late.report.spans}
    assert told == {
        ("reward 0", "parse"): False,
        ("reward 0", "rag_8b"): True,
        ("reward 0 reference", "rag_32b"): False,
        ("reward 1", "parse"): False,
    }
    services.let_go.set()
    reward.deadline_s = PATIENCE_S
    again = go(result_of(reward, [action(query="another")]))  # by now the 8B endpoint has answered the first one too
    assert reasons(again) == [""]
    assert len(services.asked["8b"]) == 3
    assert services.calls["judge"] == 1  # of the other one


def test_a_person_who_waits_is_told_what_is_out_and_so_are_spans(services, remote, go):
    reward = remote(timeout_s=PATIENCE_S, deadline_s=PATIENCE_S)
    assert reward.batches.status() == "none is being scored"
    assert reward.unreported_spans() == []
    services.hangs.add("judge")
    scoring = go.soon(score(reward, [action(query="a"), "hello", action(query="b")]))
    until(lambda: reward.batches.status() == "of 3 completions 2 in judge")
    told = {(span.track, span.name): span.failed for span in reward.unreported_spans()}
    assert told == {
        **{(f"reward {place}", "parse"): False for place in range(3)},
        **{(f"reward {place}", "rag_8b"): False for place in (0, 2)},
        **{(f"reward {place} reference", "rag_32b"): False for place in (0, 2)},
        **{(f"reward {place}", "judge"): True for place in (0, 2)},
    }
    services.let_go.set()
    scoring.result(PATIENCE_S)
    assert reward.batches.status() == "none is being scored"
    assert reward.unreported_spans() == []


def test_a_person_is_told_of_the_oldest_batch_alone(services, remote, go, loop):
    reward = remote(timeout_s=PATIENCE_S, deadline_s=PATIENCE_S)
    services.hangs |= {"8b", "32b"}
    older, newer = reward.batches.begin([0]), reward.batches.begin([0, 0])
    loop.call_soon_threadsafe(newer.start, 0, ACTION)
    until(lambda: services.calls["8b"])
    assert reward.batches.status() == "none is being scored yet; 1 more batches in flight"
    loop.call_soon_threadsafe(older.start, 0, action(query="another"))
    until(lambda: reward.batches.status() == "of 1 completions 1 in rag_8b, 1 in rag_32b; 1 more batches in flight")


# Giving up


def test_a_cut_off_settles_what_is_out_and_all_that_comes(services, remote, go, loop):
    reward = remote(timeout_s=PATIENCE_S, deadline_s=PATIENCE_S)
    services.hangs.add("8b")
    scoring = go.soon(result_of(reward, [ACTION, "hello"]))
    until(lambda: services.calls["8b"])
    loop.call_soon_threadsafe(reward.batches.cut_off, "stopped")
    assert reasons(scoring.result(PATIENCE_S)) == ["stopped", "not_json"]
    until(lambda: go(in_hand(reward)) == [])
    services.let_go.set()
    assert reasons(go(result_of(reward, [action(query="another"), "hello"]))) == ["stopped", "stopped"]
    assert reward.batches.status() == "none is being scored"
    assert (services.calls["8b"], services.calls["judge"]) == (1, 0)


def test_after_a_cut_off_no_reference_is_fetched_ahead(services, remote, go, loop):
    reward = remote()
    loop.call_soon_threadsafe(reward.batches.cut_off, "stopped")
    loop.call_soon_threadsafe(reward.fetch_references, [0])
    go(reward.warm_up())  # which asks once, and after what came before
    assert services.calls["32b"] == 1


def test_another_text_at_a_place_takes_the_first_one_out_of_the_childs_hands(services, remote, go, loop):
    reward = remote(timeout_s=PATIENCE_S, deadline_s=PATIENCE_S)
    services.hangs.add("judge")
    batch = reward.batches.begin([0])
    loop.call_soon_threadsafe(batch.start, 0, action(query="as it was streamed"))
    until(lambda: services.calls["judge"])
    result = go(reward.result(batch, ["hello"]))
    assert result.values == [-0.25]
    until(lambda: go(in_hand(reward)) == [])
    assert [span.name for span in result.report.spans] == ["parse"]


def test_what_is_given_up_before_the_child_has_come_to_it_is_not_asked_for(services, remote_process, go, loop):
    reward = remote_process(timeout_s=PATIENCE_S, deadline_s=PATIENCE_S)
    go(score(reward, ["hello"]))
    process_of(reward).send_signal(signal.SIGSTOP)  # as one that is busy, or is being started
    batch = reward.batches.begin([0])
    loop.call_soon_threadsafe(batch.start, 0, ACTION)
    until(lambda: reward._asked)
    loop.call_soon_threadsafe(batch.cancel)
    until(lambda: not reward._asked)
    process_of(reward).send_signal(signal.SIGCONT)
    until(lambda: go(in_hand(reward)) == [])
    assert services.calls["8b"] == 0


# The child's life


def test_what_a_killed_child_had_in_hand_is_asked_again_of_a_new_one(
    services, remote_process, go, loop, caplog, tmp_path
):
    chain = build_reward(services.url, [row()], timeout_s=PATIENCE_S, deadline_s=PATIENCE_S, records=True)
    limit = Limit(name="max_calls", kind="calls", most=1000)
    chain.budget = Budget(tmp_path / "spent.json", [limit])
    for name, transport in chain._transports().items():
        transport.count_by(chain.budget.quota(name))
    reward = remote_process(chain=chain)
    services.hangs.add("judge")
    texts = ["hello", action(query="a"), action(query="b")]
    batch = reward.batches.begin([0, 0, 0])
    loop.call_soon_threadsafe(batch.start_all, texts)
    until(lambda: services.calls["judge"] == 2)
    killed = process_of(reward)
    killed.kill()
    services.let_go.set()
    result = go(reward.result(batch, texts))
    assert result.values == [-0.25, 0.75, 0.75]
    assert process_of(reward).pid != killed.pid
    assert process_of(reward).poll() is None
    assert services.calls == {"8b": 4, "32b": 2, "judge": 4}
    assert result.report.traffic["judge"]["calls"] == 2  # of the new one: the other can't tell any more
    assert [stages.completion_record.verdicts["judge"].candidate for stages in batch.stages[1:]] == [0.75, 0.75]
    assert read_account(tmp_path / "spent.json").taken["max_calls"] >= sum(services.calls.values())  # of both
    assert own_words(caplog) == [
        "the reward process ended with code -9; what it had in hand (2 calls) is asked again of the next, once"
    ]


def test_what_two_children_had_in_hand_is_missing_and_the_next_batch_has_a_new_one(services, remote_process, go):
    reward = remote_process(timeout_s=PATIENCE_S, deadline_s=PATIENCE_S)
    services.hangs.add("judge")
    scoring = go.soon(result_of(reward, ["hello", action(query="a")]))
    for asked in (1, 2):
        until(lambda: services.calls["judge"] == asked)  # noqa: B023
        process_of(reward).kill()
    lost = scoring.result(PATIENCE_S)
    assert lost.values == [-0.25, None]
    assert reasons(lost) == ["not_json", "reward_process_ended"]
    assert lost.rewards[1].outcome is Outcome.INFRA
    services.let_go.set()
    assert go(score(reward, [action(query="c"), "hello"])) == [0.75, -0.25]


def test_a_text_that_ends_each_child_costs_its_own_batch_alone(remote_process, go, caplog):
    reward = remote_process(chain=deadly.poisoned)
    texts = (["a", "b"], ["c", deadly.POISON], ["d", "e"])

    async def all_at_once():
        return await asyncio.gather(*(reward.score_all([{"prompt": ""}] * 2, each) for each in texts))

    assert [result.values for result in go(all_at_once())] == [[1.0, 1.0], [None, None], [1.0, 1.0]]
    assert sum("the reward process ended with code 1" in line for line in own_words(caplog)) == 2
    assert go(reward.score_all([{"prompt": ""}], ["f"])).values == [1.0]


def test_those_that_are_scored_together_are_together_in_the_next_child_too(remote_process, go, loop):
    """One of them had its reward from the child that ended."""
    reward = remote_process(chain=MixedReward([deadly.together, deadly.one_by_one], [1.0, 1.0]))
    reward.deadline_s = PATIENCE_S / 2
    row = reward.row_of({"prompt": ""})
    batch = reward.batches.begin([row] * 4, 2)
    loop.call_soon_threadsafe(batch.start_all, ["a", deadly.SLOW, "b", "c"])
    until(lambda: [each is None for each in batch.rewards] == [False, True, False, False])
    process_of(reward).kill()
    # Two completions of a prompt, and 0: also in the child that had only one of them to score.
    assert go(reward.result(batch, ["a", deadly.SLOW, "b", "c"])).values == [2.0] * 4


def test_what_is_asked_again_has_the_time_that_is_left(services, remote_process, go):
    reward = remote_process(timeout_s=LONG_S, deadline_s=LONG_S)
    services.let_go.set()
    go(reward.warm_up())
    services.let_go.clear()
    services.hangs.add("judge")
    reward.deadline_s, began = 6.0, time.monotonic()
    scoring = go.soon(result_of(reward, [ACTION]))
    until(lambda: services.calls["judge"] == 2)
    time.sleep(3.0)
    process_of(reward).kill()
    assert reasons(scoring.result(PATIENCE_S)) == ["deadline"]
    assert time.monotonic() - began < 6.0 + 2.0  # anew it would be 9


def test_a_child_that_does_not_answer_is_waited_for_no_longer_than_the_deadline(services, remote_process, go):
    """Not for what it has counted either. Nor is anything complained about when it ends in the end: see the fixture of
    the loop."""
    reward = remote_process(deadline_s=LONG_S)
    go(reward.warm_up())
    reward.deadline_s = 0.5
    process_of(reward).send_signal(signal.SIGSTOP)
    for _ in range(2):
        began = time.monotonic()
        assert reasons(go(result_of(reward, [ACTION]))) == ["deadline"]
        assert time.monotonic() - began < 0.5 + LAST_WORD_S + 2.0
    process_of(reward).send_signal(signal.SIGCONT)
    reward.deadline_s = PATIENCE_S
    result = go(result_of(reward, [ACTION]))
    assert result.values == [0.75]
    assert result.report.traffic["judge"]["calls"] == 1  # it is heard again, and tells what it has counted


@pytest.fixture
def often_pinged(monkeypatch):
    def patch(ping_s, most_silent):
        names = {"PING_S": ping_s, "MOST_SILENT_PINGS": most_silent, "MOST_SILENT_PINGS_AT_START": 10_000}
        for name, value in names.items():
            monkeypatch.setattr(f"salesrl_trl.reward.remote.{name}", value)

    return patch


def test_a_stopped_child_is_replaced_and_what_it_had_in_hand_is_asked_again(
    services, remote_process, go, caplog, often_pinged
):
    often_pinged(ping_s=0.1, most_silent=20)
    reward = remote_process(timeout_s=LONG_S, deadline_s=LONG_S)
    assert go(score(reward, [ACTION])) == [0.75]
    stopped = process_of(reward)
    stopped.send_signal(signal.SIGSTOP)
    assert go(score(reward, [action(query="a"), action(query="b")])) == [0.75, 0.75]
    assert process_of(reward).pid != stopped.pid
    assert is_gone(stopped.pid)
    assert own_words(caplog) == [
        "the reward process has not answered for 2 s, and is ended",
        "the reward process ended with code -9; what it had in hand (2 calls) is asked again of the next, once",
    ]


def test_a_child_that_is_at_work_is_left_alone(services, remote, go, often_pinged):
    often_pinged(ping_s=0.05, most_silent=20)
    reward = remote()
    go(reward.warm_up())
    child = process_of(reward)
    services.set("8b", ANSWER, delay_s=1.5)  # longer than it may be silent
    assert go(score(reward, [ACTION])) == [0.75]
    assert process_of(reward) is child


def test_closing_ends_the_child_and_may_be_repeated(services, remote_process, go, caplog):
    reward = remote_process()
    go(score(reward, [ACTION]))
    child = process_of(reward)
    assert child.poll() is None
    go(reward.aclose())
    assert child.poll() == 0
    go(reward.aclose())
    assert own_words(caplog) == []


def test_closing_what_was_never_used_starts_no_child(remote, go):
    reward = remote()
    go(reward.aclose())
    assert len(reward._children._made) == 0


def test_closing_while_calls_are_out_ends_the_child_without_a_complaint(services, remote_process, go, loop, caplog):
    reward = remote_process(timeout_s=PATIENCE_S, deadline_s=PATIENCE_S)
    services.hangs |= {"8b", "32b"}
    batch = reward.batches.begin([0, 0])
    for place in range(2):
        loop.call_soon_threadsafe(batch.start, place, action(query=f"q{place}"))
    until(lambda: services.calls["8b"] == 2)
    child = process_of(reward)
    go(reward.aclose())
    assert child.poll() == 0
    assert own_words(caplog) == []


def test_closing_ends_a_child_that_does_not_answer_too(remote_process, go, monkeypatch):
    monkeypatch.setattr("salesrl_trl.reward.remote.ANSWER_S", 0.5)
    reward = remote_process()
    go(score(reward, ["hello"]))
    child = process_of(reward)
    child.send_signal(signal.SIGSTOP)
    go(reward.aclose())
    try:
        until(lambda: child.poll() is not None)
    finally:
        child.kill()


def test_a_report_after_closing_starts_no_child(remote, go):
    reward = remote()
    go(score(reward, ["hello"]))
    go(reward.aclose())
    assert set(go(reward.drained(NOTHING_SCORED)).traffic) == {"rag_8b", "rag_32b", "judge"}
    assert reward.batches.status() == "none is being scored"
    assert len(reward._children._made) == 0


def test_a_child_that_could_not_be_started_is_tried_again(remote_process, go, monkeypatch):
    reward = remote_process()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", "/nowhere/python")
        assert go(score(reward, ["hello"])) == [None]
    assert go(score(reward, ["hello"])) == [-0.25]


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_all_processes_is_the_parents_to_answer(services, remote_process, go, sent):
    """A terminal's Ctrl-C and a scheduler's SIGTERM reach the child too: rewards of the last step are still wanted."""
    reward = remote_process()
    go(reward.warm_up())
    child = process_of(reward)
    child.send_signal(sent)
    assert go(score(reward, [ACTION])) == [0.75]
    assert process_of(reward) is child
    assert child.poll() is None


def test_the_child_ends_when_its_parent_is_killed(services):
    services.hangs.add("judge")
    paths = os.pathsep.join((str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")))
    command = [sys.executable, "-c", PARENT, services.url]
    with subprocess.Popen(command, env={**os.environ, "PYTHONPATH": paths}, stdout=subprocess.PIPE, text=True) as it:
        try:
            services.let_go.set()  # for the warm-up
            pid = int(it.stdout.readline())
            services.let_go.clear()
            until(lambda: services.calls["judge"] == 2 or it.poll() is not None)
            assert it.poll() is None
            assert not is_gone(pid)
        finally:
            it.kill()
    until(lambda: is_gone(pid))


# What is sent, and what is not


def test_keys_reach_the_services_and_are_in_no_command_line_and_no_environment(services, remote_process, go):
    reward = remote_process()
    go(score(reward, [ACTION]))
    assert services.asked["8b"][0].headers["Authorization"] == "Bearer rag-secret"
    assert services.asked["judge"][0].headers["Authorization"] == "Bearer judge-secret"
    child = Path(f"/proc/{process_of(reward).pid}")
    command, environment = (child / "cmdline").read_bytes(), (child / "environ").read_bytes()
    assert b"salesrl_trl.reward.worker" in command
    for secret in SECRETS:
        assert secret not in command + environment
    ours = subprocess.run(["env", "-0"], capture_output=True, check=True).stdout  # as any child of ours has it
    added = set(environment.split(b"\0")) - set(ours.split(b"\0"))
    # So that the package is found from its source tree, and so that nothing in the child takes a GPU.
    hidden = {f"{name}={value}".encode() for name, value in NO_ACCELERATOR.items()}
    assert {each for each in added if not each.startswith(b"PYTHONPATH=")} == hidden


def test_nobody_else_can_speak_to_the_child(services, remote, go):
    """What comes through the socket is unpickled. It has no name to connect to, and no other child inherits it."""
    reward = remote()
    go(score(reward, [ACTION]))
    ours = child_of(reward)._channel._writer.get_extra_info("socket")
    assert (ours.family, ours.getsockname(), ours.getpeername()) == (socket.AF_UNIX, "", "")
    assert not os.get_inheritable(ours.fileno())


def test_the_child_does_without_torch(remote_process, go):
    reward = remote_process()
    go(score(reward, [ACTION]))
    maps = Path(f"/proc/{process_of(reward).pid}/maps").read_text()
    assert "python" in maps
    assert "libtorch" not in maps


def test_a_chain_that_can_not_be_sent_is_refused_with_what_to_do(services):
    chain = build_reward(services.url, [row()])
    chain.hook = lambda: None
    with pytest.raises(ConfigError, match="can't be sent to a process of its own") as caught:
        RemoteReward(chain)
    assert "`reward_process: false`" in str(caught.value)
    assert not any(secret.decode() in str(caught.value) for secret in SECRETS)


def test_the_demos_chain_with_several_judges_and_caches_scores_in_a_child(services, remote_process, go, tmp_path):
    providers = [
        {"name": name, "base_url": f"{services.url}/v1", "model": name, "max_concurrency": 3}
        for name in ("first", "second")
    ]
    config = RewardConfig(
        rag_base_url=services.url,
        judge_providers=providers,
        reference_cache=str(tmp_path / "references.sqlite"),
        branch_reward_weights={"fairness": {"judge": 0.5, "margin": 0.5}},
    )
    rows = load_rows("demo", "train", list(DEFAULT_BRANCHES), None)
    parts = assembly.prepare_reward(config, list(DEFAULT_BRANCHES))
    chain = assembly.build_reward(config, parts, rows, services.url, "", output_dir=tmp_path / "run")
    reward = remote_process(chain=chain)
    result = go(result_of(reward, [ACTION, "hello"], [len(rows) - 1, 0]))
    assert result.values == [0.75, 0.0]
    assert set(result.report.traffic) == {"rag_8b", "rag_32b", "judge_first", "judge_second"}
    go(reward.aclose())
    assert (tmp_path / "run/answers.rank0.sqlite").is_file()
    assert (tmp_path / "references.sqlite").is_file()


def test_what_is_sent_keeps_its_parts_together(services):
    """A transport and its flights share one counter, also in the child."""
    chain = pickle.loads(pickle.dumps(build_reward(services.url, [row()])))
    for transport in chain._transports().values():
        limit, *_, traffic, _ = transport._flights._make.args
        assert limit is transport._limit
        assert traffic is transport._traffic


# Where a run places it


@pytest.mark.parametrize(
    ("setting", "on_cpu", "placed_in_a_child"),
    [
        (None, True, False),
        (None, False, True),
        (True, True, True),
        (True, False, True),
        (False, True, False),
        (False, False, False),
    ],
)
def test_a_run_has_its_chain_in_a_child_where_that_is_wanted(services, caplog, setting, on_cpu, placed_in_a_child):
    chain = build_reward(services.url, [row()])
    where = assembly.placed(chain, setting, on_cpu)
    if placed_in_a_child:
        assert isinstance(where, RemoteReward)
        assert where.deadline_s == chain.deadline_s
    else:
        assert where is chain
    assert own_words(caplog) == []


@pytest.mark.parametrize(
    ("setting", "on_cpu", "warns"), [(None, False, True), (None, True, False), (False, False, False)]
)
def test_a_chain_that_can_not_be_sent_stays_where_nobody_asked_for_a_child(services, caplog, setting, on_cpu, warns):
    chain = build_reward(services.url, [row()])
    chain.hook = lambda: None
    with caplog.at_level(logging.WARNING):
        assert assembly.placed(chain, setting, on_cpu) is chain
    assert ("rewards stay in the trainer's process" in caplog.text) is warns


@pytest.mark.parametrize("on_cpu", [True, False])
def test_a_chain_that_can_not_be_sent_is_an_error_where_a_child_was_asked_for(services, on_cpu):
    chain = build_reward(services.url, [row()])
    chain.hook = lambda: None
    with pytest.raises(ConfigError, match="`reward_process: false`"):
        assembly.placed(chain, True, on_cpu)
