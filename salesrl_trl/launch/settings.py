"""Reads the settings of a run from a recipe and a command line: recipe keys and precedence."""

import copy
import difflib
import functools
import itertools
import json
import os
import re
import sys
from argparse import SUPPRESS, ArgumentParser, Namespace
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import yaml
from trl import TrlParser

from salesrl_trl.config.checks import (
    Count,
    NumberOrNone,
    Positive,
    check,
    check_settings,
    find_modules_in,
    load_object,
)
from salesrl_trl.config.keys import FORMER, with_entries
from salesrl_trl.config.quick_evaluations import WORST_BRANCH, QuickEvalSettings
from salesrl_trl.data.files import DEMO, DEMO_PICTURES, nearest_file, read_yaml, unreadable
from salesrl_trl.demo.packaged import PACKAGED, POLICY_OF
from salesrl_trl.errors import ConfigError, SalesRLError
from salesrl_trl.launch import coming_from
from salesrl_trl.launch.evaluation.quick_record import checked_figures
from salesrl_trl.launch.presets import FOLDER, PRESETS
from salesrl_trl.launch.recipes import FULL, RECIPES
from salesrl_trl.launch.settings_help import answer_help, settings
from salesrl_trl.names import REWARD, RUN_FILE
from salesrl_trl.types import DEFAULT_BRANCHES, SALES

if TYPE_CHECKING:
    from trl import ModelConfig

    from salesrl_trl.config import SalesGRPOConfig
    from salesrl_trl.launch.data_config import DataConfig
    from salesrl_trl.launch.reward_config import RewardConfig


@dataclass
class TelemetryConfig:
    """Measurements, logs and quick evaluations of a run, and their intervals."""

    peak_tflops: Positive | None = None
    """Dense bf16 peak of a device in TFLOP/s, to compute the utilisation of chips unknown to the package."""
    trace_steps: str = "1:50"
    """First and last step in `trace.json`. `"100:"` traces all steps from 100 on, `""` none. A failing step is always
    traced."""
    quick_eval_steps: NumberOrNone = 0
    """Optimizer steps between quick evaluations, which decode greedily; 0 for none."""
    quick_eval_rows: Count = 16
    """Held-out rows of a quick evaluation, spread evenly over the branches; the same during the whole run."""
    quick_eval_best: str | None = None
    """The metric that selects the best policy, kept in `OUTPUT_DIR/best`: `reward` (the mean over all rows),
    `worst_branch`, a branch (its score), or one of your metrics (over all rows, higher is better). At least
    `min_valid_reward_fraction` of that branch, or of each branch, must be scored."""
    quick_eval_figures: list[str] = field(default_factory=list)
    """Dotted paths of classes for your own metrics, e.g. `"my_package.my_module.MyFigure"`. They implement
    `config.quick_evaluations.Figure`."""

    def __post_init__(self) -> None:
        check_settings(self)
        self.traced_steps()
        self.quick_eval()

    def traced_steps(self) -> range:
        """The steps of `trace_steps`, counted from 1."""
        if not self.trace_steps:
            return range(0)
        match = re.fullmatch(r"(\d+):(\d*)", str(self.trace_steps))
        steps = range(int(match[1]), int(match[2]) + 1 if match[2] else sys.maxsize) if match else range(0)
        expected = "Expected FIRST:LAST, FIRST: or nothing, quoted in YAML."
        check(len(steps) > 0, f"`trace_steps` is {self.trace_steps!r}. {expected}")
        return steps

    def quick_eval(self) -> QuickEvalSettings:
        return QuickEvalSettings(
            steps=self.quick_eval_steps,
            rows=self.quick_eval_rows,
            best=self.quick_eval_best,
            figures=checked_figures(load_object(path, "quick_eval_figures") for path in self.quick_eval_figures),
        )

    def check_branches(self, branches: list[str]) -> None:
        """Raise `ConfigError` if `quick_eval_best` is not a metric, or a metric of yours has the name of a branch."""
        own = checked_figures(self.quick_eval().figures, branches)
        known, best = (REWARD, WORST_BRANCH, *branches, *(figure.name for figure in own)), self.quick_eval_best
        check(best in (None, *known), f"`quick_eval_best` is {best!r}. Expected one of: {', '.join(known)}.")


