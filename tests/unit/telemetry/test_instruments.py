"""Instruments by themselves: what goes wrong around them ends no run. And the seconds of a start."""

import json
import logging
import time

import psutil
import pytest
import torch
from accelerate import Accelerator
from torch import nn

from salesrl_trl.names import START_UP_FILE, STEP_SECONDS, Phase, StartUp
from salesrl_trl.telemetry import flops
from salesrl_trl.telemetry.instruments import (
    BATCHES_KEPT,
    Instruments,
    InstrumentSettings,
    imports_so_far,
    write_start,
)
from salesrl_trl.telemetry.timeline import StepTimes
from salesrl_trl.timing import Span

CPU = torch.device("cpu")


@pytest.fixture
def build(tmp_path):
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
        "other 2.0; side by side with these: warm_up 2.0"
    )
    kept = json.loads((tmp_path / START_UP_FILE).read_text())
    assert kept["total_s"] == 30.0
    assert kept["phases_s"] == {"imports": 7.0, "engine": 11.0, "services": 8.01 - 8.0}
    assert kept["beside_s"] == {"warm_up": 2.0}


def test_imports_count_from_the_beginning_of_the_process():
    seconds = time.time() - psutil.Process().create_time()
    assert imports_so_far().seconds == pytest.approx(seconds, abs=0.2)
    assert imports_so_far().ended <= time.perf_counter()
