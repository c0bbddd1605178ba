"""A stage of a preflight: its checks in order, and its report. Does not import torch."""

import logging
import textwrap
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from salesrl_trl.errors import SalesRLError
from salesrl_trl.launch.checks.outcome import Figure, Finding, Findings, StageVerdict
from salesrl_trl.launch.process import advice, recognised, short

if TYPE_CHECKING:
    from salesrl_trl.launch.plan import Plan

logger = logging.getLogger(__name__)

Check = Callable[["Plan", Findings], None]
"""Checks a plan and adds findings. Raises a `SalesRLError` if later checks can't work."""

WIDTH = 119


@dataclass(frozen=True)
class PreflightStage:
    """A stage: a list of checks under one name."""

    name: str
    needs: tuple[str, ...]  # names of earlier stages that this one requires
    checks: tuple[Check, ...]

    def run(self, plan: "Plan", findings: Findings) -> None:
        """Run the checks until one finds nothing to check."""
        for check in self.checks:
            if findings.skipped is None:
                check(plan, findings)


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
    start, findings = time.perf_counter(), Findings()
    try:
        stage.run(plan, findings)
    except Exception as error:
        findings.items.append(finding_of(error))
    reason = [Finding(findings.skipped)] if findings.skipped else []
    seconds = time.perf_counter() - start
    return StageReport(stage.name, findings.verdict, seconds, (*findings.items, *reason), dict(findings.figures))


def finding_of(error: Exception) -> Finding:
    """An error as a finding. This package's errors contain their remedy; the catalogue has those of other errors."""
    if isinstance(error, SalesRLError):
        return Finding(str(error), is_failure=True)
    fault, text = recognised(error), f"{type(error).__name__}: {short(error)}"
    if fault is None:
        logger.error("an error that is not in the catalogue", exc_info=error)
        return Finding(text, "The traceback is on stderr.", is_failure=True)
    head, *steps = advice(fault, None, str(error))
    return Finding(f"{head} {text}", " ".join(" ".join(steps).split()), is_failure=True)


def stage_text(report: StageReport) -> str:
    """A line with verdict, seconds and metrics, followed by the findings and their remedies."""
    head = f"{report.stage:<12} {report.verdict:<8} {report.seconds:6.2f} s  "
    values = {name: f"{value:.4g}" if isinstance(value, float) else value for name, value in report.figures.items()}
    figures = ", ".join(f"{name} {value}" for name, value in values.items())
    lines = textwrap.wrap(figures, WIDTH, initial_indent=head, subsequent_indent=" " * len(head)) or [head.rstrip()]
    for finding in report.findings:
        lines += textwrap.wrap(finding.text, WIDTH, initial_indent="  - ", subsequent_indent="    ")
        lines += textwrap.wrap(finding.remedy, WIDTH, initial_indent="    -> ", subsequent_indent="       ")
    return "\n".join(lines)
