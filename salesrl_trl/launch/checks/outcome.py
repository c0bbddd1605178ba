"""The findings of checks: problems with their remedies, and metrics."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

Figure = float | int | str | None


class StageVerdict(StrEnum):
    """The outcome of a stage."""

    PASSED = "passed"
    NOTED = "noted"  # passed, with notes
    FAILED = "failed"
    SKIPPED = "skipped"


@dataclass(frozen=True)
class Finding:
    """One finding of a check."""

    text: str  # the actual and the expected state
    remedy: str = ""
    is_failure: bool = False

    @property
    def message(self) -> str:
        """Text and remedy."""
        return f"{self.text} {self.remedy}".rstrip()


@dataclass
class Findings:
    """Collects the findings of checks. Notes also appear in a run's banner."""

    items: list[Finding] = field(default_factory=list)
    figures: dict[str, Figure] = field(default_factory=dict)  # by name with its unit: `p95_s`, `free_gib`
    skipped: str | None = None  # why there was nothing to check

    def add(self, text: str, remedy: str = "", *, is_failure: bool = False) -> None:
        """Add a note, or a failure."""
        self.items.append(Finding(text, remedy, is_failure))

    def notes(self, texts: Iterable[str | None]) -> None:
        """Add a note for each text."""
        self.items += map(Finding, filter(None, texts))

    def fail(self, text: str, remedy: str) -> None:
        self.add(text, remedy, is_failure=True)

    @property
    def verdict(self) -> StageVerdict:
        if any(finding.is_failure for finding in self.items):
            return StageVerdict.FAILED
        if self.skipped is not None:
            return StageVerdict.SKIPPED
        return StageVerdict.NOTED if self.items else StageVerdict.PASSED
