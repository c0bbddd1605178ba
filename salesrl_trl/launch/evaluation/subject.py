"""The subject of a quick evaluation, its answers, and the processes of a run.

`greedy` implements the subject. Refuses to generate answers, and to score them.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol, TypeVar, cast

from accelerate import PartialState
from accelerate.utils import broadcast_object_list, gather_object

from salesrl_trl.types import Answered, Example

T = TypeVar("T")


class Subject(Protocol):
    """The policy that is evaluated. All ranks call each method together."""

    def answer(self, rows: Sequence[Example], /) -> list[Answered]:
        """Answer this rank's rows greedily, and score the answers, in their order. Training stays as it is."""

    def betas(self) -> Mapping[str, float]:
        """The current KL coefficients by branch. Empty without a KL target."""

    def save(self, folder: Path, /) -> None: ...

    def log(self, figures: Mapping[str, float | None], /) -> None:
        """Log figures under their names. `None` is left out of TensorBoard."""


class Processes:
    """The processes of a run, by accelerate. A run without a launcher has one."""

    def __init__(self) -> None:
        self._state = PartialState()

    @property
    def count(self) -> int:
        return int(self._state.num_processes)

    @property
    def index(self) -> int:
        """The number of this process. The main process has 0."""
        return int(self._state.process_index)

    def gather(self, items: Sequence[T]) -> list[T]:
        """The items of all processes, in their order."""
        return list(gather_object(list(items)))

    def from_main(self, value: T) -> T:
        """The value of the main process, on all."""
        return cast(T, broadcast_object_list([value])[0])

    def wait(self) -> None:
        self._state.wait_for_everyone()
