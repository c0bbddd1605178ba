"""The start of a run: its seconds by phase, from the beginning of the process to the end of the first step.

Owns the line on the console and the file of these seconds. The phases are marked by the code that is timed.
"""

import json
import logging
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True, kw_only=True, slots=True)
class StartUpSeconds:
    """The seconds of a start."""

    total: float
    """From the beginning of the process, or of the first phase, to the end of the first step."""
    phases: dict[str, float]
    """One after another. The time between them is left out."""
    beside: dict[str, float]
    """Side by side with those: of other threads and processes."""
    first_step: float
    evaluation: float
    """The part of the first step in which an evaluation went on."""

    @classmethod
    def of(cls, spans: Sequence[Span], first: StepTimes) -> "StartUpSeconds":
        """The seconds of a start, from all spans until now and the first step."""
        known = [span for span in spans if span.name in set(StartUp)]
        phases, beside = dict[str, float](), dict[str, float]()
        for span in sorted(known, key=lambda span: span.started):
            sums = phases if span.track == PHASES_TRACK else beside
            sums[span.name] = sums.get(span.name, 0.0) + span.seconds
        return cls(
            total=first.ended - min([first.started, *(span.started for span in known)]),
            phases=phases,
            beside=beside,
            first_step=first.wall,
            evaluation=first.seconds.get(Phase.EVALUATION, 0.0),
        )

    def line(self) -> str:
        """`[Start] 31.4 s to the end of the first step: imports 9.0, engine 10.1, first step 4.0; beside: ...`"""
        parts = [f"{name} {seconds:.1f}" for name, seconds in self.phases.items() if seconds >= SHOWN_S]
        evaluated = f" (evaluation {self.evaluation:.1f})" if self.evaluation else ""
        parts.append(f"first step {self.first_step:.1f}{evaluated}")
        other = self.total - sum(self.phases.values()) - self.first_step
        parts.append(f"other {max(other, 0.0):.1f}")
        beside = ", ".join(f"{name} {seconds:.1f}" for name, seconds in self.beside.items() if seconds >= SHOWN_S)
        return f"[Start] {self.total:.1f} s to the end of the first step: {', '.join(parts)}" + (
            f"; side by side with these: {beside}" * bool(beside)
        )

    def keep(self, output_dir: Path) -> None:
        """Log the line, and write the file. A full disk does not end the run."""
        logger.info(self.line())
        figures = {
            "total_s": self.total,
            "phases_s": self.phases,
            "beside_s": self.beside,
            "first_step_s": self.first_step,
            "evaluation_s": self.evaluation,
        }
        try:
            (output_dir / START_UP_FILE).write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            logger.warning(f"{output_dir / START_UP_FILE} can't be written ({type(error).__name__})")
