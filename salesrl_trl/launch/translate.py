"""`python -m salesrl_trl.launch.translate FILE [--processes N] [--output RECIPE.yaml]`.

Converts a verl configuration (YAML), or arguments such as `data.seed=1` in a script that starts verl, to a recipe. Its
comments document the origin of each setting, dropped names with reasons, and what to review. Exit code: 0; 2 for an
unreadable file.
"""

import argparse
import re
import shlex
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import yaml

from salesrl_trl.config.keys import with_entries
from salesrl_trl.data.files import nearest_file, read_yaml, unreadable
from salesrl_trl.errors import ConfigError
from salesrl_trl.ground.command_line import exit_code
from salesrl_trl.ground.shutdown import end_tidily
from salesrl_trl.launch import coming_from as table
from salesrl_trl.launch.coming_from import known_as, line_of

_GROUP = "rollout.n"
_REFERENCE = re.compile(r"\$(?:(\w+)|\{([\w.]+)(?::?[-=]([^${}]*))?\})")
_KEY = re.compile(r"([{,]\s*[\w.]+):(?=\S)")
_PRODUCT = re.compile(r"\$\(\(\s*(\d+)\s*\*\s*(\d+)\s*\)\)")
_EXPONENT = re.compile(r"\d+(?:\.\d*)?[eE][-+]?\d+")  # a number for Hydra, but a text for PyYAML
_OFF: tuple[object, ...] = (None, False, 0, -1, "", [])  # values of unused settings


def read(path: Path) -> dict[str, object]:
    """The values of a configuration, or of a script's arguments, by name. Raises `ConfigError`."""
    try:
        content = read_yaml(path) if path.suffix in (".yaml", ".yml") else _words(path.read_text("utf-8-sig"))
    except OSError as error:
        raise ConfigError(f"{path} can't be read ({unreadable(error)}).{nearest_file(path)}") from None
    except (ValueError, yaml.YAMLError, RecursionError) as error:
        raise ConfigError(f"{path} is not YAML ({type(error).__name__}). Expected verl's, or a script.") from None
    values = table.flat(content) if isinstance(content, Mapping) else {}
    is_script = path.suffix not in (".yaml", ".yml")  # whose other arguments belong to the shell
    found = {
        name: _resolved(value, values)
        for name, value in values.items()
        if not is_script or "." in name or (name.isupper() and known_as(name))
    }
    if not any(map(known_as, found)):
        raise ConfigError(f"{path} lacks verl settings. Expected its YAML, or a script with e.g. `data.seed=1`.")
    return found


def _words(text: str) -> dict[str, object]:
    values: dict[str, object] = {"HOME": "~", "PWD": "."}
    text = _PRODUCT.sub(lambda found: str(int(found[1]) * int(found[2])), text.replace("\\\n", " "))
    for name, is_set, value in (word.partition("=") for word in shlex.split(text, comments=True)):
        if is_set:
            value = _KEY.sub(r"\1: ", value) if value.startswith("{") else value  # YAML needs a space, Hydra none
            values |= table.flat({name.lstrip("+"): _resolved(table.value_of(value), values)})
    return values


def _resolved(value: object, values: Mapping[str, object], depth: int = 8) -> object:
    """The value with references such as `$NAME` or `${name}` resolved, if known."""
    if isinstance(value, list):
        return [_resolved(item, values, depth) for item in value]
    if not isinstance(value, str) or "$" not in value or not depth:
        return float(value) if isinstance(value, str) and _EXPONENT.fullmatch(value) else value
    known = {name: str(here) for name, here in values.items() if here is not None}
    text = _REFERENCE.sub(lambda found: known.get(found[1] or found[2], found[0 if found[3] is None else 3]), value)
    return _resolved(table.value_of(text), values, depth - 1)


