"""Replays rewards from another run's record instead of calling services.

A completion matches a recorded one with the same text at the same index of the same rank's batch in the same step,
or else one with the same text and row. Recorded failures are repeated with their reasons. `launch.assembly`
substitutes it for a reward.
"""

import asyncio
import difflib
import json
import logging
import sqlite3
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from salesrl_trl.errors import ConfigError, ServiceError
from salesrl_trl.names import Stage
from salesrl_trl.record.reader import digest_of, open_record, rank_of, record_files, row_of, text_of, unpacked
from salesrl_trl.reward.batch import BatchReport, Sample, conversation_of, row_id_of
from salesrl_trl.reward.scorer import Scorer
from salesrl_trl.reward.stage_times import StageTimes
from salesrl_trl.telemetry.completion_record import QUEUE
from salesrl_trl.types import Example, Outcome, Reward, missing

logger = logging.getLogger(__name__)

NOT_RECORDED = "not_recorded"
T = TypeVar("T")
_FIELDS = "outcome, reason, reward, reference_reward, parts, functions, seconds"
_SAME = "digest = ? AND row = ?"
_VERY = f"{_SAME} AND mode = ? AND step - staleness - (mode = 'train') = ? AND place = ?"
"""A `Sample` and its `Origin` as record columns."""
_CALLS = """
SELECT service, body, calls.answer, failure, seconds FROM calls JOIN texts ON texts.id = request
WHERE path LIKE 'turn %' AND (calls.answer IS NOT NULL OR failure != '') ORDER BY calls.id
"""
_ORDERS = """
SELECT value FROM (SELECT min(id) AS first FROM completions WHERE mode = 'train' AND step = ? GROUP BY time)
JOIN meta ON name = 'order ' || first ORDER BY first
"""
_Row = tuple[Any, ...]
_Call = tuple[sqlite3.Connection, int | None, str, float]  # file, answer, failure and seconds


