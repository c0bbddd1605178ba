"""The cache: what is kept, what is shared, and what no failure may do."""

import asyncio
import contextlib
import json
import sqlite3
import stat
import threading
import time

import pytest
from support import virtual_time
from support.seconds import check_seconds

from salesrl_trl.errors import ServiceUnavailable
from salesrl_trl.reward.answer_file import AnswerFile
from salesrl_trl.reward.answer_store import AnswerStore
from salesrl_trl.reward.cache import Memo, cache_key
from salesrl_trl.reward.service.deadline import deadline, remaining_s


@pytest.fixture(autouse=True)
def _writes_at_once(monkeypatch):
    monkeypatch.setattr("salesrl_trl.reward.answer_store.WRITE_AFTER_S", 0.0)


def memo(store):
    return Memo(store, lambda value: value, lambda value: value)


def asker(answer="answer", *, fails=0, delay_s=0.0):
    """Counts how often it was asked."""

    async def ask():
        ask.times += 1
        await asyncio.sleep(delay_s)
        if ask.times <= fails:
            raise ServiceUnavailable("down")
        return answer

    ask.times = 0
    return ask


def kept(store, key):
    return asyncio.run(store.get(key))


def test_a_key_depends_on_every_part_and_on_nothing_else():
    assert cache_key("8b", {"a": 1, "b": 2}) == cache_key("8b", {"b": 2, "a": 1})
    keys = {cache_key(*parts) for parts in (("a", "b"), ("ab",), ("a", ["b"]), ("b", "a"), ("a", "b", None), ("a", 1))}
    assert len(keys) == 6


def test_equal_calls_at_the_same_time_are_one(tmp_path):
    ask = asyncio.run(_many(AnswerStore(tmp_path / "c.sqlite"), 50, asker(delay_s=0.05)))
    assert ask.times == 1


async def _many(store, count, ask):
    keep = memo(store)
    assert await asyncio.gather(*(keep.get("k", ask) for _ in range(count))) == ["answer"] * count
    assert keep.hits == count - 1
    return ask


def test_an_answer_outlives_the_process(tmp_path):
    path = tmp_path / "folder" / "c.sqlite"
    first = AnswerStore(path)
    first.put("k", {"text": "价格"})
    first.close()
    assert kept(AnswerStore(path), "k") == {"text": "价格"}
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_values_are_json_and_keys_are_hashes(tmp_path):
    path = tmp_path / "c.sqlite"
    store = AnswerStore(path)
    store.put(cache_key("a customer's words"), {"a": [1, None]})
    store.close()
    ((key, value),) = sqlite3.connect(path).execute("SELECT key, value FROM answers").fetchall()
    assert (len(key), json.loads(value.partition(" ")[2])) == (64, {"a": [1, None]})  # behind its checksum


@pytest.mark.parametrize(
    ("change", "asked"),
    [
        ("replace(value, '0.75', '0.95')", 1),  # in [0, 1] as before
        ("replace(value, substr(value, 1, 1), 'g')", 1),  # a checksum that is none
        ("(SELECT value FROM answers WHERE key = 'another')", 1),
        ("value", 0),
        ("'0.75'", 0),  # as an earlier version wrote it
    ],
)
def test_a_value_that_has_changed_on_the_disk_is_asked_for_again(tmp_path, change, asked):
    path = tmp_path / "c.sqlite"
    store = AnswerStore(path)
    store.put("k", 0.75)
    store.put("another", 0.5)
    store.close()
    with contextlib.closing(sqlite3.connect(path)) as file, file:
        file.execute(f"UPDATE answers SET value = {change} WHERE key = 'k'")
    ask = asker(0.75)
    assert asyncio.run(memo(AnswerStore(path)).get("k", ask)) == 0.75
    assert ask.times == asked


def test_a_failure_is_not_kept(tmp_path):
    async def run():
        keep, ask = memo(AnswerStore(tmp_path / "c.sqlite")), asker(fails=1)
        with pytest.raises(ServiceUnavailable):
            await keep.get("k", ask)
        return await keep.get("k", ask), ask.times

    assert asyncio.run(run()) == ("answer", 2)


