"""Feeds training batches to the judge drift monitor, requests its scores, and logs its alarms."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from accelerate import PartialState
from accelerate.logging import get_logger
from accelerate.utils import broadcast_object_list, gather_object

from salesrl_trl.errors import JudgeAlarm
from salesrl_trl.judged.meter import SECOND_JUDGE, STOP, Alarm, Meter, Written
from salesrl_trl.names import BY_SECOND_JUDGE, JUDGE_ALARMS, agreement_of
from salesrl_trl.reward.batch import RewardBatch, completion_text
from salesrl_trl.reward.scorer import METER
from salesrl_trl.rollout.rollout_scoring import CompletedBatch
from salesrl_trl.types import JUDGE
from salesrl_trl.wiring.part import Part, PartContext

logger = get_logger(__name__)

MOST_TEXTS = 64  # completions compared per batch over all ranks, in whole groups

Scores: TypeAlias = dict[int, float | None]  # by request number; `None` for a failed call


class _Plan(NamedTuple):
    asked: Mapping[int, int]  # call number -> index among all ranks' completions
    agreements: Mapping[str, float]  # by branch
    alarms: Sequence[Alarm]


class JudgeMeter(Part):
    """Feeds the drift monitor and makes its calls. No step waits for them; answers count once they arrive."""

    def connect(self, run: PartContext) -> None:
        settings = run.reward_loop.reward.names.meter
        assert settings is not None
        self._settings = settings
        self._run = run
        self._reward_loop = run.reward_loop
        self._meter = Meter(settings)
        self._open: list[tuple[RewardBatch, Sequence[int]]] = []  # with its call numbers
        self._alarms = 0
        self._unrelated = set[str]()  # branches for which that was logged
        self.second_since: int | None = None  # step of the alarm since which the second judge scores rewards
        self._take_judge(None)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._take_judge(state.get("second_since"))

    def state_dict(self) -> dict[str, Any]:
        return {} if self.second_since is None else {"second_since": self.second_since}

    def _take_judge(self, second_since: int | None) -> None:
        """Select the judge at a start, a resume or an alarm. Evaluations use one judge for the whole run, to stay
        comparable."""
        is_asked = self._settings.on_alarm == SECOND_JUDGE
        self.second_since = second_since if is_asked else None
        modes = ["eval", "train"] if self.second_since is not None else ["eval"] if is_asked else []
        self._reward_loop.by_second = frozenset(modes)
        if self.second_since is not None:
            logger.warning(
                f"[Judge] since the alarm in step {second_since}, the second judge scores new batches instead of the "
                "first. Batches in flight keep their judge. The drift monitor is off: it would compare with the judge "
                "that raised the alarm"
            )
            self._reward_loop.give_up([batch for batch, _ in self._open])
            self._open = []
        elif second_since is not None:
            logger.warning("[Judge] the first judge scores rewards again: `on_alarm` is no longer `second_judge`")

    def on_batch(self, batch: CompletedBatch) -> Mapping[str, float]:
        rollout, result = batch.rollout, batch.rollout.result
        if not rollout.is_trained_on or result is None:
            return {}
        if self.second_since is not None:
            return {JUDGE_ALARMS: float(self._alarms), BY_SECOND_JUDGE: 1.0}
        # 1. Collect this rank's completions and the scores received since the last batch.
        size, state = len(rollout.inputs), PartialState()
        first, total = state.process_index * size, state.num_processes * size
        step = math.ceil(total / MOST_TEXTS)
        written = {}
        for place, (row, reward) in enumerate(zip(rollout.inputs, result.rewards, strict=True), first):
            group, score = place // self._run.args.num_generations, reward.components.get(JUDGE)
            if score is not None and group % step == 0:
                text, branch = completion_text(rollout.completions[place - first]), self._run.branches.of(row)
                written[place] = Written(text=text, branch=branch, group=group, score=score)
        gathered = gather_object([(written, self._scores())])
        # 2. Let the first process decide.
        [plan] = broadcast_object_list([self._plan(gathered, total) if state.is_main_process else None])
        assert isinstance(plan, _Plan)
        # 3. Make this rank's calls.
        asked = {number: at - first for number, at in plan.asked.items() if first <= at < first + size}
        if asked:
            calls = self._reward_loop.begin([{**rollout.rewards.rows[place], METER: True} for place in asked.values()])
            self._reward_loop.post(calls.start_all, [rollout.completions[place] for place in asked.values()])
            self._open.append((calls, [*asked]))
        # 4. Report alarms.
        self._report(plan)
        figures = {agreement_of(branch): value for branch, value in plan.agreements.items()}
        return {**figures, JUDGE_ALARMS: float(self._alarms), BY_SECOND_JUDGE: float(self.second_since is not None)}

    def _plan(self, gathered: Sequence[tuple[Mapping[int, Written], Scores]], size: int) -> _Plan:
        meter = self._meter
        for _, scores in gathered:
            meter.add_scores(scores)
        written = {place: completion for of_rank, _ in gathered for place, completion in of_rank.items()}
        places, asked = [*written], meter.add([*written.values()], size)
        alarms, meter.alarms = meter.alarms, []
        agreements = {branch: meter.agreement(branch) for branch in self._run.branches.names}
        for branch, agreement in agreements.items():
            if branch not in self._unrelated and meter.is_unrelated(branch):
                self._unrelated.add(branch)
                logger.warning(
                    f"[Judge] in {branch}, the two judges' scores are almost unrelated (correlation {agreement:.2f}), "
                    "so at least one of them may be noise. Compare their verdicts before you trust the reward"
                )
        return _Plan(
            asked={number: places[at] for number, at in asked.items()},
            agreements={branch: value for branch, value in agreements.items() if not math.isnan(value)},
            alarms=alarms,
        )

    def _scores(self) -> Scores:
        """Collect the scores of settled batches and drop these batches."""
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
        agreements = ", ".join(f"{agreement:.2f}" for agreement in plan.agreements.values())
        both = f" Agreement of the judges by branch: {agreements}." if agreements else ""
        for alarm in plan.alarms:
            what = alarm.described(with_text=self._settings.shows_text)
            logger.warning(f"[Judge] the judge's score may have drifted.{both} {what}")
            if self._settings.on_alarm == STOP and self._run.run_control.error is None:  # on every rank
                self._run.run_control.error = JudgeAlarm(
                    f"the judge drift monitor found: {alarm.described(with_text=False)}. Expected a reward that the "
                    "second judge confirms. The state was saved. Inspect the completions of the last steps; then fix "
                    "the rubric, or resume from an earlier checkpoint with another judge."
                )
        if plan.alarms and self._settings.on_alarm == SECOND_JUDGE:
            self._take_judge(self._run.trl.step() + 1)
