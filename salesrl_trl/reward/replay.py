"""Rewards from the record of another run, in place of its services.

Owns the look-up, and what becomes of a completion that is not there. The same text in the same place of the same
process's batch of the same step is the same completion; else one of the same text to the same row stands for it. A
recorded failure is a failure again, with its reason.
"""

import asyncio
import difflib
import json
import logging
import sqlite3
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from salesrl_trl.errors import ConfigError, ServiceError
from salesrl_trl.names import Stage
from salesrl_trl.recording.reader import digest_of, open_record, record_files, row_of
from salesrl_trl.recording.schema import rank_of
from salesrl_trl.reward.base import ORIGIN, UNNAMED, BatchedReward, RewardNames
from salesrl_trl.reward.batch import BatchReport, Sample
from salesrl_trl.reward.scoring import missing
from salesrl_trl.reward.stage_times import StageTimes
from salesrl_trl.types import Example, Outcome, Reward

logger = logging.getLogger(__name__)

NOT_RECORDED = "not_recorded"
"""Reason of a completion that the record does not have."""
_FIELDS = "outcome, reason, reward, reference_reward, parts, functions, seconds"
_SAME = "digest = ? AND row = ?"
_VERY = f"{_SAME} AND mode = ? AND step - staleness - (mode = 'train') = ? AND place = ?"
"""Of `Origin`, in the columns of a record."""


class _Row(NamedTuple):
    row: Any
    """As the reward keeps it."""
    prompt: object
    name: str
    """In the record."""
    mode: str | None = None
    step: int | None = None


