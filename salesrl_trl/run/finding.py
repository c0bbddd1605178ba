"""An error as a finding, with what to do about it. Called by commands and by the stages of a preflight."""

import logging

from salesrl_trl.build.checks.outcome import Finding
from salesrl_trl.errors import SalesRLError
from salesrl_trl.run.fault import PAGE
from salesrl_trl.run.last_words import recognised, short

logger = logging.getLogger(__name__)


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
