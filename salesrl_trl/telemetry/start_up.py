"""The start of a run: its seconds by phase, from the beginning of the process to the end of the first step.

Owns the line on the console and the file of these seconds, for `instruments`. The code that is timed marks the phases.
"""

import json
import logging
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from salesrl_trl.names import START_UP_FILE, Phase, StartUp
from salesrl_trl.telemetry.timeline import StepTimes
from salesrl_trl.timing import PHASES_TRACK, Span

logger = logging.getLogger(__name__)

SHOWN_S = 0.05
"""Shorter phases are not in the line. The file has all."""


def imports_so_far() -> Span:
    """The time from the beginning of this process until now: Python has started, and imported what was asked for."""
    after_name = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    began = int(after_name[19]) / os.sysconf("SC_CLK_TCK")  # seconds since the machine started, to 10 ms
    now = time.perf_counter()
    return Span(name=StartUp.IMPORTS, started=now - (time.clock_gettime(time.CLOCK_BOOTTIME) - began), ended=now)


def write_start(spans: Sequence[Span], first: StepTimes, output_dir: Path) -> None:
    """Log the seconds of a start, from all spans until now and the first step, and write them to a file.

    The phases go one after another; others go side by side with those, in other threads and processes. The time in
    between is "other". A full disk does not end the run.
    """
    known = sorted((span for span in spans if span.name in set(StartUp)), key=lambda span: span.started)
    phases, beside = dict[str, float](), dict[str, float]()
    for span in known:
        sums = phases if span.track == PHASES_TRACK else beside
        sums[span.name] = sums.get(span.name, 0.0) + span.seconds
    total = first.ended - min([first.started, *(span.started for span in known)])
    evaluation = first.seconds.get(Phase.EVALUATION, 0.0)
    logger.info(_line(total, phases, beside, first.wall, evaluation))
    figures = {
        "total_s": total,
        "phases_s": phases,
        "beside_s": beside,
        "first_step_s": first.wall,
        "evaluation_s": evaluation,
    }
    try:
        (output_dir / START_UP_FILE).write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        logger.warning(f"{output_dir / START_UP_FILE} can't be written ({type(error).__name__})")


def _line(
    total: float, phases: Mapping[str, float], beside: Mapping[str, float], first_step: float, evaluation: float
) -> str:
    """`[Start] 31.4 s to the end of the first step: imports 9.0, engine 10.1, first step 4.0; side by side ...`"""

    def shown(seconds_by_name: Mapping[str, float]) -> list[str]:
        return [f"{name} {seconds:.1f}" for name, seconds in seconds_by_name.items() if seconds >= SHOWN_S]

    evaluated = f" (evaluation {evaluation:.1f})" if evaluation else ""
    other = max(total - sum(phases.values()) - first_step, 0.0)
    parts = [*shown(phases), f"first step {first_step:.1f}{evaluated}", f"other {other:.1f}"]
    side = f"; side by side with these: {', '.join(shown(beside))}" if beside else ""
    return f"[Start] {total:.1f} s to the end of the first step: {', '.join(parts)}{side}"
