"""One object for each event loop. Connections, events and running tasks break when a second loop uses them."""

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar
from weakref import WeakKeyDictionary

T = TypeVar("T")


class PerLoop(Generic[T]):
    """One object for each event loop, which `make` makes on that loop when it first asks."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._made: WeakKeyDictionary[asyncio.AbstractEventLoop, T] = WeakKeyDictionary()

    def __reduce__(self) -> tuple[object, ...]:
        return PerLoop, (self._make,)  # another process has other loops

    def get(self) -> T:
        """The running loop's object."""
        loop = asyncio.get_running_loop()
        if loop not in self._made:
            self._made[loop] = self._make()
        return self._made[loop]

    def pop(self) -> T | None:
        """Remove and return the running loop's object; `None` if it has none."""
        return self._made.pop(asyncio.get_running_loop(), None)
