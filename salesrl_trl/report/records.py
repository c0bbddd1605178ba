"""The files of a run's folder, read into frozen dataclasses.

Owns the merge of several event files, and how a record that was cut off is read. Derives nothing: shares, means and
advice belong to `figures`.
"""

import json
import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from salesrl_trl.errors import ConfigError
from salesrl_trl.names import (
    BEST_FOLDER,
    CHECKPOINT_FOLDERS,
    HELD_OUT_FILE,
    QUICK_EVAL,
    QUICK_EVAL_FILE,
    SPENT_FILE,
    TRACE_FILE,
    TRAIN,
    beta_of,
    reward_of,
)
from salesrl_trl.reward.service.account import Account, read_account

EVENT_FILES = "events.out.tfevents.*"
RUNS = "runs"
"""transformers' folder for event files inside a run's folder."""


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
    scores: Mapping[str, float | None]
    """Mean score by branch. `None` where no row was scored."""
    figures: Mapping[str, float | None]
    """The user's own figures over all rows, by name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldOutRecord:
    """One entry of `held_out.json`."""

    step: int
    """Optimizer steps before the evaluation; 0 is before training."""
    figures: Mapping[str, float | None]
    """`{"reward": 0.29, "fairness": 0.36, "valid_actions": 0.95}`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """The records of a run, for the report."""

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
    held_out: tuple[HeldOutRecord, ...]
    """By step."""
    unread: tuple[str, ...]
    """Sentences about files that could not be read."""
    kept: tuple[str, ...]
    """Names of the checkpoint folders, `best` first."""
    has_trace: bool
    """Whether the folder has a `trace.json`."""
    account: Account = field(default_factory=Account)
    """What the run spent, by its `budget.json`. A run without a budget has no such file."""

    def of(self, tag: str) -> Mapping[int, float]:
        """Figures of a tag by step; empty if it was never logged."""
        return self.series.get(tag, {})


def read_run(folder: Path, logging_dir: Path | None = None) -> Run:
    """Read a run's folder.

    Args:
        folder (`Path`):
            The run's `output_dir`. The run may be unfinished, killed or resumed.
        logging_dir (`Path`, *optional*):
            Folder of the TensorBoard files, if not below `folder`.

    Returns:
        [`Run`]: the records.

    Raises:
        `ConfigError`: the folder does not exist, has no event file, or holds several runs.
    """
    if not folder.is_dir():
        raise ConfigError(f"{folder} is no folder. Expected the `output_dir` of a run.")
    events = _Events()
    for path in _event_files(folder, logging_dir):
        events.read(path)
    events.forget_repeated_steps()
    series = {tag: dict(sorted(values.items())) for tag, values in sorted(events.values.items())}
    quick_evals, unread = _quick_evals(folder / QUICK_EVAL_FILE)
    held_out, not_held = _held_out(folder / HELD_OUT_FILE)
    account, not_told = _account(folder / SPENT_FILE)
    return Run(
        folder=folder,
        series=series,
        steps=_steps(series),
        branches=_branches(series),
        seconds=(events.first_s, events.last_s) if math.isfinite(events.first_s) else None,
        starts=len(events.starts),
        infinite=events.infinite,
        quick_evals=quick_evals,
        held_out=held_out,
        unread=(*unread, *not_held, *not_told),
        kept=_kept(folder),
        has_trace=(folder / TRACE_FILE).is_file(),
        account=account,
    )


def _account(path: Path) -> tuple[Account, tuple[str, ...]]:
    try:
        return read_account(path), ()
    except ConfigError:
        return Account(), (f"{path.name} could not be read",)


def _steps(series: Mapping[str, Mapping[int, float]]) -> tuple[int, ...]:
    """Steps of training. Quick evaluations do not count: one may come before the first step."""
    trained = (values for tag, values in series.items() if not tag.startswith(QUICK_EVAL))
    return tuple(sorted({step for values in trained for step in values if step > 0}))


def _branches(series: Mapping[str, object]) -> tuple[str, ...]:
    starts = (reward_of(""), beta_of(""))
    return tuple(sorted({tag.removeprefix(start) for tag in series for start in starts if tag.startswith(start)}))


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


