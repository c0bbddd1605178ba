"""The form of a stage: its name, its findings and its report. Owns no check."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

from salesrl_trl.errors import ConfigError
from salesrl_trl.run.tools import Finding, finding_of

if TYPE_CHECKING:
    from salesrl_trl.build.plan import Plan

Figure = float | int | str | None


class StageVerdict(StrEnum):
    """The outcome of a stage."""

    PASSED = "passed"
    NOTED = "noted"
    """Passed, with something to know."""
    FAILED = "failed"
    SKIPPED = "skipped"


@dataclass
class Findings:
    """Collects what a stage finds.

    A note is a line for the user, in the banner of a run too. A figure is for those who look for it.
    """

    found: list[Finding] = field(default_factory=list)
    figures: dict[str, Figure] = field(default_factory=dict)
    """By name, which has the unit: `p95_s`, `free_gib`."""
    skipped: str | None = None
    """Reason why the stage had nothing to do."""

    def note(self, text: str, remedy: str = "") -> None:
        self.add(text, remedy, is_failure=False)

    def fail(self, text: str, remedy: str) -> None:
        self.add(text, remedy, is_failure=True)

    def add(self, text: str, remedy: str, *, is_failure: bool) -> None:
        self.found.append(Finding(text, remedy, is_failure))

    def raise_failure(self) -> None:
        """Raise `ConfigError` with the first failure, if there is one."""
        for finding in self.found:
            if finding.is_failure:
                raise ConfigError(finding.message)

    @property
    def verdict(self) -> StageVerdict:
        if any(finding.is_failure for finding in self.found):
            return StageVerdict.FAILED
        if self.skipped is not None:
            return StageVerdict.SKIPPED
        return StageVerdict.NOTED if self.found else StageVerdict.PASSED


class PreflightStage(Protocol):
    """A stage of the preflight."""

    name: str
    needs: tuple[str, ...]
    """Names of earlier stages without which this one can't run."""

    def run(self, plan: "Plan") -> Findings:
        """Check. With `plan.in_depth` it may take seconds.

        Raises:
            `SalesRLError`: the stage failed. The message says what was got, what was expected and what to do.
        """


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
        findings = stage.run(plan)
    except Exception as error:
        findings = Findings([finding_of(error)])
    found = [*findings.found, *([Finding(findings.skipped)] if findings.skipped else [])]
    return StageReport(stage.name, findings.verdict, time.perf_counter() - start, tuple(found), dict(findings.figures))
