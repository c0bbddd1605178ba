"""The command lines of the package's tools, which `commands.toml` holds: a command's parser, and its work.

Owns how a wrong argument is refused. Each command calls it. Standard library only.
"""

import argparse
import sys
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from salesrl_trl.errors import ConfigError
from salesrl_trl.ground.shutdown import EXIT_BAD_INPUT

_KINDS: dict[str, Callable[[str], object]] = {"int": int, "float": float, "path": Path}


class ToolParser(argparse.ArgumentParser):
    """Raises `ConfigError` for wrong arguments. `argparse` would print its usage and exit."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"the arguments do not work: {message}. Correct them; `--help` lists all.")


def parser_of(command: str, **kinds: Callable[[str], object]) -> argparse.ArgumentParser:
    """The parser of `python -m salesrl_trl.COMMAND`. One that takes the settings of a recipe too is a `ToolParser`.
    `kinds`: types of the command's own."""
    table: dict[str, Any] = tomllib.loads(Path(__file__).with_name("commands.toml").read_text("utf-8"))[command]
    texts = {"prog": table.get("prog", f"python -m salesrl_trl.{command}"), "description": table["description"]}
    if "usage" in table:
        parser: argparse.ArgumentParser = ToolParser(usage=f"%(prog)s {table['usage']}", allow_abbrev=False, **texts)
    else:
        parser = argparse.ArgumentParser(**texts)
    for name, option in table["options"].items():
        kind = {"type": (_KINDS | kinds)[option["type"]]} if "type" in option else {}
        names = [name, name.replace("_", "-")] if name.startswith("--") and "_" in name else [name]
        parser.add_argument(*names, **option | kind)
    return parser


def given(argv: Sequence[str], name: str) -> str | None:
    """What a command line gives for a setting: `""` for its name alone, `None` for nothing."""
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
    """Do a command's work with its arguments. A `ConfigError`, an `OSError` or one of the `failures` is one message on
    stderr, and exit code 2."""
    parser = parser_of(command)
    args = parser.parse_args(argv)
    caught: tuple[type[Exception], ...] = (ConfigError, OSError, *failures)
    try:
        return work(args) or 0
    except caught as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT
