"""The whole chain under load and under faults: figures of benchmarks/log/README.md."""

import asyncio

import pytest
from faults.fault_server import seconds_of
from support import virtual_time
from support.loopback import action, build_reward, examples, row
from support.seconds import check_seconds

from salesrl_trl.service.event_loop import now
from salesrl_trl.types import Outcome


def test_a_dead_judge_costs_little_while_its_fallback_lives(fault_in_memory):
    dead = fault_in_memory("hang_up")
    alive = fault_in_memory("latency", seconds={"8b": 0.0, "32b": 0.0, "completions": 0.02})
    providers = [
        {"name": "first", "base_url": f"{dead.url}/v1", "weight": 1.0},
        {"name": "second", "base_url": f"{alive.url}/v1", "weight": 0.0},
    ]
    reward = build_reward(alive.url, [row()], attempts=3, providers=providers, limits={"max_concurrency": 64})
    result, seconds = timed_batch(reward, [action(query=f"q{index}") for index in range(200)])
    print(f"first judge dead, second alive, 200 verdicts: {seconds:.2f} s, {dead.stats['requests']} wasted calls")
    assert {each.outcome for each in result.rewards} == {Outcome.OK}
    assert dead.stats["requests"] <= 20
    assert result.report.usage["second"].verdicts == 200
    assert seconds <= 1.0


@pytest.mark.alone
def test_everything_dead_is_missing_with_a_reason_and_soon():
    reward = build_reward("http://127.0.0.1:9", [row()], attempts=3)
    result, seconds = timed_batch(reward, [action(query=f"q{index}") for index in range(200)], run=asyncio.run)
    assert {each.reason for each in result.rewards} <= {"rag_8b_unavailable", "rag_8b_breaker_open"}
    assert all(each.value is None for each in result.rewards)
    assert result.report.traffic["rag_8b"]["sent"] <= 20
    check_seconds(seconds, most=1.0)


def timed_batch(reward, completions, indices=None, run=virtual_time.run):
    """The result of one batch, and the seconds that it took on the loop's clock."""

    async def once():
        started = now()
        rows = examples(indices or [0] * len(completions))
        result = await reward.score_all(rows, completions)
        seconds = now() - started
        await reward.aclose()
        return result, seconds

    return run(once())


def test_a_thousand_chains_in_flight_take_as_long_as_the_slowest(fault_in_memory):
    medians, sigma, count = {"8b": 5.6, "32b": 2.0, "completions": 3.2}, 0.3, 1000
    slowest = max(
        sum(seconds_of(end, medians[end], sigma, f"item-{index} ".encode()) for end in ("8b", "completions"))
        for index in range(count)
    )
    rows = [row(f"r{index}", message_id=f"m{index}") for index in range(count // 8)]
    url = fault_in_memory("latency", seconds=medians, sigma=sigma).url
    limits = {"max_concurrency": count, "initial_concurrency": count}
    reward = build_reward(url, rows, timeout_s=60.0, limits=limits)
    completions = [action(query=f"item-{index} real") for index in range(count)]
    result, seconds = timed_batch(reward, completions, [index // 8 for index in range(count)])
    print(f"1,000 chains of 5.6 s + 3.2 s: {seconds:.2f} s; the slowest one: {slowest:.2f} s")
    assert {each.outcome for each in result.rewards} == {Outcome.OK}
    sent = {name: each["sent"] for name, each in result.report.traffic.items()}
    assert sent == {"rag_8b": 1000, "rag_32b": 125, "judge": 1000}
    assert seconds == pytest.approx(slowest, rel=1e-3)


def test_a_warm_up_ends_with_the_deadline(fault_in_memory):
    server = fault_in_memory("status", status=429, headers={"Retry_After": "3600"})
    reward = build_reward(server.url, [row()], deadline_s=10.0)

    async def warm_up():
        started = now()
        outcome = await reward.warm_up()
        seconds = now() - started
        await reward.aclose()
        return outcome, seconds

    outcome, seconds = virtual_time.run(warm_up())
    assert {error.code for error in outcome.values()} == {"rag_8b_http_429", "rag_32b_http_429", "judge_http_429"}
    assert seconds <= 10.0


def test_a_batch_that_is_cut_off_leaves_the_next_one_unharmed(fault_in_memory):
    slow = fault_in_memory("latency", seconds={"8b": 2.0, "32b": 0.0, "completions": 2.0})
    reward = build_reward(slow.url, [row()], deadline_s=3.5)

    async def twice():
        arguments = {"prompts": [None], "completions": [action()], "row": [0]}
        first = await reward(**arguments)
        second = await reward(**arguments)  # the 8B answer is kept, so there is time for the verdict
        await reward.aclose()
        return first, second

    assert virtual_time.run(twice()) == ([None], [0.75])
