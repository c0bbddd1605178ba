"""What commands have in common: wrong arguments are refused as settings are, and a failure is told to programs too.

Imports no torch.
"""

import argparse
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

from salesrl_trl.errors import ConfigError, SalesRLError
from salesrl_trl.ground.shutdown import EXIT_BAD_INPUT, EXIT_INTERRUPTED, EXIT_STOPPED
from salesrl_trl.run.finding import finding_of


class ToolParser(argparse.ArgumentParser):
    """Raises `ConfigError` for wrong arguments. `argparse` would print its usage and exit."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"the arguments do not work: {message}. Correct them; `--help` lists all.")


def exit_code_of(argv: Sequence[str], prepare: Callable[[], Callable[[], int]]) -> int:
    """Run a command, and print its failure.

    `argv`: its arguments. With `--json` a failure is JSON. `prepare`: Checks what was given, and returns what is to be
    done, which returns an exit code.

    Returns:
        `int`: that exit code; `EXIT_BAD_INPUT` where `prepare` failed, `EXIT_STOPPED` for a failure behind it.
    """
    failing_as = EXIT_BAD_INPUT
    try:
        work = prepare()
        failing_as = EXIT_STOPPED
        return work()
    except SalesRLError as error:
        tell_failure(error, as_json="--json" in argv)
        return failing_as
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED


def tell_failure(error: Exception, as_json: bool) -> None:
    """Print an error: its name and message on stderr, or `{"failure": {"error", "text", "remedy"}}` on stdout.

    The text of an error of this package holds its remedy.
    """
    found, name = finding_of(error), type(error).__name__
    if as_json:
        print(json.dumps({"failure": {"error": name, "text": found.text, "remedy": found.remedy}}))
    else:
        print(f"{name}: {found.message}", file=sys.stderr)


def strict_json(value: object) -> str:
    """JSON for every reader: numbers that are none, or infinite, are null."""
    return json.dumps(finite(value))


def finite(value: object) -> object:
    """The same value, with null for numbers that are none, or infinite."""
    if isinstance(value, Mapping):
        return {name: finite(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
