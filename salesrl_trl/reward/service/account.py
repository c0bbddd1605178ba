"""The account of a run's spending: one JSON file in the run's folder, which outlives the run's processes.

    {"services": {"judge_a": {"calls": 30, "prompt_tokens": 9000, "completion_tokens": 600, "usd": 0.42}},
     "taken": {"max_usd": 0.5}, "most": {"max_usd": 2.0}, "refused": {}}

Owns the file, its lock, and how much of a limit a process may take at a time. `budget` writes here, in every process
that asks services. The banner, the check before a run, the figures and the report read. The file holds numbers and
names of services and settings, nothing else.

A process takes a block of what is left before it sends the requests of the block. All blocks together are never more
than what is left. The block of a process that was killed stays taken, because its requests may have left.
"""

import contextlib
import fcntl
import json
import math
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TextIO

from salesrl_trl.errors import ConfigError
from salesrl_trl.ground.process import write_whole

CALLS, USD = "calls", "usd"
"""What a limit counts."""
BLOCKS = 32
"""A block is a 32nd of a process's even part of what is left. So kills and idle processes cost a small share."""
MOST_REQUESTS = 256
"""Most requests' worth of a block."""
LOCK_TIMEOUT_S = 20.0
"""Longest wait for other processes. One of them needs milliseconds."""
LOCK_RETRY_S = 0.002


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

    def of(self, spent: Spent) -> float:
        """What of `spent` counts: calls, or US dollars."""
        return spent.calls if self.kind == CALLS else spent.usd


@dataclass(kw_only=True, slots=True)
class Account:
    """What the processes of a run, and of the runs that it goes on from, have spent."""

    services: dict[str, Spent] = field(default_factory=dict)
    """By service. Requests that are under way count with what they are expected to cost."""
    taken: dict[str, float] = field(default_factory=dict)
    """Calls or US dollars of each limit that are used, or in the block of a process."""
    most: dict[str, float] = field(default_factory=dict)
    """What each limit was when a block of it was last taken or given back."""
    refused: dict[str, float] = field(default_factory=dict)
    """Names of the limits at which a request was refused, and what they were then."""

    def total(self, service: str | None = None) -> Spent:
        """The sum of a service, or of all."""
        total = Spent()
        for name, spent in self.services.items():
            if service in (None, name):
                total.add(spent)
        return total

    def used(self, limit: Limit) -> float:
        """Calls or US dollars that count against a limit."""
        return limit.of(self.total(limit.service))

    def reached(self, limits: Iterable[Limit]) -> list[Limit]:
        """The limits at which requests are refused. One that has been raised since is none, one that has been lowered
        to what is used is one."""
        return [
            limit for limit in limits if max(self.refused.get(limit.name, -math.inf), self.used(limit)) >= limit.most
        ]

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
        block = max(request, min(left / (BLOCKS * processes), MOST_REQUESTS * request))
        if limit.kind == CALLS:
            block = math.floor(block)
        self.taken[limit.name] += block
        return block


@contextlib.contextmanager
def open_account(path: Path) -> Iterator[Account]:
    """The account, for one process at a time. What the block changes is written at its end, whole or not at all.

    Raises `OSError` or `ConfigError` where the file can't be used.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.with_suffix(".lock"), "a") as lock:
        _wait_for(lock)
        account = read_account(path)
        yield account
        write_whole(path, json.dumps(asdict(account), indent=1))


def _wait_for(lock: TextIO) -> None:
    until = time.monotonic() + LOCK_TIMEOUT_S
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > until:
                raise
            time.sleep(LOCK_RETRY_S)


def read_account(path: Path) -> Account:
    """The account in a file, from any process. Nothing is spent where there is no file.

    Raises `ConfigError` where the file can't be read.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return Account(**{**content, "services": {name: Spent(**sums) for name, sums in content["services"].items()}})
    except FileNotFoundError:
        return Account()
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(
            f"the account of what was spent, {path}, can't be read ({error}). Expected the file of an earlier run. "
            "See to its folder; or delete the file, to begin with nothing spent."
        ) from None
