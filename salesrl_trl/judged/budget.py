"""A run's budget: the account its processes share, and this process's requests against it.

- A process reserves calls and US dollars in blocks, so that most requests don't read the file. The blocks never exceed
  the remaining budget. A killed process's block stays reserved, since its requests may have been sent.
- Each request is counted before it is sent, at the mean cost of earlier ones, and corrected when it ends. A limit on
  calls is therefore never exceeded, and one on US dollars only by the error of that mean.
"""

import asyncio
import contextlib
import json
import logging
import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from filelock import FileLock

from salesrl_trl.errors import BudgetSpent, ConfigError, ServiceError
from salesrl_trl.ground.process import write_whole
from salesrl_trl.ground.texts import calls_and_usd
from salesrl_trl.service.breaker import Quota, SharedBudget
from salesrl_trl.service.event_loop import PerLoop, now, remaining_s

logger = logging.getLogger(__name__)

CALLS, USD, TOKENS = "calls", "usd", "tokens"
BLOCKS = 32  # a block is 1/32 of a process's share of the remaining budget, so that a kill costs little
LOCK_TIMEOUT_S = 20.0  # longest wait for other processes; each needs milliseconds
WRITE_AFTER_S = 1.0  # longest interval between writes of the account while requests are sent
LEAST_LEVEL = 1e-6  # tolerance for clock rounding, which no wait would resolve
BURST = 1 / 12  # share of a per-minute rate available immediately; the rest accrues evenly
LONGEST_NAP_S = 0.5  # polling interval of the level, which rises when requests use fewer tokens than expected
FIRST_PROMPT_TOKENS = 1000  # assumed tokens of a prompt until one is counted
FIRST_SHARE = 1e-3  # highest assumed cost of a request until one is counted, as a share of the limit
LATEST = 64  # number of recent requests in the mean token counts, approximately


@dataclass(kw_only=True, slots=True)
class Spent:
    """Sent requests and their cost."""

    calls: float = 0
    prompt_tokens: float = 0
    completion_tokens: float = 0
    usd: float = 0.0

    def of(self, kind: str) -> float:
        return {CALLS: self.calls, USD: self.usd, TOKENS: self.prompt_tokens + self.completion_tokens}[kind]

    def add(self, other: "Spent") -> None:
        self.calls += other.calls
        self.prompt_tokens += other.prompt_tokens
        self.completion_tokens += other.completion_tokens
        self.usd += other.usd


@dataclass(frozen=True, kw_only=True, slots=True)
class Limit:
    """One spending limit of a run."""

    name: str  # its setting: `"max_calls"`, `"judge_providers[openai].max_usd"`
    kind: str  # the unit: `CALLS` or `USD`
    most: float
    service: str | None = None  # the service it applies to; `None`: all of the reward's services


@dataclass(kw_only=True, slots=True)
class Account:
    """Spending of a run's processes and of the runs it resumes."""

    services: dict[str, Spent] = field(default_factory=dict)  # pending requests at their expected cost
    taken: dict[str, float] = field(default_factory=dict)  # by limit: used, or reserved by a process
    most: dict[str, float] = field(default_factory=dict)  # each limit's value when last read
    refused: dict[str, float] = field(default_factory=dict)  # a limit's value when it refused a request

    def total(self, service: str | None = None) -> Spent:
        total = Spent()
        for name, spent in self.services.items():
            if service in (None, name):
                total.add(spent)
        return total

    def in_words(self) -> str:
        return calls_and_usd(self.total().calls, self.total().usd)

    def used(self, limit: Limit) -> float:
        return self.total(limit.service).of(limit.kind)

    def reached(self, limits: Iterable[Limit]) -> list[Limit]:
        """The limits that refuse requests at their current values."""
        refused = self.refused
        return [limit for limit in limits if max(refused.get(limit.name, -math.inf), self.used(limit)) >= limit.most]

    def give_back(self, limit: Limit, held: float) -> None:
        """Release the rest of a process's block, negative if it overspent."""
        # at least the amount spent: an old run may get a new limit
        self.taken[limit.name] = max(self.taken.get(limit.name, 0.0) - held, self.used(limit))
        self.most[limit.name] = limit.most

    def take(self, limit: Limit, request: float, processes: int) -> float | None:
        """Reserve a block for requests of this many calls or US dollars; `None` if the budget can't cover one."""
        left = limit.most - self.taken[limit.name]
        if left <= 0 or left < request:
            self.refused[limit.name] = limit.most
            return None
        block = max(request, left / (BLOCKS * processes))
        block = math.floor(block) if limit.kind == CALLS else block
        self.taken[limit.name] += block
        return block


