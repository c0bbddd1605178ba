"""The requests of this process, held against the run's budget.

Owns which request may leave now, which waits for a part of the budget or for its tokens, and what each has cost. The
law is `budget`'s, the file `spent_file`'s. `transport` and the judge's client ask; nothing is sent here.

The file is used on a thread of its own: no disk and no lock of another process holds up the event loop.
"""

import asyncio
import contextlib
import logging
import sqlite3
from collections import deque
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType

from salesrl_trl.errors import BudgetSpent, ServiceError, ServiceUnavailable
from salesrl_trl.reward.service.budget import CALLS, USD, BudgetShare, Means, Price, Spent, Terms, TokenRate
from salesrl_trl.reward.service.deadline import now, remaining_s
from salesrl_trl.reward.service.per_event_loop import PerLoop
from salesrl_trl.reward.service.spent_file import Return, SpentFile

logger = logging.getLogger(__name__)

NO_ACCOUNT = "budget_unknown"
"""Reason code of a request that was not sent because the account can't be used."""
BOOK_AFTER_S = 1.0
"""Longest time from a request to its line in the account."""
LONGEST_NAP_S = 0.5
"""Longest time between two looks at the level of tokens. Requests that had fewer tokens than expected raise it."""
FREE = Price()


class Budget:
    """What this process holds of the run's budget, and what it has spent.

    It is picklable before its first use. All methods belong to the event loop.

    Args:
        terms (`Terms`):
            The run's limits, and the file of the account.
    """

    def __init__(self, terms: Terms) -> None:
        self.terms = terms
        self.parts = [BudgetShare(limit) for limit in terms.limits]
        self.meters: list[Meter] = []
        self._file = SpentFile(terms.path)
        self._thread: ThreadPoolExecutor | None = None
        self._clerk: PerLoop[_Clerk] = PerLoop(_Clerk)
        self._said = False

    def meter(self, service: str, price: Price = FREE, tokens_per_minute: float | None = None) -> "Meter":
        """The meter of a service, which holds its requests against all limits that are about it.

        Args:
            service (`str`):
                Name of the service.
            price (`Price`, *optional*):
                Of its tokens. Without one, no limit of money holds for it.
            tokens_per_minute (`float`, *optional*):
                Most tokens of any minute, of all processes.
        """
        parts = [
            part
            for part in self.parts
            if part.limit.service in (None, service) and not (part.limit.kind == USD and price.is_free)
        ]
        rate = None if tokens_per_minute is None else TokenRate(tokens_per_minute / self.terms.processes)
        self.meters.append(Meter(self, service, parts, price, rate))
        return self.meters[-1]

    def record(self) -> None:
        """A meter has something to book. It is in the file within `BOOK_AFTER_S`."""
        clerk = self._clerk.get()
        if clerk.timer is None:
            clerk.timer = asyncio.get_running_loop().call_later(BOOK_AFTER_S, self._book_soon, clerk)

    async def refill(self, parts: Iterable[BudgetShare], usd: float) -> None:
        """Get new parts for those that are used up. `usd`: the cost of a request.

        Raises:
            `ServiceError`: the account can't be used.
        """
        clerk = self._clerk.get()
        clerk.wanted |= dict.fromkeys(parts, usd)
        await self._written(clerk)

    def refill_soon(self, part: BudgetShare) -> None:
        """Get more of a part before it is used up, and do not wait."""
        clerk = self._clerk.get()
        clerk.wanted[part] = 0.0
        if clerk.coming is None:
            clerk.coming = asyncio.ensure_future(self._next_exchange(clerk))

    async def settle(self) -> None:
        """Write what was spent. What can't be written now is written with the next."""
        clerk = self._clerk.get()
        if self._has_spent or clerk.coming is not None or clerk.lock.locked():
            clerk.books = True
            with contextlib.suppress(ServiceError):  # requests that need the file fail by themselves
                await self._written(clerk)

    async def aclose(self) -> None:
        """Write what was spent, give back what is held, and close the file. The next use opens it again."""
        clerk = self._clerk.get()
        await asyncio.sleep(0)  # requests that were cancelled a moment ago are booked now
        if clerk.timer is not None:
            clerk.timer.cancel()
        async with clerk.lock:
            clerk.returns = True  # by the next exchange
        if self._has_spent or any(part.held for part in self.parts):
            with contextlib.suppress(ServiceError):
                await self._written(clerk)
        thread, self._thread = self._thread, None
        if thread is not None:
            await asyncio.get_running_loop().run_in_executor(thread, self._file.close)
            thread.shutdown(wait=False)
        self._clerk.pop()

    @property
    def _has_spent(self) -> bool:
        return any(meter.has_spent for meter in self.meters)

    def _book_soon(self, clerk: "_Clerk") -> None:
        clerk.timer = None
        if self._has_spent:
            clerk.booking = asyncio.ensure_future(self.settle())

    async def _written(self, clerk: "_Clerk") -> None:
        """Wait for an exchange with the file that begins from now on. Those who come before it share it."""
        if clerk.coming is None:
            clerk.coming = asyncio.ensure_future(self._next_exchange(clerk))
        error = await asyncio.shield(clerk.coming)
        if error is not None:
            raise error

    async def _next_exchange(self, clerk: "_Clerk") -> ServiceError | None:
        async with clerk.lock:
            await asyncio.sleep(0)
            clerk.coming = None
            return await self._exchange(clerk)

    async def _exchange(self, clerk: "_Clerk") -> ServiceError | None:
        """Book what was spent, and exchange the parts that are wanted."""
        wanted = {part: usd for part, usd in clerk.wanted.items() if part.runs_low}
        clerk.wanted = {}
        if not (wanted or clerk.returns or clerk.books):
            return None  # those who waited for the exchange before got what these want
        clerk.books = False
        spent: dict[str, Spent] = {}
        for meter in self.meters:
            spent.setdefault(meter.service, Spent()).add(meter.drain())
        going = [part for part in self.parts if part in wanted or (clerk.returns and part.held)]
        returned = []
        for part in going:
            held = part.held if clerk.returns else min(part.held, 0.0)
            returned.append(Return(part.limit, held, part in wanted, wanted.get(part, 0.0), not part.lets_pass))
        for part, each in zip(going, returned, strict=True):
            part.held -= each.held  # requests that end meanwhile count in the next part
        if self._thread is None:
            self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="budget")
        try:
            parts = await asyncio.get_running_loop().run_in_executor(
                self._thread, self._file.exchange, spent, returned
            )
        except (sqlite3.Error, OSError) as error:
            for part, each in zip(going, returned, strict=True):
                part.held += each.held
            for meter in self.meters:
                meter.spent.add(spent.pop(meter.service, Spent()))
                meter.has_spent = True
            return self._unusable(error)
        for part, each in zip(going, returned, strict=True):
            if each.wants:
                part.receive(parts[part.limit.name], is_needed=each.needs)
        return None

    def _unusable(self, error: Exception) -> ServiceError:
        message = f"the account of what was spent, {self.terms.path}, can't be used: {error}."
        if not self._said:
            self._said = True
            logger.error(f"{message} Requests with a limit wait for it in vain. See to the folder and its free space.")
        return ServiceError(message, NO_ACCOUNT)


