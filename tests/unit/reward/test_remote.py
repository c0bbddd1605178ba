"""The reward chain in a child process, over real HTTP."""

import asyncio
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from support import deadly
from support.forked import COLD_PYTHON
from support.loopback import ACTION, ANSWER, VERDICT, Services, action, build_reward, chat_completion, examples, row
from support.seconds import is_gone, until

from salesrl_trl.ground.process import NO_ACCELERATOR
from salesrl_trl.judged.budget import Budget, Limit, read_account
from salesrl_trl.reward import remote as remote_module
from salesrl_trl.reward.remote import RemoteReward
from salesrl_trl.reward.reward_loop import RewardLoop
from salesrl_trl.types import Outcome

PATIENCE_S = 30.0
"""Until a test that waits in vain fails."""
LONG_S = 600.0
LONG = {"timeout_s": PATIENCE_S, "deadline_s": PATIENCE_S}
PARENT = """
import asyncio, sys
from salesrl_trl.reward.remote import RemoteReward
from support.loopback import ACTION, build_reward, row

async def main():
    reward = RemoteReward(build_reward(sys.argv[1], [row()]))
    await reward.warm_up()
    print(reward.child.process.pid, flush=True)
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


class OnItsLoop:
    """A reward in a child, on its loop as a trainer has it, with what a test asks of both."""

    def __init__(self, reward):
        self.reward = reward
        self.complaints = []
        self.loop = RewardLoop(reward)
        for each in (self.loop._batches.loop, self.loop._calls.loop):
            each.set_exception_handler(lambda loop, context: self.complaints.append(context["message"]))

    def begin(self, indices):
        return self.loop.begin(examples(indices))

    def begun(self, *texts):
        batch = self.begin([0] * len(texts))
        self.loop.post(batch.start_all, texts)
        return batch

    def result(self, completions, indices=None, rows=None):
        indices = [0] * len(completions) if indices is None else indices
        return self.loop.result(self.loop.begin(rows or examples(indices)), completions)

    def values(self, *completions):
        return self.result(completions).values

    @property
    def process(self):
        return self.reward._starting.result().process


@pytest.fixture
def remote_process(services, monkeypatch):
    """A chain in a child: `remote_process(rows, **settings of build_reward)`. Complaints of its loop are errors."""
    built = []

    def build(rows=None, chain=None, **settings):
        built.append(OnItsLoop(RemoteReward(chain or build_reward(services.url, rows or [row()], **settings))))
        return built[-1]

    monkeypatch.setattr(sys, "executable", COLD_PYTHON)  # the process that is stopped and killed is the child itself
    gc.freeze()
    yield build
    gc.collect()
    services.let_go.set()
    for it in built:
        it.loop.close()
        assert it.complaints == []


@pytest.fixture
def often_looked_at(monkeypatch):
    def patch(ping_s, most_silent=10_000):
        monkeypatch.setattr(remote_module, "PING_S", ping_s)
        monkeypatch.setattr(remote_module, "SILENT_PINGS", most_silent)

    return patch


def own_words(caplog):
    return [each.getMessage() for each in caplog.records if each.name.startswith("salesrl_trl")]


def reasons(result):
    return [each.reason for each in result.rewards]


def answers_by_query(request):
    query = request.json["rewritten_query"]
    if query == "refused":
        return 400, {}
    if query == "down":
        return 500, {}
    if query == "hollow":
        return 200, {**ANSWER, "answer": ":", "passages": []}
    return 200, {**ANSWER, "answer": f"About {query}."}


def judge_by_answer(request):
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


def untimed(report):
    """The parts of a report that hold no time and do not depend on which of two calls was faster, such as whether a
    failed completion already had its row's reference."""
    spans = sorted((span.track, span.name, span.failed) for span in report.spans if span.name != "rag_32b")
    records = sorted(record.score for record in report.records)
    hits = {name: count for name, count in report.cache_hits.items() if name != "references"}
    traffic = {name: {**each, "full_ms": None} for name, each in report.traffic.items()}  # a duration
    return spans, records, dict(report.usage), traffic, hits


def test_rewards_and_reports_are_those_of_the_chain_in_this_process(services, remote_process):
    services.functions |= {"8b": answers_by_query, "judge": judge_by_answer}
    rows = [row("r1", message_id="m1"), row("r2", "hallucination", message_id="m2")]
    settings = {"weights": {"fairness": {"judge": 0.5, "margin": 0.25, "retrieval": 0.25}}}
    own = build_reward(services.url, rows, **settings)
    here, there = RewardLoop(own), remote_process(rows, **settings)
    assert there.reward.names == own.names
    for completions, indices in ((MIXED, ROWS_OF_MIXED), ([action(query="another"), MIXED[0], "x"], [0, 0, 1])):
        local = here.result(here.begin(examples(indices)), completions)
        distant = there.result(completions, indices)
        for one, other in zip(local.rewards, distant.rewards, strict=True):
            assert set(one.seconds) == set(other.seconds)
            assert replace(one, seconds={}) == replace(other, seconds={})
        one, other = local.report, distant.report
        assert untimed(one) == untimed(other)
        for span in other.spans:  # by one clock, in both processes
            assert other.started <= span.started <= span.ended <= other.started + other.seconds
        assert 0.0 < other.judge_seconds <= other.seconds
        assert len({each.outcome for each in distant.rewards}) == (len(Outcome) if completions is MIXED else 2)
    here.close()


