"""What commands have in common: findings, failures for people and programs, and JSON.

`env`, `preflight`, `evaluate`, `rejudge` and other commands call it. Imports no torch.
"""

import json
import logging
import math
import sys
from collections.abc import Callable, Mapping, Sequence

from salesrl_trl.errors import SalesRLError
from salesrl_trl.ground.shutdown import EXIT_BAD_INPUT, EXIT_FAILED, EXIT_INTERRUPTED
from salesrl_trl.launch.catalogue import PAGE
from salesrl_trl.launch.checks.outcome import Finding
from salesrl_trl.launch.last_words import recognised, short

logger = logging.getLogger(__name__)


def exit_code_of(argv: Sequence[str], prepare: Callable[[], Callable[[], int]]) -> int:
    """Run a command, and print its failure. `prepare` checks the arguments, and returns the function that does the
    work and returns an exit code. A failure's is `EXIT_BAD_INPUT` in `prepare`, and `EXIT_FAILED` in the work."""
    failing_as = EXIT_BAD_INPUT
    try:
        work = prepare()
        failing_as = EXIT_FAILED
        return work()
    except SalesRLError as error:
        print_failure(error, as_json="--json" in argv)
        return failing_as
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED


def print_failure(error: Exception, as_json: bool) -> None:
    """Print an error: its name and message on stderr, or `{"failure": {"error", "text", "remedy"}}` on stdout."""
    finding, name = finding_of(error), type(error).__name__
    if as_json:
        print(json.dumps({"failure": {"error": name, "text": finding.text, "remedy": finding.remedy}}))
    else:
        print(f"{name}: {finding.message}", file=sys.stderr)


def strict_json(value: object) -> str:
    """JSON that every reader accepts: numbers that are NaN or infinite are null."""
    return json.dumps(finite(value))


def finite(value: object) -> object:
    """The same value, with `None` in place of numbers that are NaN or infinite."""
    if isinstance(value, Mapping):
        return {name: finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def finding_of(error: Exception) -> Finding:
    """An error as a finding. An error of this package has its remedy in its text, another one in the catalogue."""
    if isinstance(error, SalesRLError):
        return Finding(str(error), is_failure=True)
    fault, text = recognised(error), f"{type(error).__name__}: {short(error)}"
    if fault is None:
        logger.error("an error that is not in the catalogue", exc_info=error)
        return Finding(text, f"The traceback is on stderr. {PAGE} has the known faults.", is_failure=True)
    steps = " ".join(f"{number}. {step}" for number, step in enumerate(fault.remedies, 1))
    return Finding(f"{fault.title}. {fault.cause} {text}", f"{steps} More: {PAGE}#{fault.anchor}.", is_failure=True)
