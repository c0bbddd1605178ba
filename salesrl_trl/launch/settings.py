"""From a recipe and a command line to the settings of a run.

Owns the keys of a recipe and the order of precedence. The classes of `config` check values.
"""

import copy
import difflib
import itertools
import json
import re
from argparse import SUPPRESS, Action, ArgumentError, ArgumentParser, Namespace
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, get_type_hints

import yaml
from trl import TrlParser

from salesrl_trl.config.checks import check_path, check_text, find_modules_in
from salesrl_trl.config.former import FORMER, with_entries
from salesrl_trl.data.files import DEMO, DEMO_PICTURES, nearest_file, read_yaml, unreadable
from salesrl_trl.demo.packaged import PACKAGED, POLICY_OF
from salesrl_trl.errors import ConfigError, Refusals, SalesRLError, without
from salesrl_trl.launch import coming_from
from salesrl_trl.launch.presets import FOLDER, PRESETS
from salesrl_trl.launch.recipes import RECIPES
from salesrl_trl.launch.settings_help import answer_help, settings
from salesrl_trl.names import RUN_FILE
from salesrl_trl.types import DEFAULT_BRANCHES, SALES

if TYPE_CHECKING:
    from trl import ModelConfig

    from salesrl_trl.config import SalesGRPOConfig
    from salesrl_trl.launch.data_config import DataConfig
    from salesrl_trl.launch.reward_config import RewardConfig
    from salesrl_trl.launch.telemetry_config import TelemetryConfig

SMALL_POLICY = "small_policy"  # a recipe's key: settings in place of its own when no model is named
SALES_CHAIN = "sales_chain"  # a recipe's key: settings that only the packaged reward chain and the demo's rows need
ENVIRONMENT = "env"  # a recipe's key. TRL's parser writes its entries to the environment.
PRESET = "preset"  # an argument of the command line, and no setting: names of overlays of the recipe
MOST_NAMES = 12  # unknown names in a message
PATHS = ("output_dir", "resume_from_checkpoint", "model_name_or_path")
"""Settings of TRL and transformers that may be paths of this machine."""


def all_kinds() -> tuple[type, ...]:
    """All settings of a run. Their import takes seconds, because it brings torch."""
    from trl import ModelConfig

    from salesrl_trl.config import SalesGRPOConfig
    from salesrl_trl.launch.data_config import DataConfig
    from salesrl_trl.launch.reward_config import RewardConfig
    from salesrl_trl.launch.telemetry_config import TelemetryConfig

    return DataConfig, RewardConfig, TelemetryConfig, SalesGRPOConfig, ModelConfig


@dataclass
class RunConfig:
    """All settings of a run, by owner."""

    data: "DataConfig"
    reward: "RewardConfig"
    telemetry: "TelemetryConfig"
    training: "SalesGRPOConfig"
    model: "ModelConfig"
    notes: list[str] = field(default_factory=list)  # for the banner: settings that differ from the recipe
    recipe: dict[str, object] = field(default_factory=dict)  # every setting before a check changes it
    given: set[str] = field(default_factory=set)  # names that are the user's own, and not a packaged recipe's

    @property
    def policy_path(self) -> str:
        """Folder or hub name of the policy: a packaged small one if no model is named."""
        if named := self.model.model_name_or_path:
            return str(named)
        small = {POLICY_OF.get(source.train_source[0], PACKAGED) for source in self.data.sources}
        return str(small.pop() if len(small) == 1 else PACKAGED)

    @property
    def policy_source(self) -> tuple[str, str | None, bool]:
        """`policy_path`, its revision, and whether code of its repository is run."""
        return self.policy_path, self.model.model_revision, self.training.trust_remote_code


def parse(argv: Sequence[str], default_recipe: Path | None, refused: Refusals | None = None) -> RunConfig:
    """Read the settings of a run from `--config FILE.yaml`, or from `default_recipe`.

    The presets of `--preset` win over the recipe, later ones over earlier ones, and the command line over all. Raises
    `ConfigError` for an unknown key, a missing file, a value outside its range: one error for all of them. `refused`
    gets them in its place, if a recipe can be read. A later look at a refused value raises `RefusedRead`.
    """
    parser = SettingsParser(all_kinds(), refused=refused)
    config = RunConfig(*parser.read(argv, default_recipe))
    config.notes, config.recipe, config.given = parser.notes, parser.values, parser.given
    return config


