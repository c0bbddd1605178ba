"""The record: what goes in comes back, whole after a kill, bounded, filtered, and never waited for."""

import logging
import os
import random
import re
import signal
import sqlite3
import stat
import subprocess
import sys
import time
import zlib
from collections import Counter
from contextlib import closing
from dataclasses import replace
from functools import partial
from itertools import islice

import pytest
from support.recordings import ANSWER, PROMPT, batch, call, entry, notes, write
from support.seconds import until

from salesrl_trl.errors import ConfigError
from salesrl_trl.record import writer
from salesrl_trl.record.reader import TABLES, digest_of, open_record, record_file, record_files, recorded, run_of
from salesrl_trl.record.writer import Batch, Recorder
from salesrl_trl.telemetry.completion_record import CompletionRecord, Judged


def rows(folder, query):
    with closing(open_record(record_file(folder, 0))) as file:
        return [tuple(row) for row in file.execute(query)]


def everything(folder):
    tables = ("meta", "completions", "verdicts", "calls")
    plain = [str(row) for table in tables for row in rows(folder, f"SELECT * FROM {table}")]
    return "\n".join([*plain, *(zlib.decompress(body).decode() for [body] in rows(folder, "SELECT body FROM texts"))])


def test_a_completion_comes_back_with_its_whole_way(tmp_path):
    [found] = write(tmp_path, [batch(step=3)])
    given = entry()
    for name in ("row", "branch", "text"):
        assert getattr(found, name) == getattr(given, name)
    assert (found.outcome, found.reason, found.reward, found.reference_reward) == ("ok", "", 0.75, 0.5)
    assert (found.parts, found.seconds) == (given.reward.components, given.reward.seconds)
    assert (found.step, found.mode, found.advantage) == (3, "train", 0.5)
    assert (found.action, found.answer, found.reference) == (notes().action, ANSWER, ANSWER)
    assert found.verdicts == notes().verdicts
    assert found.digest == digest_of(PROMPT, "an action")
    assert rows(tmp_path, "SELECT service, seconds, failure FROM calls ORDER BY id") == [
        ("rag_8b", 0.25, "rag_8b_timeout"),
        ("rag_8b", 0.25, ""),
    ]


def test_the_filter_sees_every_text(tmp_path):
    secrets = re.compile("nurse|5980|Wang|好")
    given = batch(entries=[entry(text="Wang: price")], calls=[call(request=b"Wang")])
    write(tmp_path, [given], clean=partial(secrets.sub, "***"))
    kept = everything(tmp_path)
    assert "***" in kept and not secrets.search(kept)


def steps_of(found):
    return [(each.step, each.mode, each.text) for each in found]


def test_a_run_that_goes_on_replaces_the_steps_that_it_takes_again(tmp_path):
    ahead = [call(time=time.time()) for _ in range(4)]
    first = [batch(step, calls=[replace(ahead[step], time=float(step))], time=float(step)) for step in (1, 2, 3)]
    write(tmp_path, [*first[:2], batch(2, mode="eval", time=2.5), first[2], batch(3, mode="eval", time=3.5)])
    # from an older checkpoint: later steps have not happened, even if none is trained on again
    assert steps_of(write(tmp_path, [], after=2)) == steps_of(recorded(tmp_path))
    again = [batch(2, [entry(text="evaluated again")], mode="eval"), batch(3, [entry(text="again")])]
    assert steps_of(write(tmp_path, again, after=2)) == [
        (1, "train", "an action"),
        (2, "train", "an action"),
        (2, "eval", "evaluated again"),
        (3, "train", "again"),
    ]
    assert rows(tmp_path, "SELECT time FROM calls WHERE completion IS NULL") == [(1.0,), (2.0,)]
    assert [each.step for each in write(tmp_path, [batch(step=1)])] == [1]  # a new run


def test_what_ranks_of_another_run_wrote_is_left_out_and_told_once(tmp_path, caplog):
    """Four processes, then a new run of two, then a resume on one and on four."""

    def run(name, ranks, steps, **given):
        gone = [record_file(tmp_path, rank) for rank in range(ranks, 4)] if given else []
        for rank in range(ranks):
            with closing(Recorder(record_file(tmp_path, rank), meta={"run": name}, others=gone, **given)) as recorder:
                for step in steps:
                    recorder.record(batch(step, [entry(text=f"{name} {rank}")]))
        return Counter((each.text, each.step) for each in recorded(tmp_path))

    assert len(run("a", 4, [1, 2, 3])) == 12
    (tmp_path / "record" / "rank-0-backup.sqlite").write_bytes(b"a copy that somebody made")
    assert run("b", 2, [1, 2, 3]) == Counter((f"b {rank}", step) for rank in range(2) for step in (1, 2, 3))
    kept = [record_file(tmp_path, rank).with_stem(f"rank-{rank}-1") for rank in range(2)]
    assert [{each.text for each in recorded(path)} for path in kept] == [{"a 0"}, {"a 1"}]  # the earlier run's
    [line] = [each.message for each in caplog.records]
    assert "rank-2.sqlite, rank-3.sqlite" in line
    # of rank 1 the steps up to the checkpoint are the run's, and the third is not
    shared = {(f"b {rank}", step): 1 for rank in range(2) for step in (1, 2)}
    assert run("b", 1, [3], after=2) == Counter({**shared, ("b 0", 3): 1})
    of_four = {(f"b {rank}", 4): 1 for rank in range(4)}
    assert run("b", 4, [4], after=3) == Counter({**shared, ("b 0", 3): 1, **of_four})
    assert len(caplog.records) == 1


