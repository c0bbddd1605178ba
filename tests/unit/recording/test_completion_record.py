"""Calls of a completion, noted by transport and client."""

import asyncio

import pytest

from salesrl_trl.errors import ServiceTimeout, ServiceUnavailable
from salesrl_trl.service.event_loop import deadline
from salesrl_trl.service.transport import Transport
from salesrl_trl.telemetry.completion_record import CallNote, CompletionRecord, noted_in


def transport(**given):
    usual = {"max_concurrency": 8, "attempt_timeout_s": 5.0, "max_attempts": 3, "hedge_fraction": 0.0}
    return Transport("judge", **{**usual, **given})


def noted(record):
    return [(call.service, call.path, call.failure, call.request) for call in record.calls]


async def test_each_attempt_is_noted_once_also_where_its_client_notes_it_too():
    record, failing = CompletionRecord(), iter([True, False, False])

    async def asked():
        if next(failing):
            raise ServiceUnavailable("down", "judge_down")
        return "yes"

    async def by_a_client():
        with CallNote("judge", "/v1/verdict", b"{}"):
            return "no"

    limits = transport()
    with deadline(60), noted_in(record):
        assert await limits.call(asked) == "yes"
        assert await limits.call(by_a_client) == "no"
    with deadline(60):
        await limits.call(asked)  # for nobody's completion
    own = ("judge", "")
    assert noted(record) == [(*own, "judge_down", b""), (*own, "", b""), ("judge", "/v1/verdict", "", b"{}")]


async def test_a_request_that_was_beaten_is_told_from_one_whose_time_was_over():
    beaten, late = CompletionRecord(), CompletionRecord()
    limits = transport(hedge_fraction=1.0, max_attempts=1)
    waits = iter([0.1] * 40 + [4.0, 0.1] + [100.0] * 9)

    async def asked():
        await asyncio.sleep(next(waits))

    with deadline(60):
        for _ in range(40):
            await limits.call(asked)
        with noted_in(beaten):
            await limits.call(asked)
        with noted_in(late), pytest.raises(ServiceTimeout):
            await limits.call(asked)
    await asyncio.sleep(0)
    assert sorted(call.failure for call in beaten.calls) == ["", "cancelled"]
    assert {call.failure for call in late.calls} == {"given_up"}


async def test_the_wait_for_a_slot_is_noted():
    record = CompletionRecord()
    limits = transport(max_concurrency=1, initial_concurrency=1)
    with deadline(60):
        first = asyncio.ensure_future(limits.call(lambda: asyncio.sleep(2.0)))
        await asyncio.sleep(0.5)
        with noted_in(record):
            await limits.call(lambda: asyncio.sleep(1.0))
        await first
    assert record.queue_s == pytest.approx(1.5)
