"""The answers of a quick evaluation, and the two things that an evaluation is given: a subject and the ranks.

Owns the protocols. A subject generates the answers and has them scored; nothing here does.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypedDict, TypeVar, cast

from accelerate import PartialState
from accelerate.utils import broadcast_object_list, gather_object

from salesrl_trl.types import Reward

T = TypeVar("T")


class Row(TypedDict):
    """A row of the held-out dataset, as the trainer takes it."""

    prompt: object
    """The prompt, as TRL takes it."""
    row: int
    """Index of the `SalesRow`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Answered:
    """One held-out row and the policy's greedy answer to it."""

    branch: str
    """The row's branch: `"fairness"`."""
    text: str
    """The policy's answer, without special tokens. It may quote a customer: not for logs."""
    reward: Reward
    """Its value, or the reason why there is none; and its components."""
    tokens: int
    """Length of the answer."""
    truncated: bool
    """Whether it came to `max_completion_length` without an end."""
    kl: float | None = None
    """Sum of the KL to the reference policy over the answer's tokens, in nats. `None` without a reference."""
    kl_tokens: int = 0
    """Tokens in that sum."""


class Subject(Protocol):
    """The policy that is evaluated: everything that a quick evaluation knows of a trainer. All ranks call each method
    together."""

    def answer(self, rows: Sequence[Row], /) -> list[Answered]:
        """Answer this rank's rows greedily and have the answers scored, in the order of the rows. Training and the
        figures of other evaluations stay as they are."""
        ...

    def betas(self) -> Mapping[str, float]:
        """The KL coefficients of now by branch. Empty without a KL target."""
        ...

    def save(self, folder: Path, /) -> None:
        """Write the policy into the folder."""
        ...

    def log(self, figures: Mapping[str, float | None], /) -> None:
        """Log figures under their names. `None` is left out of TensorBoard."""
        ...


class Ranks(Protocol):
    """The processes of a run."""

    @property
    def count(self) -> int:
        """How many there are."""
        ...

    @property
    def index(self) -> int:
        """The number of this one, from 0. The main process has 0."""
        ...

    def gather(self, items: Sequence[T]) -> list[T]:
        """The items of all ranks, in the order of the ranks."""
        ...

    def from_main(self, value: T) -> T:
        """The value of the main process, on all ranks."""
        ...

    def wait(self) -> None:
        """Until all ranks are here."""
        ...


class Processes:
    """`Ranks` over accelerate. A run without a launcher has one."""

    def __init__(self) -> None:
        self._state = PartialState()

    @property
    def count(self) -> int:
        return int(self._state.num_processes)

    @property
    def index(self) -> int:
        return int(self._state.process_index)

    def gather(self, items: Sequence[T]) -> list[T]:
        return list(gather_object(list(items)))

    def from_main(self, value: T) -> T:
        return cast(T, broadcast_object_list([value])[0])

    def wait(self) -> None:
        self._state.wait_for_everyone()