def test_a_failure_reaches_everybody_who_waits():
    async def run():
        keep = memo(AnswerStore())
        ask = asyncio.gather(*(keep.get("k", asker(fails=9, delay_s=0.02)) for _ in range(5)), return_exceptions=True)
        return await ask

    assert [type(result) for result in asyncio.run(run())] == [ServiceUnavailable] * 5


@pytest.mark.parametrize("out_of_time", [True, False])
def test_a_failure_for_want_of_time_alone_is_asked_again_by_who_has_more(out_of_time):
    async def run():
        keep, times = memo(AnswerStore()), []

        async def ask():
            times.append(remaining_s())
            await asyncio.sleep(0.02)
            if len(times) == 1:
                error = ServiceUnavailable("come back in 5 s")
                error.out_of_time = out_of_time
                raise error
            return "answer"

        with deadline(3.0):
            first = asyncio.create_task(keep.get("k", ask))
        with deadline(60.0):
            second = asyncio.create_task(keep.get("k", ask))
        results = await asyncio.gather(first, second, return_exceptions=True)
        return [type(result) for result in results], len(times)

    failed = ServiceUnavailable
    assert asyncio.run(run()) == (([failed, str], 2) if out_of_time else ([failed, failed], 1))


def test_one_that_is_cut_off_does_not_cancel_the_others():
    async def run():
        keep, ask = memo(AnswerStore()), asker(delay_s=0.1)
        first, second = (asyncio.create_task(keep.get("k", ask)) for _ in range(2))
        await asyncio.sleep(0.02)
        first.cancel()
        return await second, ask.times

    assert asyncio.run(run()) == ("answer", 1)


@pytest.mark.parametrize("content", [b"no database at all, but long enough to look at" * 100, b""])
def test_a_broken_file_is_as_good_as_none(tmp_path, caplog, content):
    path = tmp_path / "c.sqlite"
    path.write_bytes(content)
    ask = asyncio.run(_many(AnswerStore(path), 3, asker()))
    assert ask.times == 1


def test_a_file_that_cannot_be_written_is_said_once_and_answers_go_on(tmp_path, caplog):
    folder = tmp_path / "file"
    folder.write_text("not a folder")
    store = AnswerStore(folder / "c.sqlite")
    for index in range(3):
        store.put(f"k{index}", index)
    assert [kept(store, f"k{index}") for index in range(3)] == [0, 1, 2]
    store.close()
    assert caplog.text.count("Delete the file, or see to its folder.") + caplog.text.count("can't be written") == 1


async def slowest_turn(over):
    """The longest that the event loop gave nobody else a turn, in seconds, until `over` is done."""
    longest, last = 0.0, time.perf_counter()
    while not over.done():
        await asyncio.sleep(0.001)
        now = time.perf_counter()
        longest, last = max(longest, now - last), now
    return longest


@pytest.mark.alone
def test_a_file_that_another_process_has_locked_is_as_an_empty_one_and_holds_nobody(tmp_path, caplog):
    path = tmp_path / "c.sqlite"
    filled = AnswerStore(path)
    filled.put("k0", "from the file")
    filled.close()
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")

    async def run():
        store, ask = AnswerStore(path), asker("asked for")
        keep = memo(store)
        began = time.perf_counter()
        asking = asyncio.gather(*(keep.get(f"k{index}", ask) for index in range(12)))
        longest = await slowest_turn(asking)
        seconds = time.perf_counter() - began
        assert await asking == ["asked for"] * 12
        other.execute("COMMIT")
        await asyncio.to_thread(store.close)
        return longest, seconds

    longest, seconds = asyncio.run(run())
    assert [kept(AnswerStore(path), f"k{index}") for index in range(12)] == ["asked for"] * 12
    assert caplog.text.count("is locked by another process") == 1
    check_seconds(longest, most=0.05, what="the loop stood still")
    check_seconds(seconds, most=0.5)  # one patience of 0.1 s for all of them


