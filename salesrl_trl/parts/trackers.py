"""Additions to the metrics that transformers sends to trackers: TensorBoard's groups under "Custom Scalars".

Ensures that trackers never end a training. Imports only trackers named in `report_to`.
"""

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

from transformers import TrainerCallback, TrainerState
from transformers.integrations import TensorBoardCallback, integration_utils
from trl.extras.profiling import ProfilingContext

from salesrl_trl import names
from salesrl_trl.ground.process import patched
from salesrl_trl.names import BRANCH, FIGURES
from salesrl_trl.telemetry.logs import spared, warn_once
from salesrl_trl.wiring.part import Part, PartContext

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

Chart = list[str | list[str]]  # the chart's kind, `"Multiline"` or `"Margin"`, and its tags
EDGES = (names.kl_of(BRANCH, "_low"), names.kl_of(BRANCH, "_high"))  # the margins of a chart, after its line


def custom_scalars(words: Mapping[str, Sequence[str]], banded: Sequence[str]) -> dict[str, dict[str, Chart]]:
    """The layout for `SummaryWriter.add_custom_scalars`: category, title, chart. `words` holds the values for the
    placeholders in `FIGURES`. `banded`: the branches with a KL band."""
    layout: dict[str, dict[str, Chart]] = {category: {} for category in names.CATEGORIES}
    for figure in FIGURES:
        for choice in names.meanings(figure.tag, words) if figure.chart is not None else ():
            is_edge = figure.tag in EDGES
            if is_edge and choice["branch"] not in banded:
                continue
            category, title = (name.format(**choice) for name in figure.chart or ())
            chart = layout[category].setdefault(title, ["Multiline", []])
            chart[0] = "Margin" if is_edge else chart[0]
            start = "" if BRANCH in figure.tag and len(words["branch"]) > 1 else names.TRAIN
            chart[1] = [*chart[1], start + figure.tag.format(**choice)]
    for charts in layout.values():
        for chart in charts.values():
            if chart[0] == "Multiline":  # TensorBoard treats its tags as regular expressions
                chart[1] = [f"^{names.pattern_of(tag).pattern}$" for tag in chart[1]]
    return layout


Ending: TypeAlias = Callable[..., object]


class TrackersPart(Part):
    """Writes the layout from `custom_scalars` if the run reports to TensorBoard. TensorBoard assigns a colour per run,
    so each branch's metrics are also written to a separate run.

    Tracker runs stay open until `close`, because the held-out metrics are logged after training. transformers closes
    the MLflow run when training ends, so these metrics would start another run. TRL fails without a trackio run."""

    def connect(self, run: PartContext) -> None:
        self._callbacks: Sequence[TrainerCallback] = run.trl.callbacks.callbacks
        self._ends: dict[TrainerCallback, Ending] = {}  # closes trackers' runs
        self._replaced = contextlib.ExitStack()
        self._runs = dict[str, "SummaryWriter"]()  # TensorBoard writers by branch
        words = run.figures.words
        banded = [branch for branch, target in run.args.kl_targets().items() if target.has_band]
        self._layout = custom_scalars(words, banded)
        self._branches = {
            figure.tag.format(**choice): choice["branch"]
            for figure in FIGURES if figure.chart and BRANCH in figure.tag and len(words["branch"]) > 1
            for choice in names.meanings(figure.tag, words)
        }  # fmt: skip
        warn_once.cache_clear()
        if {"wandb", "mlflow", "trackio"}.intersection(run.args.report_to):
            profiled = spared("`profiling/...` of a tracker")(ProfilingContext._log_metrics)
            self._replaced.enter_context(patched(ProfilingContext, "_log_metrics", profiled))
        for callback in self._callbacks:
            if isinstance(callback, (*integration_utils.INTEGRATION_TO_CALLBACK.values(),)):
                _spare(callback)
            if isinstance(callback, integration_utils.MLflowCallback | integration_utils.TrackioCallback):
                callback.on_train_end = functools.partial(self._end_later, callback, callback.on_train_end)
            elif isinstance(callback, integration_utils.SwanLabCallback):
                callback.setup = functools.partial(_set_up_swanlab, callback._swanlab, callback.setup)
                callback.on_log = functools.partial(_log_values, callback.on_log)

    def _end_later(self, owner: TrainerCallback, end: Ending, *args: object, **named: object) -> None:
        self._ends[owner] = functools.partial(end, *args, **named)  # returns nothing: it would become the control

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

    def end_run(self) -> None:
        """Make TensorBoard start another file for the next run's metrics."""
        for callback in self._callbacks:
            if isinstance(callback, TensorBoardCallback):
                callback.on_train_end(None, None, None)

    def close(self) -> None:
        """End the tracker runs whose training has ended."""
        while self._ends:
            self._ends.popitem()[1]()
        self._replaced.close()


def _spare(callback: TrainerCallback) -> None:
    """Keep a tracker's callback from ending the run. At the start, only disk and network errors are tolerated, so that
    a wrong setting or key fails before the first step."""
    what = type(callback).__name__.removesuffix("Callback")
    callback.on_train_begin = spared(what, OSError)(callback.on_train_begin)
    callback.on_log = spared(what)(callback.on_log)
    callback.on_save = spared(what)(callback.on_save)
    callback.on_evaluate = spared(what)(callback.on_evaluate)
    callback.on_train_end = spared(what)(callback.on_train_end)


def _set_up_swanlab(swanlab: object, set_up: Callable[..., None], *args: object, **named: object) -> None:
    """transformers checks for a run with `get_run() is None`, but SwanLab 0.10 raises an error instead."""
    get_run, has_run = swanlab.get_run, swanlab.has_run  # type: ignore[attr-defined]

    def run_or_none() -> object:
        return get_run() if has_run() else None

    with patched(swanlab, "get_run", run_or_none):
        set_up(*args, **named)


def _log_values(on_log: Callable[..., None], *args: object, logs: Mapping[str, object], **named: object) -> None:
    """Drop metrics without a value, for each of which SwanLab would print an error at every step."""
    on_log(*args, logs={name: value for name, value in logs.items() if value is not None}, **named)