@contextlib.contextmanager
def open_account(path: Path) -> Iterator[Account]:
    """Lock the account for one process. Changes are written atomically when the block ends. Raises `OSError` or
    `ConfigError` if the file is unusable."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_suffix(".lock"), timeout=LOCK_TIMEOUT_S, poll_interval=0.002):
        account = read_account(path)
        yield account
        write_whole(path, json.dumps(asdict(account), indent=1))


def read_account(path: Path) -> Account:
    """Read an account; an absent file is an empty account. Raises `ConfigError` if it is unreadable."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return Account(**{**content, "services": {name: Spent(**sums) for name, sums in content["services"].items()}})
    except FileNotFoundError:
        return Account()
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ConfigError(
            f"the spending account {path} can't be read ({error}). Expected the file of an earlier run. Check its "
            "folder, or delete the file to start with nothing spent."
        ) from None


@dataclass(frozen=True, kw_only=True, slots=True)
class Price:
    """A provider's token prices in US dollars."""

    prompt_token: float = 0.0
    completion_token: float = 0.0
    max_completion_tokens: int = 512  # most tokens per answer

    def of(self, prompt_tokens: float, completion_tokens: float) -> float:
        return prompt_tokens * self.prompt_token + completion_tokens * self.completion_token

    @property
    def is_free(self) -> bool:
        return self.prompt_token == self.completion_token == 0


FREE = Price()


class Budget(SharedBudget):
    """This process's reservations in the run's account at `path`, and its spending since the last write. All methods
    run on one event loop. `processes` is the number of ranks that share the account. Your own script creates one at
    `names.SPENT_FILE` in its output folder, with a quota for a function's `Transport`:

        budget = Budget(Path("out/budget.json"), [Limit(name="max_calls", kind="calls", most=10_000)])
        transport = Transport("my_judge", ..., quota=budget.quota("my_judge", Price(prompt_token=2.5e-7)))

    To count US dollars, report a request's tokens: `with transport.bill() as bill: bill.count(900, 60)`.
    """

    def __init__(self, path: Path, limits: Sequence[Limit] = (), processes: int = 1) -> None:
        self.path = path
        self.limits = tuple(limits)
        self._processes = processes
        self._held = {limit.name: 0.0 for limit in limits}  # reserved and unspent, by limit
        self.refused: set[str] = set()  # names of exhausted limits
        self._unwritten: dict[str, Spent] = {}  # by service
        self._written_s = -math.inf
        self._has_complained = False

    def quota(
        self, service: str, price: Price = FREE, tokens_per_minute: float | None = None,
        requests_per_minute: float | None = None,
    ) -> "ServiceQuota":  # fmt: skip
        """A service's quota under all limits that apply to it; limits in US dollars skip services without a price."""
        about = [limit for limit in self.limits if limit.service in (None, service)]
        limits = [limit for limit in about if not (limit.kind == USD and price.is_free)]
        stated = ((TOKENS, tokens_per_minute), (CALLS, requests_per_minute))
        rates = [Rate(per_minute / self._processes, kind) for kind, per_minute in stated if per_minute is not None]
        return ServiceQuota(self, service, limits, price, rates)

    def take(self, limits: Sequence[Limit], request: Spent) -> None:
        """Refill exhausted reservations. Afterwards each limit covers the request or refuses it. Raises `ServiceError`
        if the account is unusable."""
        if short := [limit for limit in limits if self._held[limit.name] < request.of(limit.kind)]:
            self._exchange(short, request)

    def record(self, service: str, limits: Sequence[Limit], spent: Spent) -> None:
        """Count a request, or the difference to its expected cost."""
        for limit in limits:
            self._held[limit.name] -= spent.of(limit.kind)
        self._unwritten.setdefault(service, Spent()).add(spent)
        if now() - self._written_s >= WRITE_AFTER_S:
            with contextlib.suppress(ServiceError):  # limited requests fail on their own
                self._exchange(())

    def settle(self) -> None:
        """Write the spending and release reservations. A failed write is retried with the next."""
        if self._unwritten or any(self._held.values()):
            with contextlib.suppress(ServiceError):
                self._exchange(self.limits)

    def joined(self, others: Iterable[SharedBudget]) -> "Budget":
        budgets = [self, *(other for other in others if isinstance(other, Budget))]
        return Budget(self.path, [*dict.fromkeys(limit for budget in budgets for limit in budget.limits)])

    def in_words(self) -> str:
        limits = ", ".join(f"{limit.name} {limit.most:,g}" for limit in self.limits) or "no limit"
        account = read_account(self.path)
        return f"{limits}; spent in this folder so far: {account.in_words()}" if account.services else limits

    def _exchange(self, limits: Sequence[Limit], request: Spent | None = None) -> None:
        """Write the spending, release these limits' reservations, and reserve new blocks for such requests."""
        self._written_s = now()
        blocks: dict[str, float | None] = {}
        try:
            with open_account(self.path) as account:
                for service, spent in self._unwritten.items():
                    account.services.setdefault(service, Spent()).add(spent)
                for limit in limits:
                    account.give_back(limit, self._held[limit.name])
                    wanted = None if request is None else request.of(limit.kind)
                    blocks[limit.name] = 0.0 if wanted is None else account.take(limit, wanted, self._processes)
        except (OSError, ConfigError) as error:
            message = f"the spending account {self.path} can't be used: {error}."
            if not self._has_complained:
                self._has_complained = True
                logger.error(f"{message} Limited requests fail until it can. Check the folder and its free space.")
            raise ServiceError(message, "budget_unknown") from None
        self._unwritten = {}
        self._held |= {name: block or 0.0 for name, block in blocks.items()}
        self.refused |= {name for name, block in blocks.items() if block is None}


