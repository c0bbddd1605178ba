"""The record: what goes in comes back, whole after a kill, bounded, filtered, and never waited for."""

import logging
import signal
import sqlite3
import subprocess
import sys
import threading
import zlib
from contextlib import closing

import pytest

from salesrl_trl.errors import ConfigError
from salesrl_trl.recording import writer
from salesrl_trl.recording.reader import digest_of, open_record, recorded
from salesrl_trl.recording.schema import TABLES, record_file, record_files
from salesrl_trl.recording.trail import Call, Judged, Trail
from salesrl_trl.recording.writer import Batch, Entry, Recorder

PROMPT = [{"role": "user", "content": "客户: 多少钱? I'm a nurse."}]
ANSWER = {"text": "It costs 5980 yuan.", "passages": [{"id": "d1", "text": "price", "score": 0.5}], "took_ms": 1.5}


def call(**given):
    fields = {"service": "rag_8b", "path": "/v1/rag/8b", "time": 1.0, "seconds": 0.25, "failure": ""}
    return Call(**{**fields, "request": b'{"query": "price"}', "answer": b'{"answer": "5980"}', **given})


def trail():
    judged = {"fairness": Judged(candidate=0.75, reference=0.5, reason="说得好", provider="judge")}
    calls = [call(failure="rag_8b_timeout", answer=None), call()]
    return Trail(action={"rewritten_query": "price"}, answer=ANSWER, reference=ANSWER, verdicts=judged, calls=calls)


def entry(place=0, text="an action", reward=0.75, **given):
    fields = {
        "row": "r1", "branch": "fairness", "prompt": PROMPT, "text": text, "tokens": 12, "place": place,
        "prompt_group": place // 2, "outcome": "ok" if reward is not None else "infra", "reason": "", "reward": reward,
        "reference_reward": 0.5, "parts": {"judge": reward}, "functions": {}, "seconds": {"judge": 0.1},
        "trail": trail(),
    }  # fmt: skip
    return Entry(**{**fields, **given})


def batch(step=1, entries=None, mode="train", **given):
    entries = [entry()] if entries is None else entries
    return Batch(
        step=step, mode=mode, number=step, staleness=0, entries=entries,
        advantages=lambda: [0.5] * len(entries), **given,
    )  # fmt: skip


def write(folder, batches, **given):
    recorder = Recorder(record_file(folder, 0), **given)
    for each in batches:
        recorder.record(each)
    recorder.close()
    return list(recorded(folder))


def rows(folder, query):
    with closing(open_record(record_file(folder, 0))) as file:
        return file.execute(query).fetchall()


def everything(folder):
    """All texts and all columns of a record, as one text."""
    tables = ("meta", "completions", "verdicts", "calls")
    plain = [str(row) for table in tables for row in rows(folder, f"SELECT * FROM {table}")]
    return "\n".join([*plain, *(zlib.decompress(body).decode() for [body] in rows(folder, "SELECT body FROM texts"))])


def test_a_completion_comes_back_with_its_whole_way(tmp_path):
    [found] = write(tmp_path, [batch(step=3)])
    given = entry()
    for name in ("row", "branch", "text", "outcome", "reason", "reward", "reference_reward", "parts", "seconds"):
        assert getattr(found, name) == getattr(given, name)
    assert (found.step, found.mode, found.advantage) == (3, "train", 0.5)
    assert (found.action, found.answer, found.reference) == (trail().action, ANSWER, ANSWER)
    assert found.verdicts == trail().verdicts
    assert found.digest == digest_of(PROMPT, "an action")
    assert rows(tmp_path, "SELECT service, seconds, failure FROM calls ORDER BY id") == [
        ("rag_8b", 0.25, "rag_8b_timeout"),
        ("rag_8b", 0.25, ""),
    ]


def test_texts_that_repeat_are_kept_once(tmp_path):
    write(tmp_path, [batch(step=step, entries=[entry(place) for place in range(4)]) for step in (1, 2)])
    assert rows(tmp_path, "SELECT count(*) FROM completions") == [(8,)]
    assert rows(tmp_path, "SELECT count(*) FROM texts") == [(4,)]  # prompt, answer, and a call's request and answer


def test_the_filter_sees_every_text(tmp_path):
    write(
        tmp_path,
        [batch(entries=[entry(text="Wang: price")], calls=[call(request=b"Wang")])],
        clean=lambda text: (
            text.replace("nurse", "***").replace("5980", "***").replace("Wang", "***").replace("好", "*")
        ),
    )
    kept = everything(tmp_path)
    assert "***" in kept
    for secret in ("nurse", "5980", "Wang", "好"):
        assert secret not in kept


