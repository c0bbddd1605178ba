"""What a run may spend: the account that its processes share, and the requests of this process held against it.

- A process takes calls and US dollars in blocks, so that a request costs no look at the file. All blocks together are
  never more than what is left. The block of a process that was killed stays taken: its requests may have left.
- A request counts before it is sent, with the mean cost of those before it, which its own replaces when it has ended.
  So no limit of calls is passed, and no limit of US dollars but by the error of that mean.
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
BLOCKS = 32  # a block is a 32nd of a process's even part of what is left, so that a kill costs a small share
LOCK_TIMEOUT_S = 20.0  # longest wait for other processes. One of them needs milliseconds.
WRITE_AFTER_S = 1.0  # while requests are sent, the account is written at least so often
LEAST_LEVEL = 1e-6  # less is the rounding of a clock that is far on, and no wait would make it good
BURST = 1 / 12  # share of a rate per minute that may be sent at once; the rest flows in evenly
LONGEST_NAP_S = 0.5  # between two looks at the level, which requests with fewer tokens than expected raise
FIRST_PROMPT_TOKENS = 1000  # tokens of a prompt, until one has been counted
FIRST_SHARE = 1e-3  # most that a request is expected to cost until one has been counted, as a share of the limit
LATEST = 64  # the mean tokens of a request are those of about so many of the latest


@dataclass(kw_only=True, slots=True)
class Spent:
    """Requests that left, and what they cost."""

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
    """One limit of a run's spending."""

    name: str  # its setting: `"max_calls"`, `"judge_providers[openai].max_usd"`
    kind: str  # what it counts: `CALLS` or `USD`
    most: float
    service: str | None = None  # the service that it is about. `None`: all of the reward's services.


@dataclass(kw_only=True, slots=True)
class Account:
    """What the processes of a run, and of the runs that it goes on from, have spent."""

    services: dict[str, Spent] = field(default_factory=dict)  # those under way with what they are expected to cost
    taken: dict[str, float] = field(default_factory=dict)  # of each limit, used or in the block of a process
    most: dict[str, float] = field(default_factory=dict)  # what each limit was at the last look at it
    refused: dict[str, float] = field(default_factory=dict)  # what a limit was when a request was refused by it

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
        """The limits at which requests are refused, by what they are now."""
        refused = self.refused
        return [limit for limit in limits if max(refused.get(limit.name, -math.inf), self.used(limit)) >= limit.most]

    def give_back(self, limit: Limit, held: float) -> None:
        """A process gives back what is left of its block; below 0 if it used more."""
        # at least what was spent: a limit may be new in an old run
        self.taken[limit.name] = max(self.taken.get(limit.name, 0.0) - held, self.used(limit))
        self.most[limit.name] = limit.most

    def take(self, limit: Limit, request: float, processes: int) -> float | None:
        """Take a block for requests of this many calls or US dollars. `None`: nothing is left for one."""
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
    """The account, for one process at a time. What the block changes is written at its end, whole or not at all.
    Raises `OSError` or `ConfigError` where the file can't be used."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_suffix(".lock"), timeout=LOCK_TIMEOUT_S, poll_interval=0.002):
        account = read_account(path)
        yield account
        write_whole(path, json.dumps(asdict(account), indent=1))


def read_account(path: Path) -> Account:
    """The account in a file. Nothing is spent where there is none. Raises `ConfigError` where it can't be read."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return Account(**{**content, "services": {name: Spent(**sums) for name, sums in content["services"].items()}})
    except FileNotFoundError:
        return Account()
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ConfigError(
            f"the account of what was spent, {path}, can't be read ({error}). Expected the file of an earlier run. "
            "See to its folder; or delete the file, to begin with nothing spent."
        ) from None


def reported(account: Account, reached: Sequence[Limit]) -> str:
    """`1,000 calls, 0.42 USD were spent; reached: max_calls 1,000`."""
    names = ", ".join(f"`{limit.name}` {limit.most:,g}" for limit in reached)
    return f"{account.in_words()} were spent; reached: {names}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Price:
    """What the tokens of a provider cost, in US dollars."""

    prompt_token: float = 0.0
    completion_token: float = 0.0
    max_completion_tokens: int = 512  # most tokens of an answer

    def of(self, prompt_tokens: float, completion_tokens: float) -> float:
        return prompt_tokens * self.prompt_token + completion_tokens * self.completion_token

    @property
    def is_free(self) -> bool:
        return self.prompt_token == self.completion_token == 0


FREE = Price()


