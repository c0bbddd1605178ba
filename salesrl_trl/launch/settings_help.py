"""`--help` of runs, and of tools that accept their settings. Texts and defaults are parsed from the source code of the
settings classes: importing the classes loads torch and TRL, which takes seconds."""

import ast
import difflib
import functools
import itertools
import json
import os
import shutil
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from salesrl_trl.config.keys import FORMER
from salesrl_trl.data.files import read_yaml
from salesrl_trl.ground.shutdown import EXIT_BAD_INPUT
from salesrl_trl.launch.coming_from import answer
from salesrl_trl.launch.presets import PRESETS

FLAGS = {"-h", "--help"}
_WIDEST, _SHORT = 110, 180


_HELP: dict[str, Any] = read_yaml(Path(__file__).with_name("help.yaml"))  # type: ignore[assignment]
GROUPS: dict[str, dict[str, str | list[str]]] = _HELP["groups"]
"""By the name for `--help GROUP`: its subject, and its classes by dotted path."""
FIRST: list[str] = _HELP["first"]
OWN_TEXTS: dict[str, str] = _HELP["texts"]
OWN_DEFAULTS: dict[str, object] = _HELP["defaults"]


class Setting(NamedTuple):
    name: str
    group: str
    text: str
    default: str


@functools.cache
def settings() -> dict[str, Setting]:
    """All settings of a run by name, including entries such as `judge_providers.model`."""
    found = dict[str, Setting]()
    for group, of in GROUPS.items():
        inside = f"{of['entries_of']}." if "entries_of" in of else ""
        for path in of["classes"]:
            for name, text, default in _fields(path):
                text = OWN_TEXTS.get(name, " ".join(text.split()))
                default = shown(OWN_DEFAULTS.get(inside + name, default))
                found.setdefault(inside + name, Setting(inside + name, group, text, default))
    return found


def _fields(path: str) -> Iterator[tuple[str, str, str]]:
    """Name, text and default of the settings defined in a class, by its dotted path."""
    module, _, name_of_class = path.rpartition(".")
    package, *parts = module.split(".")
    spec = find_spec(package)  # without importing the package
    assert spec is not None and spec.submodule_search_locations
    source = Path(spec.submodule_search_locations[0], *parts).with_suffix(".py").read_text("utf-8")
    kinds = (node for node in ast.parse(source).body if isinstance(node, ast.ClassDef))
    kind = next(node for node in kinds if node.name == name_of_class)
    texts = dict[str, str]()
    for node, below in itertools.pairwise(kind.body):
        match node, below:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str() as text)):
                texts[name] = text
    for node in kind.body:
        match node:
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.Call(func=ast.Name(id="field"), keywords=keywords)):
                given = {str(keyword.arg): keyword.value for keyword in keywords}
                yield name, texts.get(name) or _help_in(given.get("metadata")), _default(given)
            case ast.AnnAssign(target=ast.Name(id=name), value=value):
                yield name, texts.get(name, ""), shown(_value(value))


def _help_in(metadata: ast.expr | None) -> str:
    parts = zip(metadata.keys, metadata.values, strict=True) if isinstance(metadata, ast.Dict) else ()
    named = {_value(key): value for key, value in parts}
    return str(_value(named["help"])).replace("%%", "%") if "help" in named else ""


def _default(given: dict[str, ast.expr]) -> str:
    made = given.get("default_factory")
    if made is None:
        return shown(_value(given.get("default")))
    return {"list": "[]", "dict": "{}"}.get(ast.unparse(made), shown(_value(getattr(made, "body", made))))


def _value(node: ast.expr | None) -> object:
    try:
        return None if node is None else ast.literal_eval(node)
    except ValueError:
        return ast.unparse(node) if node is not None else None


def shown(value: object) -> str:
    """A value as on a command line; `none` for `None`."""
    if isinstance(value, dict | list | tuple):
        return json.dumps(value)
    return {"None": "none", "True": "true", "False": "false", "": '""'}.get(str(value), str(value))


def answer_help(argv: Sequence[str], own: str = "") -> None:
    """Answer `--help` and exit; do nothing without it.

    `--help` alone shows the first page, or `own`, a tool's page. Words after it name a group or a setting, or search.
    """
    if FLAGS.isdisjoint(argv):
        return
    place = next(place for place, word in enumerate(argv) if word in FLAGS)
    words = [word.lstrip("-").replace("-", "_") for word in argv[place + 1 :]]
    found = _asked(words) if words else own or _first_page()
    if os.environ.get("RANK", "0") == "0":
        print(found or _unknown(words), file=sys.stdout if found else sys.stderr)
    raise SystemExit(0 if found else EXIT_BAD_INPUT)


def _first_page() -> str:
    first = [_entry(settings()[name]) for name in FIRST]
    counts = Counter(setting.group for setting in settings().values())
    groups = [f"  {group:<10} {counts[group]:>4}  {of['about']}" for group, of in GROUPS.items()]
    parts = {"first": "\n".join(first), "groups": "\n".join(groups), "presets": ", ".join(PRESETS)}
    return str(_HELP["first_page"]).rstrip().format(**parts)


def _asked(words: Sequence[str]) -> str:
    """The page of a group or a setting, or search results; empty if nothing is found."""
    known, word = settings(), FORMER.get(words[0], words[0])
    if len(words) == 1 and word in known:
        return _setting_page(known[word])
    if len(words) == 1 and word in GROUPS:
        title, found = f"{word}: {GROUPS[word]['about']}", [each for each in known.values() if each.group == word]
    else:
        lowered = [word.lower() for word in words]
        every = [(f"{each.name} {each.text}".lower(), each) for each in known.values()]
        found = [each for text, each in every if all(word in text for word in lowered)]
        title = f"{len(found)} settings match {' and '.join(words)}. `--help SETTING` shows all about one:"
    return "\n".join([title, "", *map(_entry, found)]) if found else ""


def _setting_page(setting: Setting) -> str:
    head = f"{setting.name}  (group {setting.group})"
    lines = [head, *_wrapped(setting.text, "    "), f"  default: {setting.default}"]
    entries = [known for known in settings().values() if known.name.startswith(f"{setting.name}.")]
    return "\n".join([*lines, *(["  entries:"] if entries else []), *map(_entry, entries)])


def _unknown(words: Sequence[str]) -> str:
    name = "_".join(words)
    near = difflib.get_close_matches(name, [*settings(), *GROUPS], n=3)
    guess = answer(name, None, {}) or (f"did you mean {', '.join(near)}?" if near else "`--help` lists all groups.")
    return f"no setting matches {' '.join(words)!r}: {guess}"


def _entry(setting: Setting) -> str:
    head = f"  --{setting.name}" + (f"  ({textwrap.shorten(setting.default, 40)})" if setting.default else "")
    return "\n".join([head, *_wrapped(textwrap.shorten(setting.text, _SHORT), "      ")])


def _wrapped(text: str, indent: str) -> list[str]:
    width = min(shutil.get_terminal_size((_WIDEST, 24)).columns, _WIDEST)
    return textwrap.wrap(text, max(width, 40), initial_indent=indent, subsequent_indent=indent)
