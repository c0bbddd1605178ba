"""The files of a run's folder, read into one frozen [`Run`]: several event files, and files that were cut off.

Derives nothing: shares and means belong to `run_figures`. Called by the report.
"""

import fnmatch
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from salesrl_trl import names
from salesrl_trl.errors import ConfigError
from salesrl_trl.judged.budget import Account, read_account

EVENT_FILES = "events.out.tfevents.*"
RUNS = "runs"  # transformers' folder for event files inside a run's folder
LARGEST_FIGURE = 1e300  # what is larger is taken for infinite: the difference of two figures has to be a float too
Figures = Mapping[str, float | None]  # figures by name. `None`: it could not be measured.


@dataclass(frozen=True, kw_only=True, slots=True)
class QuickEval:
    """One line of `quick_eval.jsonl`: `reward` and `scores` (by branch) are means, `figures` the user's own."""

    step: int
    mode: str
    reward: float | None
    best: bool
    scores: Figures
    figures: Figures


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """What a run's folder tells of the run."""

    folder: Path
    series: Mapping[str, Mapping[int, float]]
    """By tag without `train/`, then by step, ascending: `{"reward": {1: 0.3, 2: 0.32}}`. Finite figures only."""
    steps: tuple[int, ...]
    """Steps with training figures, ascending. Empty for a run that stopped before its first step."""
    branches: tuple[str, ...]
    seconds: tuple[float, float] | None
    """Wall times of the first and the last event, in seconds since 1970; `None` without an event."""
    starts: tuple[int, ...]  # first steps of the starts: a run that was resumed has more than one
    infinite: int  # number of infinite figures. They are in no series. NaN is in none either: it means "not measured".
    quick_evals: tuple[QuickEval, ...]
    held_out: Mapping[int, Figures]
    """Each evaluation of the held-out rows by its step, ascending; step 0 is before training."""
    unread: tuple[str, ...]  # sentences about files that could not be read
    account: Account  # what the run spent. A run without a budget spent nothing that was counted.

    def of(self, tag: str) -> Mapping[int, float]:
        """Figures of a tag by step; empty if it was never logged."""
        return self.series.get(tag, {})


def read_run(folder: Path, logging_dir: Path | None = None) -> Run:
    """Read a run's folder. The run may be unfinished, killed or resumed. Its event files may lie in `logging_dir`.
    Raises `ConfigError` if the folder does not exist, has no event file, or holds several runs."""
    if not folder.is_dir():
        raise ConfigError(f"{folder} is no folder. Expected the `output_dir` of a run.")
    files, times = list[list[_Scalar]](), list[float]()
    for path in _event_files(folder, logging_dir):
        scalars, ends = _read_events(path)
        files.append(scalars)
        times += ends
    series, infinite = _merged(files)
    # Quick evaluations do not count as steps of training: one may come before the first
    trained = (values for tag, values in series.items() if not tag.startswith(names.QUICK_EVAL))
    unread = []
    quick_evals, bad = _quick_evals(folder / names.QUICK_EVAL_FILE)
    if bad:
        unread.append(f"{bad} line{'s' * (bad > 1)} of {names.QUICK_EVAL_FILE} could not be read, left out")
    held_out, is_whole = _held_out(folder / names.HELD_OUT_FILE)
    if not is_whole:
        unread.append(f"{names.HELD_OUT_FILE} could not be read{' in part' if held_out else ''}")
    try:
        account = read_account(folder / names.SPENT_FILE)
    except ConfigError:
        account = Account()
        unread.append(f"{names.SPENT_FILE} could not be read")
    return Run(
        folder=folder,
        series=series,
        steps=tuple(sorted({step for values in trained for step in values if step > 0})),
        branches=names.branches_in(series),
        seconds=(min(times), max(times)) if times else None,
        starts=tuple(start.step for start in sorted(filter(None, map(_start, files)))),
        infinite=infinite,
        quick_evals=quick_evals,
        held_out=held_out,
        unread=tuple(unread),
        account=account,
    )


