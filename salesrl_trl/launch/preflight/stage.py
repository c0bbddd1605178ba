"""A stage of a preflight: its checks in order, and its report. Imports no torch.

`runner` has the list of stages and runs them; `__main__` prints their reports.
"""

import textwrap
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from salesrl_trl.errors import Refusals
from salesrl_trl.launch.checks.outcome import Figure, Finding, Findings, StageVerdict
from salesrl_trl.launch.commands import finding_of

if TYPE_CHECKING:
    from salesrl_trl.launch.plan import Plan

Check = Callable[["Plan", Findings], None]
"""Looks at a plan, and adds to the findings. It raises a `SalesRLError` where nothing behind it can work."""

WIDTH = 119
NBSP = "\N{NO-BREAK SPACE}"  # keeps a figure and its name on one line


@dataclass(frozen=True)
class PreflightStage:
    """A stage: a list of checks under one name."""

    name: str
    needs: tuple[str, ...]  # names of earlier stages without which this one can't run
    checks: tuple[Check, ...]

    def run(self, plan: "Plan", refused: Refusals) -> Findings:
        """Make the checks, up to one that says that there is nothing to check, or refuses something."""
        findings, before = Findings(refused=refused), len(refused.errors)
        for check in self.checks:
            if findings.skipped is None and len(refused.errors) == before:
                with refused:
                    check(plan, findings)
        return findings


@dataclass(frozen=True)
class StageReport:
    """The outcome of one stage."""

    stage: str
    verdict: StageVerdict
    seconds: float
    findings: tuple[Finding, ...]
    figures: Mapping[str, Figure]


def report_of(stage: PreflightStage, plan: "Plan") -> StageReport:
    """Run a stage and time it. An error becomes a finding."""
    start = time.perf_counter()
    try:
        findings = stage.run(plan, Refusals())
        findings.items += [finding_of(error) for error in findings.refused.errors]
    except Exception as error:
        findings = Findings([finding_of(error)])
    reason = [Finding(findings.skipped)] if findings.skipped else []
    seconds = time.perf_counter() - start
    return StageReport(stage.name, findings.verdict, seconds, (*findings.items, *reason), dict(findings.figures))


def stage_text(report: StageReport) -> str:
    """A line with verdict, seconds and figures. Below it a line for each finding, and one for its remedy."""
    head = f"{report.stage:<12} {report.verdict:<8} {report.seconds:6.2f} s  "
    shown = {
        name: f"{value:.4g}" if isinstance(value, float) else f"{value}" for name, value in report.figures.items()
    }
    figures = ", ".join(f"{name}{NBSP}{value}" for name, value in shown.items())
    lines = textwrap.wrap(figures, WIDTH, initial_indent=head, subsequent_indent=" " * len(head)) or [head.rstrip()]
    for finding in report.findings:
        lines += textwrap.wrap(finding.text, WIDTH, initial_indent="  - ", subsequent_indent="    ")
        lines += textwrap.wrap(finding.remedy, WIDTH, initial_indent="    -> ", subsequent_indent="       ")
    return "\n".join(lines).replace(NBSP, " ")