SMALL_POLICY = "small_policy"  # recipe key: settings that replace the recipe's if no model is named
SALES_CHAIN = "sales_chain"  # recipe key: settings for the built-in reward pipeline and the demo's rows
ENVIRONMENT = "env"  # recipe key: environment variables to set
PRESET = "preset"  # command line argument: names of recipe overlays
MOST_NAMES = 12  # unknown names in a message
_EMPTY = ("", "[]")  # words for a list without entries
Recipe = dict[str, Any]


def all_kinds() -> tuple[type, ...]:
    """All settings classes of a run. Importing them loads torch, which takes seconds."""
    from trl import ModelConfig

    from salesrl_trl.config import SalesGRPOConfig
    from salesrl_trl.launch.data_config import DataConfig
    from salesrl_trl.launch.reward_config import RewardConfig

    return DataConfig, RewardConfig, TelemetryConfig, SalesGRPOConfig, ModelConfig


@dataclass
class RunConfig:
    data: "DataConfig"
    reward: "RewardConfig"
    telemetry: "TelemetryConfig"
    training: "SalesGRPOConfig"
    model: "ModelConfig"
    notes: list[str] = field(default_factory=list)  # banner lines about settings that differ from the recipe
    recipe: dict[str, object] = field(default_factory=dict)  # all settings, before checks change them
    given: set[str] = field(default_factory=set)  # settings given by the user, not by a built-in recipe

    @property
    def policy_path(self) -> str:
        """Folder or hub name of the policy; a built-in small one if no model is named."""
        if named := self.model.model_name_or_path:
            return str(named)
        small = {POLICY_OF.get(source.train_source[0], PACKAGED) for source in self.data.sources}
        return str(small.pop() if len(small) == 1 else PACKAGED)

    @property
    def policy_source(self) -> tuple[str, str | None, bool]:
        """`policy_path`, its revision, and whether to run its remote code."""
        return self.policy_path, self.model.model_revision, self.training.trust_remote_code


def parse(argv: Sequence[str], default_recipe: Path | None) -> RunConfig:
    """Read the settings of a run from `--config FILE.yaml`, or from `default_recipe`.

    Presets take precedence over the recipe, later presets over earlier ones, and the command line over all. Raises
    `ConfigError` for an unknown key, a missing file, or an invalid value.
    """
    parser = SettingsParser(all_kinds())
    config = RunConfig(*parser.read(argv, default_recipe))
    config.notes, config.recipe, config.given = parser.notes, parser.values, parser.given
    return config


def parse_part(argv: Sequence[str], kinds: Sequence[type], default_recipe: Path | None = None) -> tuple[Any, ...]:
    """Read the settings of a tool: an instance of each of the `kinds`. Accepts all recipes and settings of a run, but
    only reads and checks those of `kinds`: training settings, for example, may need a GPU. Raises as `parse`."""
    return SettingsParser(kinds, names_of_settings()).read(argv, default_recipe)


def names_of_settings() -> set[str]:
    """Names of all settings of a run, read from the source code: importing the classes takes seconds."""
    return {name for name in settings() if "." not in name}


