"""The trace file: what is on which track, and that it can be read whenever the run ends."""

import json
import resource
from contextlib import closing

from salesrl_trl.telemetry.trace import REWARDS_PROCESS, STEPS_TRACK, TraceWriter
from salesrl_trl.timing import Span


def span(name="forward", started=1.0, ended=2.0, **given):
    return Span(name=name, started=started, ended=ended, **given)


def read(path, kind="X"):
    return [event for event in json.loads(path.read_text(encoding="utf-8")) if event["ph"] == kind]


def test_it_can_be_read_before_and_after_every_write_and_replaces_an_earlier_one(tmp_path):
    path = tmp_path / "out/trace.json"
    path.parent.mkdir()
    path.write_text('[{"ph":"X"}]')
    with closing(TraceWriter(path, 10**6, 0.0)) as trace:
        assert json.loads(path.read_text()) == []
        for count in range(1, 4):
            trace.write(0, [span()])
            assert len(read(path)) == count
        trace.write(0, [])
        assert len(read(path)) == 3
    assert len(read(path)) == 3


def test_times_are_microseconds_since_the_origin_and_ranks_with_clocks_of_their_own_lie_on_one_scale(tmp_path):
    with closing(TraceWriter(tmp_path / "t.json", 10**6, 1005.0)) as trace:
        trace.write(0, [span(started=5.0, ended=5.5), span(name="backward", started=5.5, ended=7.0)], 1000.0)
        trace.write(1, [span(started=500.0, ended=501.0)], clock_offset=505.25)
    shown = [(each["pid"], each["ts"], each["dur"]) for each in read(tmp_path / "t.json")]
    assert shown == [(0, 0.0, 0.5e6), (0, 0.5e6, 1.5e6), (1, 0.25e6, 1e6)]


def test_each_track_has_a_name_and_a_place(tmp_path):
    spans = [span(), span(track=STEPS_TRACK), span(name="judge", track="reward 3"),
             span(name="rag_32b", track="reward 3 reference"), span(name="rag_8b", track="reward 3")]  # fmt: skip
    with closing(TraceWriter(tmp_path / "t.json", 10**6, 0.0)) as trace:
        trace.write(2, spans)
    events = read(tmp_path / "t.json")
    about = read(tmp_path / "t.json", "M")
    names = {(each["pid"], each["tid"]): each["args"]["name"] for each in about if each["name"] == "thread_name"}
    assert {(e["pid"], names[e["pid"], e["tid"]]) for e in events} == {
        (2, "phases"), (2, "steps"), (REWARDS_PROCESS + 2, "reward 3"), (REWARDS_PROCESS + 2, "reward 3 reference")
    }  # fmt: skip
    titles = {each["pid"]: each["args"]["name"] for each in about if each["name"] == "process_name"}
    assert titles == {2: "rank 2", REWARDS_PROCESS + 2: "rank 2: rewards and other threads"}
    assert len(names) == len(set(names.values())) == 4


def test_it_does_not_grow_beyond_its_size_and_says_that_it_is_full(tmp_path):
    path = tmp_path / "t.json"
    with closing(TraceWriter(path, 5000, 0.0)) as trace:
        for _ in range(100):
            trace.write(0, [span() for _ in range(10)])
        assert trace.full
        size = path.stat().st_size
        trace.write(0, [span()])
        assert path.stat().st_size == size
    assert size <= 5000 + 200  # the note that it is full
    assert read(path, "i")[0]["name"] == "the trace is full"
    assert 10 <= len(read(path)) < 100


def test_a_full_disk_leaves_what_was_written_before(tmp_path):
    """A file system that takes no more than 4 KiB, as /dev/full takes nothing: by the process's own limit."""
    path, limits, written = tmp_path / "t.json", resource.getrlimit(resource.RLIMIT_FSIZE), 0
    with closing(TraceWriter(path, 10**6, 0.0)) as trace:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
        try:
            while True:
                trace.write(0, [span(name=f"span {written}")] * 5)
                written += 1
        except OSError:
            pass
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert 0 < path.stat().st_size <= 4096
    assert len(read(path)) == 5 * written > 0
