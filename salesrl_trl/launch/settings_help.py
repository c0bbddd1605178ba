"""`--help` of a run, and of the tools that take its settings.

Owns what is shown of a setting. Texts, defaults and limits are those of the classes that define the settings, read
from their source: an import of the classes brings torch and TRL, which takes seconds.
"""

import ast
import difflib
import functools
import importlib
import inspect
import json
import os
import re
import shutil
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, NamedTuple, Union, get_args, get_origin

from salesrl_trl.config import ranges
from salesrl_trl.config.former import FORMER
from salesrl_trl.config.ranges import LORA, TRAINING, Range, texts_in
from salesrl_trl.data.files import read_yaml
from salesrl_trl.launch.coming_from import answer
from salesrl_trl.launch.presets import FOLDER, PRESETS
from salesrl_trl.launch.recipes import FULL, RECIPES

FLAGS = {"-h", "--help"}
_UNKNOWN = 2
_WIDEST, _SHORT = 110, 180


_HELP: dict[str, Any] = read_yaml(Path(__file__).with_name("help.yaml"))  # type: ignore[assignment]
GROUPS: dict[str, dict[str, Any]] = _HELP["groups"]
"""By the name that `--help GROUP` takes: what it is about, and its classes by dotted path."""
FIRST: list[str] = _HELP["first"]
OWN_TEXTS: dict[str, str] = _HELP["texts"]


class Setting(NamedTuple):
    """What is known of a setting from its source."""

    name: str
    group: str
    section: str  # the heading above it in its group; empty without one
    text: str
    default: str
    expected: str  # the values that it may have; empty where nothing but the text says so

    @property
    def first(self) -> str:
        """The first sentences of its text: as many as two lines hold, and one at least."""
        first, *others = re.split(r"(?<=\.)\s", self.text.split("\n")[0])
        for sentence in others:
            if len(first) + len(sentence) > _SHORT:
                break
            first = f"{first} {sentence}"
        return first


class _Names(dict[str, object]):
    """The names of a module of this package, each evaluated from source when it is first asked for."""

    def __init__(self, module: str) -> None:
        self._body = _tree(module).body

    def __missing__(self, name: str) -> object:
        if name in vars(ranges):
            return vars(ranges)[name]
        for node in self._body:
            match node:
                case ast.Assign(targets=[ast.Name(id=found)], value=value) if found == name:
                    return self.value_of(value)
                case ast.Import(names=names) if name in {alias.name for alias in names} & sys.stdlib_module_names:
                    return importlib.import_module(name)
                case ast.ImportFrom(module=str() as module, names=names) if name in {alias.name for alias in names}:
                    if module.startswith("salesrl_trl."):
                        return _Names(module)[name]
                    if module.split(".")[0] in sys.stdlib_module_names:
                        return getattr(importlib.import_module(module), name)
        raise KeyError(name)

    def value_of(self, node: ast.expr) -> object:
        return eval(compile(ast.Expression(node), "<setting>", "eval"), {}, self)


@functools.cache
def _tree(module: str) -> ast.Module:
    package, *path = module.split(".")
    [folder] = getattr(find_spec(package), "submodule_search_locations", None) or [""]
    file = Path(folder, *path)
    file = file / "__init__.py" if file.is_dir() else file.with_suffix(".py")
    return ast.parse(file.read_text("utf-8"))


@functools.cache
def settings() -> dict[str, Setting]:
    """All settings of a run by name, and entries of settings as `judge_providers.model`."""
    found = dict[str, Setting]()
    for group, path in [(group, path) for group, of in GROUPS.items() for path in of["classes"]]:
        for setting in _settings_of(path, group):
            inside = GROUPS[group].get("entries_of")
            name = f"{inside}.{setting.name}" if inside else setting.name
            earlier = found.setdefault(name, setting._replace(name=name))
            if not earlier.text:
                found[name] = earlier._replace(text=setting.text)
    return found


