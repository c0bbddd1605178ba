"""A run's record in its folder (all settings, versions, the command), and the comparison of two runs. Does not need
torch. Excludes machine details, so that runs on different machines can be compared."""

import dataclasses
import json
import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, cast

import yaml

from salesrl_trl.checkpoint.whole import step_of
from salesrl_trl.config.keys import from_json, is_secret, without_keys
from salesrl_trl.data.files import read_yaml
from salesrl_trl.errors import ConfigError
from salesrl_trl.ground.own_code import code
from salesrl_trl.ground.process import put_aside, write_whole
from salesrl_trl.ground.versions import packages
from salesrl_trl.launch.coming_from import flat
from salesrl_trl.names import FINISHED_FILE, RUN_FILE, SETTINGS_FILE

if TYPE_CHECKING:
    from salesrl_trl.config import SalesGRPOConfig

Difference: TypeAlias = tuple[object, object]  # the values of two runs; `ABSENT` for none
ABSENT = "(none)"
_HEAD = "# All settings of a run. `--config` with this file repeats the run; set another `--output_dir`.\n"


def write_record(folder: Path, recipe: Mapping[str, object], command: Sequence[str], processes: int) -> None:
    """Write both files. `recipe` has all settings. Renames the files of an earlier start."""
    (folder / FINISHED_FILE).unlink(missing_ok=True)
    put_aside(folder / SETTINGS_FILE, folder / RUN_FILE)
    write_whole(folder / SETTINGS_FILE, settings_text(recipe))
    launcher = {name: os.environ[name] for name in sorted(os.environ) if name.startswith("ACCELERATE_")}
    record = {
        "command": list(_command(command)),
        "processes": processes,
        "launcher": without_keys(launcher),
        "code": dataclasses.asdict(code()),
        "versions": {"python": platform.python_version()}
        | {package.name: package.installed for package in packages() if package.installed},
    }
    write_whole(folder / RUN_FILE, json.dumps(record, indent=2) + "\n")


def write_finished(training: "SalesGRPOConfig", step: int) -> None:
    """Record that a run with these settings has finished after `step` optimizer steps."""
    text = json.dumps({"step": step, **_extent(training)}, indent=2) + "\n"
    write_whole(Path(training.output_dir) / FINISHED_FILE, text)


def has_finished(training: "SalesGRPOConfig") -> bool:
    """Whether a run with these settings has finished, so that a resume would do nothing."""
    resumed = training.resume_from_checkpoint
    step = None if resumed is None else step_of(Path(resumed))
    try:
        noted = json.loads((Path(training.output_dir) / FINISHED_FILE).read_text(encoding="utf-8"))
        return noted == {"step": noted["step"], **_extent(training)} and (step is None or step >= noted["step"])
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _extent(training: "SalesGRPOConfig") -> dict[str, object]:
    """The settings that determine the extent of a run."""
    return {name: getattr(training, name) for name in ("max_steps", "num_train_epochs", "held_out_eval", "mode")}


def settings_text(recipe: Mapping[str, object]) -> str:
    plain = without_keys(recipe)
    return _HEAD + yaml.safe_dump(plain, sort_keys=False, allow_unicode=True, width=float("inf"))


def differences(folder: Path, other: Path) -> dict[str, dict[str, Difference]]:
    found, (first, second) = dict[str, dict[str, Difference]](), (_read(folder), _read(other))
    for part, values in first.items():
        both = {name: (values.get(name, ABSENT), second[part].get(name, ABSENT)) for name in values | second[part]}
        found[part] = {name: pair for name, pair in both.items() if pair[0] != pair[1]}
    return found


def _read(folder: Path) -> dict[str, dict[str, object]]:
    try:
        settings = cast("dict[str, object]", read_yaml(folder / SETTINGS_FILE))
        record = json.loads((folder / RUN_FILE).read_text(encoding="utf-8"))
        started = {name: record[name] for name in ("processes", "launcher")} | {"command": " ".join(record["command"])}
        plain = {name: from_json(value) for name, value in settings.items()}
        parts = {"settings": plain, "versions": record["versions"], "code": record["code"], "command": started}
        return {part: flat(values) for part, values in parts.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, yaml.YAMLError) as error:
        lack = f"{folder} lacks a readable {SETTINGS_FILE} and {RUN_FILE} ({type(error).__name__})"
        raise ConfigError(f"{lack}. Expected a run's `output_dir`.") from None


def _command(command: Sequence[str]) -> Iterator[str]:
    """The script's path relative to the working folder, and the arguments, with keys masked."""
    script, here = Path(command[0]).absolute(), Path.cwd()
    yield str(script.relative_to(here)) if script.is_relative_to(here) else script.name
    name = ""
    for argument in command[1:]:
        is_name = argument.startswith("--")
        name, is_joined, value = argument.partition("=") if is_name else (name, "", argument)
        shown = "***" if is_secret(name) else str(without_keys(value))
        yield f"{name}={shown}" if is_joined else argument if is_name else shown
