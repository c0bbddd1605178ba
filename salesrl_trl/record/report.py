"""`python -m salesrl_trl.record.report OUTPUT_DIR [--lang en|zh]`.

Reads a finished or unfinished run's folder and writes the viewer's report tab as one HTML page. Imports neither torch
nor TRL. Exit code: 0; 2, with one message, for an invalid folder.
"""

import argparse
import json
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

from salesrl_trl import names
from salesrl_trl.errors import ConfigError
from salesrl_trl.ground.command_line import exit_code
from salesrl_trl.ground.shutdown import end_tidily
from salesrl_trl.judged.budget import Account, read_account
from salesrl_trl.record.view.page import page

EVENT_FILES = "events.out.tfevents.*"
RUNS = "runs"  # transformers' folder for event files inside a run's folder
MAX_POINTS = 360  # per line; more are indistinguishable
MAX_LINES = 9  # per chart, the page's number of colours
MAX_ROWS = 30  # per table

Series = Mapping[int, float]  # finite values by ascending step
Json = dict[str, object]


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """The data in a run's folder."""

    series: Mapping[str, Series]  # by tag without `train/`
    held_out: Mapping[int, Mapping[str, float | None]]  # held-out evaluations by ascending step
    account: Account

    def of(self, tag: str) -> Series:
        """A tag's values; empty if it was never logged."""
        return self.series.get(tag, {})


def main(argv: Sequence[str] | None = None) -> int:
    """Write the report. Returns the exit code."""
    return exit_code("report", argv, _write)


def _write(args: argparse.Namespace) -> None:
    print(f"Page: {write_report(args.output_dir, args.lang)}")


def write_report(folder: Path, language: str = "en") -> Path:
    """Write the report of a run's folder. Returns its path. Raises `ConfigError`."""
    figures = figures_of(read_run(folder))
    html = folder / names.REPORT_PAGE_FILE
    state = {"runs": [{"name": folder.resolve().name, "path": str(folder)}], "facets": {}}
    data = {"state": state, "report": {"figures": figures}, "language": language}
    html.write_text(page(data), encoding="utf-8", errors="replace")
    return html


# Charts


def figures_of(run: Run) -> Json:
    """A run's chart data as JSON values. `assets/report.js` contains the labels in both languages."""
    branches = names.branches_in(run.series)
    steps = run.of(names.STEP_SECONDS)
    phases = {str(phase): run.of(names.time_of(phase)) for phase in names.Phase}
    reasons = [tag for tag in run.series if tag.startswith(names.FAILURE_REASONS)]
    counts = {tag.removeprefix(names.FAILURE_REASONS): run.of(tag) for tag in reasons}
    kinds = sorted({kind for evaluation in run.held_out.values() for kind in evaluation})
    evaluations = [[step, *map(values.get, kinds)] for step, values in run.held_out.items()]
    return {
        "reward": _rewards(run, branches),
        "kl": [_kl(run, branch) for branch in branches if run.of(names.kl_of(branch))],
        "phases": _by_size(phases, sum(steps.values()), len(steps)),
        "failures": _by_size(counts, math.fsum(sum(series.values()) for series in counts.values()), 1),
        "held_out": {"kinds": kinds, "rows": [*evaluations[:1], *evaluations[1:][-MAX_ROWS:]]},
        "spent": [{"service": name, **asdict(spent)} for name, spent in sorted(run.account.services.items())],
        "limits": [[name, run.account.taken[name], most] for name, most in run.account.most.items()],
    }


def _rewards(run: Run, branches: Sequence[str]) -> list[Json]:
    """Lines: each branch's reward and, dashed, its reference. The overall reward is unnamed."""
    lines = [] if len(branches) == 1 else [_line("", run.of(names.REWARD), len(branches))]
    for colour, branch in enumerate(branches):
        lines.append(_line(branch, run.of(names.reward_of(branch)), colour))
        lines.append({**_line(branch, run.of(names.reference_of(branch)), colour), "dash": 1})
    return [line for line in lines if line["points"]]


def _kl(run: Run, branch: str) -> Json:
    """A branch's KL, its band and share of steps within it, if any, and its coefficient."""
    edges = [list(run.of(names.kl_of(branch, kind)).values())[-1:] for kind in ("_low", "_high", "_share_in_band")]
    return {
        "branch": branch,
        "kl": [_line("KL", run.of(names.kl_of(branch)), 0)],
        "band": [edge for [edge] in edges] if all(edges) else None,
        "beta": [_line("beta", beta, 1)] if (beta := run.of(names.beta_of(branch))) else [],
    }


