"""Instruments by themselves: what goes wrong around them ends no run."""

import errno
import json
import logging

import pytest
import torch
from accelerate import Accelerator
from torch import nn

from salesrl_trl.names import STEP_SECONDS, Phase
from salesrl_trl.telemetry import instruments as module
from salesrl_trl.telemetry.instruments import Instruments, InstrumentSettings
from salesrl_trl.telemetry.trace import TraceWriter

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


def test_a_model_that_cannot_be_counted_is_told_of_and_has_no_utilisation(build, caplog):
    instruments = build(peak_flops=1e12)
    with caplog.at_level(logging.WARNING, logger="salesrl_trl"):
        instruments.record_model(nn.Linear(2, 2))
        instruments.record_model(nn.Linear(2, 2))  # told once
    assert [record.message.startswith("no MFU: ") for record in caplog.records] == [True]


def test_a_model_that_breaks_the_count_ends_nothing(build, caplog, monkeypatch):
    def broken(model):
        raise AttributeError("layers")

    monkeypatch.setattr(module, "model_flops", broken)
    with caplog.at_level(logging.WARNING, logger="salesrl_trl"):
        build(peak_flops=1e12).record_model(nn.Linear(2, 2))
    assert "AttributeError: layers" in caplog.text


def test_a_full_disk_ends_the_trace_and_not_the_run(build, caplog, monkeypatch, tmp_path):
    instruments = build()
    instruments.start(is_main=True)
    instruments.timeline.starts()
    a_step(instruments)

    def full(*_):
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(TraceWriter, "write", full)
    with caplog.at_level(logging.WARNING, logger="salesrl_trl"):
        for _ in range(3):
            assert a_step(instruments)[STEP_SECONDS] > 0
        instruments.close()
    assert [record.message.startswith("the trace ends here") for record in caplog.records] == [True]
    assert json.loads((tmp_path / "trace.json").read_text())  # what was written before


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
    mask = torch.ones(4, 8, dtype=torch.long, device="meta")
    for _ in range(module.BATCHES_KEPT):
        instruments.record_batch(mask, mask)
    assert instruments._trained.device.type == "meta"
    assert instruments._lengths == []


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


def test_closing_twice_is_closing_once(build):
    instruments = build(heartbeat_s=10.0)
    instruments.start(is_main=True)
    instruments.close()
    instruments.close()