def parse_part(
    argv: Sequence[str], kinds: Sequence[type], default_recipe: Path | None = None, own: Iterable[str] = ()
) -> tuple[Any, ...]:
    """Read the settings of a tool: an object of each of the `kinds`. It accepts every recipe and setting of a run, but
    reads and checks its own alone: training settings, for example, may need a GPU. Raises as `parse`. `own`: names of
    the tool's other options, for guesses at a misspelt one.
    """
    parser = SettingsParser(kinds, names_of_settings())
    parser.options_beside = {f"--{name}" for name in own}
    return parser.read(argv, default_recipe)


def names_of_settings() -> set[str]:
    """Names of all settings of a run. Read from source: an import of the classes takes seconds."""
    return {name for name in settings() if "." not in name}


class SettingsParser(TrlParser):
    """TRL's parser. It raises `ConfigError` where `argparse` would exit, refuses unknown names with a guess, and has
    presets, and `small_policy` when no model is named, replace settings of the recipe.

    `unread`: names of settings that are accepted and not read. `refused`: takes what is refused, which `read` raises
    without it.
    """

    dataclass_types: list[type]  # of transformers' parser

    def __init__(self, kinds: Sequence[type], unread: Collection[str] = (), refused: Refusals | None = None) -> None:
        super().__init__(kinds, allow_abbrev=False)
        self._unread, self._keeps = unread, refused is not None
        self._refused = Refusals() if refused is None else refused
        hints = dict(pair for kind in kinds for pair in get_type_hints(kind).items())
        self._texts = {name for name, hint in hints.items() if hint in (str, str | None)}
        for name, hint in hints.items():
            off = f"--no_{name}"  # transformers makes it of a switch that is on by default
            if hint == bool | None and off not in self._option_string_actions:
                self.add_argument(off, action="store_false", dest=name, default=SUPPRESS, help=SUPPRESS)
        # After `read`: lines for the banner; the recipe's `env` and every setting, before a class changes it.
        self.notes: list[str] = []
        self.values: dict[str, object] = {}
        self._given: set[str] = set()
        self.given: set[str] = set()  # those, and the names of a recipe of the user's own
        self._presets: dict[str, dict[str, object]] = {}
        self.options_beside = set[str]()
        self._of_chain: dict[str, object] = {}  # settings of `sales_chain`, and their values without it
        self._entries: dict[str, object] = {}  # what the command line gives by dotted and by former names

    @property
    def keys(self) -> set[str]:
        """Names of all settings, and the keys of a recipe that are no settings."""
        keys = {action.dest for action in self._actions}
        return keys | {ENVIRONMENT, SMALL_POLICY, SALES_CHAIN, *self._unread}

    def read(self, argv: Sequence[str], default_recipe: Path | None = None) -> tuple[Any, ...]:
        """An object of each of the `kinds`. Works once: the values of a recipe become defaults of this parser.

        `default_recipe`: recipe for a command line without `--config`. Without both, there is no recipe. `--help` is
        answered, and ends the process.
        """
        answer_help(argv, default_recipe)
        words = ArgumentParser(add_help=False, allow_abbrev=False)
        words.add_argument("--config", nargs="?", action="append", default=[])
        words.add_argument(f"--{PRESET}", nargs="*", action="append", default=[])
        given, argv = words.parse_known_args(argv)
        argv = self._without_entries(argv)
        if len(given.config) > 1:
            raise ConfigError("`--config` is given more than once. Expected one recipe. Leave out the others.")
        if given.config == [None]:
            raise ConfigError("`--config` names no file. Expected the YAML file of a recipe. Add its path.")
        known = {"--config", f"--{PRESET}", *(option for action in self._actions for option in action.option_strings)}
        for name in self._unread:
            known |= {f"--{name}", f"--{name.replace('_', '-')}", f"--no_{name}"}
        unknown = {name: value for name, value in _arguments(argv).items() if name not in known}
        guesses = self._with_guesses(unknown, known | self.options_beside)
        self._refused.check(lambda: not unknown, f"unknown arguments: {guesses}. Correct them; `--help` lists all.")
        names = [*itertools.chain(*given.preset)]
        strange = [name for name in names if name not in PRESETS]
        self._refused.check(
            lambda: not strange and all(given.preset),
            f"`--preset` names {', '.join(strange) or 'nothing'}. Expected some of: {', '.join(PRESETS)}. Correct or "
            "remove it.",
        )
        self._presets = {name: self._checked_recipe(FOLDER / f"{name}.yaml") for name in names if name in PRESETS}
        recipe: dict[str, object] = {}
        if file := given.config[0] if given.config else default_recipe:
            file = RECIPES[file] if file in RECIPES and not Path(file).is_file() else Path(file)
            argv = ["--config", str(file), *argv]
            with self._refused:
                recipe = self._checked_recipe(file)
            if not recipe or not all(isinstance(name, str) for name in recipe):
                self._refused.tell()  # checks of other values than the recipe's would mislead
            for folder in _folders_of_code(file):
                find_modules_in(folder)
        self._given = {_setting(word.split("=")[0], "") for word in argv if word.startswith("--")}
        is_packaged = file and Path(file).resolve() in RECIPES.values()
        self.given = self._given | {FORMER.get(name, name).split(".")[0] for name in self._entries}
        self.given |= set() if is_packaged else recipe.keys()
        self.notes, self.values = [], {ENVIRONMENT: recipe[ENVIRONMENT]} if recipe.get(ENVIRONMENT) else {}
        if "--config" not in argv:
            self.set_defaults_with_config()
        read: tuple[Any, ...] = (*(None for _ in self.dataclass_types), [])
        with self._refused, _own_errors():
            read = self.parse_args_and_config(argv, return_remaining_strings=True, fail_with_unknown_args=False)
        if not self._keeps:
            self._refused.tell()
        return tuple(read[:-1])

    def _without_entries(self, argv: Sequence[str]) -> list[str]:
        """The command line without entries of settings, such as `--branch_kl.settings.law fixed`, and without settings
        by former names: these are kept for later."""
        settings = "|".join(self.keys)
        dotted = {word.split("=")[0][2:] for word in argv if re.match(rf"--({settings})\.", word)}
        words = ArgumentParser(add_help=False, allow_abbrev=False, argument_default=SUPPRESS)
        for name in {*FORMER, *dotted}:
            words.add_argument(*{f"--{name}", f"--{name.replace('_', '-')}"}, dest=name, nargs="*")
        given, others = words.parse_known_args(argv)
        values = {name: [*map(coming_from.value_of, texts)] for name, texts in vars(given).items()}
        self._entries = {name: value[0] if len(value) == 1 else value for name, value in values.items()}
        return others

    def parse_known_args(self, *args: Any, **kwargs: Any) -> tuple[Any, list[str]]:
        """Checks paths. Keeps the values: the classes change them while they check them."""
        namespace, unknown = super().parse_known_args(*args, **kwargs)
        for name in PATHS:
            if isinstance(path := getattr(namespace, name, None), str):
                with self._refused.of(None, name):
                    check_path(name, path)
        if _is_own_task(namespace):
            left = {name: value for name, value in self._of_chain.items() if name not in self._given}
            vars(namespace).update(left)
            if left:
                self.notes.append(
                    "functions of your own score rows of your own, so the recipe's settings of "
                    f"`{SALES_CHAIN}` are left out: {', '.join(left)}"
                )
        entries = with_entries({**vars(namespace), **self._entries})
        vars(namespace).update({name: entries[name] for name in vars(namespace)})
        if not _is_own_task(namespace) and getattr(namespace, "branches", None) == []:
            namespace.branches = list(DEFAULT_BRANCHES)
        if getattr(namespace, "held_out_eval", False) is None:
            namespace.held_out_eval = True
        self.values |= copy.deepcopy(vars(namespace))
        self.dataclass_types = [_Builder(kind, self._refused) for kind in self.dataclass_types]  # type: ignore[misc]
        return namespace, unknown

    def _get_value(self, action: Action, arg_string: str) -> object:
        """The value of a text. One of another type is refused, and the other texts are read."""
        return self._refused_alone(action, partial(super()._get_value, action, arg_string))

    def _check_value(self, action: Action, value: object) -> None:
        self._refused_alone(action, partial(super()._check_value, action, value))

    def _refused_alone(self, action: Action, read: Callable[[], object]) -> object:
        with self._refused.of(None, action.dest):
            try:
                return read()
            except ArgumentError as error:
                self.error(str(error))

    def set_defaults_with_config(self, **config: object) -> list[str]:
        """Make defaults of the recipe's values, `sales_chain`'s among them, of the presets', and, if no model is
        named, of `small_policy`'s."""
        parts = (config.pop(SMALL_POLICY, None), config.pop(SALES_CHAIN, None))
        small_policy, chain = (with_entries(part) if isinstance(part, dict) else part for part in parts)
        known = self.keys | FORMER.keys()
        config = with_entries({name: value for name, value in config.items() if name in known})
        if isinstance(chain, dict):
            chain = {name: value for name, value in chain.items() if name not in config}
            self._of_chain = {name: self.get_default(name) for name in chain if name not in self._unread}
            config |= chain
        for name, preset in self._presets.items():
            of_chain: Any = preset.pop(SALES_CHAIN, {})
            self._of_chain |= {name: self.get_default(name) for name in of_chain if name not in self._unread}
            overlay = with_entries({**preset, **of_chain})
            self.notes.append(f"preset {name}: {_changes(overlay, config, self._given)}")
            config |= overlay
        is_named = "model_name_or_path" in self._given or config.get("model_name_or_path") is not None
        if isinstance(small_policy, dict) and small_policy and not is_named:
            changes = _changes(small_policy, config, self._given)
            self.notes.append(f"no model is named, so the recipe's settings of `{SMALL_POLICY}` are used: {changes}")
            config |= small_policy
        if isinstance(config.get("shared_prompts"), int | float):
            config["shared_prompts"] = str(config["shared_prompts"])
        for name in self._texts & config.keys():  # argparse converts only what the command line gives
            kind = type(config[name]).__name__
            with self._refused.of(None, name):
                if not isinstance(config[name], str | None):
                    config[name] = None
                    raise ConfigError(f"`{name}` of the recipe is of type {kind}. Expected a text. Put it in quotes.")
        return super().set_defaults_with_config(**config)  # type: ignore[no-any-return]

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"the settings do not work: {message}. `--help` lists all.")

    def _checked_recipe(self, path: Path) -> dict[str, object]:
        """The content of a recipe, whose unknown names are refused. Raises `ConfigError` where it can't be read."""
        check_path("--config", str(path))
        if not path.is_file():
            raise ConfigError(
                f"there is no recipe {path}.{nearest_file(path)} Expected a YAML file, or a packaged recipe: "
                f"{', '.join(RECIPES)}. Correct --config."
            )
        try:
            recipe = read_yaml(path)
            check_text(str(path), recipe)
        except OSError as error:
            raise ConfigError(
                f"{path} can't be read ({unreadable(error)}). Expected a file of settings that this user may read."
            ) from None
        except RecursionError:
            raise ConfigError(
                f"{path} is nested too deeply, or holds itself. Expected a mapping of settings."
            ) from None
        except UnicodeDecodeError as error:
            raise ConfigError(f"{path}, {unreadable(error)}.") from None
        except yaml.YAMLError as error:
            fault = str(error)
            if isinstance(error, yaml.MarkedYAMLError) and (mark := error.problem_mark) is not None:
                # The place alone, without the line itself: it may hold a key. It begins in one line, ends in another.
                parts = ((error.context, error.context_mark), (error.problem, mark))
                fault = ", ".join(f"{text} (line {at.line + 1}, column {at.column + 1})" for text, at in parts if at)
            raise ConfigError(f"{path} is not YAML: {fault}. Correct it there.") from None
        if not isinstance(recipe, dict):
            raise ConfigError(f"{path} holds a {type(recipe).__name__}. Expected a mapping of settings.")
        known, given = self.keys | FORMER.keys(), dict(recipe)
        for key in (SMALL_POLICY, SALES_CHAIN):
            part = recipe.get(key) or {}
            if not isinstance(part, dict):
                raise ConfigError(f"`{key}` of {path} is a {type(part).__name__}. Expected a mapping of settings.")
            given |= part
        unknown = {name: given[name] for name in sorted(given.keys() - known, key=str)}
        guesses = self._with_guesses(unknown, known)
        self._refused.check(
            lambda: not unknown,
            f"{path} has unknown keys: {guesses}. Expected settings of DataConfig, RewardConfig, TelemetryConfig, "
            "SalesGRPOConfig or trl's ModelConfig. Correct or remove them; `--help` lists all.",
        )
        return recipe

    def _with_guesses(self, unknown: Mapping[Any, object], known: set[str]) -> str:
        """`"learning_rat (did you mean learning_rate?)"`, or what replaces a setting, or what a name of another system
        is here. Of many names the first ones. No check reads a setting that was meant."""
        entries = coming_from.flat(unknown)
        if not any(map(coming_from.known_as, map(str, entries.keys() - unknown.keys()))):
            entries = dict(unknown)
        given = {str(coming_from.known_as(_setting(name))): value for name, value in entries.items()}
        settings, texts = {option.removeprefix("--") for option in known}, []
        for name, value in itertools.islice(entries.items(), MOST_NAMES):
            bare, near = _setting(name), difflib.get_close_matches(str(name), known, n=1)
            self._refused.names |= {_setting(text) for text in near}
            note = coming_from.answer(bare, value, given)
            note = note or (f"here {bare.lower()}" if bare.isupper() and bare.lower() in settings else "")
            note = note or (f"did you mean {near[0]}?" if near else "")
            texts.append(f"{name} ({note})" if note else str(name))
        rest = f", and {len(entries) - MOST_NAMES} more" if len(entries) > MOST_NAMES else ""
        is_verl = any("(of verl;" in text for text in texts)
        return ", ".join(texts) + rest + "; `salesrl translate FILE` makes a recipe of verl's" * is_verl


