"""What a transport asks before and after a request, and the bill of one.

Owns the interface alone: `judged.budget` holds requests against the account of a run. A quota counts every request of
one service.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from salesrl_trl.errors import ServiceError, ServiceUnavailable


class SharedBudget(ABC):
    """What the processes of a run may spend together, and have spent by the account in `path`."""

    path: Path

    @abstractmethod
    def settle(self) -> None:
        """Write what was spent and give back what is held."""

    @abstractmethod
    def joined(self, others: Iterable["SharedBudget"]) -> "SharedBudget":
        """One budget by the limits of all, which share an account."""

    @abstractmethod
    def in_words(self) -> str:
        """The limits, and what was spent so far. Raises `ConfigError` where the account can't be read."""


class Quota(ABC):
    """The requests to one service, held against a budget and against rates a minute."""

    budget: SharedBudget

    @property
    @abstractmethod
    def is_spent(self) -> bool: ...

    @abstractmethod
    def refuse_if_spent(self) -> None:
        """Raise `BudgetSpent` where a limit is reached."""

    @abstractmethod
    async def admit(self) -> None:
        """Wait until a request may be sent, and count it. Raises `BudgetSpent` where a limit is reached,
        `ServiceError` where the account can't be used, `TimeoutError` where the deadline comes first."""

    @abstractmethod
    def admits_now(self) -> bool:
        """Count one more request, if it may be sent without a wait."""

    @abstractmethod
    def give_back(self) -> None:
        """A request that was admitted is not sent."""

    @abstractmethod
    def charge(self, tokens: tuple[float, float] | None, *, is_stated: bool = False) -> None:
        """A request has ended with so many tokens of prompt and answer. `None`: nobody knows, so the mean counts.
        `is_stated`: by the provider."""


@dataclass
class Bill:
    """The bill of one request to a provider: `with transport.bill() as bill: ...; bill.count(prompt, completion)`.

    A request that was cut off under way, or whose answer states no usage, is billed by the mean of the others: the
    provider has worked, and bills it. One that was refused by its status, or could not be sent, costs nothing.
    Without a quota nothing is billed.
    """

    quota: Quota | None
    tokens: tuple[int, int] | None = None

    def count(self, prompt_tokens: int, completion_tokens: int) -> None:
        self.tokens = (prompt_tokens, completion_tokens)

    def __enter__(self) -> "Bill":
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self.quota is None:
            return
        is_free = isinstance(error, ServiceUnavailable) or (isinstance(error, ServiceError) and bool(error.status))
        self.quota.charge(self.tokens or ((0, 0) if is_free else None), is_stated=self.tokens is not None)