class Budget(SharedBudget):
    """What this process holds of the run's account in `path`, and what it has spent since it last wrote there. All
    methods belong to one event loop. `processes` is the number of ranks, which share the account. A script of your own
    makes one, with `names.SPENT_FILE` of its output folder, and a quota of it for the `Transport` of a function:

        budget = Budget(Path("out/budget.json"), [Limit(name="max_calls", kind="calls", most=10_000)])
        transport = Transport("my_judge", ..., quota=budget.quota("my_judge", Price(prompt_token=2.5e-7)))

    For US dollars the function states the tokens of a request: `with transport.bill() as bill: bill.count(900, 60)`.
    """

    def __init__(self, path: Path, limits: Sequence[Limit] = (), processes: int = 1) -> None:
        self.path = path
        self.limits = tuple(limits)
        self._processes = processes
        self._held = {limit.name: 0.0 for limit in limits}  # of the blocks that were taken
        self.refused: set[str] = set()  # names of limits of which nothing is left
        self._unwritten: dict[str, Spent] = {}  # by service
        self._written_s = -math.inf
        self._has_complained = False

    def quota(
        self, service: str, price: Price = FREE, tokens_per_minute: float | None = None,
        requests_per_minute: float | None = None,
    ) -> "ServiceQuota":  # fmt: skip
        """The quota of a service, by all limits that are about it. Limits of money are not about one without price."""
        about = [limit for limit in self.limits if limit.service in (None, service)]
        limits = [limit for limit in about if not (limit.kind == USD and price.is_free)]
        stated = ((TOKENS, tokens_per_minute), (CALLS, requests_per_minute))
        rates = [Rate(per_minute / self._processes, kind) for kind, per_minute in stated if per_minute is not None]
        return ServiceQuota(self, service, limits, price, rates)

    def take(self, limits: Sequence[Limit], request: Spent) -> None:
        """Take blocks of the limits that this process has used up. Afterwards they hold the request, or are refused.
        Raises `ServiceError` where the account can't be used."""
        if short := [limit for limit in limits if self._held[limit.name] < request.of(limit.kind)]:
            self._exchange(short, request)

    def record(self, service: str, limits: Sequence[Limit], spent: Spent) -> None:
        """Count a request, or what it cost more or less than was expected."""
        for limit in limits:
            self._held[limit.name] -= spent.of(limit.kind)
        self._unwritten.setdefault(service, Spent()).add(spent)
        if now() - self._written_s >= WRITE_AFTER_S:
            with contextlib.suppress(ServiceError):  # requests with a limit fail by themselves
                self._exchange(())

    def settle(self) -> None:
        """Write what was spent and give back what is held. What can't be written now is written with the next."""
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
        """Write what was spent, give back what is held of these limits, and take new blocks for such requests."""
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
            message = f"the account of what was spent, {self.path}, can't be used: {error}."
            if not self._has_complained:
                self._has_complained = True
                logger.error(f"{message} Requests with a limit fail until then. See to the folder and its free space.")
            raise ServiceError(message, "budget_unknown") from None
        self._unwritten = {}
        self._held |= {name: block or 0.0 for name, block in blocks.items()}
        self.refused |= {name for name, block in blocks.items() if block is None}


class Rate:
    """The law of a rate per minute: a level that grows evenly up to a burst. A request waits until the level is as
    high as what it is expected to have, or at its highest, and takes that. At its end it settles the difference."""

    def __init__(self, per_minute: float, kind: str = TOKENS) -> None:
        self.kind = kind
        self._burst = per_minute * BURST
        self._per_second = per_minute * (1 - BURST) / 60
        self._level = self._burst
        self._at: float | None = None

    def wait_s(self, moment: float, amount: float) -> float:
        """Seconds until a request of so many tokens, or 1, may be sent; 0 for at once."""
        if self._at is not None:
            self._level = min(self._level + max(moment - self._at, 0.0) * self._per_second, self._burst)
        self._at = moment
        short = min(amount, self._burst) - self._level
        return short / self._per_second if short > LEAST_LEVEL else 0.0

    def take(self, amount: float) -> None:
        self._level -= amount


@dataclass(eq=False)
class ServiceQuota(Quota):
    """The requests to one service, held against the limits that are about it. Made by `Budget.quota`."""

    budget: Budget
    service: str
    limits: Sequence[Limit]
    price: Price
    rates: Sequence[Rate]

    def __post_init__(self) -> None:
        self._counted = 0  # requests in the means
        self._means: Sequence[float] = (FIRST_PROMPT_TOKENS, self.price.max_completion_tokens)
        self._expected: deque[Spent] = deque()  # of the requests to a judge that have not ended
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
            request.calls = 0  # that it was sent is no expectation
            self._expected.append(request)

    def _end(self, spent: Spent) -> None:
        expected = self._expected.popleft() if self._expected else Spent()
        for rate in self.rates:
            rate.take(spent.of(rate.kind) - expected.of(rate.kind))
        spent.usd -= expected.usd
        self.budget.record(self.service, self.limits, spent)
