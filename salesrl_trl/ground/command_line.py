"""The command lines of the package's tools, defined in `commands.toml`: parsing, running, and exit codes."""

import argparse
import json
import math
import sys
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn, TypeAlias

from salesrl_trl.errors import ConfigError, SalesRLError
from salesrl_trl.ground.shutdown import EXIT_BAD_INPUT, EXIT_FAILED

_KINDS: dict[str, type] = {"int": int, "float": float, "path": Path}


class ToolParser(argparse.ArgumentParser):
    """Raises `ConfigError` for invalid arguments, where `argparse` would print its usage and exit."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"invalid arguments: {message}. Correct them; `--help` lists all.")


def parser_of(command: str) -> argparse.ArgumentParser:
    """The parser of `salesrl COMMAND`; a `ToolParser` if the command also accepts a recipe's settings."""
    table = tomllib.loads(Path(__file__).with_name("commands.toml").read_text("utf-8"))[command]
    texts = {"prog": table.get("prog", f"salesrl {command}"), "description": table["description"]}
    if "usage" in table:
        parser: argparse.ArgumentParser = ToolParser(usage=f"%(prog)s {table['usage']}", allow_abbrev=False, **texts)
    else:
        parser = argparse.ArgumentParser(**texts)
    for name, option in table.get("options", {}).items():
        kind = {"type": _KINDS[option["type"]]} if "type" in option else {}
        names = [name, name.replace("_", "-")] if name.startswith("--") and "_" in name else [name]
        parser.add_argument(*names, **option | kind)
    return parser


def given(argv: Sequence[str], name: str) -> str | None:
    """A setting's value on the command line; `""` for a flag without a value, `None` if absent."""
    words = ToolParser(add_help=False, allow_abbrev=False)
    words.add_argument(f"--{name}", nargs="?", const="")
    value: str | None = getattr(words.parse_known_args(argv)[0], name)
    return value


def exit_code(
    command: str,
    argv: Sequence[str] | None,
    work: Callable[[argparse.Namespace], int | None],
    *failures: type[Exception],
) -> int:
    """Run a command with its parsed arguments, like `ended`, which also treats `OSError` as a failure."""
    args = parser_of(command).parse_args(argv)
    return ended(argv or (), lambda: work(args), OSError, *failures)


Work: TypeAlias = Callable[[], "int | Work | None"]


def ended(argv: Sequence[str], work: Work, *failures: type[Exception]) -> int:
    """Run a command and return its exit code. After its checks, `work` may return a function with the remaining work.

    Errors of this package and `failures` are reported as one message, on stderr or, with `--json`, as a JSON object on
    stdout. The exit code is then `EXIT_BAD_INPUT`, or `EXIT_FAILED` for the remaining work.
    """
    told: tuple[type[Exception], ...] = (SalesRLError, *failures)
    failing_as = EXIT_BAD_INPUT
    try:
        result = work()
        while callable(result):
            failing_as = EXIT_FAILED
            result = result()
        return result or 0
    except told as error:
        name = type(error).__name__
        if "--json" in argv:
            print(json.dumps({"failure": {"error": name, "text": str(error), "remedy": ""}}))
        else:
            print(f"{name}: {error}", file=sys.stderr)
        return failing_as


def strict_json(value: object) -> str:
    """JSON that every parser accepts, with null for NaN and infinite numbers."""
    return json.dumps(finite(value))


def finite(value: object) -> object:
    """The same value, with `None` instead of NaN and infinite numbers."""
    if isinstance(value, Mapping):
        return {name: finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