def _settings_of(path: str, group: str) -> Iterator[Setting]:
    """The settings that a class itself defines, by its dotted path."""
    module, _, name_of_class = path.rpartition(".")
    names = _Names(module)
    [kind] = [node for node in _tree(module).body if isinstance(node, ast.ClassDef) and node.name == name_of_class]
    texts, documented = texts_in(kind), _documented(ast.get_docstring(kind) or "")
    for node in kind.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            name, of_field = node.target.id, {}
            if isinstance(node.value, ast.Call) and ast.unparse(node.value.func) == "field":
                of_field = {keyword.arg: keyword.value for keyword in node.value.keywords}
            section, text = documented.get(name, ("", ""))
            metadata = _or_source(of_field.get("metadata"), names)
            text = texts.get(name) or text or (str(metadata.get("help", "")) if isinstance(metadata, dict) else "")
            default = _or_source(of_field.get("default", None if of_field else node.value), names)
            if factory := of_field.get("default_factory"):
                made = _or_source(getattr(factory, "body", factory), names)  # of a lambda what it makes
                default = {"list": [], "dict": {}}.get(ast.unparse(factory), made)
            hint = _or_source(node.annotation, names)
            limit = TRAINING.get(name, LORA.get(name))
            expected = f"a number, {limit.text}" if limit is not None else _expected(hint)
            yield Setting(name, group, section, OWN_TEXTS.get(name, text.replace("%%", "%")), shown(default), expected)


def _or_source(node: ast.expr | None, names: _Names) -> object:
    """The value of an expression, or its source where it can't be had without the import of its module."""
    try:
        return None if node is None else names.value_of(node)
    except Exception:  # it may use anything
        return ast.unparse(node) if node is not None else None


def _expected(hint: object) -> str:
    """The numbers or choices that a type allows; empty for other types."""
    kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    first, *others = [kind for kind in kinds if kind is not NoneType]
    plain, *limits = get_args(first) if get_origin(first) is Annotated else (first,)
    words = [ranges.TYPES[plain][1]] if plain in ranges.TYPES else []
    for limit in limits:
        if isinstance(limit, Range):
            words.append(limit.text)
        elif isinstance(limit, tuple | dict | list):
            words.append(f"one of: {', '.join(limit)}")
    return "" if others or not words else ", ".join(words) + "; or none" * (NoneType in kinds)


def _documented(docstring: str) -> dict[str, tuple[str, str]]:
    """Heading and text of each argument that a docstring in the form of transformers describes."""
    found, heading, name = dict[str, tuple[str, str]](), "", ""
    for line in inspect.cleandoc(docstring).splitlines():
        if begin := re.fullmatch(r" {4}(\w+) ?(\(.*\))?:", line):
            name = begin[1]
            found[name] = (heading, "")
        elif title := re.fullmatch(r" {4}> (?:Parameters that control )?(.*)", line):
            heading, name = title[1], ""
        elif name and line.startswith("        "):
            break_or_space = "\n" if line.lstrip().startswith(("- ", "> ")) else " "
            plain = re.sub(r"\[([^\]]+)\](\([^)]*\))?", r"\1", line.strip())
            found[name] = (heading, f"{found[name][1]}{break_or_space}{plain}".strip())
        elif line.strip():
            name = ""
    return found


def shown(value: object) -> str:
    """A value as a command line has it; `none` for one that is not given."""
    if isinstance(value, dict | list | tuple):
        return json.dumps(value)
    return {"None": "none", "True": "true", "False": "false", "": '""'}.get(str(value), str(value))


def answer_help(argv: Sequence[str], recipe: Path | None = None, own: str = "") -> None:
    """Print what `--help` asks for, and end the process; do nothing without it.

    `--help` alone is the first page, or `own`, that of a tool. A word after it is a group, a setting, or a search.
    """
    if FLAGS.isdisjoint(argv):
        return
    place = next(place for place, word in enumerate(argv) if word in FLAGS)
    words = [word for word in argv[place + 1 :] if not word.startswith("-")]
    options = [word.lstrip("-").replace("-", "_") for word in argv[place + 1 : place + 2]]
    words = words or [name for name in options if name in ("preset", *settings(), *FORMER)]
    recipe = _recipe(argv[:place], recipe)
    found = _asked(words, recipe) if words else own or _first_page(recipe)
    if os.environ.get("RANK", "0") == "0":
        print(found or _unknown(words), file=sys.stdout if found else sys.stderr)
    raise SystemExit(0 if found else _UNKNOWN)


def _first_page(recipe: Path) -> str:
    values, known = _values(recipe), settings()
    first = [_entry(name, shown(values.get(name, known[name].default)), known[name].first) for name in FIRST]
    counts = Counter(setting.group for setting in known.values())
    groups = [f"  {group:<10} {counts[group]:>4}  {of['about']}" for group, of in GROUPS.items()]
    parts = {"first": "\n".join(first), "groups": "\n".join(groups), "presets": ", ".join(PRESETS)}
    return str(_HELP["first_page"]).rstrip().format(recipe=recipe.name, **parts)


