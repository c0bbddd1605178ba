"""SQLite files of a run on a network file system lie on the local disk, and their copies at their place."""

import sqlite3
from collections import namedtuple
from contextlib import closing

import pytest
from support.recordings import batch

from salesrl_trl.ground import local_disk
from salesrl_trl.ground.local_disk import LocalFile, is_remote
from salesrl_trl.judged.cache import AnswerStore
from salesrl_trl.record.reader import record_file
from salesrl_trl.record.writer import Recorder

Mount = namedtuple("Mount", "mountpoint fstype")


@pytest.fixture
def mounted(tmp_path, monkeypatch):
    """`shared` in the test's folder is of this kind; the cache folder beside it is local."""

    def mount(kind, cache="cache"):
        mounts = [
            Mount("/", "ext4"),
            Mount(str(tmp_path / "shared"), kind),
            Mount(str(tmp_path / "shared/local"), "xfs"),
        ]
        monkeypatch.setattr("psutil.disk_partitions", lambda all: mounts)
        monkeypatch.setenv("SALESRL_CACHE_DIR", str(tmp_path / cache))
        return tmp_path / "shared/run"

    return mount


def rows(path):
    with closing(sqlite3.connect(path)) as file:
        return [row[0] for row in file.execute("SELECT * FROM t")]


def grown(place, *values):
    connection = sqlite3.connect(place.file)
    connection.execute("CREATE TABLE IF NOT EXISTS t (x)")
    connection.executemany("INSERT INTO t VALUES (?)", [(value,) for value in values])
    connection.commit()
    return connection


@pytest.mark.parametrize(
    ("kind", "remote"),
    [("nfs4", True), ("lustre", True), ("fuse.sshfs", True), ("ext4", False), ("fuse.fuse-overlayfs", False)],
)
def test_the_innermost_mount_decides(mounted, kind, remote):
    folder = mounted(kind)
    assert is_remote(folder / "not there yet") is remote
    assert is_remote(folder.parent / "local/run") is False  # a local disk mounted below
    assert is_remote(folder.parent.with_name("shared2")) is False


def test_a_copy_is_whole_resumed_from_and_newer_local_work_survives_a_kill(mounted, monkeypatch):
    path = mounted("nfs") / "a.sqlite"
    place = LocalFile(path)
    with closing(grown(place, 1)) as connection:
        place.copy(connection)
        assert not path.exists()  # it isn't time yet
        place.copy(connection, now=True)
    assert rows(path) == [1] and [each.name for each in path.parent.iterdir()] == ["a.sqlite"]
    assert path.stat().st_mode & 0o777 == 0o600
    grown(place, 2).close()  # and killed before a copy
    assert rows(LocalFile(path).file) == [1, 2]
    LocalFile(path).discard()
    assert rows(LocalFile(path).file) == [1]  # as on another machine

    monkeypatch.setattr(local_disk, "LEAST_PAUSE_S", 0.0)
    place = LocalFile(path)
    with closing(grown(place, 3)) as connection:
        place.copy(connection)
    assert rows(path) == [1, 3]


def test_without_a_local_folder_the_file_stays_and_that_is_logged(mounted, caplog):
    path = mounted("nfs", cache="shared/cache") / "a.sqlite"
    assert LocalFile(path).file == path
    assert "Set `SALESRL_CACHE_DIR` to a local folder" in caplog.text


async def test_records_and_answers_are_at_their_place_at_the_end(mounted, tmp_path, real_time):
    folder = mounted("nfs")
    with closing(Recorder(record_file(folder, 0), meta={"run": "a"})) as recorder:
        recorder.record(batch(step=3))
    with closing(sqlite3.connect(record_file(folder, 0))) as file:
        assert file.execute("PRAGMA journal_mode").fetchone() == ("delete",)
        assert file.execute("SELECT value FROM meta WHERE name = 'run'").fetchall() == [("a",)]

    async def use(keep):
        store = AnswerStore(folder / "answers.sqlite")
        found = await store.get("key")
        if keep is not None:
            store.put("key", keep)
        await store.aclose()
        return found

    assert await use({"text": "yes"}) is None
    assert not [each for each in (tmp_path / "cache/databases").rglob("*") if each.is_file()]
    assert await use(None) == {"text": "yes"}


async def test_a_share_that_fails_costs_neither_answers_nor_records_and_is_logged_once(
    mounted, monkeypatch, caplog, real_time
):
    folder = mounted("nfs")
    monkeypatch.setattr(local_disk, "LEAST_PAUSE_S", 0.0)
    monkeypatch.setattr(local_disk, "PAUSES_PER_COPY", 0)
    monkeypatch.setattr("shutil.copyfile", lambda *_: (_ for _ in ()).throw(OSError(116, "Stale file handle")))
    recorder = Recorder(record_file(folder, 0), meta={"run": "a"})
    for step in (1, 2):
        recorder.record(batch(step=step))
    recorder.close()
    local = LocalFile(record_file(folder, 0)).file
    with closing(sqlite3.connect(local)) as file:
        assert file.execute("SELECT DISTINCT step FROM completions").fetchall() == [(1,), (2,)]
    assert caplog.text.count("can't be copied") == 1 and "Stale file handle" in caplog.text
    store = AnswerStore(folder / "answers.sqlite")
    store.put("key", 1)
    await store._write()
    assert await store.get("key") == 1


def test_an_earlier_runs_record_is_set_aside_at_its_place(mounted):
    path = record_file(mounted("nfs"), 0)
    for run in ("a", "b"):
        with closing(Recorder(path, meta={"run": run})) as recorder:
            recorder.record(batch(step=1))
    runs = {}
    for each in path.parent.iterdir():
        with closing(sqlite3.connect(each)) as file:
            runs[each.name] = file.execute("SELECT value FROM meta WHERE name = 'run'").fetchone()[0]
    assert runs == {"rank-0.sqlite": "b", "rank-0-1.sqlite": "a"}
