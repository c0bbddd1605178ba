"""One thing that a check found, with what to do about it; and an error as such a finding.

Owns the form. Checks and commands make findings, and `preflight.stage` collects them.
"""

import logging
from dataclasses import dataclass

from salesrl_trl.errors import SalesRLError
from salesrl_trl.run.fault import PAGE
from salesrl_trl.run.last_words import recognised, short

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Finding:
    """One thing that a stage found."""

    text: str
    """What was got, and what was expected."""
    remedy: str = ""
    """What to do; empty if there is nothing to do."""
    is_failure: bool = False

    @property
    def message(self) -> str:
        """Text and remedy."""
        return f"{self.text} {self.remedy}".rstrip()


def finding_of(error: Exception) -> Finding:
    """An error of this package says what to do. Of another one the catalogue does, as at the end of a run."""
    if isinstance(error, SalesRLError):
        return Finding(str(error), is_failure=True)
    fault, text = recognised(error), f"{type(error).__name__}: {short(error)}"
    if fault is None:
        logger.error("an error that is not in the catalogue", exc_info=error)
        return Finding(text, f"The traceback is on stderr. {PAGE} has the known faults.", is_failure=True)
    steps = " ".join(f"{number}. {step}" for number, step in enumerate(fault.remedies, 1))
    return Finding(f"{fault.title}. {fault.cause} {text}", f"{steps} More: {PAGE}#{fault.anchor}.", is_failure=True)