# Event files


class _Scalar(NamedTuple):
    written_s: float
    step: int
    tag: str  # without `train/`
    number: float


def _event_files(folder: Path, logging_dir: Path | None) -> list[Path]:
    """Every event file of one run. A folder above several runs is refused, because their steps would be merged."""
    top = logging_dir or folder
    if not top.is_dir():
        raise ConfigError(f"{top} is no folder. Expected the one with the run's TensorBoard files.")
    files = sorted(path for path in top.rglob(EVENT_FILES) if path.is_file())
    aside = f"{names.EARLIER_RUNS}[0-9]*"  # folders of earlier runs, each of which has a report of its own
    files = [path for path in files if not fnmatch.fnmatch(path.relative_to(top).parts[0], aside)] or files
    if not files:
        raise ConfigError(
            f"{top} holds no TensorBoard file ({EVENT_FILES}). Expected the `output_dir` of a run with "
            "`report_to: tensorboard`; if its files were put elsewhere, name the place with --logging_dir."
        )
    others = set()
    for path in files:
        # The run's own folder is what lies above `runs/`: `debug` for `debug/runs/Aug01_host/events...`
        folders = path.relative_to(top).parent.parts
        if RUNS in folders and (above := folders[: len(folders) - 1 - folders[::-1].index(RUNS)]):
            others.add("/".join(above))
    if others and logging_dir is None:
        raise ConfigError(
            f"{folder} holds the runs of other folders: {', '.join(sorted(others))}. Expected one run's folder."
        )
    return files


def _read_events(path: Path) -> tuple[list[_Scalar], list[float]]:
    """The training figures of one file, up to a record that was cut off, and the times of its first and last event."""
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
    return scalars, times


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

    A start repeats steps after a resume, and as another run in the same folder. What was written before a start about
    its first step and later ones is forgotten, also where the start has not come so far.
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
    """The evaluations, and the number of lines that are none. Of one step and mode the later line counts."""
    latest: dict[tuple[int, str], QuickEval] = {}
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    records = [_parsed(line) for line in text.splitlines() if line.strip()]
    for step, record in (evaluations := _with_steps(records)):
        mode = str(record.get("mode") or "evaluation")
        branches, own = _object(record.get("branches")), _object(record.get("figures"))
        latest[step, mode] = QuickEval(
            step=step,
            mode=mode,
            reward=_finite(record.get("reward")),
            best=record.get("best") is True,
            scores={name: _finite(_object(values).get("score")) for name, values in branches.items()},
            figures={name: _finite(value) for name, value in own.items()},
        )
    return tuple(latest[key] for key in sorted(latest)), len(records) - len(evaluations)


def _held_out(path: Path) -> tuple[dict[int, Figures], bool]:
    """The evaluations by step, and whether all of the file could be read."""
    records = _parsed(path.read_text(encoding="utf-8", errors="replace")) if path.is_file() else []
    evaluations = _with_steps(records) if isinstance(records, list) else []
    figures = dict[int, dict[str, float | None]]()
    for step, record in evaluations:
        record.pop(names.BY_ROW, None)
        dataset = f"{record.pop(names.DATASET)} " if names.DATASET in record else ""
        figures.setdefault(step, {}).update({f"{dataset}{name}": _finite(value) for name, value in record.items()})
    return dict(sorted(figures.items())), isinstance(records, list) and len(records) == len(evaluations)


def _parsed(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):  # it was cut off, or is no evaluation
        return None


def _with_steps(records: Sequence[object]) -> list[tuple[int, dict[str, object]]]:
    """The records that are evaluations, without their step: objects with one. They may lack anything else."""
    steps = [(_finite(record.pop("step", None)), record) for record in map(_object, records)]
    return [(int(step), record) for step, record in steps if step is not None]


def _object(value: object) -> dict[str, object]:
    return value if isinstance(value, dict) else {}


def _finite(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= LARGEST_FIGURE:
        return None
    return float(value)
