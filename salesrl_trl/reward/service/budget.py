"""The requests of this process, held against the run's budget.

Owns which request may leave, and what it counts for. `transport` asks before it sends, the judge's client says what an
answer cost, and the reward settles at the end of a batch. `account` has the file that all processes share.

- A request counts before it is sent, with the mean cost of those before it. When it has ended, the mean gives way to
  what the request cost. So there are never more calls than a limit, and never more US dollars than a limit but for
  the error of that mean.
- This process takes calls and US dollars from the account in blocks, so that a request costs no look at the file. At
  the end of a batch it gives back what is left.
- Reading and writing the file takes about a millisecond, during which the event loop stands.
"""

import asyncio
import contextlib
import logging
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from salesrl_trl.errors import BudgetSpent, ConfigError, ServiceError, ServiceUnavailable
from salesrl_trl.reward.service.account import USD, Limit, Spent, open_account
from salesrl_trl.reward.service.deadline import now, remaining_s
from salesrl_trl.reward.service.per_event_loop import PerLoop
from salesrl_trl.reward.service.token_rate import TokenRate

logger = logging.getLogger(__name__)

NO_ACCOUNT = "budget_unknown"
"""Reason code of a request that was not sent because the account can't be used."""
WRITE_AFTER_S = 1.0
"""While requests are sent, the account is written at least so often."""
LONGEST_NAP_S = 0.5
"""Longest time between two looks at the level of tokens. Requests that had fewer tokens than expected raise it."""
FIRST_PROMPT_TOKENS = 1000
"""Tokens of a prompt, until one has been counted."""
FIRST_SHARE = 1e-3
"""Most that a request is expected to cost until one has been counted, as a share of the limit."""
LATEST = 64
"""The mean tokens of a request are those of about so many of the latest."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Price:
    """What the tokens of a provider cost, in US dollars."""

    prompt_token: float = 0.0
    completion_token: float = 0.0
    max_completion_tokens: int = 512
    """Most tokens of an answer."""

    def of(self, prompt_tokens: float, completion_tokens: float) -> float:
        """The cost of a request."""
        return prompt_tokens * self.prompt_token + completion_tokens * self.completion_token

    @property
    def is_free(self) -> bool:
        """Whether no request costs anything."""
        return self.prompt_token == self.completion_token == 0


FREE = Price()


class Budget:
    """What this process holds of the run's budget, and what it has spent.

    It can be pickled before its first use. All methods belong to one event loop.
    """

    def __init__(self, path: Path, limits: Sequence[Limit] = (), processes: int = 1) -> None:
        self.path = path
        """File of the account."""
        self.limits = tuple(limits)
        self._processes = processes
        self._held = {limit.name: 0.0 for limit in limits}  # of the blocks that were taken
        self._refused: set[str] = set()  # names of limits of which nothing is left
        self._unwritten: dict[str, Spent] = {}  # by service
        self._written_s = -math.inf
        self._has_complained = False

    def quota(self, service: str, price: Price = FREE, tokens_per_minute: float | None = None) -> "ServiceQuota":
        """The quota of a service, by all limits that are about it. Limits of money are not about one without price."""
        about = [limit for limit in self.limits if limit.service in (None, service)]
        limits = [limit for limit in about if not (limit.kind == USD and price.is_free)]
        rate = None if tokens_per_minute is None else TokenRate(tokens_per_minute / self._processes)
        return ServiceQuota(self, service, limits, price, rate)

    def refused(self, limits: Sequence[Limit]) -> Limit | None:
        """The first of these limits of which nothing is left."""
        return next((limit for limit in limits if limit.name in self._refused), None)

    def take(self, limits: Sequence[Limit], request: Spent) -> None:
        """Take blocks of the limits that this process has used up. Afterwards they hold the request, or are refused.

        Raises `ServiceError` where the account can't be used.
        """
        short = [limit for limit in limits if self._held[limit.name] < limit.of(request)]
        if short:
            self._exchange(short, request)

    def record(self, service: str, limits: Sequence[Limit], spent: Spent) -> None:
        """Count a request, or what it cost more or less than was expected."""
        for limit in limits:
            self._held[limit.name] -= limit.of(spent)
        self._unwritten.setdefault(service, Spent()).add(spent)
        if now() - self._written_s >= WRITE_AFTER_S:
            with contextlib.suppress(ServiceError):  # requests with a limit fail by themselves
                self._exchange(())

    def settle(self) -> None:
        """Write what was spent and give back what is held. What can't be written now is written with the next."""
        if self._unwritten or any(self._held.values()):
            with contextlib.suppress(ServiceError):
                self._exchange(self.limits)

    def _exchange(self, limits: Sequence[Limit], request: Spent | None = None) -> None:
        """Write what was spent, give back what is held of these limits, and take new blocks for such requests."""
        self._written_s = now()
        blocks: dict[str, float | None] = {}
        try:
            with open_account(self.path) as account:
                for service, spent in self._unwritten.items():
                    account.services.setdefault(service, Spent()).add(spent)
                for limit in limits:
                    account.give_back(limit, self._held[limit.name])
                    blocks[limit.name] = 0.0
                    if request is not None:
                        blocks[limit.name] = account.take(limit, limit.of(request), self._processes)
        except (OSError, ConfigError) as error:
            message = f"the account of what was spent, {self.path}, can't be used: {error}."
            if not self._has_complained:
                self._has_complained = True
                logger.error(f"{message} Requests with a limit fail until then. See to the folder and its free space.")
            raise ServiceError(message, NO_ACCOUNT) from None
        self._unwritten = {}
        self._held |= {name: block or 0.0 for name, block in blocks.items()}
        self._refused |= {name for name, block in blocks.items() if block is None}


