"""The law of a budget: what may be sent, and what is left of it.

Owns limits, the parts of them that processes hold, and the rate of tokens. Pure: no clock, no event loop, no file.
`spent_file` keeps what all processes have spent. `meter` applies the law to the requests of a service.

A process holds a part of what is left and gives it out itself. Then a request costs no look at the file. All parts
together are never more than what is left, and the last parts are single requests.

- Of calls: one is taken before each request. So there are never more than the limit.
- Of money: what a request cost is known when it has ended. No request is sent once a part is used up. So the sum ends
  above the limit by the requests that were under way then: at most one for each slot.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

CALLS, USD = "calls", "usd"
"""What a limit counts."""

SHARES = 64
"""A process gets a 64th of what is left. So what processes hold and do not use is a small share of the limit."""
MOST_CALLS = 256
"""Most requests' worth that a process gets at a time."""
FIRST_SHARE = 1000
"""The part of money that a process gets while no price of a request is known: a thousandth of the limit."""
LATEST = 64
"""The mean of a request's tokens and cost is over about so many of the latest."""
FIRST_PROMPT_TOKENS = 1000
"""Tokens of a prompt, until one has been counted."""
BURST = 1 / 12
"""Share of `tokens_per_minute` that may be sent at once. The rest flows in at an even rate, so that no minute has more
than the limit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Limit:
    """One limit of a run's spending."""

    name: str
    """Its setting: `"max_calls"`, `"judge_providers[openai].max_usd"`."""
    kind: str
    """What it counts: `CALLS` or `USD`."""
    most: float
    """Calls, or US dollars."""
    service: str | None = None
    """The service that it is about. `None`: all of the reward's services."""


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


@dataclass(kw_only=True, slots=True)
class Spent:
    """Requests that left, and what they cost."""

    calls: float = 0
    prompt_tokens: float = 0
    completion_tokens: float = 0
    usd: float = 0.0

    def add(self, other: "Spent") -> None:
        """Add another sum to this one."""
        self.calls += other.calls
        self.prompt_tokens += other.prompt_tokens
        self.completion_tokens += other.completion_tokens
        self.usd += other.usd


@dataclass(frozen=True, kw_only=True, slots=True)
class Account:
    """What the processes of a run, and of the runs that it goes on from, have spent."""

    services: Mapping[str, Spent]
    """By service."""
    refused: Mapping[str, float]
    """Names of the limits at which a request was refused, and what they were then."""
    taken: Mapping[str, float] = field(default_factory=dict)
    """Calls or US dollars of each limit that are used, or held by processes, or were held by ones that were killed."""
    most: Mapping[str, float] = field(default_factory=dict)
    """What each limit was when a part of it was last exchanged."""

    def total(self, service: str | None = None) -> Spent:
        """The sum of a service, or of all."""
        sums = Spent()
        for name, spent in self.services.items():
            if service in (None, name):
                sums.add(spent)
        return sums

    def used(self, limit: Limit) -> float:
        """Calls or US dollars that count against a limit."""
        spent = self.total(limit.service)
        return spent.calls if limit.kind == CALLS else spent.usd

    def reached(self, limits: Iterable[Limit]) -> list[Limit]:
        """The limits at which requests are refused. One that has been raised since is none, one that has been lowered
        to what is used is one."""
        return [
            limit for limit in limits if max(self.refused.get(limit.name, -math.inf), self.used(limit)) >= limit.most
        ]


NOTHING_SPENT = Account(services={}, refused={})


@dataclass(frozen=True, kw_only=True, slots=True)
class Terms:
    """A run's budget: the same in all its processes."""

    path: Path
    """File of the account."""
    limits: tuple[Limit, ...] = ()
    """All limits of calls and money."""
    processes: int = 1
    """Processes that share `tokens_per_minute`."""


class BudgetShare:
    """What this process holds of one limit.

    Args:
        limit (`Limit`):
            The limit.
    """

    def __init__(self, limit: Limit) -> None:
        self.limit = limit
        self.held = 0.0
        """Calls or US dollars that this process may still use. Below 0 it has used more than it got."""
        self.low = 0
        """The next part is asked for when so many calls are left."""
        self.is_refused = False
        """Whether nothing is left."""

    @property
    def lets_pass(self) -> bool:
        """Whether a request may be sent by what is held."""
        return self.held >= 1 if self.limit.kind == CALLS else self.held > 0

    @property
    def runs_low(self) -> bool:
        """Whether it is time for the next part."""
        return not self.lets_pass or (self.limit.kind == CALLS and self.held <= self.low)

    def receive(self, part: float, *, is_needed: bool) -> None:
        """The account gave so much; 0 if nothing is left. `is_needed`: it knew that requests wait, and noted a refusal
        then."""
        self.held += part
        self.low = int(self.held / 4) if self.limit.kind == CALLS else 0
        self.is_refused = is_needed and not part and not self.lets_pass


def granted(limit: Limit, used: float, request: float) -> float:
    """What a process gets of a limit; 0 if nothing is left.

    Args:
        limit (`Limit`):
            The limit.
        used (`float`):
            Calls or US dollars that are used, or held by processes.
        request (`float`):
            What a request takes of it. 0 if that is not known.
    """
    left = limit.most - used
    if limit.kind == CALLS:
        return max(float(math.floor(min(left, max(1.0, min(left / SHARES, MOST_CALLS))))), 0.0)
    single = request or limit.most / FIRST_SHARE
    return max(min(left, max(single, min(left / SHARES, MOST_CALLS * single))), 0.0)


class Means:
    """The mean tokens of a provider's latest requests.

    Args:
        price (`Price`):
            Its prices.
    """

    def __init__(self, price: Price) -> None:
        self._price = price
        self._count = 0
        self.prompt_tokens = float(FIRST_PROMPT_TOKENS)
        self.completion_tokens = float(price.max_completion_tokens)

    @property
    def tokens(self) -> float:
        """Tokens of a request, of prompt and answer."""
        return self.prompt_tokens + self.completion_tokens

    @property
    def usd(self) -> float:
        """The cost of a request. 0 if no request has been counted."""
        return 0.0 if not self._count else self._price.of(self.prompt_tokens, self.completion_tokens)

    def record(self, prompt_tokens: float, completion_tokens: float) -> None:
        """A request has had so many."""
        self._count = min(self._count + 1, LATEST)
        self.prompt_tokens += (prompt_tokens - self.prompt_tokens) / self._count
        self.completion_tokens += (completion_tokens - self.completion_tokens) / self._count


class TokenRate:
    """How long a request has to wait for its tokens.

    A level of tokens grows evenly up to a burst. A request takes what it is expected to have, and settles the
    difference when it has ended. It waits until the level is as high, or at its highest.

    Args:
        per_minute (`float`):
            Most tokens of any minute.
    """

    def __init__(self, per_minute: float) -> None:
        self._burst = per_minute * BURST
        self._per_second = per_minute * (1 - BURST) / 60
        self._level = self._burst
        self._at: float | None = None

    def wait_s(self, now: float, tokens: float) -> float:
        """Seconds until a request of so many tokens may be sent; 0 for at once."""
        if self._at is not None:
            self._level = min(self._level + max(now - self._at, 0.0) * self._per_second, self._burst)
        self._at = now
        return max(min(tokens, self._burst) - self._level, 0.0) / self._per_second

    def take(self, tokens: float) -> None:
        """A request of so many tokens is about to be sent. A negative number gives back."""
        self._level -= tokens
