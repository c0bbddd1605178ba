"""From components to the number GRPO trains on.

Pure: no services, no clock. One combined value for each completion, because TRL counts a missing one of several reward
functions as 0: a completion without a judge's score would be the worst of its group.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from salesrl_trl.errors import ConfigError
from salesrl_trl.names import Stage
from salesrl_trl.reward.stage import Case, RewardStage, check_stages
from salesrl_trl.types import Answer, InvalidAction, Outcome, Reward, SalesRow

FORMAT = "format"
COMPONENTS = {
    "judge": "score of the answer by the branch's own rubric, in [0, 1]",
    "margin": "that score less the reference's, in [-1, 1]; missing without a reference",
    "retrieval": "score of the best passage the action found, in [0, 1]; 0 where it found none",
    "right_document": "1: the best passage is one of the row's known documents, 0: it is another; missing without any",
    FORMAT: "1: the completion is a valid action",
}
"""The components that a branch may weigh, beside `judge_<rubric>`, the score by another rubric."""
OTHER_RUBRIC = "judge_"
REFERENCE = "reference"
"""The reference's own score by the branch's rubric. Logged beside the components, never weighed."""
MAX_WEIGHT = 1e6
"""Largest weight, and largest reward of an invalid action. Sums stay far from infinity."""
MISSING_RULES = ("none", "reweight")
"""Rules for a completion that lacks a weighed component."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scoring:
    """The law of the reward.

        value = sum over components c of w_c * c

    Where a component is missing (a judge failed, there was no reference), the value is missing too (`"none"`), or the
    others stand in for it (`"reweight"`), so that a value keeps its scale:

        value = (sum of all w) / (sum of w that are there) * sum over those of w_c * c

    Nothing stands in for all of a branch's judgements: a dead judge must not be the best score.
    """

    weights: Mapping[str, Mapping[str, float]]
    """Branch to component to weight: `{"fairness": {"judge": 0.8, "margin": 0.2}}`."""
    missing: str = "none"
    """One of `MISSING_RULES`."""
    invalid_action: float = 0.0
    """Reward of a completion that is no action, or whose answer is hollow."""
    stage_components: tuple[str, ...] = ()
    """Components that stages of your own add, beside `COMPONENTS`."""

    def __post_init__(self) -> None:
        if not abs(self.invalid_action) <= MAX_WEIGHT:
            raise ConfigError(
                f"`invalid_action_reward` is {self.invalid_action}. Expected a finite number, {MAX_WEIGHT:g} at most."
            )
        for branch, weights in self.weights.items():
            if not weights or not all(0 < weight <= MAX_WEIGHT for weight in weights.values()):
                raise ConfigError(
                    f"`branch_reward_weights` of branch {branch!r} is {dict(weights)}. Expected at least one "
                    f"component, each with a weight above 0 and up to {MAX_WEIGHT:g}."
                )
            for component in weights:
                _check_component(branch, component, self.stage_components)

    @property
    def component_names(self) -> tuple[str, ...]:
        """Every component a reward may have, in a fixed order."""
        others = [name for weights in self.weights.values() for name in weights if name.startswith(OTHER_RUBRIC)]
        return tuple(dict.fromkeys((*COMPONENTS, REFERENCE, *others, *self.stage_components)))

    def rubrics(self, branch: str) -> dict[str, str]:
        """The judgements a branch needs: component to rubric."""
        weights = self.weights[branch]
        own = {"judge": branch} if {"judge", "margin"} & weights.keys() else {}
        others = {name: name.removeprefix(OTHER_RUBRIC) for name in weights if name.startswith(OTHER_RUBRIC)}
        return {**own, **others}

    def with_stages(self, stages: Sequence[RewardStage]) -> "Scoring":
        """The same law, with the components of these stages.

        Raises:
            `ConfigError`: two stages or components have one name, or no stage adds a component that is expected.
        """
        check_stages(stages, taken=tuple(Stage), known=(*COMPONENTS, REFERENCE))
        added = tuple(component for stage in stages for component in stage.components)
        lacking = sorted(set(self.stage_components) - set(added))
        if lacking:
            raise ConfigError(
                f"no stage of the reward adds {', '.join(lacking)}. Expected one for each of `stage_components`. The "
                f"stages add: {', '.join(added) or 'nothing'}."
            )
        return replace(self, stage_components=added)

    def score(self, case: Case, seconds: Mapping[str, float]) -> Reward:
        """The reward of an answered action, from what the judge and the stages found."""
        weights = self.weights[case.row.branch]
        unknown: dict[str, float | None] = dict.fromkeys(self.stage_components)
        components = {**_components(case), **unknown, **case.components}
        value = self._combine(weights, components)
        if value is None:
            outcome, reason = case.failure or (Outcome.INFRA, _lacking(weights, components))
            return Reward(outcome=outcome, value=None, reason=reason, components=components, seconds=seconds)
        return Reward(
            outcome=Outcome.OK,
            value=value,
            components=components,
            reference_value=self._reference_value(case, unknown),
            seconds=seconds,
        )

    def score_invalid(self, action: InvalidAction, seconds: Mapping[str, float] | None = None) -> Reward:
        """The reward of a completion that is no action: the policy's own fault, so a real, low number."""
        return Reward(
            outcome=Outcome.INVALID_ACTION,
            value=self.invalid_action,
            reason=action.reason,
            components={"format": 0.0},
            seconds=seconds or {},
        )

    def _reference_value(self, case: Case, unknown: Mapping[str, float | None]) -> float | None:
        """The reward of the reference answer, from the same components. Its margin above itself is 0."""
        if case.reference is None:
            return None
        scores = {name: None if verdict is None else verdict.reference for name, verdict in case.verdicts.items()}
        components = {
            **scores,
            "margin": None if scores.get("judge") is None else 0.0,
            "retrieval": _best_score(case.reference),
            "right_document": _right_document(case.row, case.reference),
            "format": 1.0,
            **unknown,
            **case.reference_components,
        }
        return self._combine(self.weights[case.row.branch], components)

    def _combine(self, weights: Mapping[str, float], components: Mapping[str, float | None]) -> float | None:
        there = {name: weight for name, weight in weights.items() if components[name] is not None}
        if not there or (self.missing == "none" and len(there) < len(weights)):
            return None
        if any(map(_is_judged, weights)) and not any(map(_is_judged, there)):
            return None
        scale = sum(weights.values()) / sum(there.values())
        return scale * sum(weight * (components[name] or 0.0) for name, weight in there.items())


