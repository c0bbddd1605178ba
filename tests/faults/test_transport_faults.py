"""The transport against services that are limited, dead or slow: figures of benchmarks/log/README.md.

In virtual time, so the seconds are those of the services and of the transport's waits alone.
"""

import asyncio

import pytest
from support import virtual_time

from salesrl_trl.errors import AccessDenied, ServiceError, ServiceUnavailable
from salesrl_trl.service.event_loop import now
from salesrl_trl.service.http import HttpClient


def succeeded(results):
    return [result for result in results if not isinstance(result, BaseException)]


def codes(results):
    return {result.code for result in results if isinstance(result, ServiceError)}


def test_a_service_of_16_slots_serves_400_calls_at_nearly_its_own_pace(fault_in_memory, transport, call_all):
    server = fault_in_memory("slots", slots=16, seconds=0.3, retry_after="1")
    results, seconds = call_all(server.url, transport(), 400)
    print(f"16 slots, 400 calls: {seconds:.2f} s, {server.stats['refused']} times 429 (ideal: 400 / 16 x 0.3 = 7.5 s)")
    assert len(succeeded(results)) == 400
    assert server.stats["refused"] <= 30
    assert seconds <= 9.5


@pytest.mark.parametrize(("answered", "patience_s"), [(0, 30), (100, 1)])
def test_a_used_up_quota_is_asked_about_a_few_times_only(fault_in_memory, transport, call_all, answered, patience_s):
    used_up = {"error": {"code": "insufficient_quota", "message": "pay"}}
    server = fault_in_memory("status", status=429, body=used_up, after=answered)
    results, _ = call_all(server.url, transport(outage_patience_s=patience_s), answered + 200)
    print(f"quota used up, 200 calls: {server.stats['refused']} upstream calls")
    assert codes(results) == {"rag_8b_quota"}
    refused = sum(isinstance(result, AccessDenied | ServiceUnavailable) for result in results)
    assert (refused, len(succeeded(results))) == (200, answered)
    assert server.stats["refused"] <= 10


def test_refusals_at_random_cost_no_call(fault_in_memory, transport, call_all):
    server = fault_in_memory("some", share=0.01, others=[{"kind": "status", "status": 401}])
    results, _ = call_all(server.url, transport(), 400)
    refused = server.scenarios.others[0].stats["refused"]
    print(f"1 % of 401s, 400 calls: {len(succeeded(results))} scored, {refused} refused")
    assert refused >= 1
    assert len(succeeded(results)) == 400
    assert server.stats["requests"] == 400 + refused  # each asked once more


def test_an_outage_that_says_when_to_come_back_is_waited_for_no_longer_than_another(
    fault_in_memory, transport, call_all
):
    server = fault_in_memory("status", status=503, headers={"Retry_After": "0.5"})
    results, seconds = call_all(server.url, transport(outage_patience_s=1.5), 50)
    assert not succeeded(results)
    assert server.stats["requests"] <= 20
    assert 1.0 <= seconds <= 3.0


def test_calls_and_hedges_together_stay_within_the_limit(transport):
    limits = transport(max_concurrency=8, initial_concurrency=8, hedge_fraction=1.0)
    flying, most = set(), []

    async def attempt(seconds):
        flying.add(asyncio.current_task())
        most.append(len(flying))
        try:
            await asyncio.sleep(seconds)
        finally:
            flying.discard(asyncio.current_task())

    async def run():
        await asyncio.gather(*(limits.call(lambda: attempt(0.01)) for _ in range(40)))
        most.clear()
        slow = [asyncio.create_task(limits.call(lambda: attempt(0.5))) for _ in range(7)]
        await asyncio.sleep(0.15)  # one hedge found a free slot, the others wait
        more = [asyncio.create_task(limits.call(lambda: attempt(0.3))) for _ in range(5)]
        await asyncio.gather(*slow, *more)

    virtual_time.run(run())
    assert limits.drain_traffic()["hedges"] >= 1
    assert max(most) == 8


def test_patience_is_with_the_outage_and_not_with_each_call(fault_in_memory, transport, call_all):
    server = fault_in_memory("hang_up")
    limits = transport(outage_patience_s=1.5)
    results, seconds = call_all(server.url, limits, 200)  # 25 rounds of 8 slots: 37 s if each waited by itself
    assert not succeeded(results)
    assert server.stats["requests"] <= 30
    assert 1.5 <= seconds <= 3.5
    results, seconds = call_all(server.url, limits, 200)  # the next batch of the same outage
    assert not succeeded(results)
    assert seconds <= 1.0


def test_stragglers_are_asked_a_second_time(fault_in_memory, transport):
    server = fault_in_memory("stragglers", every=50, seconds=[0.3, 1.0], late_seconds=20.0)
    limits = transport(max_concurrency=128, initial_concurrency=128)
    latencies = []

    async def worker(http, calls):
        for _ in range(calls):
            started = now()
            await limits.call(lambda: http.post("/v1/rag/8b", {}))
            latencies.append(now() - started)

    async def everybody():
        http = HttpClient("rag_8b", server.url)
        await asyncio.gather(*(worker(http, 10) for _ in range(100)))
        await http.aclose()

    virtual_time.run(everybody())
    p99 = sorted(latencies)[989]
    extra = server.stats["requests"] - 1000
    print(f"2 % stragglers of 20 s: p99 {p99:.2f} s, slowest {max(latencies):.2f} s, {extra / 10:.1f} % extra calls")
    assert len(latencies) == 1000
    assert extra <= 50
    assert p99 <= 2.5
