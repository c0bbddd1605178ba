"""The files of a run's folder, read into one frozen [`Run`].

Owns the merge of several event files, and how a file that was cut off is read. Derives nothing: shares and means
belong to `run_figures`. Called by the report. The viewer reads the record of the completions, by `recording.reader`.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from salesrl_trl import names
from salesrl_trl.errors import ConfigError
from salesrl_trl.reward.service.budget import Account, read_account

EVENT_FILES = "events.out.tfevents.*"
RUNS = "runs"
"""transformers' folder for event files inside a run's folder."""
LARGEST_FIGURE = 1e300
"""What is larger is taken for infinite: the difference of two figures has to be a float too."""
Figures = Mapping[str, float | None]
"""Figures by name. `None`: it could not be measured."""


@dataclass(frozen=True, kw_only=True, slots=True)
class QuickEval:
    """One line of `quick_eval.jsonl`."""

    step: int
    """Optimizer steps before the evaluation."""
    mode: str
    """The way of sampling: `"greedy"`."""
    reward: float | None
    """Mean reward over all branches."""
    best: bool
    """Whether it is marked as the best."""
    scores: Figures
    """Mean score by branch. `None` where no row was scored."""
    figures: Figures
    """The user's own figures over all rows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """What a run's folder tells of the run."""

    folder: Path
    """The run's `output_dir`."""
    series: Mapping[str, Mapping[int, float]]
    """By tag without `train/`, then by step, ascending: `{"reward": {1: 0.3, 2: 0.32}}`. Finite figures only."""
    steps: tuple[int, ...]
    """Steps with training figures, ascending. Empty for a run that stopped before its first step."""
    branches: tuple[str, ...]
    """Their names."""
    seconds: tuple[float, float] | None
    """Wall times of the first and the last event, in seconds since 1970; `None` without an event."""
    starts: int
    """Event files with training figures. A run that was resumed has more than one."""
    infinite: int
    """Number of infinite figures. They are in no series. NaN is in none either: it means "not measured"."""
    quick_evals: tuple[QuickEval, ...]
    """By step."""
    held_out: Mapping[int, Figures]
    """Each evaluation of the held-out rows by its step, ascending; step 0 is before training."""
    unread: tuple[str, ...]
    """Sentences about files that could not be read."""
    checkpoints: tuple[str, ...]
    """Names of their folders, `best` first."""
    has_trace: bool
    """Whether the folder has a `trace.json`."""
    account: Account
    """What the run spent. A run without a budget spent nothing that was counted."""

    def of(self, tag: str) -> Mapping[int, float]:
        """Figures of a tag by step; empty if it was never logged."""
        return self.series.get(tag, {})


def read_run(folder: Path, logging_dir: Path | None = None) -> Run:
    """Read a run's folder. The run may be unfinished, killed or resumed. Its event files may lie in `logging_dir`.

    Raises:
        `ConfigError`: the folder does not exist, has no event file, or holds several runs.
    """
    if not folder.is_dir():
        raise ConfigError(f"{folder} is no folder. Expected the `output_dir` of a run.")
    files = [_read_events(path) for path in _event_files(folder, logging_dir)]
    series, infinite = _merged([file.scalars for file in files])
    quick_evals, bad_lines = _quick_evals(folder / names.QUICK_EVAL_FILE)
    unread = [f"{bad_lines} line{'s' * (bad_lines > 1)} of {names.QUICK_EVAL_FILE} could not be read, left out"] * (
        bad_lines > 0
    )
    held_out = _held_out(folder / names.HELD_OUT_FILE)
    if held_out is None:
        unread.append(f"{names.HELD_OUT_FILE} could not be read")
    try:
        account = read_account(folder / names.SPENT_FILE)
    except ConfigError:
        account = Account()
        unread.append(f"{names.SPENT_FILE} could not be read")
    times = [time for file in files for time in file.times]
    return Run(
        folder=folder,
        series=series,
        steps=_steps(series),
        branches=names.branches_in(series),
        seconds=(min(times), max(times)) if times else None,
        starts=sum(_start(file.scalars) is not None for file in files),
        infinite=infinite,
        quick_evals=quick_evals,
        held_out=held_out or {},
        unread=tuple(unread),
        checkpoints=_checkpoints(folder),
        has_trace=(folder / names.TRACE_FILE).is_file(),
        account=account,
    )


def _steps(series: Mapping[str, Mapping[int, float]]) -> tuple[int, ...]:
    """Steps of training. Quick evaluations do not count: one may come before the first step."""
    trained = (values for tag, values in series.items() if not tag.startswith(names.QUICK_EVAL))
    return tuple(sorted({step for values in trained for step in values if step > 0}))


def _checkpoints(folder: Path) -> tuple[str, ...]:
    folders = [path.name for path in folder.glob(f"{names.CHECKPOINT_FOLDERS}*") if path.is_dir()]
    folders.sort(key=lambda name: (len(name), name))  # checkpoint-20 before checkpoint-100
    return (*([names.BEST_FOLDER] if (folder / names.BEST_FOLDER).is_dir() else []), *folders)


# Event files


class _Scalar(NamedTuple):
    written_s: float
    step: int
    tag: str
    """Without `train/`."""
    number: float


class _EventFile(NamedTuple):
    scalars: list[_Scalar]
    times: list[float]
    """Of the first and the last event; empty without an event."""


