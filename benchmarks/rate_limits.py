"""The transport against services that turn calls away (429), beside a plain semaphore, as a table in Markdown.

    python -m benchmarks.rate_limits [--seeds 10]

128 calls of 1 s, at most 64 at once, three times in a row. The first round starts from 8 calls at once; the others are
"warm". A call that is turned away comes back after its Retry-After of 1 s. The semaphore has 64 slots, and a call
leaves its slot while it waits. In virtual time: 10 s on one core.
"""

import argparse
import asyncio
import logging
import random
import sys
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from support import virtual_time

from salesrl_trl.errors import ServiceOverloaded
from salesrl_trl.service.event_loop import now
from salesrl_trl.service.transport import Transport

Client = Callable[["Service"], Callable[[], Awaitable[None]]]
CALLS, SLOTS, ROUNDS, SECONDS, RETRY_AFTER_S = 128, 64, 3, 1.0, 1.0
TITLES = ("service", "semaphore: s, requests", "first round: s, requests", "warm: s, requests", "s / semaphore")


class Service:
    """Answers a request after a second, unless it turns it away."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self.flying = self.requests = 0
        self._minute, self._used = -1.0, 0.0

    def turns_away(self) -> bool:
        return False

    def has_left(self, most: float, request: float) -> bool:
        """Whether so much is left of what a minute has. Minutes are those of the clock."""
        if (minute := now() // 60) != self._minute:
            self._minute, self._used = minute, 0.0
        if self._used + request > most:
            return False
        self._used += request
        return True

    async def __call__(self) -> None:
        self.requests += 1
        if self.turns_away():
            raise _later()
        self.flying += 1
        await asyncio.sleep(SECONDS)
        self.flying -= 1


class Shared(Service):
    """A gateway whose quota others use up: a share of its answers is a 429, after the second that an answer takes."""

    def __init__(self, seed: int, share: float) -> None:
        super().__init__(seed)
        self._share = share

    async def __call__(self) -> None:
        await super().__call__()
        if self.dice.random() < self._share:
            raise _later()


class Concurrent(Service):
    def turns_away(self) -> bool:
        return self.flying >= 8


class Requests(Service):
    def turns_away(self) -> bool:
        return not self.has_left(60, 1)


class Tokens(Service):
    def turns_away(self) -> bool:
        return not self.has_left(10_000, self.dice.randint(200, 600))


RANDOM = {f"{share:.0%} random": partial(Shared, share=share) for share in (0.0, 0.02, 0.05, 0.1)}
ENFORCED: dict[str, Callable[[int], Service]] = {
    "8 at once": Concurrent,
    "60 requests a minute": Requests,
    "10,000 tokens a minute": Tokens,
}


class Cost(NamedTuple):
    """What a round takes."""

    seconds: float
    requests: float

    def __str__(self) -> str:
        return f"{self.seconds:.1f}, {self.requests:.0f}"


def _later() -> ServiceOverloaded:
    error = ServiceOverloaded("later", code="judge_http_429")
    error.retry_after_s = RETRY_AFTER_S
    return error


def by_semaphore(service: Service) -> Callable[[], Awaitable[None]]:
    slots = asyncio.Semaphore(SLOTS)

    async def call() -> None:
        while True:
            try:
                async with slots:
                    return await service()
            except ServiceOverloaded:
                await asyncio.sleep(RETRY_AFTER_S)

    return call


def by_transport(service: Service) -> Callable[[], Awaitable[None]]:
    transport = Transport("judge", max_concurrency=SLOTS, attempt_timeout_s=60, max_attempts=3, hedge_fraction=0)
    return partial(transport.call, service)


async def rounds(service: Service, client: Client) -> list[Cost]:
    call, found = client(service), []
    for _ in range(ROUNDS):
        began, before = now(), service.requests
        await asyncio.gather(*(call() for _ in range(CALLS)))
        found.append(Cost(now() - began, service.requests - before))
    return found


def measured(service: Callable[[int], Service], client: Client, seeds: int) -> tuple[Cost, Cost]:
    """A first round, and one of those after it, on average over seeds."""
    first, warm = [], []
    for seed in range(seeds):
        random.seed(seed)  # of the transport's jitter
        one, *others = virtual_time.run(rounds(service(seed), client))
        first.append(one)
        warm += others
    return _mean(first), _mean(warm)


def _mean(costs: Sequence[Cost]) -> Cost:
    return Cost(*map(fmean, zip(*costs, strict=True)))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10)
    seeds = parser.parse_args(arguments).seeds
    print(f"| {' | '.join(TITLES)} |\n|{'---|' * len(TITLES)}")
    for name, service in {**RANDOM, **ENFORCED}.items():
        _, semaphore = measured(service, by_semaphore, seeds)
        first, warm = measured(service, by_transport, seeds)
        print(f"| {name} | {semaphore} | {first} | {warm} | {warm.seconds / semaphore.seconds:.2f} |", flush=True)


if __name__ == "__main__":
    logging.disable(logging.INFO)  # of this process alone: a test calls `main`
    main()