class SettingsParser(TrlParser):
    """TRL's parser with presets, `small_policy` and `sales_chain`. Raises `ConfigError` where `argparse` would exit,
    with suggestions for unknown names.

    `unread`: names of settings to accept but ignore.
    """

    dataclass_types: list[type]  # of transformers' parser

    def __init__(self, kinds: Sequence[type], unread: Collection[str] = ()) -> None:
        super().__init__(kinds, allow_abbrev=False)
        self._unread = unread
        lists = [action for action in self._actions if action.nargs == "+"]
        self._without = {action.dest: action.default for action in lists}  # lists without entries
        for action in lists:
            action.nargs, action.type = "*", _or_empty(action.type or str)
        # Set by `read`: banner lines; the recipe's `env` and all settings, before their classes change them.
        self.notes: list[str] = []
        self.values: dict[str, object] = {}
        self.given: set[str] = set()
        self._of_chain: dict[str, object] = {}  # settings of `sales_chain`, with their defaults

    @property
    def keys(self) -> set[str]:
        """Names of all settings, and the other keys of a recipe."""
        return {action.dest for action in self._actions} | {ENVIRONMENT, SMALL_POLICY, SALES_CHAIN, *self._unread}

    def read(self, argv: Sequence[str], default_recipe: Path | None = None) -> tuple[Any, ...]:
        """An instance of each of the `kinds`. Works once: a recipe's values become defaults of this parser.

        `default_recipe`: the recipe without `--config`. `--help` prints its answer and exits.
        """
        answer_help(argv)
        words = ArgumentParser(add_help=False, allow_abbrev=False)
        words.add_argument("--config", nargs="?", action="append", default=[])
        words.add_argument(f"--{PRESET}", nargs="*", action="append", default=[])
        chosen, argv = words.parse_known_args(argv)
        argv, entries = self._without_entries(argv)
        check(len(chosen.config) < 2 and chosen.config != [None], "`--config` needs exactly one YAML file.")
        self._check_arguments(argv)
        names = [*itertools.chain(*chosen.preset)]
        strange = [name for name in names if name not in PRESETS]
        found = f"`--preset` names {', '.join(strange) or 'nothing'}"
        check(not strange and all(chosen.preset), f"{found}. Expected some of: {', '.join(PRESETS)}.")
        recipe, is_built_in = Recipe(), True
        if file := chosen.config[0] if chosen.config else default_recipe:
            file = RECIPES[file] if file in RECIPES and not Path(file).is_file() else Path(file)
            recipe, is_built_in = self._checked_recipe(file), file.resolve() in RECIPES.values()
            for folder in _folders_of_code(file):
                find_modules_in(folder)
        on_command_line = {_setting(word.split("=")[0], "") for word in argv if word.startswith("--")}
        self.given = on_command_line | (set() if is_built_in else recipe.keys())
        self.values = {ENVIRONMENT: recipe[ENVIRONMENT]} if recipe.get(ENVIRONMENT) else {}
        try:
            os.environ.update({name: str(value) for name, value in (recipe.pop(ENVIRONMENT, None) or {}).items()})
            self.set_defaults_with_config(**self._overlaid(recipe, names, on_command_line))
            parsed, left = self.parse_known_args(argv)  # with options that are not read, and their values
            stray = " ".join(itertools.takewhile(lambda word: not word.startswith("-"), left))
            check(not stray, f"`{stray}` belongs to no setting. Expected `--config FILE` or `--NAME VALUE`.")
            namespace = self._settled(parsed, entries, on_command_line)
            self.values |= copy.deepcopy(namespace)
            return tuple(
                kind(**{each.name: namespace[each.name] for each in fields(kind) if each.init})
                for kind in self.dataclass_types
            )
        except SalesRLError:
            raise
        except (ValueError, TypeError, OSError) as error:  # from other libraries; `OSError` from the environment
            raise ConfigError(f"invalid settings: {error}") from error

    def _without_entries(self, argv: Sequence[str]) -> tuple[list[str], dict[str, object]]:
        """Split the command line into settings, and entries of settings (`--branch_kl.settings.law fixed`) or settings
        by former names."""
        settings = "|".join(self.keys)
        dotted = {word.split("=")[0][2:] for word in argv if re.match(rf"--({settings})\.", word)}
        words = ArgumentParser(add_help=False, allow_abbrev=False, argument_default=SUPPRESS)
        for name in {*FORMER, *dotted}:
            words.add_argument(*_spellings(name), dest=name, nargs="*")
        given, others = words.parse_known_args(argv)
        values = {name: [*map(coming_from.value_of, texts)] for name, texts in vars(given).items()}
        return others, {name: value[0] if len(value) == 1 else value for name, value in values.items()}

    def _check_arguments(self, argv: Sequence[str]) -> None:
        known = {option for action in self._actions for option in action.option_strings}
        known |= {option for name in self._unread for option in (*_spellings(name), f"--no_{name}")}
        unknown = {name: value for name, value in _arguments(argv).items() if name not in known}
        if unknown:
            raise ConfigError(f"unknown arguments: {self._with_guesses(unknown, known)}. `--help` lists all.")

    def _overlaid(self, recipe: Recipe, presets: Sequence[str], on_command_line: Collection[str]) -> dict[str, object]:
        """The recipe's values including `sales_chain`, overridden by presets, and by `small_policy` if no model is
        named."""
        small_policy, chain = (with_entries(recipe.pop(key, None) or {}) for key in (SMALL_POLICY, SALES_CHAIN))
        own = with_entries(recipe)
        config, of_chain = {**chain, **own}, [name for name in chain if name not in own]
        for name in presets:
            preset = self._checked_recipe(FOLDER / f"{name}.yaml")
            more = preset.pop(SALES_CHAIN, {})
            of_chain += more
            overlay = with_entries({**preset, **more})
            changed = {at for at in overlay.keys() - on_command_line if overlay[at] != config.get(at)}
            shown = ", ".join(f"{at} {value}" for at, value in overlay.items() if at in changed)
            self.notes.append(f"preset {name}: {shown or 'no changes'}")
            config |= overlay
        self._of_chain = {name: self.get_default(name) for name in of_chain if name not in self._unread}
        is_named = "model_name_or_path" in on_command_line or config.get("model_name_or_path") is not None
        if small_policy and not is_named:
            names = ", ".join(name for name in small_policy if name not in on_command_line)
            self.notes.append(f"no model is named, so the recipe's `{SMALL_POLICY}` settings apply: {names}")
            config |= small_policy
        return config

    def _settled(
        self, namespace: Namespace, entries: Mapping[str, object], on_command_line: Collection[str]
    ) -> dict[str, object]:
        values = vars(namespace)
        nothing = (None, [], *([text] for text in _EMPTY))
        values |= {name: value for name, value in self._without.items() if values[name] in nothing}
        self._drop_weights_of_replaced_functions(values, on_command_line)
        if _is_own_task(namespace):
            left = {name: value for name, value in self._of_chain.items() if name not in on_command_line}
            values |= left
            if left:
                reason = f"your own functions score your own rows, so `{SALES_CHAIN}` settings are ignored"
                self.notes.append(f"{reason}: {', '.join(left)}")
        known = values.keys()
        values = {name: value for name, value in with_entries({**values, **entries}).items() if name in known}
        if not _is_own_task(namespace) and values.get("branches") == []:
            values["branches"] = list(DEFAULT_BRANCHES)
        if values.get("held_out_eval", False) is None:
            values["held_out_eval"] = True
        return values

    def _drop_weights_of_replaced_functions(self, values: dict[str, Any], on_command_line: Collection[str]) -> None:
        """Ignore a recipe's `reward_weights` if the command line replaces the `reward_funcs` that they weight, and
        metrics of a replaced function, named by their `of`."""
        before, now = self.get_default("reward_funcs") or [], values.get("reward_funcs") or []
        if not before or now == before:
            return
        gone = _names(before) - _names(now)
        figures = values.get("quick_eval_figures") or []
        lost = [path for path in figures if getattr(load_object(path, "quick_eval_figures"), "of", "") in gone]
        weights = None if "reward_weights" in on_command_line else values.get("reward_weights")
        left = [path for path in figures if path not in lost]
        for name, ignored, rest in (("reward_weights", weights, None), ("quick_eval_figures", lost, left)):
            if ignored:
                self.notes.append(f"`reward_funcs` replaces the recipe's, so its `{name}` {ignored} are ignored")
                values[name] = rest

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"invalid settings: {message}. `--help` lists all.")

    def _checked_recipe(self, path: Path) -> Recipe:
        """The content of a recipe. Raises `ConfigError` if it can't be read or has unknown names."""
        expected = f"Expected a YAML file, or a built-in recipe: {', '.join(RECIPES)}."
        check(path.is_file(), f"there is no recipe {path}.{nearest_file(path)} {expected}")
        try:
            recipe = read_yaml(path)
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path} can't be read ({unreadable(error)}).") from None
        except (yaml.YAMLError, RecursionError) as error:
            fault, mark = getattr(error, "problem", None) or str(error), getattr(error, "problem_mark", None)
            place = f" (line {mark.line + 1}, column {mark.column + 1})" if mark else ""
            # without the line itself, which may contain a key
            raise ConfigError(f"{path} is not YAML: {fault}{place}.") from None
        if not isinstance(recipe, dict):
            raise ConfigError(f"{path} contains a {type(recipe).__name__}. Expected a mapping of settings.")
        known, given = self.keys | FORMER.keys(), dict(recipe)
        for key in (SMALL_POLICY, SALES_CHAIN, ENVIRONMENT):
            part = recipe.get(key) or {}
            check(isinstance(part, dict), f"`{key}` of {path} is a {type(part).__name__}. Expected a mapping.")
            given |= part if key != ENVIRONMENT else {}
        if unknown := {name: given[name] for name in sorted(given.keys() - known, key=str)}:
            raise ConfigError(f"{path} has unknown keys: {self._with_guesses(unknown, known)}. `--help` lists all.")
        return recipe

    def _with_guesses(self, unknown: Mapping[str, object], known: set[str]) -> str:
        """Names with suggestions: `"learning_rat (did you mean learning_rate?)"`, the replacement of a former setting,
        or the equivalent of another system's name. Shows the first names."""
        entries = coming_from.flat(unknown)
        if not any(map(coming_from.known_as, map(str, entries.keys() - unknown.keys()))):
            entries = dict(unknown)
        given = {str(coming_from.known_as(_setting(name))): value for name, value in entries.items()}
        settings, texts = {option.removeprefix("--") for option in known}, []
        for name, value in itertools.islice(entries.items(), MOST_NAMES):
            bare, near = _setting(name), difflib.get_close_matches(str(name), known, n=1)
            note = coming_from.answer(bare, value, given)
            note = note or (f"here {bare.lower()}" if bare.isupper() and bare.lower() in settings else "")
            switch = re.sub("^no[-_]", "", bare)
            note = note or (f"write --{switch} false" if switch != bare and switch in settings else "")
            note = note or (f"did you mean {near[0]}?" if near else "")
            texts.append(f"{name} ({note})" if note else str(name))
        rest = f", and {len(entries) - MOST_NAMES} more" if len(entries) > MOST_NAMES else ""
        hint = "; `salesrl translate FILE` converts verl's configuration"
        return ", ".join(texts) + rest + (hint if any("(of verl;" in text for text in texts) else "")