def _event_files(folder: Path, logging_dir: Path | None) -> list[Path]:
    """Every event file of one run. A folder above several runs is refused, because their steps would be merged."""
    top = logging_dir or folder
    if not top.is_dir():
        raise ConfigError(f"{top} is no folder. Expected the one with the run's TensorBoard files.")
    files = sorted(path for path in top.rglob(EVENT_FILES) if path.is_file())
    if not files:
        raise ConfigError(
            f"{top} holds no TensorBoard file ({EVENT_FILES}). Expected the `output_dir` of a run with "
            "`report_to: tensorboard`; if its files were put elsewhere, name the place with --logging_dir."
        )
    others = sorted({str(owner) for path in files if (owner := _owner(path.relative_to(top))) != Path()})
    if others and logging_dir is None:
        raise ConfigError(f"{folder} holds the runs of other folders: {', '.join(others)}. Expected one run's folder.")
    return files


def _owner(path: Path) -> Path:
    """The folder that a relative event file's `runs/` lies in: `debug` for `debug/runs/Aug01_host/events...`."""
    folders = path.parent.parts
    inner = len(folders) - 1 - folders[::-1].index(RUNS) if RUNS in folders else 0
    return Path(*folders[:inner])


def _read_events(path: Path) -> _EventFile:
    """The training figures of one file, up to a record that was cut off."""
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

    scalars, times, now_s = [], list[float](), -math.inf
    for event in LegacyEventFileLoader(str(path)).Load():
        now_s = max(now_s, event.wall_time)  # a clock may be set back: in a file the order of events counts
        times = [*times[:1], now_s]
        scalars += [
            _Scalar(now_s, event.step, value.tag.removeprefix(names.TRAIN), number)
            for value in event.summary.value
            if value.tag.startswith(names.TRAIN) and (number := _number_of(value)) is not None
        ]
    return _EventFile(scalars, times)


def _number_of(value: Any) -> float | None:
    """The number of a summary's value, of either kind that TensorBoard's writers make; `None` for texts and others."""
    kind = value.WhichOneof("value")
    if kind == "simple_value":
        return float(value.simple_value)
    if kind != "tensor" or value.metadata.plugin_data.plugin_name != "scalars":
        return None
    from tensorboard.util.tensor_util import make_ndarray

    return float(make_ndarray(value.tensor).reshape(-1)[0])


def _start(scalars: list[_Scalar]) -> _Scalar | None:
    """The first figure of training. The file of a last evaluation has none, but it has the tag `epoch`."""
    return next((scalar for scalar in scalars if scalar.tag != "epoch"), None)


def _merged(files: list[list[_Scalar]]) -> tuple[dict[str, dict[int, float]], int]:
    """The scalars of all files by tag and step, and the number of infinite ones. Of one step the latest counts.

    A start repeats steps after a resume from an earlier checkpoint, and as another run in the same folder. What was
    written before a start about its first step and later ones is forgotten, also where the start has not come so far.
    TensorBoard's own accumulator drops the repeated steps instead.
    """
    starts = [start for scalars in files if (start := _start(scalars))]
    series: dict[str, dict[int, float]] = {}
    infinite = 0
    for scalar in sorted((scalar for scalars in files for scalar in scalars), key=lambda scalar: scalar.written_s):
        if any(start.written_s > scalar.written_s and start.step <= scalar.step for start in starts):
            continue
        values = series.setdefault(scalar.tag, {})
        values.pop(scalar.step, None)
        infinite += math.isinf(scalar.number)
        if math.isfinite(scalar.number):
            values[scalar.step] = scalar.number
    return {tag: dict(sorted(values.items())) for tag, values in sorted(series.items())}, infinite


# Evaluations


def _quick_evals(path: Path) -> tuple[tuple[QuickEval, ...], int]:
    """The evaluations, and the number of lines that could not be read. Of one step and mode the later line counts."""
    if not path.is_file():
        return (), 0
    lines = [line for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    read = [evaluation for line in lines if (evaluation := _quick_eval(_parsed(line)))]
    latest = {(evaluation.step, evaluation.mode): evaluation for evaluation in read}
    return tuple(latest[key] for key in sorted(latest)), len(lines) - len(read)


def _quick_eval(record: object) -> QuickEval | None:
    if not isinstance(record, dict) or (step := _finite(record.get("step"))) is None:
        return None
    branches, figures = (
        value if isinstance(value, dict) else {} for value in map(record.get, ("branches", "figures"))
    )
    return QuickEval(
        step=int(step),
        mode=str(record.get("mode") or "evaluation"),
        reward=_finite(record.get("reward")),
        best=record.get("best") is True,
        scores={name: _finite(values.get("score")) for name, values in branches.items() if isinstance(values, dict)},
        figures={name: _finite(value) for name, value in figures.items()},
    )


def _held_out(path: Path) -> dict[int, Figures] | None:
    """The evaluations by step; `None` if the file can't be read."""
    if not path.is_file():
        return {}
    records = _parsed(path.read_text(encoding="utf-8", errors="replace"))
    if not isinstance(records, list):
        return None
    by_step = {
        int(step): {name: _finite(value) for name, value in record.items() if name != "step"}
        for record in records
        if isinstance(record, dict) and (step := _finite(record.get("step"))) is not None
    }
    return dict(sorted(by_step.items()))


def _parsed(text: str) -> object:
    """A JSON value; `None` for a text that was cut off."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _finite(value: object) -> float | None:
    """A finite number, or `None`."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= LARGEST_FIGURE:
        return None
    return float(value)
