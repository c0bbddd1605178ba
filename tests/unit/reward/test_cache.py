"""The cache: what is kept, what is shared, and what no failure may do."""

import asyncio
import contextlib
import json
import os
import pickle
import signal
import sqlite3
import stat
import subprocess
import sys
import threading
import time
import warnings

import pytest
from pydantic import TypeAdapter
from support.seconds import check_seconds

from salesrl_trl.errors import ServiceUnavailable
from salesrl_trl.judged import cache as module
from salesrl_trl.judged.cache import AnswerStore, Cache, cache_key
from salesrl_trl.judged.rag_client import kept
from salesrl_trl.types import Answer, Passage

pytestmark = pytest.mark.usefixtures("real_time")


def cache_of(store):
    return Cache(store, TypeAdapter(str))


def asker(answer="answer", *, fails=0, delay_s=0.0):
    async def ask():
        ask.times += 1
        await asyncio.sleep(delay_s)
        if ask.times <= fails:
            raise ServiceUnavailable("down")
        return answer

    ask.times = 0
    return ask


async def put(store, values):
    for key, value in values.items():
        store.put(key, value)
    await store.aclose()


async def got(store, *keys):
    values = [await store.get(key) for key in keys]
    await store.aclose()
    return values


@pytest.fixture
def path(tmp_path):
    return tmp_path / "folder" / "c.sqlite"


def test_a_key_depends_on_every_part_and_on_nothing_else():
    assert cache_key("8b", {"a": 1, "b": 2}) == cache_key("8b", {"b": 2, "a": 1})
    keys = {cache_key(*parts) for parts in (("a", "b"), ("ab",), ("a", ["b"]), ("b", "a"), ("a", "b", None), ("a", 1))}
    assert len(keys) == 6


@pytest.mark.parametrize("content", [None, b"no database at all, but long enough to look at" * 100, b""])
async def test_equal_calls_at_the_same_time_are_one_whatever_the_file_holds(path, content):
    if content is not None:
        path.parent.mkdir()
        path.write_bytes(content)
    store, ask = AnswerStore(path), asker(delay_s=0.05)
    cache = cache_of(store)
    assert await asyncio.gather(*(cache.get("k", ask) for _ in range(50))) == ["answer"] * 50
    await store.aclose()
    assert (ask.times, cache.hits) == (1, 49)


async def test_an_answer_outlives_the_process_for_its_owner_alone_as_json_under_a_hash(path):
    key = cache_key("a customer's words")
    await put(AnswerStore(path), {key: {"text": "价格", "scores": [1, None]}})
    assert await got(pickle.loads(pickle.dumps(AnswerStore(path))), key) == [{"text": "价格", "scores": [1, None]}]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with contextlib.closing(sqlite3.connect(path)) as file:
        ((stored_key, value),) = file.execute("SELECT key, value FROM kept").fetchall()
    assert (len(stored_key), json.loads(value)["scores"]) == (64, [1, None])


async def test_a_failure_is_not_kept_and_reaches_everybody_who_waits(path):
    store, ask = AnswerStore(path), asker(fails=1, delay_s=0.02)
    cache = cache_of(store)
    failed = await asyncio.gather(*(cache.get("k", ask) for _ in range(5)), return_exceptions=True)
    assert [type(result) for result in failed] == [ServiceUnavailable] * 5
    assert await cache.get("k", ask) == "answer"
    await store.aclose()
    assert (ask.times, cache.hits) == (2, 0)


async def test_one_that_is_cut_off_does_not_cancel_the_others():
    cache, ask = cache_of(AnswerStore()), asker(delay_s=0.1)
    first, second = (asyncio.create_task(cache.get("k", ask)) for _ in range(2))
    await asyncio.sleep(0.02)
    first.cancel()
    assert (await second, ask.times) == ("answer", 1)


async def slowest_turn(over):
    """The longest that the event loop gave nobody else a turn, in seconds, until `over` is done."""
    longest, last = 0.0, time.perf_counter()
    while not over.done():
        await asyncio.sleep(0.001)
        now = time.perf_counter()
        longest, last = max(longest, now - last), now
    return longest


@pytest.mark.alone
async def test_a_file_that_another_process_has_locked_is_as_an_empty_one_and_holds_nobody(path, caplog, monkeypatch):
    monkeypatch.setattr(module, "LOCK_PAUSE_S", 0.3)
    await put(AnswerStore(path), {"k0": "from the file"})
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    store, ask = AnswerStore(path), asker("asked for")
    cache = cache_of(store)
    began = time.perf_counter()
    asking = asyncio.gather(*(cache.get(f"k{index}", ask) for index in range(12)))
    longest = await slowest_turn(asking)
    seconds = time.perf_counter() - began
    assert await asking == ["asked for"] * 12
    assert await cache.get("k12", ask) == "asked for"
    other.execute("COMMIT")
    await asyncio.sleep(0.3)  # it is back
    await store.aclose()
    other.close()
    assert await got(AnswerStore(path), *(f"k{index}" for index in range(13))) == ["asked for"] * 13
    assert caplog.text.count("database is locked") == 1
    check_seconds(longest, most=0.05, what="the loop stood still")
    check_seconds(seconds, most=0.5)  # one patience of 0.1 s for all of them