def test_whole_groups_are_kept_and_other_ones_at_each_step(tmp_path):
    batches = [batch(step=step, entries=[entry(place) for place in range(8)]) for step in range(1, 5)]
    write(tmp_path, batches, keep=2)
    kept = rows(tmp_path, "SELECT step, group_concat(place), min(prompt_group), max(prompt_group) FROM completions "
                          "GROUP BY step")  # fmt: skip
    assert [first == last for *_, first, last in kept] == [True] * 4
    assert [len(places.split(",")) for _, places, *_ in kept] == [2] * 4
    assert len({places for _, places, *_ in kept}) == 4


def test_a_full_file_drops_its_oldest_steps_and_says_so_once(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(writer, "WAITING_BATCHES", 20)

    def long(step):
        own = Trail(answer={"text": "".join(chr(19968 + (step * 7919 + i * 104729) % 20000) for i in range(20_000))})
        return batch(step=step, entries=[entry(trail=own)])

    limit = 300_000
    found = write(tmp_path, map(long, range(1, 21)), most_bytes=limit)
    steps = [each.step for each in found]
    assert steps == list(range(steps[0], 21))
    assert 1 < steps[0] < 20
    assert record_file(tmp_path, 0).stat().st_size < 2 * limit
    [line] = [each.message for each in caplog.records if "oldest" in each.message]
    assert "record_gib" in line
    assert rows(tmp_path, "SELECT value FROM meta WHERE name = 'dropped_up_to_step'") == [(str(steps[0] - 1),)]


def test_a_run_that_goes_on_replaces_the_steps_that_it_takes_again(tmp_path):
    write(tmp_path, [batch(step=step) for step in (1, 2, 3)])
    found = write(tmp_path, [batch(step=3, entries=[entry(text="again")])], goes_on=True)
    assert [(each.step, each.text) for each in found] == [(1, "an action"), (2, "an action"), (3, "again")]
    assert [each.step for each in write(tmp_path, [batch(step=1)])] == [1]  # a new run


def test_after_a_kill_each_batch_is_there_or_not(tmp_path):
    program = (
        "import sys, itertools, pathlib, time; sys.path[:0] = sys.argv[2:]\n"
        "from test_writer import batch, entry, Recorder, record_file\n"
        "recorder = Recorder(record_file(pathlib.Path(sys.argv[1]), 0))\n"
        "for step in itertools.count(1):\n"
        "    recorder.record(batch(step, [entry(n) for n in range(16)]))\n"
        "    print(step, flush=True)\n"
        "    time.sleep(0.003)\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path), __file__.rpartition("/")[0], *sys.path]
    for lines in (60, 71, 83):
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
            for _, line in zip(range(lines), child.stdout, strict=False):
                assert line
            child.send_signal(signal.SIGKILL)
        with closing(sqlite3.connect(record_file(tmp_path, 0))) as file:
            assert file.execute("PRAGMA integrity_check").fetchone() == ("ok",)
            sizes = file.execute("SELECT count(*) FROM completions GROUP BY step").fetchall()
        assert sizes
        assert set(sizes) == {(16,)}


def test_a_disk_that_does_not_take_it_ends_the_record_and_not_the_run(tmp_path, caplog):
    (tmp_path / "record").write_text("a file where the folder should be")
    recorder = Recorder(record_file(tmp_path, 0))
    for step in range(1, 60):
        recorder.record(batch(step))
    recorder.close()
    [line] = [
        each.message for each in caplog.records if each.levelno == logging.WARNING and "can't be" in each.message
    ]
    assert "Training goes on without" in line


def test_a_filter_that_fails_ends_the_record_without_a_word_of_the_text(tmp_path, caplog):
    def clean(text):
        raise ValueError(text)

    assert write(tmp_path, [batch()], clean=clean) == []
    assert "ValueError" in caplog.text
    assert "action" not in caplog.text


def test_a_prompt_may_hold_a_picture(tmp_path):
    picture = {"role": "user", "content": [{"type": "image", "image": object()}]}
    [found] = write(tmp_path, [batch(entries=[entry(prompt=[picture])])])
    assert found.digest == digest_of([picture], found.text)


def test_a_slow_disk_is_not_waited_for(tmp_path, caplog, monkeypatch):
    freed = threading.Event()
    opened = writer.opened
    monkeypatch.setattr(writer, "opened", lambda *given, **named: (freed.wait(), opened(*given, **named))[1])
    recorder = Recorder(record_file(tmp_path, 0))
    for step in range(1, 40):
        recorder.record(batch(step))
    freed.set()
    recorder.close()
    kept = [each.step for each in recorded(tmp_path)]
    assert kept == list(range(1, len(kept) + 1))
    assert f"{39 - len(kept)} batches are not in" in caplog.text
    assert len(kept) >= writer.WAITING_BATCHES


def test_a_record_of_another_version_or_none_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="has no record"):
        list(recorded(tmp_path))
    path = record_file(tmp_path, 0)
    path.parent.mkdir()
    with closing(sqlite3.connect(path)) as file:
        file.executescript(f"{TABLES} PRAGMA user_version = 99;")
    assert record_files(tmp_path) == [path]
    with pytest.raises(ConfigError, match="version 99"):
        list(recorded(tmp_path))
