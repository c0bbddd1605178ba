"""Checks of settings whose messages say what was got and what was expected. All classes of settings call them."""

import ast
import importlib
import json
import re
import sys
import urllib.parse
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar, cast

from salesrl_trl.errors import ConfigError, nearest

T = TypeVar("T")

Kind = TypeVar("Kind", bound=list[object] | dict[str, object])


def check(condition: bool, message: str) -> None:
    """Raise `ConfigError` with this message unless the condition holds."""
    if not condition:
        raise ConfigError(message)


def check_url(setting: str, url: str | None) -> None:
    if url is None:
        return
    from salesrl_trl.service.statuses import address_fault

    fault = address_fault(url)
    check(fault is None, f"`{setting}` holds {fault}.")
    try:
        parts = urllib.parse.urlsplit(url)
        has_host = bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number, or half of an IPv6 address
        has_host = False
    check(  # without showing it: a key may stand there by mistake
        re.fullmatch(r"https?://\S+", url) is not None and has_host,
        f"`{setting}` is no address. Expected one that starts with http:// or https://, with a host, and behind a "
        "colon nothing but its port.",
    )


def structure(setting: str, value: object, kind: type[Kind]) -> Kind:
    """The value of a setting that is a list or a mapping: from YAML as it is, from the command line as JSON. Raises
    `ConfigError` if the text is no JSON, or the value is of another kind."""
    expected = "a mapping" if kind is dict else "a list"
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise ConfigError(
                f"`{setting}` is not JSON (column {error.colno}). Expected {expected}, in YAML or as JSON."
            ) from None
    if not isinstance(value, kind):
        raise ConfigError(f"`{setting}` is a {type(value).__name__}. Expected {expected}.")
    return value


def build_object(path: str, setting: str, kind: Callable[..., T]) -> T:
    """An object of the class that a dotted path names, made without arguments. `setting` holds the path. `kind`: a
    class, perhaps an abstract one, that it has to derive from. Raises `ConfigError` where it can't be made."""
    loaded = load_object(path, setting)
    wanted = f"{kind.__module__}.{kind.__qualname__}"
    assert isinstance(kind, type)  # mypy takes no abstract class for a `type[T]`, but for a callable that makes one
    if not (isinstance(loaded, type) and issubclass(loaded, kind)):
        raise ConfigError(f"`{setting}` is {path!r}, which is no {wanted}. Expected a class that derives from it.")
    try:
        return cast(T, loaded())
    except TypeError as error:
        raise ConfigError(
            f"`{setting}` is {path!r}, which can't be made without arguments ({error}). Expected one that can, with "
            f"every method of {wanted}. Give its arguments defaults, or derive a class that sets them."
        ) from error


def find_modules_in(folder: Path) -> None:
    """Have Python look for modules in this folder too, after all other places."""
    if str(folder) not in sys.path:
        sys.path.append(str(folder))


def load_object(path: str, setting: str) -> object:
    """The class or function that a dotted path names: `"my_package.my_module.MyClass"`. Its module may be in the
    working folder. With arguments behind it, `"my_module.make(limit=3)"`, what it returns. `setting` holds the path.
    Raises `ConfigError` if there is none."""
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
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{where}, and there is no module {error.name!r}. Expected one in the working folder, or one that Python "
            "finds elsewhere. Install it, or add its folder to PYTHONPATH."
        ) from error
    except AttributeError as error:
        near = nearest(name, vars(sys.modules[module]) if module in sys.modules else ())
        raise ConfigError(
            f"{where}, and {module!r} has no {name!r}.{near} Expected a class or function of that module."
        ) from error
    try:
        call = cast(ast.Call, ast.parse(path, mode="eval").body)
        keywords = {str(each.arg): ast.literal_eval(each.value) for each in call.keywords}
        return cast(object, loaded(*map(ast.literal_eval, call.args), **keywords))
    except (SyntaxError, AttributeError, ValueError, TypeError) as error:
        raise ConfigError(f"{where}, which does not work ({error}). Expected plain values, as in `f(a=1)`.") from error