async def test_a_file_that_can_not_be_made_is_said_once_and_used_again_once_it_is_mended(path, caplog, monkeypatch):
    monkeypatch.setattr(module, "FAULT_PAUSE_S", 0.2)
    path.mkdir(parents=True)
    store, ask = AnswerStore(path), asker()
    cache = cache_of(store)
    assert [await cache.get(f"k{index}", ask) for index in (0, 1, 2, 0, 1)] == ["answer"] * 5
    assert ask.times == 3
    path.rmdir()
    await asyncio.sleep(0.2)
    assert await cache.get("k3", ask) == "answer"
    await store.aclose()
    assert await got(AnswerStore(path), *(f"k{index}" for index in range(4))) == ["answer"] * 4
    assert caplog.text.count("counts as empty") == 1


async def test_a_disk_that_does_not_answer_is_waited_for_once(path, monkeypatch):
    monkeypatch.setattr(module, "LOOK_UP_TIMEOUT_S", 0.2)
    monkeypatch.setattr(module, "LAST_WRITE_TIMEOUT_S", 0.1)
    answers = threading.Event()
    monkeypatch.setattr(AnswerStore, "_connect", lambda store: answers.wait() and sqlite3.connect(":memory:"))
    began = time.perf_counter()
    store, ask = AnswerStore(path), asker()
    assert [await cache_of(store).get(str(number), ask) for number in range(20)] == ["answer"] * 20
    await store.aclose()
    seconds = time.perf_counter() - began
    answers.set()
    check_seconds(seconds, least=0.2, most=1.0)  # not 20 times


WRITER = """
import asyncio, sys
from pathlib import Path
from salesrl_trl.judged.cache import AnswerStore

async def main():
    store, number = AnswerStore(Path(sys.argv[1])), 0
    while True:
        store.put(f"{sys.argv[2]}{number}", ["x" * 2000, number])
        await asyncio.sleep(0.001)
        number += 1
        if number % 100 == 0:
            print(number, flush=True)

asyncio.run(main())
"""


async def test_processes_that_share_a_file_leave_it_whole_when_they_are_killed(path):
    """And all that is more than a second old is in it, so that it is not paid for again."""
    command = [sys.executable, "-c", WRITER, str(path)]
    writers = {name: subprocess.Popen([*command, name], stdout=subprocess.PIPE) for name in "ab"}
    for writer in writers.values():
        writer.stdout.readline()
    time.sleep(1.0)
    for writer in writers.values():
        os.kill(writer.pid, signal.SIGKILL)
        writer.communicate()
    with contextlib.closing(sqlite3.connect(path)) as file:
        assert file.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    keys = [f"{name}{number}" for name in writers for number in range(100)]
    assert await got(AnswerStore(path), *keys) == [["x" * 2000, number] for _ in writers for number in range(100)]


UNCLOSED = """
import asyncio, sys
from pathlib import Path
from salesrl_trl.judged.cache import AnswerStore
store = AnswerStore(Path(sys.argv[1]))
async def main():
    store.put("k", 1)
    await store.get("other")
asyncio.run(main())
"""


def test_a_store_that_nobody_closed_holds_up_no_process(path):
    subprocess.run([sys.executable, "-c", UNCLOSED, str(path)], check=True, timeout=60)


async def test_memory_holds_the_latest_only():
    store = AnswerStore(most=2)
    await put(store, {"k0": 0, "k1": 1, "k2": 2})
    assert await got(store, "k0", "k1", "k2") == [None, 1, 2]


async def test_a_store_that_keeps_nothing_still_shares_what_is_under_way():
    cache, ask = cache_of(AnswerStore(most=0)), asker(delay_s=0.02)
    await asyncio.gather(*(cache.get("k", ask) for _ in range(5)))
    await cache.get("k", ask)
    assert ask.times == 2


def test_an_answer_of_a_users_own_client_is_kept_without_a_warning_that_quotes_it():
    answer = Answer(text="a", passages=[Passage(id=1, text="a customer's words", score=1.0)], took_ms=1.0)
    with warnings.catch_warnings(action="error"):
        assert kept(answer)["passages"][0]["text"] == "a customer's words"
