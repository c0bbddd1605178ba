"""Synthetic records with the viewer's index, and run folders with real TensorBoard files."""

import itertools
import json

import pytest
from support.synthetic_record import make_record
from support.viewing import served
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

from salesrl_trl.record.view.record_index import Index

STARTED_S = 1_700_000_000.0
"""2023-11-14 22:13:20 UTC."""


@pytest.fixture(scope="session")
def two_runs(tmp_path_factory):
    """Two runs of 12 steps, 1,536 completions and an evaluation of 128, on the same rows. One has hostile texts."""
    folder = tmp_path_factory.mktemp("runs")
    one = make_record(folder / "one", 1600, hostile=True)
    return one, make_record(folder / "other", 1600, seed=1, better=0.1)


@pytest.fixture(scope="session")
def both(two_runs):
    index = Index(list(two_runs))
    index.refresh()
    yield index
    index.close()


@pytest.fixture(scope="session")
def viewer(two_runs):
    with served(*two_runs) as viewer:
        yield viewer


class RunFolder:
    """Writes the files of a run."""

    def __init__(self, path):
        self.path = path
        self._numbers = itertools.count()

    def events(self, steps, seconds_per_step=10.0, started_s=STARTED_S, where="runs/Aug01_host"):
        """One event file, `{step: {tag: value}}`; step n is written n x `seconds_per_step` after `started_s`."""
        folder = self.path / where
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / f"events.out.tfevents.1700000000.host.1.{next(self._numbers)}"
        with file.open("wb") as handle:
            writer = RecordWriter(handle)
            writer.write(Event(wall_time=started_s, file_version="brain.Event:2").SerializeToString())
            for step, figures in steps.items():
                for tag, figure in figures.items():
                    summary = Summary(value=[Summary.Value(tag=f"train/{tag}", simple_value=figure)])
                    at = started_s + step * seconds_per_step
                    writer.write(Event(wall_time=at, step=step, summary=summary).SerializeToString())
        return file

    def held_out(self, *records):
        (self.path / "held_out.json").write_text(json.dumps(records), encoding="utf-8")


@pytest.fixture
def run_folder(tmp_path):
    path = tmp_path / "run"
    path.mkdir()
    return RunFolder(path)


def kl_of(branch, kl, share, beta):
    name = f"kl/{branch}"
    band = {f"{name}_low": 0.02, f"{name}_high": 0.06, f"{name}_share_in_band": share}
    return {name: kl, **band, f"beta/{branch}": beta}


@pytest.fixture
def two_branches(run_folder):
    """Twenty steps of 10 s with every kind of metric; values are chosen so that sums are easy by hand."""
    run_folder.events(
        {
            step: {
                "reward": step / 100,  # 0.01 .. 0.20
                "reward/fairness": step / 50,
                "reward/hallucination": 0.25,
                "reference/fairness": 0.5,
                **kl_of("fairness", 0.03, 0.75, beta=0.05),
                **kl_of("hallucination", 0.2, 0.2, beta=0.1),
                "time/data_loading_s": 0.1,
                "time/generation_s": 3.0,
                "time/reward_wait_s": 6.2,
                "time/backward_s": 0.4,
                "time/unaccounted_s": 0.3,
                "time/step_s": 10.0,
                "failures/reason/missing_field": 2.0,  # 40 in total
                "failures/reason/rag_8b_timeout": 1.0 if step <= 10 else 0.0,  # 10 in total
            }
            for step in range(1, 21)
        }
    )
    run_folder.held_out(
        {"step": 0, "reward": 0.29, "fairness": 0.36, "valid_actions": 0.9},
        {"step": 20, "reward": 0.45, "fairness": 0.56, "valid_actions": None},
    )
    return run_folder
