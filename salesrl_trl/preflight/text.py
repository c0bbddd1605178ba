"""Reports of stages as text and as JSON. Imports no torch."""

import dataclasses
import textwrap
from collections.abc import Sequence

from salesrl_trl.preflight.stage import Figure, StageReport, StageVerdict

WIDTH = 119
NBSP = "\N{NO-BREAK SPACE}"
"""Keeps a figure and its name on one line."""


def stage_text(report: StageReport) -> str:
    """A line with verdict, seconds and figures. Below it a line for each finding, and one for its remedy."""
    head = f"{report.stage:<12} {report.verdict:<8} {report.seconds:6.2f} s  "
    figures = ", ".join(f"{name}{NBSP}{_shown(value)}" for name, value in report.figures.items())
    lines = textwrap.wrap(figures, WIDTH, initial_indent=head, subsequent_indent=" " * len(head)) or [head.rstrip()]
    for finding in report.findings:
        lines += textwrap.wrap(finding.text, WIDTH, initial_indent="  - ", subsequent_indent="    ")
        lines += textwrap.wrap(finding.remedy, WIDTH, initial_indent="    -> ", subsequent_indent="       ")
    return "\n".join(lines).replace(NBSP, " ")


def next_step(reports: Sequence[StageReport], wanted: Sequence[str]) -> str:
    """The last line: what to do now."""
    seconds, last = sum(report.seconds for report in reports), reports[-1]
    if last.verdict is StageVerdict.FAILED:
        return f"Stage {last.stage} failed after {seconds:.1f} s. Next: mend what it names, then start this again."
    if wanted:
        following = "all stages: `python -m salesrl_trl.preflight` without `--stage`"
        return f"Passed in {seconds:.1f} s: {', '.join(wanted)}. Next: {following}."
    return f"All stages passed in {seconds:.1f} s. Next: start the recipe's script with the same settings."


def all_reports(reports: Sequence[StageReport], following: str) -> dict[str, object]:
    """All reports, for programs."""
    return {
        "passed": reports[-1].verdict is not StageVerdict.FAILED,
        "seconds": sum(report.seconds for report in reports),
        "stages": [dataclasses.asdict(report) for report in reports],
        "next": following,
    }


def _shown(value: Figure) -> str:
    return f"{value:.4g}" if isinstance(value, float) else f"{value}"
