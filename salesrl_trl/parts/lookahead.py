"""A lookahead that follows what rewards and steps take: the least number with which training hardly waits.

It is chosen from seconds that the instruments measured over all ranks, so that all ranks choose the same.
"""

import logging
import statistics
from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

from salesrl_trl.names import REWARD_EXPOSED, REWARD_SECONDS, STEP_SECONDS, Phase, time_of
from salesrl_trl.wiring.part import Part, PartContext

logger = logging.getLogger(__name__)

WAITS = 0.05
"""Share of a step's other time that it may wait for rewards."""
FEWEST, MOST = 3, 16
"""Measured steps before the number rises, and before it falls."""
LOWER = 0.7
"""A number that was too small is tried again when rewards take less than this share of their time then."""
_NOT_OF_A_STEP = (Phase.EVALUATION, Phase.CHECKPOINT, Phase.LOGGING)


class _Measured(NamedTuple):
    compute: float  # seconds of a step without waiting
    waited: float
    rewards: float  # seconds from a batch's first call to its last answer


class LookaheadPart(Part):
    """Chooses a number, up to `max_rollout_lookahead`.

    Rewards of R seconds are taken to wait `R - (N + 1) * compute` with a lookahead of N. A number with which more was
    waited than that is too small, and is remembered with its R.
    """

    def connect(self, run: PartContext) -> None:
        self._pipeline = run.pipeline
        self._fewest, self._most = run.least_lookahead, run.args.most_lookahead
        self.number = max(run.args.rollout_lookahead, self._fewest)
        self._measured: deque[_Measured] = deque(maxlen=MOST)
        self._unsettled = self.number + 1  # steps that still show the number before
        self._too_small: dict[int, float] = {}

    def on_log(self, _: object, __: object, ___: object, logs: Mapping[str, float], **____: object) -> None:
        """Moves the number by the figures of a step's line. It is the same on all ranks, as these figures are."""
        self._pipeline.turns.lookahead = self.next(logs)

    def next(self, figures: Mapping[str, float]) -> int:
        """The number for the steps to come, after a step with these figures. Says when it changes."""
        rewards, waited = figures.get(REWARD_SECONDS), figures.get(REWARD_EXPOSED)
        if rewards is None or waited is None or not rewards >= 0 or not waited >= 0:  # no batch was scored, or NaN
            return self.number
        if self._unsettled:
            self._unsettled -= 1
            return self.number
        others = sum(figures.get(time_of(phase), 0.0) for phase in _NOT_OF_A_STEP)
        self._measured.append(_Measured(figures[STEP_SECONDS] - waited - others, waited, rewards))
        if len(self._measured) < FEWEST:
            return self.number
        means = compute, waited, rewards = [statistics.mean(column) for column in zip(*self._measured, strict=True)]
        if (chosen := self._chosen(*means)) != self.number:
            logger.info(
                f"[Lookahead] rollouts are up to {chosen} steps ahead, {self.number} before: rewards of a batch take "
                f"{rewards:.1f} s, a step without waiting {compute:.1f} s, and it waited {waited:.1f} s "
                f"(max_rollout_lookahead {self._most})"
            )
            self.number, self._unsettled = chosen, chosen + 1
            self._measured.clear()
        return self.number

    def _chosen(self, compute: float, waited: float, rewards: float) -> int:
        if waited > WAITS * compute:
            self._too_small[self.number] = rewards
            return min(max(self.number + 1, self._least(compute)), self._most)
        if len(self._measured) < MOST:
            return self.number
        tried = [number for number, then in self._too_small.items() if rewards > LOWER * then]
        return min(self.number, max([self._fewest, self._least(compute), *(number + 1 for number in tried)]))

    def _least(self, compute: float) -> int:
        """The least number with which hardly anything is expected to be waited for."""
        for number in range(self._most):
            waits = [max(each.rewards - (number + 1) * compute, 0.0) for each in self._measured]
            if statistics.mean(waits) <= WAITS * compute:
                return number
        return self._most