class _Builder:
    """Stands for a class of settings where TRL's parser builds them. Its refusals do not end the parser's work."""

    def __init__(self, kind: type, refused: Refusals) -> None:
        self.__dataclass_fields__ = kind.__dataclass_fields__  # type: ignore[attr-defined]
        self._kind, self._refused = without(kind, refused.names) if refused.names else kind, refused

    def __call__(self, **values: object) -> object:
        built: object = None
        with self._refused, _own_errors():
            try:
                built = self._kind(**values)
            except ConfigError as error:
                built = built if error.settings is None else error.settings
                raise
        return built


@contextmanager
def _own_errors() -> Iterator[None]:
    """Make a `ConfigError` of what other libraries raise for settings."""
    try:
        yield
    except SalesRLError:
        raise
    except (ValueError, TypeError, OSError) as error:  # the last one is of the environment
        raise ConfigError(f"the settings do not work: {error}") from error


def _folders_of_code(recipe: Path) -> Iterator[Path]:
    """Where a recipe's functions may be: beside it; if a run wrote it, beside the files of that run's command too."""
    recipe = recipe.absolute()
    yield recipe.parent
    try:
        command = json.loads(recipe.with_name(RUN_FILE).read_text(encoding="utf-8"))["command"]
        files = [Path(str(word).rpartition("=")[2]) for word in command]
        files = [file for file in files if file.suffix in (".py", ".yaml", ".yml") and file.is_file()]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):  # no run's folder
        return
    yield from (file.absolute().parent for file in files)