class Rate:
    """A per-minute rate limiter: a level that grows evenly up to a burst. A request waits until the level covers its
    expected amount, or is full, then subtracts that amount and settles the difference when it ends."""

    def __init__(self, per_minute: float, kind: str = TOKENS) -> None:
        self.kind = kind
        self._burst = per_minute * BURST
        self._per_second = per_minute * (1 - BURST) / 60
        self._level = self._burst
        self._at: float | None = None

    def wait_s(self, moment: float, amount: float) -> float:
        """Seconds until a request of this many tokens, or one request, may be sent."""
        if self._at is not None:
            self._level = min(self._level + max(moment - self._at, 0.0) * self._per_second, self._burst)
        self._at = moment
        short = min(amount, self._burst) - self._level
        return short / self._per_second if short > LEAST_LEVEL else 0.0

    def take(self, amount: float) -> None:
        self._level -= amount


@dataclass(eq=False)
class ServiceQuota(Quota):
    """Counts requests to one service against its limits. Created by `Budget.quota`."""

    budget: Budget
    service: str
    limits: Sequence[Limit]
    price: Price
    rates: Sequence[Rate]

    def __post_init__(self) -> None:
        self._counted = 0  # number of requests in the means
        self._means: Sequence[float] = (FIRST_PROMPT_TOKENS, self.price.max_completion_tokens)
        self._expected: deque[Spent] = deque()  # of pending judge requests
        self._queue: PerLoop[asyncio.Lock] = PerLoop(asyncio.Lock)

    @property
    def is_spent(self) -> bool:
        return any(limit.name in self.budget.refused for limit in self.limits)

    def _refuse_if_spent(self) -> None:
        for limit in self.limits:
            if limit.name in self.budget.refused:
                raise BudgetSpent(f"{self.service} was not asked: the limit {limit.name} is reached")

    async def admit(self) -> None:
        self._refuse_if_spent()
        if not self.rates:
            self._begin()
            return
        async with asyncio.timeout(remaining_s()), self._queue.get():
            while wait_s := self._wait_s():
                await asyncio.sleep(min(wait_s, LONGEST_NAP_S))
            self._begin()

    def admits_now(self) -> bool:
        with contextlib.suppress(ServiceError):
            self._refuse_if_spent()
            if self._wait_s():
                return False
            self._begin()
            return True
        return False

    def give_back(self) -> None:
        self._end(Spent(calls=-1))

    def charge(self, tokens: tuple[float, float] | None, *, is_stated: bool = False) -> None:
        if tokens is not None and is_stated:
            self._counted = min(self._counted + 1, LATEST)
            of_each = zip(self._means, tokens, strict=True)
            self._means = [mean + (count - mean) / self._counted for mean, count in of_each]
        self._end(self._spent(*(tokens or self._means)))

    def _wait_s(self) -> float:
        request = self._request()
        return max((rate.wait_s(now(), request.of(rate.kind)) for rate in self.rates), default=0.0)

    def _spent(self, prompt_tokens: float, completion_tokens: float) -> Spent:
        usd = self.price.of(prompt_tokens, completion_tokens)
        return Spent(prompt_tokens=prompt_tokens, completion_tokens=completion_tokens, usd=usd)

    def _request(self) -> Spent:
        request = self._spent(*self._means)
        request.calls = 1
        if not self._counted:
            dollars = (limit.most for limit in self.limits if limit.kind == USD)
            request.usd = min([request.usd, *(FIRST_SHARE * dollar_limit for dollar_limit in dollars)])
        return request

    def _begin(self) -> None:
        request = self._request()
        self.budget.take(self.limits, request)
        self._refuse_if_spent()
        self.budget.record(self.service, self.limits, Spent(calls=1, usd=request.usd))
        for rate in self.rates:
            rate.take(request.of(rate.kind))
        if self.rates or not self.price.is_free:
            request.calls = 0  # already counted as sent
            self._expected.append(request)

    def _end(self, spent: Spent) -> None:
        expected = self._expected.popleft() if self._expected else Spent()
        for rate in self.rates:
            rate.take(spent.of(rate.kind) - expected.of(rate.kind))
        spent.usd -= expected.usd
        self.budget.record(self.service, self.limits, spent)