class _Clerk:
    """The exchanges with the file on one event loop."""

    def __init__(self) -> None:
        self.wanted: dict[BudgetShare, float] = {}
        self.returns = self.books = False
        self.lock = asyncio.Lock()  # held by the exchange that is under way
        self.coming: asyncio.Task[ServiceError | None] | None = None
        self.booking: asyncio.Task[None] | None = None
        self.timer: asyncio.TimerHandle | None = None


class Meter:
    """Counts the requests to one service. Made by `Budget.meter`.

    Args:
        budget (`Budget`):
            Of this process.
        service (`str`):
            Name of the service.
        parts (`list[BudgetShare]`):
            What this process holds of the limits that are about the service.
        price (`Price`):
            Of its tokens.
        rate (`TokenRate`, *optional*):
            Makes requests wait for their tokens.
    """

    def __init__(
        self, budget: Budget, service: str, parts: list[BudgetShare], price: Price, rate: TokenRate | None
    ) -> None:
        self._budget = budget
        self.service = service
        self.spent = Spent()
        """What is not in the file yet."""
        self.has_spent = False
        self._parts = parts
        self._calls = [part for part in parts if part.limit.kind == CALLS]
        self._money = [part for part in parts if part.limit.kind == USD]
        self._price = price
        self._means = Means(price)
        self._rate = rate
        self._expected: deque[float] = deque()  # tokens taken for each request that has not ended
        self._queue: PerLoop[asyncio.Lock] = PerLoop(asyncio.Lock)

    @property
    def is_spent(self) -> bool:
        """Whether no request will be sent any more."""
        return any(part.is_refused for part in self._parts)

    def refuse_if_spent(self) -> None:
        """Raise `BudgetSpent` if no request will be sent any more."""
        for part in self._parts:
            if part.is_refused:
                raise BudgetSpent(f"{self.service} was not asked: the limit {part.limit.name} is reached")

    async def admit(self) -> None:
        """Wait until a request may be sent, and count it.

        Raises:
            `BudgetSpent`: a limit is reached.
            `TimeoutError`: the deadline comes before the request's turn.
        """
        self.refuse_if_spent()
        if self._rate is None and all(part.lets_pass for part in self._parts):
            self._count()
            return
        async with asyncio.timeout(remaining_s()):
            if self._rate is not None:
                await self._tokens(self._rate)
            try:
                while short := [part for part in self._parts if not part.lets_pass]:
                    await self._budget.refill(short, self._means.usd)
                    self.refuse_if_spent()
            except BaseException:
                self._end(0.0)
                raise
        self._count()

    def admits_now(self) -> bool:
        """Count one more request, if it may be sent without a wait."""
        if not all(part.lets_pass for part in self._parts):
            return False
        if self._rate is not None:
            if self._rate.wait_s(now(), self._means.tokens):
                return False
            self._expect(self._rate)
        self._count()
        return True

    def give_back(self) -> None:
        """A request that was admitted is not sent."""
        for part in self._calls:
            part.held += 1
        self._book(calls=-1)
        self._end(0.0)

    def charge(self, prompt_tokens: float, completion_tokens: float, *, is_counted: bool) -> None:
        """A request has ended. `is_counted`: the provider said the tokens."""
        usd = self._price.of(prompt_tokens, completion_tokens)
        if is_counted:
            self._means.record(prompt_tokens, completion_tokens)
        for part in self._money:
            part.held -= usd
        self._end(prompt_tokens + completion_tokens)
        self.spent.add(Spent(prompt_tokens=prompt_tokens, completion_tokens=completion_tokens, usd=usd))
        self._book()

    def charge_estimate(self) -> None:
        """A request has ended, and nobody says what it cost: the mean of the others."""
        self.charge(self._means.prompt_tokens, self._means.completion_tokens, is_counted=False)

    def charge_nothing(self) -> None:
        """A request has ended that costs nothing."""
        self._end(0.0)

    def _count(self) -> None:
        for part in self._calls:
            part.held -= 1
            if part.held == part.low:
                self._budget.refill_soon(part)
        self._book(calls=1)

    def _book(self, calls: int = 0) -> None:
        self.spent.calls += calls
        if not self.has_spent:
            self.has_spent = True
            self._budget.record()

    def drain(self) -> Spent:
        """What is not in the file yet. Starts over."""
        spent, self.spent, self.has_spent = self.spent, Spent(), False
        return spent

    async def _tokens(self, rate: TokenRate) -> None:
        """Wait in line for the tokens of a request, and take them."""
        async with self._queue.get():
            while wait_s := rate.wait_s(now(), self._means.tokens):
                await asyncio.sleep(min(wait_s, LONGEST_NAP_S))
            self._expect(rate)

    def _expect(self, rate: TokenRate) -> None:
        rate.take(self._means.tokens)
        self._expected.append(self._means.tokens)

    def _end(self, tokens: float) -> None:
        """A request has ended with so many tokens."""
        if self._rate is not None and self._expected:
            self._rate.take(tokens - self._expected.popleft())


class Bill:
    """The bill of one request to a provider. Used as a context.

        with transport.bill() as bill:
            answer = await post(...)
            bill.count(prompt_tokens, completion_tokens)

    A request that was cut off under way, or whose answer states no usage, is billed by the mean of the others: the
    provider has worked, and bills it. One that was refused by its status, or could not be sent, costs nothing.

    Args:
        meter (`Meter`, *optional*):
            Gets the tokens. Without one nothing is billed.
    """

    def __init__(self, meter: Meter | None) -> None:
        self._meter = meter
        self._tokens: tuple[int, int] | None = None

    def count(self, prompt_tokens: int, completion_tokens: int) -> None:
        """The provider has counted so many tokens."""
        self._tokens = (prompt_tokens, completion_tokens)

    def __enter__(self) -> "Bill":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._meter is None:
            return
        if self._tokens is not None:
            self._meter.charge(*self._tokens, is_counted=True)
        elif isinstance(error, ServiceUnavailable) or (isinstance(error, ServiceError) and error.status is not None):
            self._meter.charge_nothing()
        else:
            self._meter.charge_estimate()