def test_a_completion_that_passes_its_deadline_is_missing_and_the_child_goes_no_further_with_it(
    services, remote_process
):
    reward = remote_process(deadline_s=LONG_S, timeout_s=LONG_S)  # the child alone would go on
    reward.loop.warm_up()
    services.hangs.add("8b")
    services.asked["judge"].clear()
    reward.reward.deadline_s = 1.0
    late = reward.result([ACTION, "hello"])
    assert reasons(late) == ["deadline", "not_json"]
    assert 0.5 < late.rewards[0].seconds["rag_8b"] < PATIENCE_S
    assert {(span.track, span.name): span.failed for span in late.report.spans} == {
        ("reward 0", "parse"): False,
        ("reward 0", "rag_8b"): True,
        ("reward 0 reference", "rag_32b"): False,
        ("reward 1", "parse"): False,
    }
    services.let_go.set()
    reward.reward.deadline_s = PATIENCE_S
    assert reasons(reward.result([action(query="another")])) == [""]
    assert len(services.asked["8b"]) == 3  # by now the 8B endpoint has answered the first one too
    assert services.calls["judge"] == 1  # of the other one


def test_a_waiting_person_reads_what_the_child_does(services, remote_process, often_looked_at):
    often_looked_at(0.1)
    reward = remote_process(**LONG)
    services.hangs.add("judge")
    texts = [action(query="a"), "hello", action(query="b")]
    batch = reward.begun(*texts)
    # limits that fell in tests before, whose transports are not collected yet, are listed behind it
    until(lambda: reward.loop.status().startswith("2 in judge (of 3 completions)"))
    services.let_go.set()
    report = reward.loop.result(batch, texts).report
    assert len(report.spans) == 3 + 2 * 3
    assert not any(span.failed for span in report.spans)


def test_what_a_killed_child_had_in_hand_is_asked_again_of_a_new_one(services, remote_process, caplog, tmp_path):
    chain = build_reward(services.url, [row()], records=True, **LONG)
    limit = Limit(name="max_calls", kind="calls", most=1000)
    chain.budget = Budget(tmp_path / "spent.json", [limit])
    for name, transport in chain._transports().items():
        transport.count_by(chain.budget.quota(name))
    reward = remote_process(chain=chain)
    services.hangs.add("judge")
    texts = ["hello", action(query="a"), action(query="b")]
    batch = reward.begun(*texts)
    until(lambda: services.calls["judge"] == 2)
    killed = reward.process
    killed.kill()
    services.let_go.set()
    result = reward.loop.result(batch, texts)
    assert result.values == [-0.25, 0.75, 0.75]
    assert reward.process.pid != killed.pid
    assert reward.process.poll() is None
    assert services.calls == {"8b": 4, "32b": 2, "judge": 4}
    assert result.report.traffic["judge"]["calls"] == 2  # of the new one: the other can't tell any more
    assert [stages.completion_record.verdicts["judge"].candidate for stages in batch.stages[1:]] == [0.75, 0.75]
    assert read_account(tmp_path / "spent.json").taken["max_calls"] >= sum(services.calls.values())  # of both
    assert own_words(caplog) == ["the reward process exited with code -9 while scoring 2 completions"]


def test_a_text_that_ends_each_child_costs_what_was_in_its_hands(remote_process, caplog):
    reward = remote_process(chain=deadly.poisoned)
    rows = [{"prompt": ""}] * 2
    result = reward.result(["c", deadly.POISON], rows=rows)
    assert {(each.outcome, each.reason) for each in result.rewards} == {(Outcome.INFRA, "reward_process_ended")}
    assert sum("the reward process exited with code 1" in line for line in own_words(caplog)) == 2
    assert reward.result(["f"], rows=rows[:1]).values == [1.0]


def test_completions_that_are_scored_together_are_missing_when_their_child_ends(remote_process):
    reward = remote_process(chain=deadly.together)
    batch = reward.loop.begin([{"prompt": ""}] * 2, 2)
    reward.loop.post(batch.start, 0, "a")
    until(lambda: reward.reward.child is not None and reward.reward.child.scored)
    reward.process.kill()
    until(lambda: batch.rewards[0] is not None)
    reward.reward.deadline_s = batch._deadline_s = 0.5  # the other one would wait for it
    assert reasons(reward.loop.result(batch, ["a", "b"])) == ["reward_process_ended", "deadline"]


