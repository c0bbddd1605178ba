"""The parts of a run over its judge: what the meter reads of each batch of training and asks for, and what was spent.

Owns the open batches of the meter's calls, and the lines about alarms. `judged.meter` owns the statistics, which the
first process computes. `judged.budget` owns the account, which the rewards' processes write.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from accelerate import PartialState
from accelerate.logging import get_logger
from accelerate.utils import broadcast_object_list, gather_object

from salesrl_trl.errors import ConfigError, JudgeAlarm
from salesrl_trl.judged.budget import Account, Budget, read_account, reported
from salesrl_trl.judged.meter import (
    SECOND,
    SECOND_JUDGE,
    STOP,
    Alarm,
    Meter,
    Written,
)
from salesrl_trl.names import (
    BUDGET_CALLS,
    BUDGET_FORECAST,
    BUDGET_USD,
    BY_SECOND_JUDGE,
    JUDGE_ALARMS,
    JUDGE_DRIFT,
    agreement_of,
)
from salesrl_trl.reward.batch import RewardBatch, completion_text
from salesrl_trl.reward.figures import RewardFigures
from salesrl_trl.reward.scorer import METER
from salesrl_trl.rollout.rollout_scoring import CompletedBatch
from salesrl_trl.types import JUDGE
from salesrl_trl.wiring.part import Part, PartContext

logger = get_logger(__name__)

MOST_TEXTS = 64  # completions of a batch whose texts are compared, of all ranks: whole groups

Scores: TypeAlias = dict[int, float | None]
"""By the number that was asked for. `None` for a call that failed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Plan:
    """What the first process concludes from a batch."""

    asked: Mapping[int, int]
    """A number for each call, and its place among all ranks' completions; a negative one for an anchor."""
    figures: Mapping[str, float]
    alarms: Sequence[Alarm]


