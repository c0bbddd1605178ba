"""Many calls to one service at once, as a step of training makes them, and how they went.

Owns the load, its figures, and when failed calls fail a stage. The transport of training makes each call.
"""

import asyncio
import dataclasses
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from salesrl_trl.config import RewardConfig
from salesrl_trl.errors import DeadlineExceeded, ServiceError, ServiceTimeout
from salesrl_trl.preflight.simulation.hints import trouble
from salesrl_trl.preflight.stage import Findings
from salesrl_trl.reward.service.deadline import clocked, deadline
from salesrl_trl.reward.service.transport import TRAFFIC, Transport
from salesrl_trl.telemetry.aggregates import percentile

T = TypeVar("T")


@dataclass(frozen=True)
class Load(Generic[T]):
    """The results of calls to one service."""

    results: Sequence[tuple[T, float] | ServiceError]
    """In the order of the calls: the answer with its seconds, retries included, or the error."""
    in_flight: int
    """Most calls at once."""
    traffic: Mapping[str, int]
    """Counts by the names of `transport.TRAFFIC`, and `slots`."""

    @property
    def errors(self) -> list[ServiceError]:
        """The calls that failed."""
        return [each for each in self.results if isinstance(each, ServiceError)]

    @property
    def answers(self) -> list[T]:
        """The calls that did not."""
        return [each[0] for each in self.results if not isinstance(each, ServiceError)]

    @property
    def codes(self) -> str:
        """Reason codes of the errors, the most frequent first: `"judge_timeout 3, judge_http_429 1"`."""
        return ", ".join(f"{code} {count}" for code, count in Counter(e.code for e in self.errors).most_common())


def under_load(config: RewardConfig) -> RewardConfig:
    """The settings of a load: all calls are sent at once, none is sent twice, and none waits for a dead service."""
    most = max(config.rag_max_concurrency, config.judge_max_concurrency)
    return dataclasses.replace(config, initial_concurrency=most, hedge_fraction=0.0, outage_patience_s=0.0)


async def put_load(
    transport: Transport | None,
    calls: Sequence[Callable[[], Awaitable[T]]],
    in_flight: int,
    patience_s: float,
    service: str,
    setting: str,
) -> Load[T]:
    """Make the calls, which all go over the transport, if there is one.

    At most `in_flight` at once. Each one may take `patience_s` seconds, retries included. The error of one that takes
    longer names the `service` and the `setting` of its time.
    """
    gate = asyncio.Semaphore(in_flight)

    async def one(call: Callable[[], Awaitable[T]]) -> tuple[T, float] | ServiceError:
        async with gate:
            try:
                with deadline(patience_s):
                    async with asyncio.timeout(patience_s if transport is None else None):  # it knows the deadline
                        result = await clocked(call)
            except TimeoutError:
                result = DeadlineExceeded("")
        return _late(result) if isinstance(result, ServiceTimeout) else result

    def _late(error: ServiceTimeout) -> ServiceTimeout:
        is_own = isinstance(error, DeadlineExceeded)
        said = f"{service} gave no complete answer within {patience_s:g} s" if is_own else str(error)
        remedy = f"look at the service's own log, or raise {setting} if it is merely slow."
        return ServiceTimeout(f"{said}. Expected an answer in time: {remedy}", f"{service}_timeout")

    results = await asyncio.gather(*(one(call) for call in calls))
    traffic = dict.fromkeys((*TRAFFIC, "slots"), 0)
    if transport is not None:
        traffic = {**transport.drain_traffic(), "slots": transport.slots}
    return Load(results, min(in_flight, len(calls)), traffic)


def report_load(findings: Findings, name: str, load: Load[T], config: RewardConfig) -> str:
    """Add the figures of a load, and what its service has trouble with. Returns them in words."""
    seconds = [each[1] for each in load.results if not isinstance(each, ServiceError)]
    figures = {
        "calls": len(load.results),
        "in_flight": load.in_flight,
        "p50_s": percentile(seconds, 0.5) if seconds else None,
        "p95_s": percentile(seconds, 0.95) if seconds else None,
        "failed": len(load.errors),
        "http_429": load.traffic["overloads"],
        "retries": load.traffic["retries"],
    }
    findings.figures |= {f"{name}_{what}": value for what, value in figures.items()}
    for text in trouble(name, load.traffic, config):
        findings.note(f"{name} {text}")
    times = f"p50 {figures['p50_s']:.2f} s, p95 {figures['p95_s']:.2f} s" if seconds else "no answer"
    return (
        f"{name}: {len(load.results)} calls, {load.in_flight} at once: {times}, {len(load.errors)} failed, "
        f"{load.traffic['overloads']} turned away, {load.traffic['retries']} retries"
    )
