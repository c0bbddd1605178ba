"""Rewards from the record of another run, in place of its services.

Owns the look-up by prompt and text, and what becomes of a completion that is not there. A recorded failure is a
failure again, with its reason.
"""

import asyncio
import difflib
import json
import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

from salesrl_trl.errors import ServiceError
from salesrl_trl.names import Stage
from salesrl_trl.recording.reader import digest_of, open_record, row_of
from salesrl_trl.recording.schema import record_files
from salesrl_trl.reward.base import BatchedReward, RewardNames
from salesrl_trl.reward.batch import BatchReport, Sample
from salesrl_trl.reward.scoring import missing
from salesrl_trl.reward.stage_times import StageTimes
from salesrl_trl.types import Example, Outcome, Reward

logger = logging.getLogger(__name__)

NOT_RECORDED = "not_recorded"
"""Reason of a completion that the record does not have."""
_Row: TypeAlias = tuple[Any, object, str]
_FIELDS = "outcome, reason, reward, reference_reward, parts, functions, seconds"


class ReplayReward(BatchedReward):
    """What another run recorded.

    Args:
        reward (`BatchedReward`):
            The reward in whose place it stands: for its names, and for what is not recorded.
        run (`Path`):
            Output folder of the recorded run, or one file of a record.
        on_miss (`str`):
            For a completion that is not recorded: `fail`, `nearest` or `live`.
        delays (`bool`, *optional*, defaults to `False`):
            Whether a reward takes as long as it did.

    Raises:
        `ConfigError`: the record is of another version.
    """

    def __init__(self, reward: BatchedReward, run: Path, on_miss: str, *, delays: bool = False) -> None:
        super().__init__(reward.deadline_s)
        self.__name__ = getattr(reward, "__name__", type(reward).__name__)
        self.lines, self.budget = reward.lines, reward.budget
        self._reward = reward
        self._on_miss = on_miss
        self._delays = delays
        self._files = [open_record(path) for path in record_files(run)]
        self._taken: Counter[bytes] = Counter()
        self._sources: Counter[str] = Counter()

    @property
    def names(self) -> RewardNames:
        return self._reward.names

    @property
    def function_names(self) -> dict[str, str]:
        return self._reward.function_names

    def check_columns(self, columns: Sequence[str]) -> None:
        self._reward.check_columns(columns)

    def row_of(self, example: Example) -> _Row:
        """The row as the reward keeps it, the prompt, and the name of the row in the record."""
        row, prompt = self._reward.row_of(example), example["prompt"]
        return row, prompt, recorded_name(self._reward, row, example)

    def row_id(self, row: _Row) -> str:
        """As `BatchedReward.row_id`."""
        return self._reward.row_id(row[0])

    def fetch_references(self, rows: Iterable[_Row]) -> None:
        """As `BatchedReward.fetch_references`, where services are asked."""
        if self._on_miss == "live":
            self._reward.fetch_references([row for row, *_ in rows])

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
        row, prompt, name = sample.row
        found, source = self._recorded(prompt, sample.text), "as recorded"
        if found is None and self._on_miss == "nearest":
            found, source = self._nearest(name, sample.text), "of the nearest text"
        if found is None:
            source = "by the services" if self._on_miss == "live" else "not recorded"
        self._sources[source] += 1
        if found is None and self._on_miss == "live":
            return await self._reward.score(replace(sample, row=row), stages)
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

    def _recorded(self, prompt: object, text: str) -> tuple[Any, ...] | None:
        """What the same text earned: of several the one after that of the last look-up, and then the last one."""
        digest = digest_of(prompt, text)
        found = self._select(f"SELECT {_FIELDS} FROM completions WHERE digest = ? ORDER BY id", digest)
        if not found:
            return None
        place = min(self._taken[digest], len(found) - 1)
        self._taken[digest] += 1
        return found[place]

    def _nearest(self, name: str, text: str) -> tuple[Any, ...] | None:
        """What the most similar text for the same row earned."""
        found = self._select(f"SELECT text, {_FIELDS} FROM completions WHERE row = ? ORDER BY id", name)
        if not found:
            return None
        matcher = difflib.SequenceMatcher(b=text, autojunk=False)

        def similarity(row: tuple[Any, ...]) -> float:
            matcher.set_seq1(row[0])
            return matcher.ratio()

        return max(found, key=similarity)[1:]

    def _select(self, query: str, *given: object) -> list[tuple[Any, ...]]:
        return [row for file in self._files for row in file.execute(query, given)]


def recorded_name(reward: BatchedReward, row: object, example: Example) -> str:
    """The name of a row in the record: its id in the dataset, or one that follows from its prompt."""
    return reward.row_id(row) if isinstance(example.get("row"), int) else row_of(example["prompt"])


def _wall_s(seconds: Mapping[str, float]) -> float:
    """Seconds of all stages. Those of both endpoints ran beside one another."""
    others = sum(each for stage, each in seconds.items() if stage not in (Stage.RAG_8B, Stage.RAG_32B))
    return others + max(seconds.get(Stage.RAG_8B, 0.0), seconds.get(Stage.RAG_32B, 0.0))
