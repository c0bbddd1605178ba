"""What trackers get beside the figures, which transformers hands to them: tables of completions, and a layout.

Owns how MLflow and SwanLab take tables (TRL hands them to others), TensorBoard's groups under "Custom Scalars", and
that no tracker ends a training. A tracker that `report_to` does not name is not imported.
"""

import contextlib
import functools
import json
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet  # type: ignore[import-untyped]
from transformers import TrainerCallback, TrainerState
from transformers.integrations import TensorBoardCallback
from transformers.integrations.integration_utils import (
    INTEGRATION_TO_CALLBACK,
    MLflowCallback,
    SwanLabCallback,
    TrackioCallback,
)
from trl.extras.profiling import ProfilingContext

from salesrl_trl.ground.patched import patched
from salesrl_trl.names import (
    BRANCH,
    CATEGORIES,
    FIGURES,
    TRAIN,
    kl_of,
    meanings,
    pattern_of,
)
from salesrl_trl.telemetry.spared import spared, warn_once
from salesrl_trl.wiring.part import Part, PartContext


def _spare(callback: TrainerCallback) -> None:
    """Let no event of a tracker's callback end the run. At its beginning the disk and the network alone are spared: a
    wrong setting or key then costs no step."""
    what = type(callback).__name__.removesuffix("Callback")
    for event in (name for name in dir(TrainerCallback) if name.startswith("on_")):
        errors = OSError if event == "on_train_begin" else Exception
        setattr(callback, event, spared(what, errors)(getattr(callback, event)))


def _tabled(tracker: str, rows: Sequence[Mapping[str, object]], mode: str, step: int) -> None:
    columns = [*rows[0]]
    if tracker == "mlflow":
        import mlflow

        table = {name: [row[name] for row in rows] for name in columns}
        mlflow.log_table(table, f"completions/{mode}_{step:05d}.json")
    elif tracker == "swanlab":
        import swanlab

        texts = [[cell if isinstance(cell, str) else json.dumps(cell, ensure_ascii=False) for cell in row.values()]
                 for row in rows]  # fmt: skip
        swanlab.log({f"{mode}/completions": swanlab.echarts.Table().add(columns, texts)}, step=step)


class Trackers:
    """The trackers of a trainer: `names` from `report_to`, and its `callbacks`. The runs of trackers stay open until
    `close`: the last figures, those of the held-out rows, come after training. At its end transformers closes the run
    of MLflow, and these figures would begin another run. Without a run of trackio TRL fails."""

    def __init__(self, names: Iterable[str], callbacks: Iterable[TrainerCallback]) -> None:
        self._names, self._callbacks = [*names], [*callbacks]
        self._ends: dict[TrainerCallback, Callable[[], None]] = {}
        self._replaced = contextlib.ExitStack()
        warn_once.cache_clear()
        if {"wandb", "mlflow", "trackio"}.intersection(self._names):
            profiled = spared("`profiling/...` of a tracker")(ProfilingContext._log_metrics)
            self._replaced.enter_context(patched(ProfilingContext, "_log_metrics", profiled))
        quiet = functools.partial(_without_writers, threading.excepthook)
        self._replaced.enter_context(patched(threading, "excepthook", quiet))
        for callback in callbacks:
            if isinstance(callback, (*INTEGRATION_TO_CALLBACK.values(),)):
                _spare(callback)
            if isinstance(callback, MLflowCallback | TrackioCallback):
                callback.on_train_end = functools.partial(self._end_later, callback, callback.on_train_end)
            elif isinstance(callback, SwanLabCallback):
                callback.setup = functools.partial(_set_up_swanlab, callback._swanlab, callback.setup)
                callback.on_log = functools.partial(_log_values, callback.on_log)

    def close_files(self) -> None:
        """Let TensorBoard begin another file, in which the next run's figures go."""
        for callback in self._callbacks:
            if isinstance(callback, TensorBoardCallback):
                callback.on_train_end(None, None, None)

    def _end_later(self, owner: TrainerCallback, end: Callable[..., None], *args: object, **named: object) -> None:
        self._ends[owner] = functools.partial(end, *args, **named)

    def log_table(self, output_dir: Path, mode: str, step: int, unique_prompts: bool) -> None:
        """Hand on the table of completions that TRL wrote. `mode`: `"train"` or `"eval"`. `step`: optimizer steps
        done. `unique_prompts`: whether to show one completion of each prompt."""
        if not {"mlflow", "swanlab"}.intersection(self._names):
            return
        path = output_dir / "completions" / f"completions_{step:05d}.parquet"
        rows = pyarrow.parquet.read_table(path).to_pylist()
        if unique_prompts:
            rows = [*{str(row["prompt"]): row for row in reversed(rows)}.values()][::-1]
        for name in self._names if rows else ():
            _tabled(name, rows, mode, step)

    def close(self) -> None:
        """End the runs whose training has ended."""
        while self._ends:
            self._ends.popitem()[1]()
        self._replaced.close()