def _by_size(series: Mapping[str, Series], whole: float, steps: int) -> Json:
    """Lines and rows of the parts of a `whole`, largest first. A row: name, mean per step, share."""
    sums = {name: math.fsum(values.values()) for name, values in series.items()}
    named = sorted((name for name, total in sums.items() if total > 0), key=lambda name: (-sums[name], name))
    return {
        "lines": [_line(name, series[name], colour) for colour, name in enumerate(named[:MAX_LINES])],
        "rows": [[name, sums[name] / steps, sums[name] / whole] for name in named[:MAX_ROWS]] if whole else [],
    }


def _line(name: str, series: Series, colour: int) -> Json:
    """A line whose points are means of neighbouring steps, with five digits."""
    steps = [*series]
    size = max(1, math.ceil(len(steps) / MAX_POINTS))
    groups = [steps[first : first + size] for first in range(0, len(steps), size)]
    means = [(group[-1], float(f"{statistics.fmean(series[step] for step in group):.5g}")) for group in groups]
    return {"name": name, "color": colour, "dash": 0, "points": means}


# The run's folder


def read_run(folder: Path) -> Run:
    """Read the folder of a run, which may be unfinished, killed or resumed. Raises `ConfigError` without event files,
    or for an unreadable file."""
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder. Expected the `output_dir` of a run.")
    top = folder / RUNS
    files = [_scalars(path) for path in sorted(top.rglob(EVENT_FILES))]
    if not files:
        raise ConfigError(
            f"{top} does not contain TensorBoard files ({EVENT_FILES}). Expected the `output_dir` of a run with "
            "`report_to: tensorboard`. If its files are elsewhere, copy them there."
        )
    account = read_account(folder / names.SPENT_FILE)
    return Run(series=_merged(files), held_out=_held_out(folder / names.HELD_OUT_FILE), account=account)


class _Scalar(NamedTuple):
    written_s: float
    step: int
    tag: str  # without `train/`
    number: float


def _scalars(path: Path) -> list[_Scalar]:
    """The training metrics of one file, up to a truncated event."""
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

    scalars, now_s = list[_Scalar](), -math.inf
    for event in LegacyEventFileLoader(str(path)).Load():
        now_s = max(now_s, event.wall_time)  # the clock may be set back; within a file, event order counts
        scalars += [
            _Scalar(now_s, event.step, value.tag.removeprefix(names.TRAIN), value.simple_value)
            for value in event.summary.value
            if value.tag.startswith(names.TRAIN) and value.WhichOneof("value") == "simple_value"
        ]
    return scalars


def _merged(files: Sequence[Sequence[_Scalar]]) -> dict[str, dict[int, float]]:
    """The finite scalars of all files by tag and step; the latest value of a step counts.

    A resume, or another run in the same folder, repeats steps. Earlier values from its first step on are discarded,
    even for steps it has not reached yet.
    """
    # a final evaluation's file contains the tag `epoch` only
    firsts = [next((scalar for scalar in scalars if scalar.tag != "epoch"), None) for scalars in files]
    starts = [first for first in firsts if first is not None]
    series: dict[str, dict[int, float]] = {}
    for scalar in sorted((scalar for scalars in files for scalar in scalars), key=lambda scalar: scalar.written_s):
        if any(start.written_s > scalar.written_s and start.step <= scalar.step for start in starts):
            continue
        values = series.setdefault(scalar.tag, {})
        values.pop(scalar.step, None)
        if math.isfinite(scalar.number):
            values[scalar.step] = scalar.number
    return {tag: dict(sorted(values.items())) for tag, values in sorted(series.items())}


def _held_out(path: Path) -> dict[int, dict[str, float | None]]:
    figures: dict[int, dict[str, float | None]] = {}
    try:
        for record in json.loads(path.read_text(encoding="utf-8")) if path.is_file() else ():
            step = figures.setdefault(int(record.pop("step")), {})
            record.pop(names.BY_ROW, None)
            step |= {name: None if value is None else float(value) for name, value in record.items()}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{path} can't be read ({error}). Expected the evaluations of a run.") from None
    return dict(sorted(figures.items()))


if __name__ == "__main__":
    end_tidily()
    sys.exit(main())
