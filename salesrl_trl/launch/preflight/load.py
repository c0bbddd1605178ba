"""Many calls to one service at once, as a step of training makes them, and which setting would help a service.

`services` puts the load, and `scored_load` asks for the same advice. The transport of training makes each call.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from salesrl_trl.errors import DeadlineExceeded, ServiceError, ServiceTimeout
from salesrl_trl.launch.reward_config import RewardConfig
from salesrl_trl.service.event_loop import clocked, deadline
from salesrl_trl.service.transport import TRAFFIC, Transport
from salesrl_trl.types import JUDGE

T = TypeVar("T")

NOTEWORTHY_SHARE = 0.05  # of a service's oddities: it moves the mean of every second group of eight


@dataclass(frozen=True)
class Target(Generic[T]):
    """A service under the load of a step."""

    transport: Transport | None  # `None` for a judge of one's own
    in_flight: int  # most calls at once
    patience_s: float  # for one call, retries included
    calls: Sequence[Callable[[], Awaitable[T]]]
    instead: str | None  # what happens without this service; `None` if training needs it


@dataclass(frozen=True)
class Load(Generic[T]):
    """The results of calls to one service."""

    results: Sequence[tuple[T, float] | ServiceError]  # by call: the answer with its seconds, or the error
    in_flight: int
    traffic: Mapping[str, int]  # counts by the names of `transport.TRAFFIC`, and `slots`

    @property
    def errors(self) -> list[ServiceError]:
        return [result for result in self.results if isinstance(result, ServiceError)]

    @property
    def answers(self) -> list[T]:
        return [result[0] for result in self.results if not isinstance(result, ServiceError)]


async def put_loads(targets: Mapping[str, Target[T]], config: RewardConfig) -> dict[str, Load[T]]:
    """Make the calls of all services at once, by service name."""
    loads = await asyncio.gather(*(_put_load(target, name, config) for name, target in targets.items()))
    return dict(zip(targets, loads, strict=True))


async def _put_load(target: Target[T], service: str, config: RewardConfig) -> Load[T]:
    """Make the calls. The error of one that takes too long names the service and the setting of its time."""
    gate, transport, patience_s = asyncio.Semaphore(target.in_flight), target.transport, target.patience_s

    async def answer_of(call: Callable[[], Awaitable[T]]) -> tuple[T, float] | ServiceError:
        async with gate:
            try:
                with deadline(patience_s):
                    async with asyncio.timeout(patience_s if transport is None else None):  # it knows the deadline
                        result = await clocked(call)
            except TimeoutError:
                result = DeadlineExceeded("")
        if not isinstance(result, ServiceTimeout):
            return result
        is_own = isinstance(result, DeadlineExceeded)
        text = f"{service} gave no complete answer within {patience_s:g} s" if is_own else str(result)
        setting = limits_of(service, config).timeout
        remedy = f"look at the service's own log, or raise {setting} if it is merely slow."
        return ServiceTimeout(f"{text}. Expected an answer in time: {remedy}", f"{service}_timeout")

    results = await asyncio.gather(*map(answer_of, target.calls))
    traffic = dict.fromkeys((*TRAFFIC, "slots"), 0)
    if transport is not None:
        traffic = transport.drain_traffic()
    return Load(results, min(target.in_flight, len(target.calls)), traffic)


def trouble(service: str, traffic: Mapping[str, int], config: RewardConfig) -> list[str]:
    """The trouble that a service had, with advice."""
    lines = []
    if traffic["overloads"]:
        relief = "larger quota, or more `judge_providers`," if service.startswith(JUDGE) else "larger service"
        lines.append(
            f"turned {traffic['overloads']} requests away and takes about {traffic['slots']} calls at once. Only a "
            f"{relief} makes it faster."
        )
    if traffic["timeouts"]:
        timeout = limits_of(service, config).timeout
        lines.append(f"{traffic['timeouts']} timeouts. Raise {timeout} if the service is only slow.")
    if traffic["failures"] + traffic["held_back"] > NOTEWORTHY_SHARE * traffic["calls"]:
        lines.append(
            f"{traffic['failures']} attempts failed and {traffic['held_back']} calls were held back after that. Mend "
            "it: `max_attempts` and `outage_patience_s` bridge short outages only."
        )
    return lines


class Limits(NamedTuple):
    """The limit of one service, and the names of its settings."""

    cap: int
    concurrency: str
    timeout: str


def limits_of(service: str, config: RewardConfig) -> Limits:
    """The limit of a service, and the names of its settings."""
    if not service.startswith(JUDGE):
        return Limits(config.rag_service.max_concurrency, "`rag.max_concurrency`", "`rag.timeout_s`")
    for provider in config.judges.providers:
        if config.judges.are_several and service == config.judges.service_of(provider):
            cap = provider.max_concurrency or config.judge_max_concurrency
            return Limits(cap, f"`max_concurrency` of {provider.name}", f"`timeout_s` of {provider.name}")
    return Limits(config.judge_max_concurrency, "`judge_max_concurrency`", "`judge_timeout_s`")
