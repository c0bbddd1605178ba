"""Timings of blocks, functions and coroutines."""

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.seconds import check_seconds

from salesrl_trl.telemetry.timeline import Timeline
from salesrl_trl.timing import TimingContext, overlap


def test_the_time_is_there_inside_the_block_and_stays_after_it():
    with TimingContext("block") as timing:
        time.sleep(0.01)
        inside = timing.cost_time
        time.sleep(0.01)
    assert 0.01 <= inside < timing.cost_time
    after = timing.cost_time
    time.sleep(0.01)
    assert timing.cost_time == after


def test_a_block_that_raises_has_its_time_and_the_error_passes_through():
    context = TimingContext("block")
    with pytest.raises(KeyError, match="mine"), context as timing:
        time.sleep(0.01)
        raise KeyError("mine")
    assert timing.failed and timing.cost_time == context.cost_time >= 0.01


def test_a_generator_is_refused_because_calling_it_takes_no_time():
    def generator():
        yield 1

    async def asynchronous():
        yield 1

    for each in (generator, asynchronous):
        with pytest.raises(TypeError, match="is a generator"):
            TimingContext("g")(each)


def test_a_context_without_a_name_is_named_after_its_function_or_its_line_and_logs_if_asked():
    lines = []

    @TimingContext(log=lines.append)
    def work():
        raise ValueError

    with pytest.raises(ValueError):
        work()
    with TimingContext(log=lines.append) as timing:
        pass
    assert timing.name.startswith("test_timing.py:")
    shown = [line.rpartition(": ") for line in lines]
    assert [name for name, *_ in shown] == [f"[Timing] {work.__qualname__}", f"[Timing] {timing.name}"]
    assert ["failed" in end for *_, end in shown] == [True, False]
    assert float(shown[1][2].removesuffix(" s")) == pytest.approx(timing.cost_time, abs=1e-3)


def test_one_context_inside_itself_has_two_times():
    context = TimingContext("again")
    with context as outer:
        with context as inner:
            time.sleep(0.01)
        kept = inner.cost_time
        time.sleep(0.01)
    assert inner.cost_time == kept
    assert outer.cost_time > kept


def test_a_decorated_function_is_timed_at_each_call_and_keeps_its_name():
    timeline = Timeline()

    @TimingContext("work", timeline)
    def work(a, *, b):
        """Adds."""
        return a + b

    assert [work(1, b=2), work(3, b=4)] == [3, 7]
    assert (work.__name__, work.__doc__) == ("work", "Adds.")
    assert [span.name for span in timeline.drain_spans()] == ["work", "work"]


async def test_a_decorated_coroutine_is_timed_until_it_ends(real_time):
    timeline = Timeline()

    @TimingContext("fetch", timeline)
    async def fetch(seconds):
        await asyncio.sleep(seconds)

    await asyncio.gather(fetch(0.02), fetch(0.5))
    short, long = sorted(span.seconds for span in timeline.drain_spans())
    assert long >= 0.5
    check_seconds(short, least=0.02, most=0.5)


async def test_tasks_that_share_a_context_do_not_mix_their_times(real_time):
    context = TimingContext("shared")

    async def one(seconds):
        async with context as timing:
            await asyncio.sleep(seconds)
        return timing.cost_time

    first, second, third = await asyncio.gather(*map(one, (0.8, 0.4, 0.01)))
    assert first >= 0.8
    check_seconds(second, least=0.4, most=0.8)
    check_seconds(third, most=0.4)


def test_threads_that_share_a_context_do_not_mix_their_times():
    context, barrier = TimingContext("shared"), threading.Barrier(4)

    def one(seconds):
        barrier.wait()
        with context as timing:
            time.sleep(seconds)
        return timing.cost_time

    with ThreadPoolExecutor(4) as pool:
        *long, short, other = pool.map(one, (0.8, 0.8, 0.01, 0.01))
    # mixed up, one would have another one's time
    assert min(long) >= 0.8
    check_seconds(max(short, other), most=0.8)


def test_a_generator_closed_elsewhere_still_ends_its_own_timing():
    context = TimingContext("generator")

    def generator():
        with context as timing:
            yield timing

    running = generator()
    timing = next(running)
    thread = threading.Thread(target=running.close)  # another context: the timing is not under way there
    thread.start()
    thread.join()
    assert timing.ended is not None
    assert timing.failed  # GeneratorExit


def test_overlap_is_what_lies_in_both():
    assert overlap((0, 2), (1, 3)) == 1
    assert overlap((0, 1), (2, 3)) == 0  # apart
    assert overlap((0, 9), (2, 3)) == overlap((2, 3), (0, 9)) == 1  # one inside the other