def test_a_stopped_child_is_replaced_and_what_it_had_in_hand_is_asked_again(
    services, remote_process, caplog, often_looked_at
):
    often_looked_at(ping_s=0.1, most_silent=60)
    reward = remote_process(timeout_s=LONG_S, deadline_s=LONG_S)
    assert reward.values(ACTION) == [0.75]
    stopped = reward.process
    stopped.send_signal(signal.SIGSTOP)
    counts = asyncio.run_coroutine_threadsafe(reward.reward.drain(), reward.loop._calls.loop)  # no completion
    assert reward.values(action(query="a"), action(query="b")) == [0.75, 0.75]
    assert counts.result(0) == asyncio.run(reward.reward._local.drain())
    assert reward.process.pid != stopped.pid
    assert is_gone(stopped.pid)
    assert sorted(own_words(caplog)) == [
        "the reward process does not respond to the request for its counters",  # the question about its counts
        "the reward process exited with code -9 while scoring 2 completions",
        "the reward process has not answered for 6 s and is being killed; its stack trace follows",
    ]


@pytest.mark.parametrize("is_stopped", [False, True])
def test_closing_ends_the_child_and_is_no_complaint_of_one_at_work(
    services, remote_process, caplog, monkeypatch, is_stopped
):
    monkeypatch.setattr(remote_module, "ANSWER_S", 0.5 if is_stopped else PATIENCE_S)
    reward = remote_process(**LONG)
    reward.values("hello")
    child = reward.process
    if is_stopped:
        child.send_signal(signal.SIGSTOP)
    else:
        services.hangs |= {"8b", "32b"}
        reward.begun(action(query="a"), action(query="b"))
        until(lambda: services.calls["8b"] == 2)
    reward.loop.close()
    try:
        until(lambda: child.poll() is not None)
    finally:
        child.kill()
    reward.loop.close()  # again
    assert child.poll() == (-signal.SIGKILL if is_stopped else 0)
    closing = "does not close and is being killed; its stack trace follows"
    said = [closing, "exited with code -9 while scoring 0 completions"]
    assert own_words(caplog) == [f"the reward process {line}" for line in said * is_stopped]


def test_a_child_that_could_not_be_started_is_tried_again(remote_process, monkeypatch):
    reward = remote_process()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", "/nowhere/python")
        assert reasons(reward.result(["hello"])) == ["reward_process_ended"]
    assert reward.values("hello") == [-0.25]


def test_a_signal_to_all_processes_is_the_parents_to_answer(services, remote_process):
    """A terminal's Ctrl-C and a scheduler's SIGTERM reach the child too: rewards of the last step are still wanted."""
    reward = remote_process()
    reward.loop.warm_up()
    child = reward.process
    for sent in (signal.SIGINT, signal.SIGTERM):
        child.send_signal(sent)
        assert reward.values(action(query=sent.name)) == [0.75]
    assert reward.process is child
    assert child.poll() is None


def test_the_child_ends_when_its_parent_is_killed(services):
    services.hangs.add("judge")
    paths = os.pathsep.join((str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")))
    command = [COLD_PYTHON, "-c", PARENT, services.url]  # a fork takes its process group along
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


def test_nobody_else_can_speak_to_the_child(services, remote_process):
    """What comes through the socket is unpickled. It has no name to connect to, and no other child inherits it."""
    reward = remote_process()
    reward.values("hello")
    ours = reward.reward.child.channel._writer.get_extra_info("socket")
    assert (ours.family, ours.getsockname(), ours.getpeername()) == (socket.AF_UNIX, "", "")
    assert not os.get_inheritable(ours.fileno())


def test_keys_are_in_no_command_line_and_no_environment_and_the_child_does_without_torch(services, remote_process):
    reward = remote_process()
    reward.values(ACTION)
    assert services.asked["8b"][0].headers["Authorization"] == "Bearer rag-secret"
    assert services.asked["judge"][0].headers["Authorization"] == "Bearer judge-secret"
    child = Path(f"/proc/{reward.process.pid}")
    command, environment = (child / "cmdline").read_bytes(), (child / "environ").read_bytes()
    assert b"salesrl_trl.reward.remote" in command
    for secret in (b"rag-secret", b"judge-secret"):
        assert secret not in command + environment
    ours = subprocess.run(["env", "-0"], capture_output=True, check=True).stdout  # as any child of ours has it
    added = set(environment.split(b"\0")) - set(ours.split(b"\0"))
    # So that the package is found from its source tree, and so that nothing in the child takes a GPU.
    hidden = {f"{name}={value}".encode() for name, value in NO_ACCELERATOR.items()}
    assert {each for each in added if not each.startswith(b"PYTHONPATH=")} == hidden
    assert "python" in (maps := (child / "maps").read_text()) and "libtorch" not in maps
