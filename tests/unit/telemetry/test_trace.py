"""The trace file: what is on which track, and that it can be read whenever the run ends."""

import json
import resource

import pytest
from accelerate import PartialState

from salesrl_trl.telemetry.timeline import StepTimes
from salesrl_trl.telemetry.trace import REWARDS_PROCESS, StepTrace
from salesrl_trl.timing import Span

STEP = StepTimes(started=0.0, ended=10.0, seconds={})


def span(name="forward", started=1.0, ended=2.0, **given):
    return Span(name=name, started=started, ended=ended, **given)


def read(path, kind="X"):
    text = path.read_text(encoding="utf-8")  # a file that is being written lacks its end
    return [event for event in json.loads(text if text.rstrip().endswith("]") else f"{text}]") if event["ph"] == kind]


@pytest.fixture
def path(tmp_path):
    PartialState(cpu=True)
    return tmp_path / "out/trace.json"


@pytest.fixture
def write(path):
    """Writes spans of a step, as a rank of this number."""

    def run(*spans, rank=0, size=10**6):
        if size not in traces:
            traces[size] = StepTrace(path, range(1, 1000), size, warnings.append)
            traces[size].start()
        traces[size].write(rank, 1, [STEP], spans)
        return warnings

    traces, warnings = {}, []
    yield run
    for each in traces.values():
        each.close(1, [], None, [])


def test_it_can_be_read_after_every_write_and_an_earlier_one_is_kept(path, write):
    path.parent.mkdir()
    path.write_text('[{"ph":"X"}]')
    for count in range(1, 4):
        write(span())
        assert len(read(path)) == 2 * count  # each with its step
    assert len(read(path.with_name("trace-1.json"))) == 1


def test_times_are_microseconds_since_the_first_span_and_each_track_has_a_name(path, write):
    write(span(), span(name="judge", track="reward 3", ended=1.5), span(name="rag_8b", track="reward 3"), rank=2)
    events, about = read(path), read(path, "M")
    assert [(each["name"], each["ts"], each["dur"]) for each in events] == [
        ("forward", pytest.approx(1e6), 1e6), ("judge", pytest.approx(1e6), 0.5e6),
        ("rag_8b", pytest.approx(1e6), 1e6), ("step 1", 0.0, 10e6),
    ]  # fmt: skip
    names = {(each["pid"], each["tid"]): each["args"]["name"] for each in about if each["name"] == "thread_name"}
    assert names == {(2, 0): "phases", (2, 1): "steps", (REWARDS_PROCESS + 2, 0): "reward 3"}
    assert {names[each["pid"], each["tid"]] for each in events} == {*names.values()}
    titles = {each["pid"]: each["args"]["name"] for each in about if each["name"] == "process_name"}
    assert titles == {2: "rank 2", REWARDS_PROCESS + 2: "rank 2: rewards and other threads"}


def test_it_does_not_grow_beyond_its_size_and_says_that_it_is_full(path, write):
    for _ in range(100):
        warnings = write(*[span()] * 10, size=5000)
    assert len(warnings) == 1 and "is full" in warnings[0]
    assert path.stat().st_size <= 5000
    assert 10 <= len(read(path)) < 100


def test_a_full_disk_leaves_what_was_written_before(path, write, caplog):
    """A file system that takes no more than 4 KiB, as /dev/full takes nothing: by the process's own limit."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        for number in range(100):
            write(*[span(name=f"span {number}")] * 5)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [message.startswith("the trace ends here") for message in caplog.messages] == [True]
    assert 0 < path.stat().st_size <= 4096
    assert read(path) and len(read(path)) % 6 == 0
