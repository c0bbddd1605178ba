"""Records of runs that never were, with the viewer's index of them. Runs' folders with real TensorBoard files, whose
wall times the tests choose."""

import itertools
import json

import pytest
from support.synthetic_record import make_record
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

from salesrl_trl.record.view.record_index import Index

STARTED_S = 1_700_000_000.0
"""2023-11-14 22:13:20 UTC."""


@pytest.fixture(scope="session")
def two_runs(tmp_path_factory):
    """Two runs of 12 steps with 1,536 completions each and an evaluation of 128: the same rows, other completions. The
    first has hostile texts."""
    folder = tmp_path_factory.mktemp("runs")
    one = make_record(folder / "one", 1600, hostile=True)
    return one, make_record(folder / "other", 1600, seed=1, better=0.1)


@pytest.fixture(scope="session")
def both(two_runs):
    """The index of both."""
    index = Index(list(two_runs))
    index.refresh()
    yield index
    index.close()


class RunFolder:
    """Writes what a run writes."""

    def __init__(self, path):
        self.path = path
        self._numbers = itertools.count()

    def events(self, steps, seconds_per_step=10.0, started_s=STARTED_S, where="runs/Aug01_host"):
        """One event file: `{step: {tag: figure}}`, step n written n x `seconds_per_step` after `started_s`."""
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

    def quick_evals(self, *records, cut_off=""):
        lines = "".join(json.dumps(record) + "\n" for record in records)
        (self.path / "quick_eval.jsonl").write_text(lines + cut_off, encoding="utf-8")

    def held_out(self, *records):
        (self.path / "held_out.json").write_text(json.dumps(records), encoding="utf-8")


@pytest.fixture
def run_folder(tmp_path):
    path = tmp_path / "run"
    path.mkdir()
    return RunFolder(path)


@pytest.fixture
def two_branches(run_folder):
    """Twenty steps of 10 s with everything in it; the figures are chosen so that sums are easy by hand."""
    run_folder.events(
        {
            step: {
                "reward": step / 100,  # 0.01 .. 0.20
                "reward/fairness": step / 50,
                "reward/hallucination": 0.25,
                "reference/fairness": 0.5,
                "kl/fairness": 0.03,
                "kl/fairness_low": 0.02,
                "kl/fairness_high": 0.06,
                "kl/fairness_in_band": 1.0 if step > 5 else 0.0,  # 15 of 20
                "kl/hallucination": 0.2,
                "kl/hallucination_low": 0.02,
                "kl/hallucination_high": 0.06,
                "kl/hallucination_in_band": 1.0 if step > 16 else 0.0,  # 4 of 20
                "beta/fairness": 0.05,
                "beta/hallucination": 0.1,
                "time/data_loading_s": 0.1,
                "time/generation_s": 3.0,
                "time/reward_wait_s": 6.2,
                "time/backward_s": 0.4,
                "time/unaccounted_s": 0.3,
                "time/step_s": 10.0,
                "time/reward_s": 7.0,
                "time/reward_exposed_s": 6.2,
                "time/reward_hidden_s": 0.8,
                "time/judge_p50_s": 2.0,
                "time/judge_p95_s": 4.0,
                "time/judge_max_s": 4.0 + step,  # longest 24
                "time/slowest_judge_s": 5.0,
                "time/rag_8b_p95_s": 1.0,
                "outcome/ok": 0.9,
                "outcome/invalid_action": 0.08,
                "outcome/judge_invalid": 0.0,
                "outcome/infra": 0.02,
                "failures/reason/missing_field": 2.0,  # 40 in all
                "failures/reason/rag_8b_timeout": 1.0 if step <= 10 else 0.0,  # 10 in all
                "failures/skipped_update": 1.0 if step in (3, 4) else 0.0,
                "perf/mfu_model": 0.31,
                "perf/mfu_step": 0.08,
                "perf/compute_ratio": 0.34,
                "perf/tokens_per_s": 5000.0,
                "memory/gpu_peak_gib": 60.0 + step / 10,  # 62.0 at most
            }
            for step in range(1, 21)
        }
    )
    run_folder.quick_evals(
        {**_evaluation(5, 0.3, fairness=0.3, hallucination=0.3), "figures": {"questions": 0.25}},
        _evaluation(10, 0.4, best=True, fairness=0.5, hallucination=0.3),
        _evaluation(15, 0.35, fairness=0.2, hallucination=0.5),
        _evaluation(20, None, fairness=0.4, hallucination=None),
    )
    run_folder.held_out(
        {"step": 0, "reward": 0.29, "fairness": 0.36, "valid_actions": 0.9},
        {"step": 20, "reward": 0.45, "fairness": 0.56, "valid_actions": None},
    )
    return run_folder


def _evaluation(step, reward, best=False, **scores):
    branches = {
        branch: {"score": score, "truncated": 0.0, "length": 28.1, "kl": 0.12, "beta": 0.05, "rows": 8}
        for branch, score in scores.items()
    }
    return {"step": step, "mode": "greedy", "reward": reward, "seconds": 1.2, "branches": branches, "best": best}