def _folders_of_code(recipe: Path) -> Iterator[Path]:
    """Folders to search for a recipe's functions: its own, that of the built-in recipes, and if a run wrote it, those
    of the files in that run's command."""
    recipe = recipe.absolute()
    yield from (recipe.parent, FULL.parent)
    try:
        command = json.loads(recipe.with_name(RUN_FILE).read_text(encoding="utf-8"))["command"]
        files = [Path(str(word).rpartition("=")[2]) for word in command]
        files = [file for file in files if file.suffix in (".py", ".yaml", ".yml") and file.is_file()]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):  # not a run's folder
        return
    yield from (file.absolute().parent for file in files)


def _or_empty(convert: Callable[[str], object]) -> Callable[[str], object]:
    """Don't convert the words for an empty list, which `_without` interprets."""

    @functools.wraps(convert)  # argparse names it in its errors
    def converted(text: str) -> object:
        return text if text in _EMPTY else convert(text)

    return converted


def _is_own_task(settings: Namespace) -> bool:
    """Whether only the user's own functions score the user's own rows."""
    functions: list[str] = getattr(settings, "reward_funcs", None) or []
    rows: object = getattr(settings, "dataset", DEMO)
    return bool(functions) and SALES not in functions and str(rows).partition(":")[0] not in (DEMO, DEMO_PICTURES)


def _names(functions: Iterable[str]) -> set[str]:
    """Names of functions listed by path: `"brief"` for `"my_rewards.brief"`."""
    return {path.partition("(")[0].rpartition(".")[2] for path in functions}


def _arguments(argv: Sequence[str]) -> dict[str, object]:
    """The arguments with their values, including verl's form `trainer.nnodes=1`."""
    found = dict[str, object]()
    for word, following in itertools.pairwise([*argv, ""]):
        name, is_set, text = word.partition("=")
        if word.startswith("--") or (is_set and "." in name and coming_from.known_as(name)):
            found[name] = coming_from.value_of(text if is_set or following.startswith("--") else following)
    return found


def _spellings(name: str) -> set[str]:
    return {f"--{name}", f"--{name.replace('_', '-')}"}


def _setting(option: object, before: str = "no_") -> str:
    """The setting named by an argument: `learning_rate` for `--learning-rate`."""
    return str(option).removeprefix("--").replace("-", "_").removeprefix(before)