def test_a_disk_that_does_not_answer_is_waited_for_once(tmp_path, monkeypatch):
    monkeypatch.setattr("salesrl_trl.reward.answer_store.LOOK_UP_TIMEOUT_S", 0.2)
    store, answers = AnswerStore(tmp_path / "c.sqlite"), threading.Event()
    monkeypatch.setattr(store._file, "_opened", lambda: answers.wait() and sqlite3.connect(":memory:"))

    async def run():
        keep, ask = memo(store), asker()
        began = time.perf_counter()
        for index in range(20):
            assert await keep.get(f"k{index}", ask) == "answer"
        seconds = time.perf_counter() - began
        answers.set()
        return seconds

    check_seconds(asyncio.run(run()), least=0.2, most=1.0)  # not 20 times


def test_a_full_disk_is_told_once_and_what_is_in_the_file_is_read_on(tmp_path, caplog, monkeypatch):
    path = tmp_path / "c.sqlite"
    store = AnswerStore(path)
    store.put("k0", "before")
    store.close()
    opened = AnswerFile._opened

    def with_little_space(file):
        connection = opened(file)
        connection.execute("PRAGMA max_page_count = 4")  # SQLite's own SQLITE_FULL beyond
        return connection

    monkeypatch.setattr(AnswerFile, "_opened", with_little_space)
    for index in range(3):
        store.put(f"k{index + 1}", "x" * 100_000)
    store.close()
    assert [len(kept(store, f"k{index}")) for index in range(4)] == [6, 100_000, 100_000, 100_000]
    assert caplog.text.count("can't be written: database or disk is full") == 1
    assert "rollback" not in caplog.text


def test_what_another_version_wrote_is_asked_for_again(tmp_path):
    store = AnswerStore(tmp_path / "c.sqlite")
    store.put("k", {"other": "form"})
    keep = Memo(store, lambda value: {"text": value}, lambda value: value["text"])
    ask = asker()
    assert asyncio.run(keep.get("k", ask)) == "answer"
    assert ask.times == 1
    assert kept(store, "k") == {"text": "answer"}


def test_a_value_is_in_the_file_within_a_second_of_its_coming(tmp_path, monkeypatch):
    """So that it is not paid for again after a kill."""
    monkeypatch.undo()
    path = tmp_path / "c.sqlite"
    store = AnswerStore(path)
    for value in ("one", "two"):
        store.put(value, value)
        time.sleep(1.0)
        assert kept(AnswerStore(path), value) == value
    store.put("three", 3)
    store.close()
    assert kept(AnswerStore(path), "three") == 3


def test_two_processes_worth_of_stores_share_a_file(tmp_path):
    first, second = AnswerStore(tmp_path / "c.sqlite"), AnswerStore(tmp_path / "c.sqlite")
    for index in range(200):
        (first, second)[index % 2].put(f"k{index}", index)
    for store in (first, second):
        store.close()
    assert all(kept(store, f"k{index}") == index for store in (first, second) for index in range(200))


def test_memory_holds_the_latest_only():
    store = AnswerStore(keep=2)
    for index in range(4):
        store.put(f"k{index}", index)
    assert [kept(store, f"k{index}") for index in range(4)] == [None, None, 2, 3]


def test_a_store_that_keeps_nothing_still_shares_what_is_under_way():
    async def run():
        keep, ask = memo(AnswerStore(keep=0)), asker(delay_s=0.02)
        await asyncio.gather(*(keep.get("k", ask) for _ in range(5)))
        await keep.get("k", ask)
        return ask.times

    assert asyncio.run(run()) == 2


def test_closing_with_a_call_under_way_that_will_not_end_does_not_hang():
    async def run():
        async def stubborn():
            while True:
                try:
                    await asyncio.sleep(30)
                except asyncio.CancelledError:
                    if stubborn.over:
                        raise

        stubborn.over = False
        keep = memo(AnswerStore())
        task = asyncio.create_task(keep.get("k", stubborn))
        await asyncio.sleep(0.01)
        await keep.aclose()
        stubborn.over = True
        task.cancel()

    virtual_time.run(asyncio.wait_for(run(), 5))
