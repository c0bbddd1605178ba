"""From a recipe and a command line to the settings of a run.

Owns the keys that a recipe may have, the order of precedence, and the settings for a recipe that names no model.
Refuses to check values: the classes of `config` do that.
"""

import difflib
from argparse import SUPPRESS
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NoReturn

import yaml
from trl import ModelConfig, TrlParser

from salesrl_trl.config import DataConfig, RewardConfig, SalesGRPOConfig, TelemetryConfig, WarmStartConfig
from salesrl_trl.data.text import unreadable
from salesrl_trl.errors import ConfigError

SMALL_POLICY = "small_policy"
"""A recipe's key. Its settings replace those of the recipe when no model is named, for the packaged small policy."""
ENVIRONMENT = "env"
"""A recipe's key. TRL's parser writes its entries to the environment."""
_KINDS = (DataConfig, RewardConfig, WarmStartConfig, TelemetryConfig, SalesGRPOConfig, ModelConfig)


@dataclass
class RunConfig:
    """All settings of a run, by owner."""

    data: DataConfig
    reward: RewardConfig
    warm_start: WarmStartConfig
    telemetry: TelemetryConfig
    training: SalesGRPOConfig
    model: ModelConfig
    notes: list[str] = field(default_factory=list)
    """Lines for the banner: settings that differ from the recipe."""


def parse(argv: Sequence[str], default_recipe: Path) -> RunConfig:
    """Read the settings of a run from `--config FILE.yaml`, or from `default_recipe`. The command line wins.

    Raises:
        `ConfigError`: an unknown key, a missing file, a value outside its range.
    """
    parser = SettingsParser(_KINDS)
    config = RunConfig(*parser.read(argv, default_recipe))
    config.notes = parser.notes
    return config


def parse_part(argv: Sequence[str], kinds: Sequence[type], **options: str) -> tuple[Any, ...]:
    """Read the settings of a tool. It accepts every recipe and every setting of a run, and checks its own.

    Args:
        argv (`Sequence[str]`):
            Command-line arguments, perhaps with `--config FILE.yaml`.
        kinds (`Sequence[type]`):
            Dataclasses of the tool's own settings.
        options:
            Further arguments of `argparse.ArgumentParser`, such as `description`.

    Returns:
        `tuple`: an object of each of the `kinds`, in their order, and a `Namespace` of all other settings.

    Raises:
        `ConfigError`: an unknown key, a missing file, a value of the tool outside its range.
    """
    return SettingsParser(kinds, [kind for kind in _KINDS if kind not in kinds], **options).read(argv)


