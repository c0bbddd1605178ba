"""What trackers get beside the figures, which transformers hands to them: tables of completions.

Owns how MLflow and SwanLab take them, and the end of a tracker's run. TRL itself hands tables to Weights & Biases and
trackio. `run.trackers` has the settings. A tracker that `report_to` does not name is not imported.
"""

import functools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import pyarrow.parquet  # type: ignore[import-untyped]
from transformers import TrainerCallback
from transformers.integrations.integration_utils import MLflowCallback, SwanLabCallback, TrackioCallback

from salesrl_trl.replaced import replaced


def _tabled(tracker: str, rows: Sequence[Mapping[str, object]], mode: str, step: int) -> None:
    columns = [*rows[0]]
    if tracker == "mlflow":
        import mlflow

        mlflow.log_table(
            {name: [row[name] for row in rows] for name in columns}, f"completions/{mode}_{step:05d}.json"
        )
    elif tracker == "swanlab":
        import swanlab

        texts = [[each if isinstance(each, str) else json.dumps(each, ensure_ascii=False) for each in row.values()]
                 for row in rows]  # fmt: skip
        swanlab.log({f"{mode}/completions": swanlab.echarts.Table().add(columns, texts)}, step=step)


class Trackers:
    """The trackers of a trainer.

    The runs of trackers stay open until `close`: the last figures, those of the held-out rows, come after training. At
    its end transformers closes the run of MLflow, and these figures would begin another run. Without a run of trackio
    TRL fails.

    Args:
        names (`Iterable[str]`):
            The trackers of `report_to`.
        callbacks (`Iterable[TrainerCallback]`):
            Callbacks of the trainer. Those of the trackers are among them.
    """

    def __init__(self, names: Iterable[str], callbacks: Iterable[TrainerCallback]) -> None:
        self._names = [*names]
        self._ends: dict[TrainerCallback, Callable[[], None]] = {}
        for each in callbacks:
            if isinstance(each, MLflowCallback | TrackioCallback):
                each.on_train_end = functools.partial(self._end_later, each, each.on_train_end)
            elif isinstance(each, SwanLabCallback):
                each.setup = functools.partial(_set_up_swanlab, each._swanlab, each.setup)
                each.on_log = functools.partial(_log_values, each.on_log)

    def _end_later(self, owner: TrainerCallback, end: Callable[..., None], *given: object, **named: object) -> None:
        self._ends[owner] = functools.partial(end, *given, **named)

    def log_table(self, output_dir: Path, mode: str, step: int, unique_prompts: bool) -> None:
        """Hand on the table of completions that TRL wrote.

        Args:
            output_dir (`Path`):
                The run's folder.
            mode (`str`):
                `"train"` or `"eval"`.
            step (`int`):
                Optimizer steps done.
            unique_prompts (`bool`):
                Whether to show one completion of each prompt.
        """
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


def _set_up_swanlab(swanlab: object, set_up: Callable[..., None], *given: object, **named: object) -> None:
    """transformers asks whether there is a run by `get_run() is None`, where SwanLab 0.10 raises an error."""
    get_run, has_run = swanlab.get_run, swanlab.has_run  # type: ignore[attr-defined]
    with replaced(swanlab, "get_run", lambda: get_run() if has_run() else None):
        set_up(*given, **named)


def _log_values(on_log: Callable[..., None], *given: object, logs: Mapping[str, object], **named: object) -> None:
    """SwanLab prints an error for each figure without a value, at each step."""
    on_log(*given, logs={name: value for name, value in logs.items() if value is not None}, **named)