class ReplayReward(BatchedReward):
    """What another run recorded.

    It stands in the place of `reward`, which gives the names, and whatever is not recorded. `run` is the output folder
    of the recorded run, or one file of a record. `on_miss` says what becomes of a completion that is not recorded:
    `fail`, `nearest` or `live`. With `delays` a reward takes as long as it did. What this `rank` recorded itself comes
    first.

    Raises `ConfigError` if the record is of another version, or of other reward functions.
    """

    def __init__(self, reward: BatchedReward, run: Path, on_miss: str, *, delays: bool = False, rank: int = 0) -> None:
        super().__init__(reward.deadline_s)
        self.__name__ = getattr(reward, "__name__", type(reward).__name__)
        self.lines, self.budget = reward.lines, reward.budget
        self._reward = reward
        self._on_miss = on_miss
        self._delays = delays
        files = {path: open_record(path) for path in record_files(run)}
        self._files = [*files.values()]
        self._own = [file for path, file in files.items() if rank_of(path) == rank]
        self._taken: Counter[tuple[object, ...]] = Counter()
        self._sources: Counter[str] = Counter()
        self._check_functions(run)

    def _check_functions(self, run: Path) -> None:
        """Numbers of other functions, or of none, would count as those of this run's."""
        query, names = "SELECT functions FROM completions WHERE reward IS NOT NULL LIMIT 1", set(self.function_names)
        for [functions] in self._select(self._files, query):
            recorded = set(json.loads(functions))
            if recorded != names and (recorded or len(names) > 1):
                raise ConfigError(
                    f"the record of {run} has numbers of {', '.join(sorted(recorded)) or 'one reward function'}. "
                    f"Expected those of this run's `reward_funcs`: {', '.join(sorted(names))}. Give the functions of "
                    "the recorded run."
                )

    @property
    def names(self) -> RewardNames:
        return self._reward.names

    @property
    def function_names(self) -> dict[str, str]:
        return self._reward.function_names

    def check_columns(self, columns: Sequence[str]) -> None:
        self._reward.check_columns(columns)

    def row_of(self, example: Example) -> _Row:
        """As `BatchedReward.row_of`, with what it is looked up by."""
        row, origin = self._reward.row_of(example), example.get(ORIGIN)
        if origin is None:
            return _Row(row, example["prompt"], recorded_name(self._reward, row, example))
        name = recorded_name(self._reward, row, origin.row)
        return _Row(row, origin.row.get("prompt"), name, origin.mode, origin.step)

    def row_id(self, row: _Row) -> str:
        """As `BatchedReward.row_id`."""
        return self._reward.row_id(row.row)

    def fetch_references(self, rows: Iterable[_Row]) -> None:
        """As `BatchedReward.fetch_references`, where services are asked."""
        if self._on_miss == "live":
            self._reward.fetch_references([each.row for each in rows])

    async def warm_up(self) -> dict[str, float | ServiceError]:
        return await self._reward.warm_up() if self._on_miss == "live" else {}

    def unusable(self, warm_up: Mapping[str, float | ServiceError]) -> list[ServiceError]:
        return self._reward.unusable(warm_up) if warm_up else []

    async def drained(self, report: BatchReport) -> BatchReport:
        return await self._reward.drained(report)

    async def aclose(self) -> None:
        """Close the record, and what the reward has open."""
        await super().aclose()
        await self._reward.aclose()
        for file in self._files:
            file.close()
        if self._sources:
            told = ", ".join(f"{count} {source}" for source, count in sorted(self._sources.items()))
            logger.info(f"[Replay] {self._sources.total()} completions: {told}")
            self._sources.clear()

    async def score(self, sample: Sample, stages: StageTimes) -> Reward:
        row: _Row = sample.row
        found, source = self._recorded(row, sample.place, sample.text), "as recorded"
        if found is None and self._on_miss == "nearest":
            found, source = self._nearest(row.name, sample.text), "of the nearest text"
        if found is None:
            source = "by the services" if self._on_miss == "live" else "not recorded"
        self._sources[source] += 1
        if found is None and self._on_miss == "live":
            return await self._reward.score(replace(sample, row=row.row), stages)
        if found is None:
            return missing(Outcome.INFRA, NOT_RECORDED, {})
        outcome, reason, value, reference, parts, functions, seconds = found
        if self._delays:
            await asyncio.sleep(_wall_s(json.loads(seconds)))
        return Reward(
            outcome=Outcome(outcome),
            value=value,
            reason=reason,
            reference_value=reference,
            components=json.loads(parts),
            by_function=json.loads(functions),
        )

    def _recorded(self, row: _Row, place: int, text: str) -> tuple[Any, ...] | None:
        """What this very completion earned, or else the same text to the same row: of several the one after that of
        the last look-up, and then the last one."""
        key: tuple[object, ...] = (digest_of(row.prompt, text), row.name)
        query = f"SELECT {_FIELDS} FROM completions WHERE"
        very = (*key, row.mode, row.step, place)  # several, where a step has several generation batches
        found = self._select(self._own, f"{query} {_VERY} ORDER BY id", *very)
        if self._taken[very] < len(found):
            key = very
        else:
            found = self._select(self._files, f"{query} {_SAME} ORDER BY id", *key)
        number = self._taken[key]
        self._taken[key] += 1
        return found[min(number, len(found) - 1)] if found else None

    def _nearest(self, name: str, text: str) -> tuple[Any, ...] | None:
        """What the most similar text for the same row earned."""
        query = f"SELECT text, {_FIELDS} FROM completions WHERE row = ? ORDER BY id"
        found = self._select(self._files, query, name)
        if not found:
            return None
        matcher = difflib.SequenceMatcher(b=text, autojunk=False)

        def similarity(row: tuple[Any, ...]) -> float:
            matcher.set_seq1(row[0])
            return matcher.ratio()

        return max(found, key=similarity)[1:]

    def _select(self, files: Iterable[sqlite3.Connection], query: str, *given: object) -> list[tuple[Any, ...]]:
        return [row for file in files for row in file.execute(query, given)]


def recorded_name(reward: BatchedReward, row: object, example: Example) -> str:
    """The name of a row in the record: the reward's id, or the dataset's, or one that follows from its columns."""
    name = reward.row_id(row)
    if name != UNNAMED:
        return name
    if isinstance(example.get("row"), int) and "id" in example:  # of `data.sources.prompt_dataset`
        return str(example["id"])
    return row_of(example["prompt"] if example.keys() == {"prompt"} else example)


def _wall_s(seconds: Mapping[str, float]) -> float:
    """Seconds of all stages. Those of both endpoints ran beside one another."""
    others = sum(each for stage, each in seconds.items() if stage not in (Stage.RAG_8B, Stage.RAG_32B))
    return others + max(seconds.get(Stage.RAG_8B, 0.0), seconds.get(Stage.RAG_32B, 0.0))