def recipe(named: Mapping[str, object], source: str) -> str:
    """The recipe for these values. Comments list every name that could not be converted, and why."""
    given, written, unknown = dict[str, object](), dict[str, list[str]](), list[str]()
    for name, value in named.items():
        key = known_as(name)
        if key is None:
            unknown.append(name)
            continue
        key = table.plain(name) if "*" in key else key
        written.setdefault(key, []).append(name.removeprefix("actor_rollout_ref."))
        given[key] = value if value not in _OFF else given.get(key, value)
    is_verl = any(line_of(key).system == "verl" for key in given)
    usual = {name: _resolved(line.default, given) for name, line in table.names().items() if line.default is not None}
    known = {key: value for key, value in given.items() if not _is_unknown(key, value)}
    every: table.Given = {key: usual[key] for key in usual if is_verl and not _is_unknown(key, usual[key])} | known
    look = [f"{key}: {given[key]} is unknown" for key in given if key not in known]
    if is_verl and every[_GROUP] < 2:
        every = {**every, _GROUP: 8}
        look.append("num_generations: 8 is a guess: GRPO compares the completions of a prompt")
    body, left = _converted(every, known.keys(), written, look)
    if is_verl and not any(line.startswith("reward_funcs:") for line in body):
        look.append("reward_funcs: verl scores by a row's data_source. Set a function: [my_rewards.my_function]")
    steps, settings = table.updates(every), {line.partition(":")[0] for line in body}
    beside = {name: here for name, here in table.beside().items() if is_verl and name not in settings}
    lines = [
        f"# Converted from {source} by `salesrl translate`. A verl step is {steps} optimizer steps here.",
        *(f"#   {command}" for command in _commands(every)),
        "",
        *body,
        *(table.flow({name: here}) for name, here in beside.items()),
        *_part("Review these", look),
        *_part("Dropped", [f"{', '.join(those)}: {reason}" for reason, those in left.items()]),
        *_part("Dropped: unknown names", [", ".join(sorted(unknown))] if unknown else []),
    ]
    return "\n".join(lines) + "\n"


def _commands(every: table.Given) -> list[str]:
    start = f"accelerate launch --num_processes {table.processes(every)}"
    end = "-m salesrl_trl.launch.train RECIPE.yaml"
    machines = every.get("trainer.nnodes") or 1
    if machines == 1:
        return [f"{start} {end}"]
    start += f" --num_machines {machines} --main_process_ip FIRST_MACHINE --main_process_port 29500"
    return [f"{start} --machine_rank {rank} {end}" for rank in range(machines)]


def _converted(
    every: table.Given, known: Collection[str], written: Mapping[str, list[str]], look: list[str]
) -> tuple[list[str], dict[str, list[str]]]:
    """The lines of the settings, each with its origin, and the dropped names by reason. `known`: the keys of the
    input; the others have verl's defaults. Adds what to review to `look`."""
    settings, origins, left = dict[str, object](), dict[str, dict[str, None]](), dict[str, list[str]]()
    order = {name: place for place, name in enumerate(table.names())}
    places = {key: order[known_as(key) or ""] for key in every}
    for key in sorted(every, key=places.__getitem__):  # names of one entry stay in the order of the input
        value, line, as_written = every[key], line_of(key), ", ".join(written.get(key, [key]))
        made = {} if value is None else table.converted(key, value, every)
        settings |= made or {}
        text = f"{as_written}: {table.flow({'v': value})[3:]}{'' if key in known else ', the default'}"
        for first in dict.fromkeys(setting.split(".")[0] for setting in made or {}):
            origins.setdefault(first, {})[text] = None
        if (made is None and (line.here or line.values)) or (made and value in line.look):
            look.append(f"{as_written}: {value}. {', '.join(filter(None, (line.here, line.note)))}")
        elif made is None and (key in known or value not in _OFF):
            left.setdefault(": ".join(filter(None, (line.see, line.note))), []).append(as_written)
        elif not made and key in known:
            is_off = not every.get(line.when, True) and value not in _OFF
            reason = f"no effect, since {line.when} is off" if is_off else "the default, or part of another setting"
            left.setdefault(reason, []).append(as_written)
    if isinstance(files := settings.get("dataset"), list):  # each entry gets the columns
        inner = {name: settings.pop(name) for name in [*settings] if name.startswith("dataset.")}
        settings["dataset"] = [with_entries({"dataset": file, **inner})["dataset"] for file in files]
    body = list[str]()
    for first, texts in origins.items():
        entry = {setting: here for setting, here in settings.items() if setting.split(".")[0] == first}
        body.append(f"{table.flow(entry)} # {'; '.join(texts)}")
    return body, left


def _is_unknown(name: str, value: object) -> bool:
    """Whether it has an unresolved reference, is required on Hydra's command line, or is not a number for a size."""
    is_size = type(line_of(name).default) is int
    return "$" in str(value) or value == "???" or (is_size and type(value) is not int)


def _part(title: str, comments: Sequence[str]) -> list[str]:
    return ["", f"# {title}", *(f"#   {' '.join(comment.splitlines())}" for comment in comments)] if comments else []


def main(argv: Sequence[str] | None = None) -> int:
    return exit_code("translate", argv, _write)


def _write(args: argparse.Namespace) -> None:
    given = read(args.file)
    if args.processes:
        given |= {"trainer.n_gpus_per_node": args.processes, "trainer.nnodes": 1}
    text = recipe(given, args.file.name)
    if args.output:
        args.output.write_text(text, "utf-8")
    print(f"{args.output}: review its comments" if args.output else text)


if __name__ == "__main__":
    end_tidily()
    sys.exit(main())
