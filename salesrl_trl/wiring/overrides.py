"""One function, by which the overrides of a class are in force for some of its objects alone. Called by `trainer`."""

import functools
import inspect
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def in_force_if(attribute: str) -> Callable[[type[T]], type[T]]:
    """A class decorator: for an object whose `attribute` is false, every override but `__init__` is the base class's
    own method."""

    def decorated(kind: type[T]) -> type[T]:
        for name, override in [*vars(kind).items()]:
            if (
                name != "__init__"
                and inspect.isfunction(override)
                and any(hasattr(base, name) for base in kind.__bases__)
            ):
                setattr(kind, name, _chosen(kind, name, override, attribute))
        return kind

    return decorated


def _chosen(kind: type, name: str, override: Callable[..., object], attribute: str) -> Callable[..., object]:
    @functools.wraps(override)
    def method(self: object, *args: object, **kwargs: object) -> object:
        if getattr(self, attribute):
            return override(self, *args, **kwargs)
        return getattr(super(kind, self), name)(*args, **kwargs)

    return method
