"""From components to the number GRPO trains on, and the seam for a stage of one's own. Pure: no services, no clock.

One combined value for each completion, because TRL counts a missing one of several reward functions as 0: a completion
without a judge's score would be the worst of its group.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from salesrl_trl.errors import ConfigError
from salesrl_trl.names import Stage
from salesrl_trl.types import (
    FORMAT,
    REFERENCE,
    RESERVED_REASONS,
    Action,
    Answer,
    InvalidAction,
    Outcome,
    Reward,
    SalesRow,
    Verdict,
)

_NAME = re.compile(r"(?!judge_)[a-z][a-z0-9_]{0,39}")
_REASON = re.compile(r"[a-z][a-z0-9_]{0,63}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A completion on its way to a reward: a valid action that was answered."""

    row: SalesRow
    """The conversation, its branch and the documents known to answer it."""
    action: Action
    """The policy's action."""
    answer: Answer
    """The 8B endpoint's answer to the action."""
    reference: Answer | None
    """The 32B endpoint's answer to the row; `None` where the branch needs none, or it could not be had."""
    verdicts: Mapping[str, Verdict | None] = field(default_factory=dict)
    """Judgements by component (`"judge"`, `"judge_<rubric>"`); `None` for one that failed. Empty before the judge."""
    failure: tuple[Outcome, str] | None = None
    """Outcome and reason code of the first judgement that could not be had."""
    components: Mapping[str, float | None] = field(default_factory=dict)
    """Components of earlier stages, for this answer."""
    reference_components: Mapping[str, float | None] = field(default_factory=dict)
    """Components of earlier stages, for the reference answer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Added:
    """The components that a stage adds. `None`, or a name that is left out, stands for a missing component."""

    components: Mapping[str, float | None] = field(default_factory=dict)
    """Components of the answer: `{"brevity": 1.0}`."""
    reference: Mapping[str, float | None] = field(default_factory=dict)
    """Components of the reference answer. A hybrid baseline needs them where a branch weighs them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Missing:
    """The completion can't be scored: no number, out of the baseline and the loss, and counted by its reason."""

    reason: str
    """A short code for logs and metric names: `"brevity_no_tokenizer"`. Never a text of a customer."""


Result: TypeAlias = Added | InvalidAction | Missing  # of a stage


class RewardStage(ABC):
    """A stage of the reward: one class, handed to `SalesReward` as an object, or named by its dotted path in
    `reward_stages`.

        class Brevity(RewardStage):
            name = "brevity"
            components = ("brevity",)

            async def run(self, case: Case) -> Added:
                return Added(components={"brevity": 1.0 if len(case.answer.text) < 400 else 0.0})

    One object serves all completions, many at a time, on one event loop. Work that blocks belongs into
    `asyncio.to_thread`. The object must be picklable, because the reward may run in a process of its own. The
    completion's deadline (`reward_deadline_s`) covers the stage.

    A `ServiceError` that it raises makes the completion missing with the error's code. Any other error makes it
    missing too: that is a fault in code, and is logged once.
    """

    name: str
    """For figures, spans and logs: `time/<name>_p50_s`. Lower-case letters, digits and `_`. Fixed from construction
    on, so that every process logs the same figures."""
    components: Sequence[str] = ()
    """The components that it may add, for `branch_reward_weights`."""
    after_judge: bool = False
    """Whether it runs behind the judge. Before the judge it knows no verdict, and what it refuses is not judged."""

    @abstractmethod
    async def run(self, case: Case) -> Result:
        """Look at a case: everything that is known so far.

        Returns:
            `Added`: go on, perhaps with further components.
            `InvalidAction`: stop here. It is the policy's own fault, so the reward is `invalid_action_reward`.
            `Missing`: stop here, without a reward.
        """

    async def aclose(self) -> None:  # noqa: B027  for those that have something to close
        """Close what belongs to the running event loop."""

    def of(self, case: Case, result: Result) -> Case | InvalidAction | Missing:
        """The case with what the stage found, or its refusal. Raises `ValueError` for one that it does not name."""
        if not isinstance(result, Added):
            if not _REASON.fullmatch(result.reason) or result.reason in RESERVED_REASONS:
                raise ValueError(
                    f"the reason of stage {self.name!r} is no short code of its own. Expected a-z, 0-9 and _, and "
                    f"none of {', '.join(sorted(RESERVED_REASONS))}."
                )
            return result
        unknown = (result.components.keys() | result.reference.keys()) - set(self.components)
        if unknown:
            raise ValueError(
                f"stage {self.name!r} adds {', '.join(sorted(unknown))}. Expected names of its `components`."
            )
        return replace(
            case,
            components={**case.components, **result.components},
            reference_components={**case.reference_components, **result.reference},
        )