class ServiceQuota:
    """The requests to one service, held against the limits that are about it. Made by `Budget.quota`."""

    def __init__(
        self, budget: Budget, service: str, limits: Sequence[Limit], price: Price, rate: TokenRate | None
    ) -> None:
        self._budget = budget
        self._service = service
        self._limits = limits
        self._price = price
        self._rate = rate
        self._counted = 0  # requests in the mean
        self._prompt_tokens = float(FIRST_PROMPT_TOKENS)
        self._completion_tokens = float(price.max_completion_tokens)
        self._expected: deque[Spent] = deque()  # of the requests to a judge that have not ended
        self._queue: PerLoop[asyncio.Lock] = PerLoop(asyncio.Lock)

    @property
    def is_spent(self) -> bool:
        """Whether no request will be sent any more."""
        return self._budget.refused(self._limits) is not None

    def refuse_if_spent(self) -> None:
        """Raise `BudgetSpent` if no request will be sent any more."""
        limit = self._budget.refused(self._limits)
        if limit is not None:
            raise BudgetSpent(f"{self._service} was not asked: the limit {limit.name} is reached")

    async def admit(self) -> None:
        """Wait until a request may be sent, and count it.

        Raises `BudgetSpent` where a limit is reached, `ServiceError` where the account can't be used, `TimeoutError`
        where the deadline comes before the request's turn.
        """
        self.refuse_if_spent()
        if self._rate is None:
            self._begin()
            return
        async with asyncio.timeout(remaining_s()), self._queue.get():
            while wait_s := self._rate.wait_s(now(), _tokens(self._request())):
                await asyncio.sleep(min(wait_s, LONGEST_NAP_S))
            self._begin()

    def admits_now(self) -> bool:
        """Count one more request, if it may be sent without a wait."""
        if self.is_spent or (self._rate is not None and self._rate.wait_s(now(), _tokens(self._request()))):
            return False
        with contextlib.suppress(ServiceError):
            self._begin()
            return True
        return False

    def give_back(self) -> None:
        """A request that was admitted is not sent."""
        self._end(Spent(calls=-1))

    def charge(self, tokens: tuple[float, float] | None, *, is_stated: bool = False) -> None:
        """A request has ended with so many tokens of prompt and answer. `None`: nobody knows, so the mean counts.
        `is_stated`: by the provider."""
        if tokens is not None and is_stated:
            self._counted = min(self._counted + 1, LATEST)
            self._prompt_tokens += (tokens[0] - self._prompt_tokens) / self._counted
            self._completion_tokens += (tokens[1] - self._completion_tokens) / self._counted
        self._end(self._spent(*(tokens or (self._prompt_tokens, self._completion_tokens))))

    def _spent(self, prompt_tokens: float, completion_tokens: float) -> Spent:
        usd = self._price.of(prompt_tokens, completion_tokens)
        return Spent(prompt_tokens=prompt_tokens, completion_tokens=completion_tokens, usd=usd)

    def _request(self) -> Spent:
        """What a request is expected to take."""
        request = self._spent(self._prompt_tokens, self._completion_tokens)
        request.calls = 1
        if not self._counted:
            limits = (limit.most for limit in self._limits if limit.kind == USD)
            request.usd = min([request.usd, *(FIRST_SHARE * most for most in limits)])
        return request

    def _begin(self) -> None:
        request = self._request()
        self._budget.take(self._limits, request)
        self.refuse_if_spent()
        self._budget.record(self._service, self._limits, Spent(calls=1, usd=request.usd))
        if self._rate is not None:
            self._rate.take(_tokens(request))
        if self._rate is not None or not self._price.is_free:
            self._expected.append(request)

    def _end(self, spent: Spent) -> None:
        """Replace what was expected of a request by what it was."""
        expected = self._expected.popleft() if self._expected else Spent()
        if self._rate is not None:
            self._rate.take(_tokens(spent) - _tokens(expected))
        spent.usd -= expected.usd
        self._budget.record(self._service, self._limits, spent)


def _tokens(spent: Spent) -> float:
    return spent.prompt_tokens + spent.completion_tokens


class Bill:
    """The bill of one request to a provider. Used as a context.

        with transport.bill() as bill:
            answer = await post(...)
            bill.count(prompt_tokens, completion_tokens)

    A request that was cut off under way, or whose answer states no usage, is billed by the mean of the others: the
    provider has worked, and bills it. One that was refused by its status, or could not be sent, costs nothing.
    Without a quota nothing is billed.
    """

    def __init__(self, quota: ServiceQuota | None) -> None:
        self._quota = quota
        self._tokens: tuple[int, int] | None = None

    def count(self, prompt_tokens: int, completion_tokens: int) -> None:
        """The provider has counted so many tokens."""
        self._tokens = (prompt_tokens, completion_tokens)

    def __enter__(self) -> "Bill":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._quota is None:
            return
        if self._tokens is not None:
            self._quota.charge(self._tokens, is_stated=True)
        else:
            is_free = isinstance(error, ServiceError) and error.status is not None
            self._quota.charge((0, 0) if is_free or isinstance(error, ServiceUnavailable) else None)