def _is_own_task(settings: Namespace) -> bool:
    """Whether functions of a user's own alone score rows of a user's own."""
    functions: list[str] = getattr(settings, "reward_funcs", None) or []
    rows: object = getattr(settings, "dataset", DEMO)
    return bool(functions) and SALES not in functions and str(rows).partition(":")[0] not in (DEMO, DEMO_PICTURES)


def _arguments(argv: Sequence[str]) -> dict[str, object]:
    """The arguments with their values, and words such as verl's `trainer.nnodes=1`."""
    found = dict[str, object]()
    for word, following in itertools.pairwise([*argv, ""]):
        name, is_set, text = word.partition("=")
        if word.startswith("--") or (is_set and "." in name and coming_from.known_as(name)):
            found[name] = coming_from.value_of(text if is_set or following.startswith("--") else following)
    return found


def _setting(option: object, before: str = "no_") -> str:
    """The setting of an argument: `learning_rate` of `--learning-rate`."""
    return str(option).removeprefix("--").replace("-", "_").removeprefix(before)


def _changes(overlay: Mapping[str, object], recipe: Mapping[str, object], on_command_line: Collection[str]) -> str:
    """What an overlay changes, without what the command line gives: `"temperature 0.6 (not 1.0), ..."`."""
    changed = []
    for name, value in overlay.items():
        if name not in on_command_line and value != recipe.get(name):
            otherwise = f" (not {recipe[name]})" if name in recipe else ""
            changed.append(name if isinstance(value, dict) else f"{name} {value}{otherwise}")
    return ", ".join(changed) or "nothing that the command line does not give"