class _Events:
    """Scalars of several event files, merged by tag and step. Of two scalars of one step, the later one counts."""

    def __init__(self) -> None:
        self.values: dict[str, dict[int, float]] = {}
        self.first_s = math.inf
        self.last_s = -math.inf
        self.starts: list[tuple[float, int]] = []
        """For each start, the time and the step of its first training figures."""
        self.infinite = 0
        self._written: dict[tuple[str, int], float] = {}

    def read(self, path: Path) -> None:
        """Add a file, up to a record that was cut off."""
        # TensorBoard's accumulator drops the steps that a resume repeats. Here, the later ones replace them.
        from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

        trained: tuple[float, int] | None = None
        now_s = -math.inf
        for event in LegacyEventFileLoader(str(path)).Load():
            now_s = max(now_s, event.wall_time)  # a clock may be set back: in a file the order of events counts
            self.first_s, self.last_s = min(self.first_s, now_s), max(self.last_s, now_s)
            for value in event.summary.value:
                if value.tag.startswith(TRAIN) and (number := _scalar(value)) is not None:
                    # the file of a last evaluation has the tag `epoch` too
                    if trained is None and value.tag != TRAIN + "epoch":
                        trained = (now_s, event.step)
                    self._add(value.tag.removeprefix(TRAIN), event.step, now_s, number)
        if trained is not None:
            self.starts.append(trained)

    def forget_repeated_steps(self) -> None:
        """Forget the earlier figures of steps that a later start repeated.

        A start repeats steps after a resume from an earlier checkpoint, and as another run in the same folder.
        """
        for started_s, first in self.starts:
            for tag, values in self.values.items():
                for step in [each for each in values if each >= first and self._written[tag, each] < started_s]:
                    del values[step]

    def _add(self, tag: str, step: int, written_s: float, number: float) -> None:
        if written_s < self._written.get((tag, step), -math.inf):
            return
        self._written[tag, step] = written_s
        values = self.values.setdefault(tag, {})
        values.pop(step, None)
        if math.isfinite(number):
            values[step] = number
        else:
            self.infinite += math.isinf(number)


def _scalar(value: Any) -> float | None:
    """The number of a summary's value; `None` for texts, histograms and others."""
    kind = value.WhichOneof("value")
    if kind == "simple_value":
        return float(value.simple_value)
    if kind != "tensor" or value.metadata.plugin_data.plugin_name != "scalars":
        return None
    from tensorboard.util.tensor_util import make_ndarray

    return float(make_ndarray(value.tensor).reshape(-1)[0])


def _quick_evals(path: Path) -> tuple[tuple[QuickEval, ...], tuple[str, ...]]:
    """The evaluations, and sentences about lines that could not be read. Of two with one step and mode, the later
    one."""
    if not path.is_file():
        return (), ()
    found: dict[tuple[int, str], QuickEval] = {}
    bad = 0
    for record in _json_lines(path):
        evaluation = _quick_eval(record)
        if evaluation is None:
            bad += 1
        else:
            found[evaluation.step, evaluation.mode] = evaluation
    lines = "1 line" if bad == 1 else f"{bad} lines"
    unread = (f"{lines} of {QUICK_EVAL_FILE} could not be read, left out",) if bad else ()
    return tuple(found[key] for key in sorted(found)), unread


def _json_lines(path: Path) -> Iterator[object]:
    """A JSON value for each line that is not empty; `None` for a line that was cut off."""
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        if line.strip():
            yield _parsed(line)


def _parsed(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _quick_eval(record: object) -> QuickEval | None:
    if not isinstance(record, dict) or (step := _number(record.get("step"))) is None:
        return None
    branches, figures = _mapping(record.get("branches")), _mapping(record.get("figures"))
    return QuickEval(
        step=int(step),
        mode=str(record.get("mode") or "evaluation"),
        reward=_number(record.get("reward")),
        best=record.get("best") is True,
        scores={branch: _number(each.get("score")) for branch, each in branches.items() if isinstance(each, dict)},
        figures={name: _number(value) for name, value in figures.items()},
    )


def _mapping(value: object) -> dict[str, object]:
    return value if isinstance(value, dict) else {}


def _held_out(path: Path) -> tuple[tuple[HeldOutRecord, ...], tuple[str, ...]]:
    if not path.is_file():
        return (), ()
    records = _parsed(path.read_text(encoding="utf-8", errors="replace"))
    if not isinstance(records, list):
        return (), (f"{HELD_OUT_FILE} could not be read",)
    found = {
        int(step): HeldOutRecord(step=int(step), figures={k: _number(v) for k, v in record.items() if k != "step"})
        for record in records
        if isinstance(record, dict) and (step := _number(record.get("step"))) is not None
    }
    return tuple(found[step] for step in sorted(found)), ()


def _number(value: object) -> float | None:
    """A finite number, or `None`."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= sys.float_info.max:
        return None
    return float(value)


def _kept(folder: Path) -> tuple[str, ...]:
    """`best`, then the checkpoints by step."""
    checkpoints = [path.name for path in folder.glob(f"{CHECKPOINT_FOLDERS}*") if path.is_dir()]
    checkpoints.sort(key=lambda name: (len(name), name))  # checkpoint-20 before checkpoint-100
    return (*([BEST_FOLDER] if (folder / BEST_FOLDER).is_dir() else []), *checkpoints)
