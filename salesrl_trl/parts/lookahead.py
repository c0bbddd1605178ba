"""Automatic lookahead: the smallest one with which training barely waits, adapted to reward and step times.

Chosen from timings over all ranks, so that all ranks choose the same.
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
"""Acceptable reward wait, as a share of the step's other time."""
FEWEST, MOST = 3, 16
"""Measured steps before the lookahead increases, and before it decreases."""
LOWER = 0.7
"""A lookahead that was too small is retried once rewards take less than this share of the time they took then."""
_NOT_OF_A_STEP = (Phase.EVALUATION, Phase.CHECKPOINT, Phase.LOGGING)


class _Measured(NamedTuple):
    compute: float  # a step's seconds without waiting
    waited: float
    rewards: float  # seconds from a batch's first call to its last answer


class LookaheadPart(Part):
    """Chooses the lookahead, up to `max_rollout_lookahead`.

    With a lookahead of N, rewards of R seconds are expected to cause a wait of `R - (N + 1) * compute`. A lookahead
    that waits longer is too small, and is remembered with its R.
    """

    def connect(self, run: PartContext) -> None:
        self._pipeline = run.pipeline
        self._fewest, self._most = run.least_lookahead, run.args.most_lookahead
        self.number = max(run.args.rollout_lookahead, self._fewest)
        self._measured: deque[_Measured] = deque(maxlen=MOST)
        self._unsettled = self.number + 1  # steps that still reflect the previous lookahead
        self._too_small: dict[int, float] = {}

    def on_log(self, _: object, __: object, ___: object, logs: Mapping[str, float], **____: object) -> None:
        """Adapts the lookahead to a step's metrics, which are identical on all ranks."""
        self._pipeline.turns.lookahead = self.next(logs)

    def next(self, figures: Mapping[str, float]) -> int:
        """The lookahead for upcoming steps, after a step with these metrics. Logs changes."""
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
                f"[Lookahead] {self.number} -> {chosen} steps: a batch's rewards take {rewards:.1f} s, a step takes "
                f"{compute:.1f} s and waited {waited:.1f} s for rewards (max_rollout_lookahead {self._most})"
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
        """The smallest lookahead with a negligible expected wait."""
        for number in range(self._most):
            waits = [max(each.rewards - (number + 1) * compute, 0.0) for each in self._measured]
            if statistics.mean(waits) <= WAITS * compute:
                return number
        return self._most
