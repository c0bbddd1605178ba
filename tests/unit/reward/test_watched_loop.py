"""A reward's event loop beside the one that keeps deadlines: code that holds it up, and what its threads carry."""

import asyncio
import contextvars
import sqlite3
import sys
import threading
import time

import pytest
import torch

from salesrl_trl.reward import watched_loop
from salesrl_trl.reward.functions import RewardFunction, per_completion
from salesrl_trl.reward.mixed import MixedReward
from salesrl_trl.reward.reward_loop import RewardLoop

DEADLINE_S = 0.5
ROW = {"prompt": "p"}
let_go = threading.Event()


@per_completion(deadline_s=DEADLINE_S)
async def holds(prompt, completion):
    while completion == "spins":
        try:
            time.sleep(0.001)
        except Exception:  # as in code that tries again and again
            continue
    if completion == "waits in C":
        let_go.wait()
    return 1.0


@pytest.fixture
def loop(monkeypatch):
    monkeypatch.setattr(watched_loop, "LOOK_S", 0.125)
    monkeypatch.setattr(watched_loop, "AGAIN_S", 0.125)
    monkeypatch.setattr(watched_loop, "LEFT_AFTER_S", 0.5)
    let_go.clear()
    loop = RewardLoop(MixedReward([holds], [1.0]))
    yield loop
    loop.close()
    let_go.set()


def scored(loop, *texts):
    result = loop.result(loop.begin([ROW] * len(texts)), texts)
    return [reward.value if reward.value is not None else reward.reason for reward in result.rewards]


def test_a_function_that_never_yields_is_interrupted_after_its_deadline_and_others_are_scored_again(loop, caplog):
    began = time.monotonic()
    held, other = scored(loop, "spins", "other")
    assert held == "holds_blocked"
    assert other in ("holds_blocked", 1.0)  # it waited for the same loop, with the same time
    assert time.monotonic() - began < DEADLINE_S + 1.0 + 5.0  # a second of grace, and a slow machine
    assert scored(loop, "other", "other") == [1.0, 1.0]
    [line] = [record.message for record in caplog.records if "does not give" in record.message]
    assert line.startswith(f"holds at {__file__}:")
    assert f"Stack: {__file__}:" in line
    assert line.endswith(" in holds")


def test_a_loop_that_stays_held_up_ends_the_rewards_with_that_reason_and_is_left_behind(loop, caplog):
    assert scored(loop, "waits in C") == ["holds_blocked"]
    assert loop.status() == "none is being scored" or "holds at" in loop.status()
    ends = time.monotonic() + 20.0
    while loop.stopped is None and time.monotonic() < ends:
        time.sleep(0.05)
    began = time.monotonic()
    assert scored(loop, "other") == ["holds_blocked"]
    loop.close()
    assert time.monotonic() - began < 10.0
    assert any("nothing more is scored" in record.message for record in caplog.records)


def test_a_short_wait_that_blocks_is_no_fault(loop, caplog):
    @per_completion
    async def slow(prompt, completion):
        time.sleep(0.4)  # more than three looks
        return 1.0

    loop.close()
    loop = RewardLoop(slow)
    assert scored(loop, "a") == [1.0]
    loop.close()
    assert caplog.records == []


customer = contextvars.ContextVar("customer", default="none")


def devices():
    return str(torch.ones(1).device), str(torch.get_default_dtype()), customer.get(), torch.cuda.current_device()


def test_devices_dtype_and_context_of_the_main_thread_hold_wherever_a_function_runs(monkeypatch):
    """Of CUDA there is a stand-in: a device that belongs to the thread, 0 in a new one."""
    of_thread = threading.local()
    monkeypatch.setattr("torch.cuda.is_initialized", lambda: True)
    monkeypatch.setattr("torch.cuda.current_device", lambda: getattr(of_thread, "index", 0))
    monkeypatch.setattr("torch.cuda.set_device", lambda index: setattr(of_thread, "index", index))
    seen = []

    @per_completion
    def sync(prompt, completion):
        seen.append(devices())
        return 1.0

    @per_completion
    async def on_the_loop(prompt, completion):
        seen.append(devices())
        seen.append(await asyncio.to_thread(devices))
        return 1.0

    def of_trl(prompts, completions):
        seen.append(devices())
        return (1.0 for _ in completions)

    loop = RewardLoop(MixedReward([sync, on_the_loop, RewardFunction(of_trl)], [1.0] * 3))
    token = customer.set("of the main thread")
    torch.cuda.set_device(1)
    torch.set_default_device("meta")
    torch.set_default_dtype(torch.float64)
    try:
        values = loop.result(loop.begin([ROW]), ["a"]).values
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)
        customer.reset(token)
        loop.close()
    assert values == [3.0]
    assert seen == [("meta", "torch.float64", "of the main thread", 1)] * 4


def test_the_error_of_an_object_that_belongs_to_another_thread_says_so(caplog):
    here = sqlite3.connect(":memory:")

    @per_completion
    def reads(prompt, completion):
        return here.execute("SELECT 1").fetchone()[0]

    loop = RewardLoop(reads)
    assert scored(loop, "a") == ["reads_raised_ProgrammingError"]
    loop.close()
    here.close()
    [line] = [record.message for record in caplog.records]
    assert "docs/REWARDS.md, 'Threads'" in line


def test_a_batch_costs_as_many_looks_as_it_has_completions():
    """Four times as many: four times the calls of functions. They were sixteen times as many."""

    def calls(count):
        made = 0

        def count_calls(frame, event, argument):
            nonlocal made
            made += event in ("call", "c_call")

        async def run():
            return await RewardFunction(lambda prompts, completions: [1.0] * len(completions)).score_all(
                [ROW] * count, ["a"] * count
            )

        sys.setprofile(count_calls)
        try:
            result = asyncio.run(run())
        finally:
            sys.setprofile(None)
        assert result.values == [1.0] * count
        return made

    assert calls(1600) < 4.5 * calls(400)