class SettingsParser(TrlParser):
    """TRL's parser, with three changes.

    - Unreadable arguments raise `ConfigError`. `argparse` would print its usage and exit.
    - Unknown arguments and keys of the recipe are refused, with a guess at the intended name.
    - The settings under `small_policy` replace the recipe's when no model is named.

    Args:
        kinds (`Sequence[type]`):
            Dataclasses of settings.
        unbuilt (`Sequence[type]`, *optional*, defaults to none):
            Dataclasses whose settings are accepted and not checked: a tool may not be able to build them. Training
            settings, for example, may need a GPU. `--help` leaves them out.
        options:
            Further arguments of `argparse.ArgumentParser`, such as `description`.
    """

    def __init__(self, kinds: Sequence[type], unbuilt: Sequence[type] = (), **options: str) -> None:
        super().__init__((*kinds, *unbuilt), allow_abbrev=False, **options)
        self.dataclass_types = list(kinds)
        shown = {"help", *(each.name for kind in kinds for each in fields(kind))}
        for action in self._actions:
            if action.dest not in shown:
                action.help = SUPPRESS
        self.notes: list[str] = []
        """After `read`: the settings of `small_policy` that hold, for the banner."""
        self._given: set[str] = set()

    @property
    def keys(self) -> set[str]:
        """Names of all settings, and the two keys of a recipe that are no settings."""
        return {action.dest for action in self._actions} | {ENVIRONMENT, SMALL_POLICY}

    def read(self, argv: Sequence[str], default_recipe: Path | None = None) -> tuple[Any, ...]:
        """Read the settings, once: the values of a recipe become defaults of this parser.

        Args:
            argv (`Sequence[str]`):
                Command-line arguments, perhaps with `--config FILE.yaml`.
            default_recipe (`Path`, *optional*):
                Recipe for a command line without `--config`. Without both, there is no recipe.

        Returns:
            `tuple`: an object of each of the `kinds`, in their order, and the `Namespace` of those `unbuilt`.

        Raises:
            `ConfigError`: an unknown key, a missing file, a value outside its range.
        """
        argv = [part for each in argv for part in (each.split("=", 1) if each.startswith("--config=") else [each])]
        if "--config" not in argv and default_recipe is not None:
            argv = ["--config", str(default_recipe), *argv]
        if argv.count("--config") > 1:
            raise ConfigError("`--config` is given more than once. Expected one recipe. Leave out the others.")
        self._check_arguments(argv)
        if "--config" in argv:
            if argv[-1] == "--config":
                raise ConfigError("`--config` names no file. Expected the YAML file of a recipe. Add its path.")
            _check_recipe(Path(argv[argv.index("--config") + 1]), self.keys)
        self._given = {name.removeprefix("--").replace("-", "_") for name in _options(argv)}  # --max-steps is read too
        self.notes = []
        try:
            return self.parse_args_and_config(argv, fail_with_unknown_args=False)  # type: ignore[no-any-return]
        except ConfigError:
            raise
        except (ValueError, TypeError) as error:
            raise ConfigError(f"the settings do not work: {error}") from error

    def set_defaults_with_config(self, **config: object) -> list[str]:
        """Make the recipe's values the defaults, those of `small_policy` where no model is named."""
        small_policy = config.pop(SMALL_POLICY, None)
        is_named = "model_name_or_path" in self._given or config.get("model_name_or_path") is not None
        if isinstance(small_policy, dict) and small_policy and not is_named:
            self.notes = [_note(small_policy, config, self._given)]
            config |= small_policy
        return super().set_defaults_with_config(**config)  # type: ignore[no-any-return]

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"the settings do not work: {message}. `--help` lists all.")

    def _check_arguments(self, argv: Sequence[str]) -> None:
        known = {option for action in self._actions for option in action.option_strings}
        unknown = [name for name in _options(argv) if name not in {*known, "--config"}]
        if unknown:
            raise ConfigError(f"unknown arguments: {_with_guesses(unknown, known)}. Correct them; `--help` lists all.")


def _options(argv: Sequence[str]) -> list[str]:
    """Names of the arguments, without their values: a value may be a secret."""
    return [each.split("=")[0] for each in argv if each.startswith("--")]


def _note(small_policy: Mapping[str, object], recipe: Mapping[str, object], given: Collection[str]) -> str:
    changed = []
    for name, value in small_policy.items():
        if name not in given and value != recipe.get(name):
            otherwise = f" (not {recipe[name]})" if name in recipe else ""
            changed.append(name if isinstance(value, dict) else f"{name} {value}{otherwise}")
    return f"no model is named: the recipe's settings for the small policy hold, {', '.join(changed)}"


def _check_recipe(path: Path, known: set[str]) -> None:
    if not path.is_file():
        raise ConfigError(f"there is no recipe {path}. Expected a YAML file. Correct --config.")
    try:
        recipe = yaml.safe_load(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}, {unreadable(error)}.") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not YAML: {error}") from error
    if not isinstance(recipe, dict):
        raise ConfigError(f"{path} holds a {type(recipe).__name__}. Expected a mapping of settings.")
    small_policy = recipe.get(SMALL_POLICY) or {}
    if not isinstance(small_policy, dict):
        raise ConfigError(
            f"`{SMALL_POLICY}` of {path} is a {type(small_policy).__name__}. Expected a mapping of settings."
        )
    unknown = sorted((set(recipe) | set(small_policy)) - known)
    if unknown:
        raise ConfigError(
            f"{path} has unknown keys: {_with_guesses(unknown, known)}. Expected settings of DataConfig, "
            "RewardConfig, WarmStartConfig, TelemetryConfig, SalesGRPOConfig or trl's ModelConfig. Correct or remove "
            "them; `--help` lists all."
        )


def _with_guesses(names: Sequence[object], known: set[str]) -> str:
    """`"learning_rat (did you mean learning_rate?)"`."""
    guesses = {name: difflib.get_close_matches(str(name), known, n=1) for name in names}
    return ", ".join(f"{name}" + (f" (did you mean {near[0]}?)" if near else "") for name, near in guesses.items())