def missing(outcome: Outcome, reason: str, seconds: Mapping[str, float]) -> Reward:
    """No number: a service or the judge failed. Out of the group's baseline, the loss and the reward metrics."""
    return Reward(outcome=outcome, value=None, reason=reason, seconds=seconds)


def default_weights(branches: Sequence[str]) -> dict[str, dict[str, float]]:
    """The judge's score and nothing else."""
    return {branch: {"judge": 1.0} for branch in branches}


def _components(case: Case) -> dict[str, float | None]:
    own = case.verdicts.get("judge")
    others = {
        name: None if verdict is None else verdict.candidate
        for name, verdict in case.verdicts.items()
        if name != "judge"
    }
    reference = None if own is None else own.reference
    return {
        "judge": None if own is None else own.candidate,
        REFERENCE: reference,
        "margin": None if own is None or reference is None else own.candidate - reference,
        "retrieval": _best_score(case.answer),
        "right_document": _right_document(case.row, case.answer),
        "format": 1.0,
        **others,
    }


def _lacking(weights: Mapping[str, float], components: Mapping[str, float | None]) -> str:
    """Reason code of a reward that lacks a component, although every judgement could be had."""
    name = next(name for name in weights if components[name] is None)
    return "no_reference" if name == "margin" else f"no_{name}"


def _best_score(answer: Answer) -> float:
    return max((passage.score for passage in answer.passages), default=0.0)


def _right_document(row: SalesRow, answer: Answer) -> float | None:
    if not row.documents:
        return None
    return float(any(passage.text in row.documents for passage in answer.passages[:1]))


def _is_judged(component: str) -> bool:
    return component in ("judge", "margin") or component.startswith(OTHER_RUBRIC)


def _check_component(branch: str, component: str, stage_components: Sequence[str]) -> None:
    known = (*COMPONENTS, *stage_components)
    if component not in known and not (component.startswith(OTHER_RUBRIC) and component != OTHER_RUBRIC):
        raise ConfigError(
            f"`branch_reward_weights` of branch {branch!r} names {component!r}. Expected one of: {', '.join(known)}, "
            f"or {OTHER_RUBRIC}<rubric>. For a component of your own add a stage to `reward_stages`."
        )
