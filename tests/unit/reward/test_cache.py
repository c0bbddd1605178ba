"""The cache: what is kept, what is shared, and what no failure may do."""

import asyncio
import json
import sqlite3
import stat

import pytest

from salesrl_trl.errors import ServiceUnavailable
from salesrl_trl.reward.cache import AnswerStore, Memo, cache_key
from salesrl_trl.reward.deadline import deadline, remaining_s


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
    assert AnswerStore(path).get("k") == {"text": "价格"}
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_values_are_json_and_keys_are_hashes(tmp_path):
    path = tmp_path / "c.sqlite"
    store = AnswerStore(path)
    store.put(cache_key("a customer's words"), {"a": [1, None]})
    store.close()
    ((key, value),) = sqlite3.connect(path).execute("SELECT key, value FROM answers").fetchall()
    assert (len(key), json.loads(value)) == (64, {"a": [1, None]})


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
        store.flush()
    assert [store.get(f"k{index}") for index in range(3)] == [0, 1, 2]
    assert caplog.text.count("is left aside") == 1


def test_what_another_version_wrote_is_asked_for_again(tmp_path):
    store = AnswerStore(tmp_path / "c.sqlite")
    store.put("k", {"other": "form"})
    keep = Memo(store, lambda value: {"text": value}, lambda value: value["text"])
    ask = asker()
    assert asyncio.run(keep.get("k", ask)) == "answer"
    assert ask.times == 1
    assert store.get("k") == {"text": "answer"}


def test_two_processes_worth_of_stores_share_a_file(tmp_path):
    first, second = AnswerStore(tmp_path / "c.sqlite"), AnswerStore(tmp_path / "c.sqlite")
    for index in range(200):
        (first, second)[index % 2].put(f"k{index}", index)
        (first, second)[index % 2].flush()
    assert all(store.get(f"k{index}") == index for store in (first, second) for index in range(200))


def test_memory_holds_the_latest_only():
    store = AnswerStore(keep=2)
    for index in range(4):
        store.put(f"k{index}", index)
    assert [store.get(f"k{index}") for index in range(4)] == [None, None, 2, 3]


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

    asyncio.run(asyncio.wait_for(run(), 5))
