"""Checks of settings, whose messages state the value and what was expected, and types of allowed values:
`Annotated[int, Range(1, 50)]`, or one of the names below. `ranges.toml` has ranges for settings that TRL and
transformers do not check, ending where values stop making sense."""

import ast
import importlib
import inspect
import json
import math
import re
import sys
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, fields
from numbers import Integral, Real
from pathlib import Path, PurePath
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypeVar, Union, cast, get_args, get_origin

from salesrl_trl.errors import ConfigError, nearest

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


T = TypeVar("T")

Kind = TypeVar("Kind", bound=list[object] | dict[str, object])


def check(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


def check_url(setting: str, url: str | None) -> None:
    """Reject an invalid address without printing it, as it may be a key entered by mistake."""
    if url is None:
        return
    from salesrl_trl.service.statuses import address_fault

    fault = address_fault(url)
    check(fault is None, f"`{setting}` holds {fault}.")
    pattern = r"https?://(\[[\da-fA-F:.]+\]|[^\s/:?#\[\]]+)(:0*[1-9]\d{0,4})?([/?]\S*)?"
    expected = "Expected one starting with http:// or https://, with a host, and only a port after a colon."
    check(re.fullmatch(pattern, url) is not None, f"`{setting}` is not an address. {expected}")


def structure(setting: str, value: object, kind: type[Kind]) -> Kind:
    """The value of a list or mapping setting, given as such in YAML or as JSON on the command line. Raises
    `ConfigError` for invalid JSON or another type."""
    expected = "a mapping" if kind is dict else "a list"
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            fault = f"`{setting}` is not JSON (column {error.colno})"
            raise ConfigError(f"{fault}. Expected {expected}, in YAML or as JSON.") from None
    if not isinstance(value, kind):
        raise ConfigError(f"`{setting}` is a {type(value).__name__}. Expected {expected}.")
    return value


def build_object(path: str, setting: str, kind: Callable[..., T]) -> T:
    """An instance of the class with this dotted path, created without arguments. `setting`: the setting with the path.
    `kind`: its required base class, possibly abstract. Raises `ConfigError` if it cannot be created."""
    loaded = load_object(path, setting)
    assert isinstance(kind, type)  # mypy accepts abstract classes as callables, but not as `type[T]`
    expected = f"Expected a subclass of {kind.__module__}.{kind.__qualname__} that needs no arguments."
    check(isinstance(loaded, type) and issubclass(loaded, kind), f"`{setting}` is {path!r}. {expected}")
    try:
        return cast(Callable[[], T], loaded)()
    except TypeError as error:
        raise ConfigError(f"`{setting}` is {path!r}, which cannot be instantiated ({error}). {expected}") from error


def find_modules_in(folder: Path) -> None:
    """Append this folder to Python's module search path."""
    if str(folder) not in sys.path:
        sys.path.append(str(folder))


def load_object(path: str, setting: str) -> object:
    """The class or function with this dotted path: `"my_package.my_module.MyClass"`. Its module may be in the working
    folder. With arguments, `"my_module.make(limit=3)"`, its return value. `setting`: the setting with the path. Raises
    `ConfigError` if it does not exist."""
    find_modules_in(Path.cwd())
    named, is_called, _ = path.partition("(")
    module, _, name = named.rpartition(".")
    where = f"`{setting}` is {path!r}"
    if not module:
        raise ConfigError(f"{where}. Expected a dotted path, such as `my_package.my_module.MyClass`.")
    try:
        loaded = getattr(importlib.import_module(module), name)
        if not is_called:
            return cast(object, loaded)
        call = cast(ast.Call, ast.parse(path, mode="eval").body)
        keywords = {str(each.arg): ast.literal_eval(each.value) for each in call.keywords}
        return cast(object, loaded(*map(ast.literal_eval, call.args), **keywords))
    except ModuleNotFoundError as error:
        expected = "Expected one in the working folder or on PYTHONPATH: add its folder there, or install it."
        raise ConfigError(f"{where}, but the module {error.name!r} does not exist. {expected}") from error
    except (SyntaxError, AttributeError, ValueError, TypeError) as error:
        known = vars(sys.modules[module]) if module in sys.modules else {}
        near = "" if name in known else nearest(name, known)
        expected = "Expected a class or function of a module, or a call with literals, e.g. `m.f(a=1)`."
        raise ConfigError(f"{where}, which does not work ({error}).{near} {expected}") from error


Settings = TypeVar("Settings", bound="DataclassInstance")

MORE_THAN_0, LESS_THAN_1 = math.ulp(0.0), math.nextafter(1.0, 0.0)


class Range(NamedTuple):
    """The allowed range of a setting, both ends included."""

    least: float
    most: float = sys.float_info.max
    why: str = ""
    """Reason for the upper end."""

    @property
    def text(self) -> str:
        """`"above 0 and at most 10: ..."`."""
        least = "above 0" if self.least == MORE_THAN_0 else f"at least {self.least:g}"
        most = "below 1" if self.most == LESS_THAN_1 else f"at most {self.most:.10g}"
        ends = {least: self.least > -sys.float_info.max, most: self.most < sys.float_info.max}
        text = " and ".join(end for end, is_set in ends.items() if is_set) or "finite"
        return f"{text}: {self.why}" if self.why else text


Count = Annotated[int, Range(1)]
NumberOrNone = Annotated[int, Range(0)]
"""E.g. a number of steps; 0 for none."""
Positive = Annotated[float, Range(MORE_THAN_0)]
Limit = Annotated[float, Range(MORE_THAN_0, math.inf)]
"""Infinite for none."""
NotNegative = Annotated[float, Range(0)]
Share = Annotated[float, Range(0, 1)]
LessThan1 = Annotated[float, Range(0, LESS_THAN_1)]


def _range(why: str = "", **ends: float) -> Range:
    """The range of an entry in `ranges.toml`, which documents the ends."""
    least = ends["least"] if "least" in ends else math.nextafter(ends["above"], math.inf)
    most = math.nextafter(ends["below"], -math.inf) if "below" in ends else ends.get("most", sys.float_info.max)
    return Range(least, most, why)


_TABLES = tomllib.loads(Path(__file__).with_name("ranges.toml").read_text("utf-8"))
TRAINING, LORA = ({name: _range(**entry) for name, entry in _TABLES[part].items()} for part in ("training", "lora"))
"""Ranges for `GRPOConfig` and `ModelConfig`."""
RESHAPING: dict[str, list[object]] = _TABLES["reshaping"]
"""Sampling parameters that reshape the token distribution, with the values that do not."""


def check_ranges(config: object, ranges: dict[str, Range]) -> None:
    for name, allowed in ranges.items():
        check_range(name, getattr(config, name), allowed)


def check_range(name: str, value: object, allowed: Range) -> None:
    """Raise `ConfigError` unless a setting is `None` or a number in the range."""
    number = value if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
    is_allowed = value is None or allowed.least <= number <= allowed.most  # never for NaN
    check(is_allowed, f"`{name}` is {value!r}. Expected a number, {allowed.text}.")


TYPES: dict[object, tuple[type, str]] = {
    int: (Integral, "a whole number"),
    float: (Real, "a number"),
    bool: (bool, "true or false"),
}


def without_effect(config: "DataclassInstance", reasons: Mapping[str, str]) -> list[str]:
    """Log lines about changed settings without effect. `reasons`: by reason, a pattern of their names, or ""."""
    lines = []
    for reason, pattern in reasons.items():
        named = [at for at in fields(config) if re.fullmatch(pattern, at.name)]
        usual = {at.name: at.default_factory() if callable(at.default_factory) else at.default for at in named}
        if idle := [name for name, default in usual.items() if getattr(config, name) != default]:
            lines.append(f"without effect: {', '.join(idle)}, because {reason}")
    return lines


def from_fields(kind: type[Settings], source: object, **others: object) -> Settings:
    """Create a dataclass from the attributes of `source` of the same names, and `others`."""
    wanted = [field.name for field in fields(kind) if field.init and field.name not in others]
    taken = {name: getattr(source, name) for name in wanted}
    return kind(**taken, **others)


def entry_of(path: str, kind: type[Settings], value: object, text: str = "") -> Settings:
    """Create a nested setting's dataclass from a mapping, its JSON, or `None` for no entries. `path`: the setting's
    dotted path. `text`: the entry set by any other text. `ConfigError`s name an entry's full path."""
    if text and isinstance(value, str) and not value.startswith("{"):
        value = {text: value}
    entry: dict[str, Any] = structure(path, {} if value is None else value, dict)
    check_names(path, entry, [field.name for field in fields(kind)])
    needed = [at.name for at in fields(kind) if at.default is MISSING and at.default_factory is MISSING]
    lacking = [name for name in needed if name not in entry]
    check(not lacking, f"`{path}` lacks {', '.join(lacking)}. Expected a mapping with {', '.join(needed)}.")
    for name, hint in inspect.get_annotations(kind).items():
        if name in entry:
            check_value(f"{path}.{name}", entry[name], hint)
    try:
        return kind(**entry)
    except ConfigError as error:
        raise error if str(error).startswith(f"`{path}") else ConfigError(f"`{path}`: {error}") from error


def check_names(path: str, names: Iterable[object], known: Sequence[str]) -> None:
    for name in names:
        near = nearest(str(name), known)
        check(name in known, f"`{path}` has an unknown {name!r}.{near} Expected some of: {', '.join(known)}.")


def check_settings(config: "DataclassInstance", where: str = "") -> None:
    """Reject values not allowed by the types of the package's own settings, e.g. fractional counts or texts for
    switches.

    `Annotated` types contain a `Range`, choices, or a function of name and value. `where`: prefix of setting names in
    messages.
    """
    for owner in (kind for kind in type(config).__mro__ if kind.__module__.startswith("salesrl_trl.")):
        for name, hint in inspect.get_annotations(owner).items():  # transformers' parser modifies the fields' types
            check_value(f"{where}{name}", getattr(config, name), hint)


def check_value(name: str, value: object, hint: object) -> None:
    """Reject a value not allowed by a type such as `Annotated[int, Range(1)]`. `name`: the setting's."""
    kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    if value is None and NoneType in kinds:
        return
    kind, *limits = get_args(kinds[0]) if get_origin(kinds[0]) is Annotated else kinds[:1]
    if kind is str and {*kinds[1:]} <= {NoneType}:
        check(isinstance(value, str | PurePath), f"`{name}` is of type {type(value).__name__}. Expected a text.")
    if get_origin(kind) is dict and len(kinds) == 1:
        check(isinstance(value, dict), f"`{name}` is a {type(value).__name__}. Expected a mapping.")
    if kind in TYPES:
        number, expected = TYPES[kind]
        is_of_kind = isinstance(value, number) and isinstance(value, bool) == (kind is bool)
        is_text = kind is float and isinstance(value, str) and re.fullmatch(r"\d+e-?\d+", value)
        note = f" YAML parses {value} as a string: write {str(value).replace('e', '.0e')}." if is_text else ""
        check(is_of_kind, f"`{name}` is {value!r}. Expected {expected}.{note}")
    for limit in limits:
        if isinstance(limit, Range):
            check_range(name, value, limit)
        elif callable(limit):
            limit(name, value)
        else:
            check(value in limit, f"`{name}` is {value!r}. Expected one of: {', '.join(limit)}.")