COMPONENTS = {
    "judge": "score of the answer by the branch's own rubric, in [0, 1]",
    "margin": "that score less the reference's, in [-1, 1]; missing without a reference",
    "retrieval": "score of the best passage the action found, in [0, 1]; 0 where it found none",
    "right_document": "1: the best passage is one of the row's known documents, 0: it is another; missing without any",
    FORMAT: "1: the completion is a valid action",
}
"""The components that a branch may weigh, beside `judge_<rubric>`, the score by another rubric."""
OTHER_RUBRIC = "judge_"
MAX_WEIGHT = 1e6  # largest weight, and largest reward of an invalid action. Sums stay far from infinity.
MISSING_RULES = ("none", "reweight")  # rules for a completion that lacks a weighed component


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
    missing: str = "none"  # one of `MISSING_RULES`
    invalid_action: float = 0.0  # reward of a completion that is no action, or whose answer is hollow
    stage_components: tuple[str, ...] = ()  # components that stages of your own add, beside `COMPONENTS`

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
            names = (*COMPONENTS, *self.stage_components)
            for component in weights:
                is_rubric = component.startswith(OTHER_RUBRIC) and component != OTHER_RUBRIC
                if component not in names and not is_rubric:
                    raise ConfigError(
                        f"`branch_reward_weights` of branch {branch!r} names {component!r}. Expected one of: "
                        f"{', '.join(names)}, or {OTHER_RUBRIC}<rubric>. For a component of your own add a stage to "
                        "`reward_stages`."
                    )

    @property
    def judged_names(self) -> tuple[str, ...]:
        """The components that a policy has that answers directly, without an action and a search."""
        others = [name for weights in self.weights.values() for name in weights if name.startswith(OTHER_RUBRIC)]
        return tuple(dict.fromkeys(("judge", "margin", REFERENCE, *others, *self.stage_components)))

    def rubrics(self, branch: str) -> dict[str, str]:
        """The judgements a branch needs: component to rubric."""
        weights = self.weights[branch]
        main = {"judge": branch} if {"judge", "margin"} & weights.keys() else {}
        others = {name: name.removeprefix(OTHER_RUBRIC) for name in weights if name.startswith(OTHER_RUBRIC)}
        return {**main, **others}

    def with_stages(self, stages: Sequence[RewardStage]) -> "Scoring":
        """The same law, with the components of these stages. Raises `ConfigError` for a name that is missing, no short
        code, or taken."""
        names: list[str] = [*Stage]
        components = [*COMPONENTS, REFERENCE]
        for stage in stages:
            if not isinstance(stage, RewardStage):
                raise ConfigError(f"a stage of the reward is a {type(stage).__name__}. Expected a `RewardStage`.")
            given = [(getattr(stage, "name", None), names), *((each, components) for each in stage.components)]
            for name, taken in given:
                if not isinstance(name, str) or not _NAME.fullmatch(name) or name in taken:
                    raise ConfigError(
                        f"the stage {type(stage).__name__} names itself or a component {name!r}. Expected lower-case "
                        f"letters, digits and _, 40 at most, and none of {', '.join(taken)}, {OTHER_RUBRIC}*."
                    )
                taken.append(name)
        return replace(self, stage_components=tuple(name for stage in stages for name in stage.components))

    def score(self, case: Case) -> Reward:
        """The reward of an answered action, from what the judge and the stages found."""
        weights, main = self.weights[case.row.branch], case.verdicts.get("judge")
        reference = None if main is None else main.reference
        scores = {name: None if verdict is None else verdict.candidate for name, verdict in case.verdicts.items()}
        judged = {
            "judge": None,
            REFERENCE: reference,
            "margin": None if main is None or reference is None else main.candidate - reference,
            **scores,
        }
        components = self._components(case, case.answer, judged, case.components)
        value = self._combine(weights, components)
        if value is None:
            lacking = next(name for name in weights if components.get(name) is None)
            no_component = "no_reference" if lacking == "margin" else f"no_{lacking}"
            outcome, reason = case.failure or (Outcome.INFRA, no_component)
            return Reward(outcome=outcome, value=None, reason=reason, components=components)
        of_reference: float | None = None
        if case.reference is not None:  # by the same law. Its margin above itself is 0.
            scores = {name: None if verdict is None else verdict.reference for name, verdict in case.verdicts.items()}
            judged = {"judge": None, "margin": None if scores.get("judge") is None else 0.0, **scores}
            of_the_reference = self._components(case, case.reference, judged, case.reference_components)
            of_reference = self._combine(weights, of_the_reference)
        return Reward(outcome=Outcome.OK, value=value, components=components, reference_value=of_reference)

    def score_invalid(self, action: InvalidAction) -> Reward:
        """The reward of a completion that is no action: the policy's own fault, so a real, low number."""
        return Reward(
            outcome=Outcome.INVALID_ACTION, value=self.invalid_action, reason=action.reason, components={"format": 0.0}
        )

    def _components(
        self, case: Case, answer: Answer, judged: Mapping[str, float | None], of_stages: Mapping[str, float | None]
    ) -> dict[str, float | None]:
        of_search, documents, found = dict[str, float | None](), case.row.documents, answer.passages
        if case.action.fields:
            of_search = {
                "retrieval": max((passage.score for passage in found), default=0.0),
                "right_document": float(any(best.text in documents for best in found[:1])) if documents else None,
                FORMAT: 1.0,
            }
        return {**judged, **of_search, **dict.fromkeys(self.stage_components), **of_stages}

    def _combine(self, weights: Mapping[str, float], components: Mapping[str, float | None]) -> float | None:
        present = {name: weight for name, weight in weights.items() if components.get(name) is not None}
        if not present or (self.missing == "none" and len(present) < len(weights)):
            return None
        judged = {name for name in weights if name in ("judge", "margin") or name.startswith(OTHER_RUBRIC)}
        if judged and not judged & present.keys():
            return None
        scale = sum(weights.values()) / sum(present.values())
        return scale * sum(weight * (components[name] or 0.0) for name, weight in present.items())
