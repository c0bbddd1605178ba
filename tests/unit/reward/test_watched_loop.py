"""A reward's event loop beside the one that keeps deadlines: code that holds it up, and what its threads carry."""

import asyncio
import contextvars
import threading
import time

import pytest
import torch

from salesrl_trl.reward.functions import RewardFunction, per_completion
from salesrl_trl.reward.mixed import MixedReward
from salesrl_trl.reward.reward_loop import RewardLoop
from salesrl_trl.service import event_loop

DEADLINE_S = 0.5
ROW = {"prompt": "p"}
let_go = threading.Event()


@per_completion(deadline_s=DEADLINE_S)
async def holds(prompt, completion):
    if completion == "waits in C":
        let_go.wait()
    return 1.0


@pytest.fixture
def loop(monkeypatch):
    monkeypatch.setattr(event_loop, "CLOSE_S", 0.5)
    let_go.clear()
    loop = RewardLoop(MixedReward([holds], [1.0]))
    yield loop
    let_go.set()
    loop.close()


def scored(loop, *texts):
    result = loop.result(loop.begin([ROW] * len(texts)), texts)
    return [reward.value if reward.value is not None else reward.reason for reward in result.rewards]


def test_a_function_that_never_yields_costs_what_waits_for_its_loop_and_is_named_once(loop, caplog):
    assert scored(loop, "waits in C", "other") == ["blocked"] * 2  # the other one waited for the same loop
    assert scored(loop, "other") == ["blocked"]
    [line] = [record.message for record in caplog.records]
    assert line.startswith(f"holds at {__file__}:")
    assert "Expected `await` wherever it waits" in line
    let_go.set()
    assert scored(loop, "other", "other") == [1.0, 1.0]


def test_closing_leaves_a_loop_behind_that_stays_held_up(loop, caplog):
    batch = loop.begin([ROW])
    loop.post(batch.start, 0, "waits in C")
    began = time.monotonic()
    while not loop._calls.held_by():
        time.sleep(0.01)
    loop.close()
    assert time.monotonic() - began < 10.0
    assert "destroyed" not in caplog.text
    assert any(line.startswith("holds at ") and line.endswith("It is abandoned.") for line in caplog.messages)


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
        return [1.0 for _ in completions]

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