class JudgeMeter(Part):
    """Feeds the meter and makes its calls. No step waits for them: their answers count later."""

    def connect(self, run: PartContext) -> None:
        settings = run.reward_loop.reward.names.meter
        assert settings is not None
        self._settings = settings
        self._run = run
        self._reward_loop = run.reward_loop
        self._branches = run.branches
        self._group = run.args.num_generations
        self._meter = Meter(settings)
        self._open: list[tuple[RewardBatch, Sequence[int]]] = []  # with its numbers
        self._alarms = 0
        self.second_since: int | None = None  # the step of the alarm since which the second judge gives the rewards
        self._take_judge(None)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._take_judge(state.get("second_since"))

    def state_dict(self) -> dict[str, Any]:
        return {} if self.second_since is None else {"second_since": self.second_since}

    def _take_judge(self, second_since: int | None) -> None:
        """A run begins or goes on, or the second judge takes the place of the first. `second_since`: the step of the
        alarm that had it do so. Evaluations have one judge in all of a run, so that they can be compared."""
        is_asked = self._settings.on_alarm == SECOND_JUDGE
        self.second_since = second_since if is_asked else None
        self._reward_loop.by_second = frozenset(["eval", "train"][: is_asked + (self.second_since is not None)])
        if self.second_since is not None:
            logger.warning(
                f"[Judge] from the alarm in step {second_since} on, the second judge gives the rewards of batches "
                "that begin, in place of the first. Those in flight keep theirs. The meter is off: it would compare "
                "with the judge of the alarm"
            )
            self._reward_loop.give_up([batch for batch, _ in self._open])
            self._open = []
        elif second_since is not None:
            logger.warning("[Judge] the first judge gives the rewards again: `on_alarm` is not `second_judge` now")

    def on_batch(self, batch: CompletedBatch) -> Mapping[str, float]:
        rollout, result = batch.rollout, batch.rollout.result
        if not rollout.is_trained_on or result is None:
            return {}
        order_gap = RewardFigures.position_gap(rollout.reports)
        if self.second_since is not None:
            return {JUDGE_ALARMS: float(self._alarms), BY_SECOND_JUDGE: 1.0}
        # 1. What this rank's completions are, and what was answered since the last batch.
        size, state = len(rollout.inputs), PartialState()
        first, total = state.process_index * size, state.num_processes * size
        step = math.ceil(total / MOST_TEXTS)
        written = {}
        for place, (row, reward) in enumerate(zip(rollout.inputs, result.rewards, strict=True), first):
            group, score = place // self._group, reward.components.get(JUDGE)
            if score is not None and group % step == 0:
                text, branch = completion_text(rollout.completions[place - first]), self._branches.of(row)
                written[place] = Written(text=text, branch=branch, group=group, score=score)
        gathered = gather_object([(written, self._scores())])
        # 2. What the first process concludes from it.
        [plan] = broadcast_object_list([self._plan(gathered, total, order_gap) if state.is_main_process else None])
        assert isinstance(plan, _Plan)
        # 3. The calls of this rank.
        asked = {
            number: (rollout.rewards.rows[place - first], SECOND, rollout.completions[place - first])
            if place >= 0
            else ({}, -1 - place, "")
            for number, place in plan.asked.items()
            if first <= place < first + size or (place < 0 and state.is_main_process)
        }
        if asked:
            calls = self._reward_loop.begin([{**row, METER: what} for row, what, _ in asked.values()])
            self._reward_loop.start_all(calls, [completion for *_, completion in asked.values()])
            self._open.append((calls, [*asked]))
        # 4. Alarms.
        self._report(plan)
        by_second = float(self.second_since is not None)
        return {**plan.figures, JUDGE_ALARMS: float(self._alarms), BY_SECOND_JUDGE: by_second}

    def _plan(self, gathered: Sequence[tuple[Mapping[int, Written], Scores]], size: int, order_gap: float) -> _Plan:
        meter = self._meter
        for _, scores in gathered:
            meter.add_scores(scores)
        written = {place: completion for of_rank, _ in gathered for place, completion in of_rank.items()}
        places, asked = [*written], meter.add([*written.values()], size, order_gap)
        alarms, meter.alarms = meter.alarms, []
        figures = {
            **{agreement_of(branch): meter.agreement(branch) for branch in self._branches.names},
            JUDGE_DRIFT: meter.drift,
        }
        return _Plan(
            asked={number: places[at] if at >= 0 else at for number, at in asked.items()},
            figures={name: value for name, value in figures.items() if not math.isnan(value)},
            alarms=alarms,
        )

    def _scores(self) -> Scores:
        """What was answered. The batches are forgotten."""
        scores: Scores = {}
        for batch, numbers in [*self._open]:
            if batch.is_settled():
                values = (None if reward is None else reward.value for reward in batch.rewards)
                scores |= dict(zip(numbers, values, strict=True))
                self._reward_loop.give_up([batch])
                self._open.remove((batch, numbers))
        return scores

    def _report(self, plan: _Plan) -> None:
        self._alarms += len(plan.alarms)
        for alarm in plan.alarms:
            agreements = [value for name, value in plan.figures.items() if name.startswith(agreement_of(""))]
            both = f" Agreement of both judges by branch: {', '.join(f'{agreement:.2f}' for agreement in agreements)}."
            what = alarm.described(with_text=self._settings.shows_text)
            logger.warning(f"[Judge] its score may not mean any more what it meant.{both * bool(agreements)} {what}")
            if self._settings.on_alarm == STOP and self._run.run_control.error is None:  # on every rank
                self._run.run_control.error = JudgeAlarm(
                    f"the judge's meter found: {alarm.described(with_text=False)}. Expected a reward that the second "
                    "judge confirms. The state was saved. Look at the completions of the last steps; then mend the "
                    "rubric, or go on from an earlier checkpoint with another judge."
                )
        if plan.alarms and self._settings.on_alarm == SECOND_JUDGE:
            self._take_judge(self._run.trl.step() + 1)


class Spending(Part):
    """The spending of a run with a budget."""

    def connect(self, run: PartContext) -> None:
        budget = run.reward_loop.reward.budget
        assert isinstance(budget, Budget)
        self._trl, self._budget, self._limits = run.trl, budget, budget.limits
        run.run_control.spending = self
        self._account = Account()
        self._first: tuple[int, Account] | None = None  # steps done, and the account then

    def account(self) -> Account:
        """What has been spent so far, by the file; as it was at the last look if the file can't be read."""
        try:
            self._account = read_account(self._budget.path)
        except ConfigError as error:
            logger.warning(str(error))
        return self._account

    def figures(self, mode: str) -> Mapping[str, float]:
        """The forecast is the largest of all limits, with u used by now and u_0 used at the run's first line:
        (u + (u - u_0) / (step - step_0) * (last_step - step)) / limit."""
        if mode != "train":
            return {}
        step, last_step = self._trl.step(), self._trl.last_step()
        account = self.account()
        total = account.total()
        figures = {BUDGET_CALLS: total.calls, BUDGET_USD: total.usd}
        if self._limits:
            if self._first is None or step <= self._first[0]:
                self._first = (step, account)
            began, first = self._first
            to_come = (last_step - step) / max(step - began, 1)
            used = [(account.used(limit), first.used(limit), limit.most) for limit in self._limits]
            figures[BUDGET_FORECAST] = max((now + (now - then) * to_come) / cap for now, then, cap in used)
        return figures

    def in_words(self) -> str:
        return self.account().total().in_words()

    def reported(self) -> str:
        account = self.account()
        return reported(account, account.reached(self._limits))

    def is_reached(self) -> bool:
        return bool(self.account().reached(self._limits))
