"""Instruments and their trace: what goes wrong around them ends no run. And the seconds of a start."""

import json
import logging
import resource
import time

import psutil
import pytest
import torch
from accelerate import Accelerator, PartialState
from torch import nn

from salesrl_trl.names import START_UP_FILE, STEP_SECONDS, Phase, StartUp
from salesrl_trl.telemetry import flops, trace
from salesrl_trl.telemetry.instruments import (
    BATCHES_KEPT,
    Instruments,
    InstrumentSettings,
    imports_so_far,
    write_start,
)
from salesrl_trl.telemetry.logs import warn_once
from salesrl_trl.telemetry.timeline import StepTimes
from salesrl_trl.telemetry.trace import REWARDS_PROCESS, StepTrace
from salesrl_trl.timing import Span

CPU = torch.device("cpu")


@pytest.fixture
def build(tmp_path):
    warn_once.cache_clear()
    built = []

    def run(**settings):
        settings = {"heartbeat_s": 0.0, "trace_steps": range(1, 100), **settings}
        built.append(Instruments(InstrumentSettings(**settings), CPU, tmp_path))
        return built[-1]

    yield run
    for each in built:
        each.close()


def a_step(instruments):
    with instruments.timeline.phase(Phase.FORWARD):
        pass
    instruments.step_ends()
    return instruments.figures(Accelerator(cpu=True))


@pytest.mark.parametrize("error", [None, AttributeError("layers")], ids=["unknown", "breaks the count"])
def test_a_model_that_cannot_be_counted_is_told_of_once_and_ends_nothing(build, caplog, monkeypatch, error):
    def broken(model):
        raise error

    if error is not None:
        monkeypatch.setattr(flops, "model_flops", broken)
    instruments = build(peak_flops=1e12)
    with caplog.at_level(logging.WARNING, logger="salesrl_trl"):
        for _ in range(2):
            instruments.count_flops(nn.Linear(2, 2))
    [told] = caplog.messages
    assert told.startswith("no MFU: ")
    assert error is None or "AttributeError: layers" in told


def test_only_the_main_rank_writes_a_trace(build, tmp_path):
    instruments = build()
    instruments.start(is_main=False)
    instruments.timeline.starts()
    a_step(instruments)
    instruments.close()
    assert not (tmp_path / "trace.json").exists()


def test_a_batch_is_counted_on_its_device_without_waiting(build):
    """On the meta device nothing can be read."""
    instruments = build()
    instruments._flops = flops.ModelFlops(per_token=7, per_head_token=5, per_pair=3)
    mask = torch.ones(4, 8, dtype=torch.long, device="meta")
    for _ in range(BATCHES_KEPT):
        instruments.record_batch(mask, mask)
    assert instruments._trained.device.type == "meta"
    assert instruments._lengths == []


STEP = StepTimes(started=20.0, ended=30.0, seconds={Phase.EVALUATION: 6.0, Phase.FORWARD: 4.0})
SPANS = [
    Span(name=StartUp.ENGINE, started=8.0, ended=19.0),
    Span(name=StartUp.IMPORTS, started=0.0, ended=3.0),
    Span(name=StartUp.IMPORTS, started=4.0, ended=8.0),
    Span(name=StartUp.WARM_UP, started=8.0, ended=10.0, track="rewards"),
    Span(name=StartUp.SERVICES, started=8.0, ended=8.01),
    Span(name=Phase.FORWARD, started=21.0, ended=25.0),
]


def test_padding_is_not_counted(build):
    instruments = build()
    instruments.timeline.starts()
    prompts = torch.tensor([[0, 1, 1], [1, 1, 1]])
    completions = torch.tensor([[1, 1, 0, 0], [1, 0, 0, 0]])
    instruments.record_batch(prompts, completions)
    instruments.record_batch(prompts, completions)
    figures = a_step(instruments)
    # 2 + 3 prompt tokens and 2 + 1 of completions, twice
    assert figures["perf/tokens_per_s"] * figures[STEP_SECONDS] == pytest.approx(16)
    assert figures["perf/samples_per_s"] * figures[STEP_SECONDS] == pytest.approx(4)


def test_a_start_is_told_by_phase_and_what_goes_on_beside_them_does_not_count(tmp_path, caplog):
    with caplog.at_level(logging.INFO, logger="salesrl_trl"):
        write_start(SPANS, STEP, tmp_path)
    assert caplog.messages[0] == (
        "[Start] 30.0 s to the end of the first step: imports 7.0, engine 11.0, first step 10.0, "
        "other 2.0; concurrently: warm_up 2.0"
    )
    kept = json.loads((tmp_path / START_UP_FILE).read_text())
    assert kept["total_s"] == 30.0
    assert kept["phases_s"] == {"imports": 7.0, "engine": 11.0, "services": 8.01 - 8.0}
    assert kept["beside_s"] == {"warm_up": 2.0}


def test_imports_count_from_the_beginning_of_the_process():
    seconds = time.time() - psutil.Process().create_time()
    # psutil adds to the time of the boot, which it knows in whole seconds
    assert imports_so_far().seconds == pytest.approx(seconds, abs=1.2)
    assert imports_so_far().ended <= time.perf_counter()


TEN_SECONDS = StepTimes(started=0.0, ended=10.0, seconds={})


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
def write(path, monkeypatch):
    def run(*spans, rank=0, size=10**6):
        if size not in traces:
            traces[size] = StepTrace(path, range(1, 1000), size)
            traces[size].start()
        traces[size].write(rank, 1, [TEN_SECONDS], spans)
        return warnings

    traces, warnings = {}, []
    monkeypatch.setattr(trace, "warn_once", warnings.append)
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
    assert len(warnings) == 1 and "later spans are dropped" in warnings[0]
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