def _asked(words: Sequence[str], recipe: Path) -> str:
    """The page of a group or a setting, or what a search finds; empty for nothing."""
    known, word = settings(), words[0].replace("-", "_")
    word = FORMER.get(word, word)
    if word == "preset":
        texts = {name: (FOLDER / f"{name}.yaml").read_text("utf-8")[2:].replace("\n# ", " ") for name in PRESETS}
        entries = [_entry(name, "", re.split(r"\.\s", text)[0]) for name, text in texts.items()]
        return "\n".join(
            ["--preset NAME ...: overlays of the recipe. Later ones win, and the command line.", *entries]
        )
    if len(words) == 1 and word in GROUPS:
        return _group_page(word, _values(recipe))
    if len(words) == 1 and word in known:
        return _setting_page(known[word], recipe)
    lowered = [word.lower() for word in words]
    found = [
        setting for setting in known.values()
        if all(word in f"{setting.name} {setting.text}".lower() for word in lowered)
    ]  # fmt: skip
    found.sort(key=lambda setting: not all(word in setting.name for word in lowered))
    lines = [_entry(setting.name, "", setting.first, setting.group) for setting in found]
    return "\n".join([f"{len(found)} settings have {' and '.join(words)}:", "", *lines]) if found else ""


def _group_page(group: str, values: dict[str, object]) -> str:
    lines, section = [f"{group}: {GROUPS[group]['about']}", ""], ""
    for setting in settings().values():
        if setting.group == group:
            if setting.section != section:
                section = setting.section
                lines += ["", f"{section}:"]
            lines.append(_entry(setting.name, shown(values.get(setting.name, setting.default)), setting.first))
    return "\n".join([*lines, "", "`--help SETTING` says all about one."])


def _setting_page(setting: Setting, recipe: Path) -> str:
    lines = [f"{setting.name}  (group {setting.group})", *_wrapped(setting.text, "    ")]
    lines += [f"  default: {setting.default}"]
    lines += [f"  expected: {setting.expected}"] * bool(setting.expected)
    for path in (recipe, *(FOLDER / f"{name}.yaml" for name in PRESETS)):
        values = _values(path)
        title = path.name if path == recipe else f"preset {path.stem}"
        lines += [f"  {title}: {shown(values[setting.name])}"] if setting.name in values else []
    entries = [known for known in settings().values() if known.name.startswith(f"{setting.name}.")]
    lines += ["  an entry has:"] * bool(entries)
    return "\n".join([*lines, *(_entry(entry.name, entry.default, entry.first) for entry in entries)])


def _unknown(words: Sequence[str]) -> str:
    name = "_".join(words).replace("-", "_")
    near = difflib.get_close_matches(name, [*settings(), *GROUPS], n=3)
    guess = answer(name, None, {}) or (f"did you mean {', '.join(near)}?" if near else "`--help` lists all groups.")
    return f"no setting has {' '.join(words)!r}: {guess}"


def _entry(name: str, default: str, text: str, group: str = "") -> str:
    short = default if len(default) <= 40 else f"{default[:37]}..."
    head = f"  --{name}" + (f"  ({short})" if short else "") + (f"  of {group}" if group else "")
    return "\n".join([head, *_wrapped(text, "      ")])


def _wrapped(text: str, indent: str) -> list[str]:
    width = min(shutil.get_terminal_size((_WIDEST, 24)).columns, _WIDEST)
    return [
        line
        for part in text.split("\n")
        for line in textwrap.wrap(part, max(width, 40), initial_indent=indent, subsequent_indent=indent)
    ]


def _recipe(argv: Sequence[str], recipe: Path | None) -> Path:
    """The recipe that a command line names, or the default one, or the packaged one."""
    words = [part for word in argv for part in word.split("=", 1)]
    named = words[words.index("--config") + 1 :][:1] if "--config" in words else words[:1]
    files = (RECIPES.get(name, Path(name)) for name in named if name in RECIPES or name.endswith((".yaml", ".yml")))
    paths = [*files, *([recipe] if recipe else [])]
    return next((path for path in paths if path.is_file()), FULL)


@functools.cache
def _values(recipe: Path) -> dict[str, object]:
    """The values of a recipe's settings, those of its nested overlays that always hold included."""
    read = read_yaml(recipe)
    values = dict(read) if isinstance(read, dict) else {}
    return {**values.pop("sales_chain", {}), **values}