def test_a_locked_file_is_written_when_it_is_free_and_batches_wait_within_a_bound(tmp_path, caplog):
    recorder = Recorder(record_file(tmp_path, 0), meta={"run": "a"})
    recorder.record(batch(1))
    until(lambda: run_of(record_file(tmp_path, 0)) == "a" and [*recorded(tmp_path)])
    with closing(sqlite3.connect(record_file(tmp_path, 0), isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        recorder.record(batch(2))
        until(recorder._queue.empty)
        for step in range(3, 100):
            recorder.record(batch(step))
        other.execute("COMMIT")
    recorder.close()
    # one was being written, the next ones waited, and the others are counted
    kept = [1, *range(2, 3 + writer.WAITING_BATCHES)]
    assert [each.step for each in recorded(tmp_path)] == kept
    assert f"{99 - len(kept)} batches were dropped from" in caplog.text


def test_a_full_record_drops_its_oldest_steps_whatever_fills_it_and_says_so_once(tmp_path, caplog):
    """Calls of no completion are most of the file."""
    limit, number = 400_000, 300

    def noise(size):
        return random.randbytes(size).hex()

    with closing(Recorder(record_file(tmp_path, 0), most_bytes=limit)) as recorder:
        for count in range(number):
            ahead = [call(time=time.time(), request=noise(1500).encode(), answer=noise(1500).encode())] * 2
            entries = [entry(place, text=noise(200), record=CompletionRecord()) for place in range(8)]
            until(lambda: not recorder._queue.full())
            recorder.record(batch(1 + count, entries, calls=ahead))
    assert record_file(tmp_path, 0).stat().st_size <= limit
    found = [*recorded(tmp_path)]
    # A batch takes 8 x 0.4 kB of texts, as much again for columns, and 3 kB for calls: 400 kB hold dozens of them.
    assert len(found) > 8 * 20
    [[lone]] = rows(tmp_path, "SELECT count(*) FROM calls")
    assert lone == pytest.approx(2 * len(found) / 8, abs=2)  # calls go with their batch
    dropped = rows(tmp_path, "SELECT value FROM meta WHERE name = 'dropped_up_to_step'")
    assert [each.step for each in found[::8]] == list(range(found[0].step, number + 1))
    assert dropped == [(str(found[0].step - 1),)]
    [line] = [each.message for each in caplog.records if "oldest" in each.message]
    assert "`gib` of `record`" in line


def test_a_run_may_have_any_name_and_its_record_is_its_owners_alone(tmp_path):
    folder = tmp_path / "why lr=1e-6 #2? 50%25"
    packed = record_file(folder, 0).with_name("rank-0.sqlite.gz")
    packed.parent.mkdir(parents=True, mode=0o700)
    packed.write_bytes(b"packed by its owner")
    before = os.umask(0o022)
    try:
        assert [each.step for each in write(folder, [batch()])] == [1]
    finally:
        os.umask(before)
    assert [*tmp_path.iterdir()] == [folder]
    assert packed.read_bytes() == b"packed by its owner"
    modes = {each.name: stat.S_IMODE(each.stat().st_mode) for each in (folder / "record", record_file(folder, 0))}
    assert modes == {"record": 0o700, "rank-0.sqlite": 0o600}


def test_after_a_kill_each_batch_is_there_or_not(tmp_path):
    program = (
        "import sys, itertools, pathlib, time; sys.path[:0] = sys.argv[2:]\n"
        "from support.recordings import Recorder, batch, entry, record_file\n"
        "recorder = Recorder(record_file(pathlib.Path(sys.argv[1]), 0))\n"
        "for step in itertools.count(1):\n"
        "    recorder.record(batch(step, [entry(n) for n in range(16)]))\n"
        "    print(step, flush=True)\n"
        "    time.sleep(0.003)\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path), *sys.path]
    for lines in (60, 71):
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
            assert len([*islice(child.stdout, lines)]) == lines
            child.send_signal(signal.SIGKILL)
        with closing(sqlite3.connect(record_file(tmp_path, 0))) as file:
            assert file.execute("PRAGMA integrity_check").fetchone() == ("ok",)
            sizes = file.execute("SELECT count(*) FROM completions GROUP BY step").fetchall()
        assert set(sizes) == {(16,)}


def test_a_disk_that_does_not_take_it_ends_the_record_and_not_the_run(tmp_path, caplog):
    (tmp_path / "record").write_text("a file where the folder should be")
    recorder = Recorder(record_file(tmp_path, 0))
    for step in range(1, 60):
        recorder.record(batch(step))
    recorder.close()
    warned = [each.message for each in caplog.records if each.levelno == logging.WARNING]
    [line] = [each for each in warned if "can't be" in each]
    assert "Training continues without" in line


def test_what_can_not_be_written_is_left_out_and_told_once_without_a_word_of_it(tmp_path, caplog):
    """A filter may fail, a number may have no place in the file, and a GPU may not give the advantages."""

    def clean(text):
        if text == "bad for the filter":
            raise ValueError(text)
        return text

    class Failing:
        def tolist(self):
            raise RuntimeError("a GPU")

    entries = [entry(0), entry(1, text="bad for the filter"), entry(2, tokens=2**64)]
    lost = Batch(step=2, mode="train", number=2, entries=[entry()], advantages=Failing())
    caplog.set_level(logging.WARNING)
    found = write(tmp_path, [batch(1, entries), lost, batch(3)], clean=clean)
    assert [(each.step, each.text) for each in found] == [(1, "an action"), (3, "an action")]
    assert rows(tmp_path, "SELECT DISTINCT completion FROM verdicts") == [(1,), (2,)]  # nothing of one that is out
    first, last = (each.message for each in caplog.records)
    assert "an entry of step 1 is dropped" in first and "ValueError" in first
    assert "3 unwritable entries" in last  # two of the first batch, and the second batch's
    assert "bad for" not in caplog.text


def test_half_a_surrogate_pair_leaves_no_hole_in_the_record(tmp_path):
    """Whatever a class of a user's own returns: a judge's words, an answer, a reason."""
    half = {"text": "half \ud83d"}
    told = CompletionRecord(action=half, answer=half, verdicts={"\ud83d": Judged(candidate=0.5, reason="half \ud83d")})
    odd = entry(0, "\ud83d", None, reason="\ud83d", row="\ud83d", components={"\ud83d": 1.0}, record=told)
    [found] = write(tmp_path, [batch(1, [odd])], clean=lambda text: f"{text}\ude00"[: len(text)])
    assert (found.text, found.reason, found.row, found.parts) == ("\ufffd", "\ufffd", "\ufffd", {"\ufffd": 1.0})
    assert (found.answer, found.action) == ({"text": "half \ufffd"}, {"text": "half \ufffd"})
    assert found.verdicts["\ufffd"].reason == "half \ufffd"


def test_a_record_of_another_version_or_none_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="lacks a record"):
        list(recorded(tmp_path))
    path = record_file(tmp_path, 0)
    path.parent.mkdir()
    with closing(sqlite3.connect(path)) as file:
        file.executescript(f"{TABLES} PRAGMA user_version = 99;")
    assert record_files(tmp_path) == [path]
    with pytest.raises(ConfigError, match="version 99"):
        list(recorded(tmp_path))
    write(tmp_path, [batch(step=2)], meta={"run": "a"}, after=1)  # a run that goes on keeps such a file beside its own
    assert [each.step for each in recorded(tmp_path)] == [2]
    assert len([*path.parent.glob("*.sqlite")]) == 2


@pytest.mark.parametrize(
    "damage",
    ["UPDATE completions SET parts = '{\"a\": 1'", "UPDATE texts SET body = x'00'", "DROP TABLE verdicts",
     "ALTER TABLE completions DROP COLUMN seconds"],
)  # fmt: skip
def test_a_damaged_record_is_refused_with_its_path(tmp_path, damage):
    write(tmp_path, [batch(step=1)])
    with closing(sqlite3.connect(record_file(tmp_path, 0))) as file, file:
        file.execute(damage)
    with pytest.raises(ConfigError, match=r"rank-0\.sqlite can't be read as a record"):
        list(recorded(tmp_path))
    (tmp_path / "packed.sqlite.gz").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"packed\.sqlite\.gz can't be read as a record"):
        list(recorded(tmp_path / "packed.sqlite.gz"))


def test_a_completion_is_read_without_its_prompt(tmp_path):
    write(tmp_path, [batch(step=1)])
    with closing(sqlite3.connect(record_file(tmp_path, 0))) as file, file:
        file.execute("UPDATE texts SET body = x'00' WHERE id IN (SELECT prompt FROM completions)")
    assert [each.text for each in recorded(tmp_path)] == ["an action"]
