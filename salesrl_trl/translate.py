"""`python -m salesrl_trl.translate FILE [--processes N] [--output RECIPE.yaml]`.

Makes a recipe of a verl configuration (YAML), or of the words such as `data.seed=1` in a script that starts verl. Its
comments say where each setting comes from, what is left out and why, and what has to be looked at. Reads the names of
`build/coming_from.yaml`. Imports no torch. Exit code: 0; 2, with one message, for a file that can't be read.
"""

import argparse
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from salesrl_trl.build.coming_from import beside, converted, flat, flow, known_as, names, processes, updates, value_of
from salesrl_trl.data.files import nearest_file, read_small, read_yaml, unreadable
from salesrl_trl.errors import ConfigError
from salesrl_trl.ground.command_line import exit_code
from salesrl_trl.ground.shutdown import end_tidily

_GROUP = "rollout.n"
_REFERENCE = re.compile(r"\$(?:(\w+)|\{([\w.]+)(?::?[-=]([^${}]*))?\})")
_PRODUCT = re.compile(r"\$\(\(\s*(\d+)\s*\*\s*(\d+)\s*\)\)")
_EXPONENT = re.compile(r"\d+(?:\.\d*)?[eE][-+]?\d+")  # a number for Hydra, and a text for PyYAML
_OFF: tuple[object, ...] = (None, False, 0, -1, "", [])  # values of what is not used


def read(path: Path) -> dict[str, object]:
    """The values of a configuration, or of a script's words: by the keys of the table, or by names that it lacks.
    Raises `ConfigError`."""
    try:
        content = read_yaml(path) if path.suffix in (".yaml", ".yml") else _words(read_small(path))
    except OSError as error:
        raise ConfigError(f"{path} can't be read ({unreadable(error)}).{nearest_file(path)} Correct it.") from None
    except (ValueError, yaml.YAMLError, RecursionError) as error:
        raise ConfigError(f"{path} is no YAML ({type(error).__name__}). Expected that of verl, or a script.") from None
    values = flat(content) if isinstance(content, Mapping) else {}
    found = dict[str, object]()
    for name, value in values.items():
        key = known_as(name) or name
        if "." in name and (key not in found or value not in _OFF):
            found[key] = _resolved(value, values)
    if not names().keys() & found.keys():
        raise ConfigError(f"{path} has no name of verl. Expected its YAML, or a script with words as `data.seed=1`.")
    return found


def _words(text: str) -> dict[str, object]:
    """Those of a script, each by the words before it, as in a shell."""
    text = _PRODUCT.sub(lambda found: str(int(found[1]) * int(found[2])), text.replace("\\\n", " "))
    values: dict[str, object] = {"HOME": "~", "PWD": "."}
    for name, is_set, value in (word.partition("=") for word in shlex.split(text, comments=True)):
        values |= {name.lstrip("+"): _resolved(value_of(value), values)} if is_set else {}
    return values


def _resolved(value: object, values: Mapping[str, object], depth: int = 8) -> object:
    """The value with what it refers to by `$NAME` or `${name}`. What is not known stays."""
    if isinstance(value, list):
        return [_resolved(item, values, depth) for item in value]
    if not isinstance(value, str) or "$" not in value or not depth:
        return float(value) if isinstance(value, str) and _EXPONENT.fullmatch(value) else value
    known = {name: str(here) for name, here in values.items() if here is not None}
    text = _REFERENCE.sub(lambda found: known.get(found[1] or found[2], found[0 if found[3] is None else 3]), value)
    return _resolved(value_of(text), values, depth - 1)


def recipe(given: Mapping[str, object], source: str) -> str:
    """The recipe of these values. Its comments have what could not be converted."""
    usual = {name: _resolved(line.default, given) for name, line in names().items() if line.default is not None}
    every: dict[str, Any] = {name: value for name, value in usual.items() if not _is_unknown(name, value)}
    known = {name: value for name, value in given.items() if not _is_unknown(name, value)}
    every |= known
    lines = names().items()
    look = [
        f"{name}: {given[name]} is not known" for name, line in lines if line.here and name in given.keys() - known
    ]
    if every[_GROUP] < 2:
        every[_GROUP] = 8
        look.append("num_generations: 8 is a guess. GRPO compares the completions of a prompt")
    settings, origins, left = dict[str, object](), dict[str, str](), list[str]()
    for name, line in lines:
        value = every.get(name)
        made = {} if value is None else converted(name, value, every)
        for setting in made or {}:
            origin = f"{name}: {flow({'v': value})[3:]}{'' if name in known else ', the default'}"
            origins[setting] = origin if settings.get(setting, ...) != (made or {})[setting] else origins[setting]
        settings |= made or {}
        if made is None and (line.here or line.values):
            look.append(f"{name}: {value}. {': '.join(filter(None, (line.here, line.note)))}")
        elif made is None and value not in _OFF:
            left.append(f"{name}: {': '.join(filter(None, (line.see, line.note)))}")
    if "reward_funcs" not in settings:
        look.append("reward_funcs: verl scores by a row's data_source. Name a function: [my_rewards.my_function]")
    body = list[str]()
    for first in dict.fromkeys(setting.split(".")[0] for setting in settings):
        entry = {setting: here for setting, here in settings.items() if setting.split(".")[0] == first}
        body.append(f"{flow(entry)} # {'; '.join(dict.fromkeys(origins[setting] for setting in entry))}")
    count, unknown = processes(every), sorted(given.keys() - names())
    return "\n".join(
        [
            f"# Made of {source} by `salesrl translate`. A step of verl is here {updates(every)} optimizer steps.",
            f"#   accelerate launch --num_processes {count} -m salesrl_trl.train RECIPE.yaml",
            "",
            *body,
            *_part("verl has no word for these", [], [flow({name: value}) for name, value in beside().items()]),
            *_part("Look at these", look),
            *_part("Left out", left),
            *_part("Left out, for these names are not known", [", ".join(unknown)] * bool(unknown)),
            "",
        ]
    )


def _is_unknown(name: str, value: object) -> bool:
    """Whether it refers to what is not known, is what Hydra's command line has to give, or is no number for a size."""
    is_size = name in names() and type(names()[name].default) is int
    return "$" in str(value) or value == "???" or (is_size and type(value) is not int)


def _part(title: str, comments: Sequence[str], lines: Sequence[str] = ()) -> list[str]:
    texts = [*(f"#   {' '.join(comment.splitlines())}" for comment in comments), *lines]
    return ["", f"# {title}", *texts] if texts else []


def main(argv: Sequence[str] | None = None) -> int:
    """Write the recipe. Returns the exit code."""
    return exit_code("translate", argv, _write)


def _write(args: argparse.Namespace) -> None:
    given = read(args.file)
    if args.processes:
        given |= {"trainer.n_gpus_per_node": args.processes, "trainer.nnodes": 1}
    text = recipe(given, args.file.name)
    if args.output:
        args.output.write_text(text, "utf-8")
    print(f"{args.output}: look at its comments" if args.output else text)


if __name__ == "__main__":
    end_tidily()
    sys.exit(main())