def _without_writers(usual: Callable[[threading.ExceptHookArgs], object], failed: threading.ExceptHookArgs) -> None:
    """An error of TensorBoard's thread comes again where the next figure is logged: without a traceback here."""
    if type(failed.thread).__name__ != "_AsyncWriterThread":
        usual(failed)


def _set_up_swanlab(swanlab: object, set_up: Callable[..., None], *args: object, **named: object) -> None:
    """transformers asks whether there is a run by `get_run() is None`, where SwanLab 0.10 raises an error."""
    get_run, has_run = swanlab.get_run, swanlab.has_run  # type: ignore[attr-defined]
    with patched(swanlab, "get_run", lambda: get_run() if has_run() else None):
        set_up(*args, **named)


def _log_values(on_log: Callable[..., None], *args: object, logs: Mapping[str, object], **named: object) -> None:
    """SwanLab prints an error for each figure without a value, at each step."""
    on_log(*args, logs={name: value for name, value in logs.items() if value is not None}, **named)


Chart = list[str | list[str]]  # kind of a chart, `"Multiline"` or `"Margin"`, and its tags
EDGES = (kl_of(BRANCH, "_low"), kl_of(BRANCH, "_high"))  # of a chart with margins, behind its line


def custom_scalars(words: Mapping[str, Sequence[str]], banded: Sequence[str]) -> dict[str, dict[str, Chart]]:
    """The layout for `SummaryWriter.add_custom_scalars`: category, then title, then chart. `words` says what the words
    in braces of `FIGURES` stand for. `banded`: the branches whose KL has a band."""
    layout: dict[str, dict[str, Chart]] = {category: {} for category in CATEGORIES}
    for figure in FIGURES:
        for choice in meanings(figure.tag, words) if figure.chart is not None else ():
            is_edge = figure.tag in EDGES
            if is_edge and choice["branch"] not in banded:
                continue
            category, title = (name.format(**choice) for name in figure.chart or ())
            chart = layout[category].setdefault(title, ["Multiline", []])
            chart[0] = "Margin" if is_edge else chart[0]
            start = "" if BRANCH in figure.tag and len(words["branch"]) > 1 else TRAIN
            chart[1] = [*chart[1], start + figure.tag.format(**choice)]
    for charts in layout.values():
        for chart in charts.values():
            if chart[0] == "Multiline":  # whose tags TensorBoard reads as regular expressions
                chart[1] = [f"^{pattern_of(tag).pattern}$" for tag in chart[1]]
    return layout


class ScalarLayout(TrainerCallback):
    """Writes the layout of `custom_scalars`, if the run reports to TensorBoard: by its callback among the trainer's
    `callbacks`. TensorBoard has a colour for each run. So the figures of a branch are also in a run of its own."""

    def __init__(
        self, words: Mapping[str, Sequence[str]], banded: Sequence[str], callbacks: Sequence[TrainerCallback]
    ) -> None:
        self._layout, self._callbacks, self._runs = custom_scalars(words, banded), callbacks, dict[str, Any]()
        self._branches = {
            figure.tag.format(**choice): choice["branch"]
            for figure in FIGURES if figure.chart and BRANCH in figure.tag and len(words["branch"]) > 1
            for choice in meanings(figure.tag, words)
        }  # fmt: skip

    def on_train_begin(self, *_: object, **__: object) -> None:
        for callback in self._callbacks:
            if isinstance(callback, TensorBoardCallback) and (writer := callback.tb_writer) is not None:
                with spared("TensorBoard"):
                    writer.add_custom_scalars(self._layout)
                    for branch in {*self._branches.values()}:
                        self._runs[branch] = type(writer)(f"{writer.log_dir}/{branch.replace('/', '_')}", flush_secs=5)

    def on_log(self, _: object, state: TrainerState, __: object, logs: Mapping[str, object], **___: object) -> None:
        with spared("TensorBoard"):
            for name in self._branches.keys() & logs.keys() if self._runs else ():
                if isinstance(logs[name], int | float):
                    self._runs[self._branches[name]].add_scalar(name, logs[name], state.global_step)

    def on_train_end(self, *_: object, **__: object) -> None:
        with spared("TensorBoard"):
            while self._runs:
                self._runs.popitem()[1].close()


class TrackersPart(ScalarLayout, Part):
    """Writes TensorBoard's layout, hands tables on, and lets no tracker end a run."""

    def __init__(self) -> None: ...

    def connect(self, run: PartContext) -> None:
        self._run, self._trackers = run, Trackers(run.args.report_to, run.trl.callbacks.callbacks)
        banded = [branch for branch, target in run.args.kl_targets().items() if target.has_band]
        super().__init__(run.figures.words, banded, run.trl.callbacks.callbacks)

    def on_table(self, mode: str, step: int) -> None:
        args = self._run.args
        unique = bool(args.log_unique_prompts)
        self._trackers.log_table(Path(args.output_dir), mode, step, unique_prompts=unique)

    def end_run(self) -> None:
        self._trackers.close_files()

    def close(self) -> None:
        self._trackers.close()