class ReplayReward(Scorer):
    """Rewards recorded by another run.

    It replaces `reward`, which provides names and unrecorded values. `run` is the recorded run's output folder, or one
    record file. `on_miss` handles unrecorded completions: `fail`, `nearest` or `live`. With `delays`, rewards arrive
    after their recorded time. Entries of this `rank` are preferred. With tools, the trainer calls `recorded_call`
    instead.

    Raises `ConfigError` if the record has another version or other reward functions.
    """

    is_replay = True

    def __init__(self, reward: Scorer, run: Path, on_miss: str, *, delays: bool = False, rank: int = 0) -> None:
        super().__init__(reward.deadline_s)
        if reward.is_played:
            text = "`replay` cannot be combined with a function with `@per_episode`, which plays each episode."
            raise ConfigError(text)
        self.__name__ = reward.own_name
        self.lines, self.budget = reward.lines, reward.budget
        self._reward, self._names = reward, reward.names
        self._on_miss = on_miss
        self._delays = delays
        files = {path: open_record(path) for path in record_files(run)}
        self._files = [*files.values()]
        self._own = [file for path, file in files.items() if rank_of(path) == rank]
        self._taken: Counter[tuple[object, ...]] = Counter()
        self._calls: dict[str, dict[str, list[_Call]]] | None = None  # by service and arguments, loaded on first use
        self._sources: Counter[str] = Counter()
        # values of other functions must not count as this run's
        query, names = "SELECT functions FROM completions WHERE reward IS NOT NULL LIMIT 1", set(self.names.functions)
        for [functions] in self._select(self._files, query):
            recorded = set(json.loads(functions))
            if recorded != names and (recorded or len(names) > 1):
                raise ConfigError(
                    f"the record of {run} has values of {', '.join(sorted(recorded)) or 'one reward function'}. "
                    f"Expected this run's `reward_funcs`: {', '.join(sorted(names))}. Use the functions of the "
                    "recorded run."
                )

    async def prepare(self, rows: Iterable[Example]) -> None:
        if self._on_miss == "live":
            await self._reward.prepare(rows)

    async def warm_up(self) -> dict[str, float | ServiceError]:
        return await self._reward.warm_up() if self._on_miss == "live" else {}

    async def drain(self) -> BatchReport:
        return await self._reward.drain()

    async def aclose(self) -> None:
        await self._reward.aclose()
        for file in self._files:
            file.close()
        if self._sources:
            counts = ", ".join(f"{count} {source}" for source, count in sorted(self._sources.items()))
            logger.info(f"[Replay] {self._sources.total()} completions: {counts}")
            self._sources.clear()

    async def score(self, sample: Sample, stages: StageTimes) -> Reward:
        row = sample.row if sample.origin is None else sample.origin.rows[sample.place]  # as in the dataset
        record, source = self._recorded(sample, row), "as recorded"
        if record is None and self._on_miss == "nearest":
            record, source = self._nearest(sample.text, row), "of the nearest text"
        if record is None:
            source = "by the services" if self._on_miss == "live" else "not recorded"
        self._sources[source] += 1
        if record is None and self._on_miss == "live":
            return await self._reward.score(sample, stages)
        if record is None:
            return missing(Outcome.INFRA, NOT_RECORDED)
        outcome, reason, value, reference, parts, functions, seconds = record
        if self._delays:  # both endpoints ran concurrently
            times = dict.fromkeys((Stage.RAG_8B, Stage.RAG_32B), 0.0) | json.loads(seconds) | {QUEUE: 0.0}
            await asyncio.sleep(sum(times.values()) - min(times[Stage.RAG_8B], times[Stage.RAG_32B]))
        return Reward(
            outcome=Outcome(outcome), value=value, reason=reason, reference_value=reference,
            components=json.loads(parts), by_function=json.loads(functions),
        )  # fmt: skip

    def _recorded(self, sample: Sample, row: Example) -> _Row | None:
        """The entry of this very completion, or else of the same text and row."""
        origin = sample.origin
        key: tuple[object, ...] = (
            digest_of(row.get("prompt"), conversation_of(sample.completion) or sample.text), recorded_name(row)
        )  # fmt: skip
        query = f"SELECT {_FIELDS} FROM completions WHERE"
        mode, step = ("", -1) if origin is None else (origin.mode, origin.step)
        very = (*key, mode, step, sample.place)
        records = self._select(self._own, f"{query} {_VERY} ORDER BY id", *very)  # one per batch of the step
        if self._taken[very] < len(records):
            key = very
        else:
            records = self._select(self._files, f"{query} {_SAME} ORDER BY id", *key)
        return self._next(key, records) if records else None

    def _next(self, key: tuple[object, ...], found: Sequence[T]) -> T:
        """The entry after that of the key's previous look-up, at most the last one."""
        number = self._taken[key]
        self._taken[key] += 1
        return found[min(number, len(found) - 1)]

    def order_of(self, step: int) -> list[list[int]] | None:
        """The recorded order in which the run trained on the parts of this process's next batch of a step. Successive
        look-ups return successive batches. `None` if unknown or irrelevant."""
        if self._delays or self._on_miss == "live":  # rewards arrive in real time
            return None
        orders = self._select(self._own, _ORDERS, step)
        number = self._taken["order", step]
        self._taken["order", step] += 1
        return json.loads(orders[number][0]) if number < len(orders) else None

    async def recorded_call(self, service: str, asked: str) -> tuple[str | None, str] | None:
        """The recorded outcome of a tool's or partner's call, by service and arguments; `None` if it must be called.
        Raises `ServiceError` for an unrecorded call."""
        if self._calls is None:
            self._calls = {}
            for file in (*self._own, *(each for each in self._files if each not in self._own)):
                for name, request, *ended in file.execute(_CALLS):
                    self._calls.setdefault(name, {}).setdefault(unpacked(request), []).append((file, *ended))
        calls, key = self._calls.get(service, {}), asked
        if asked not in calls and calls and self._on_miss == "nearest":
            [key] = difflib.get_close_matches(asked, calls, n=1, cutoff=0.0)
        if key not in calls:
            if self._on_miss == "live":
                return None
            raise ServiceError(f"{service} was not called with these arguments", f"{service}_{NOT_RECORDED}")
        file, answer, failure, seconds = self._next((service, key), calls[key])
        if self._delays:
            await asyncio.sleep(seconds)
        return None if answer is None else text_of(file, answer) or "", failure

    def _nearest(self, text: str, row: Example) -> _Row | None:
        query = f"SELECT text, {_FIELDS} FROM completions WHERE row = ? ORDER BY id"
        records = self._select(self._files, query, recorded_name(row))
        matcher = difflib.SequenceMatcher(b=text, autojunk=False)

        def similarity(record: _Row) -> float:
            matcher.set_seq1(record[0])
            return matcher.ratio()

        return max(records, key=similarity)[1:] if records else None

    def _select(self, files: Iterable[sqlite3.Connection], query: str, *values: object) -> list[_Row]:
        return [row for file in files for row in file.execute(query, values)]


def recorded_name(row: Example) -> str:
    """A row's name in the record: its id in the dataset, or one derived from its columns."""
    return row_id_of(row) or row_of(row["prompt"] if row.keys() == {"prompt"} else row)
