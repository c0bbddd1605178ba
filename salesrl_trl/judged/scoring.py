"""Combines components into the reward for GRPO and defines the interface of custom stages. Pure: no services or clock.

Each completion gets one combined value, because TRL counts a `None` among several reward functions as 0, which would
make a completion without a judge's score the worst of its group.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from salesrl_trl import types
from salesrl_trl.errors import ConfigError
from salesrl_trl.names import Stage
from salesrl_trl.types import Action, Answer, InvalidAction, Outcome, Reward, SalesRow, Verdict

_NAME = re.compile(r"(?!judge_)[a-z][a-z0-9_]{0,39}")
_REASON = re.compile(r"[a-z][a-z0-9_]{0,63}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """An answered valid action, on its way to a reward."""

    row: SalesRow
    """The conversation, its branch and the documents known to answer it."""
    action: Action
    """The policy's action."""
    answer: Answer
    """The 8B endpoint's answer to the action."""
    reference: Answer | None
    """The 32B endpoint's answer to the row; `None` if not needed or not available."""
    verdicts: Mapping[str, Verdict | None] = field(default_factory=dict)
    """Verdicts by component (`"judge"`, `"judge_<rubric>"`); `None` for a failed one. Empty before the judge."""
    failure: tuple[Outcome, str] | None = None
    """Outcome and reason code of the first failed verdict."""
    components: Mapping[str, float | None] = field(default_factory=dict)
    """Components from earlier stages for this answer."""
    reference_components: Mapping[str, float | None] = field(default_factory=dict)
    """Components from earlier stages for the reference answer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Added:
    """The components that a stage adds. A component is undefined if it is `None` or absent."""

    components: Mapping[str, float | None] = field(default_factory=dict)
    """Components of the answer: `{"brevity": 1.0}`."""
    reference: Mapping[str, float | None] = field(default_factory=dict)
    """Components of the reference answer, required by a hybrid baseline if a branch weighs them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Missing:
    """The completion can't be scored: it is excluded from the baseline and the loss, and counted by its reason."""

    reason: str
    """A short code for logs and metric names: `"brevity_no_tokenizer"`. It must not quote a customer."""


Result: TypeAlias = Added | InvalidAction | Missing  # a stage's result


class RewardStage(ABC):
    """A custom reward stage. Pass an object to `SalesReward`, or name its dotted path in `reward_stages`.

        class Brevity(RewardStage):
            name = "brevity"
            components = ("brevity",)

            async def run(self, case: Case) -> Added:
                return Added(components={"brevity": 1.0 if len(case.answer.text) < 400 else 0.0})

    One object serves all completions concurrently on one event loop. Run blocking work in `asyncio.to_thread`. The
    object must be picklable, because the reward may run in its own process. The completion's deadline
    (`reward_deadline_s`) covers the stage.

    If it raises `ServiceError`, the completion is unscored with the error's code. Any other error is a bug: the
    completion is unscored too, and the error is logged once.
    """

    name: str
    """For metrics, spans and logs: `time/<name>_p50_s`. Lower-case letters, digits and `_`. Constant after
    construction, so that every process logs the same metrics."""
    components: Sequence[str] = ()
    """The components that it may add, for `branch_reward_weights`."""
    after_judge: bool = False
    """Whether it runs after the judge. Before the judge it sees no verdicts, and cases it rejects are not judged."""

    @abstractmethod
    async def run(self, case: Case) -> Result:
        """Process a case, which holds all results so far.

        Returns:
            `Added`: continue, optionally with further components.
            `InvalidAction`: stop. The policy is at fault, so the reward is `invalid_action_reward`.
            `Missing`: stop without a reward.
        """

    async def aclose(self) -> None:  # noqa: B027  for those that have something to close
        """Close the running event loop's resources."""

    def of(self, case: Case, result: Result) -> Case | InvalidAction | Missing:
        """Apply the stage's result to the case. Raises `ValueError` for undeclared names or reasons."""
        if not isinstance(result, Added):
            if not _REASON.fullmatch(result.reason) or result.reason in types.RESERVED_REASONS:
                raise ValueError(
                    f"stage {self.name!r} returned an invalid reason. Expected a-z, 0-9 and _, and none of "
                    f"{', '.join(sorted(types.RESERVED_REASONS))}."
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
    "margin": "that score minus the reference's, in [-1, 1]; undefined without a reference",
    "retrieval": "score of the best passage the action found, in [0, 1]; 0 without passages",
    "right_document": "1 if the best passage is one of the row's known documents, else 0; undefined without documents",
    types.FORMAT: "1: the completion is a valid action",
}
"""The components a branch may weigh, in addition to `judge_<rubric>`, the score by another rubric."""
OTHER_RUBRIC = "judge_"
MAX_WEIGHT = 1e6  # largest weight and largest reward of an invalid action, far from overflow
MISSING_RULES = ("none", "reweight")  # rules for a completion that lacks a weighted component


@dataclass(frozen=True, kw_only=True, slots=True)
class Scoring:
    """Combines components into the reward.

        value = sum over components c of w_c * c

    If a component is undefined, e.g. after a judge's failure or without a reference, the completion is unscored
    (`"none"`), or the others replace it (`"reweight"`) at the same scale:

        value = (sum of all w) / (sum of w of defined c) * sum over defined c of w_c * c

    A completion without any of its branch's verdicts is always unscored: a dead judge must not be the best score.
    """

    weights: Mapping[str, Mapping[str, float]]
    """Branch to component to weight: `{"fairness": {"judge": 0.8, "margin": 0.2}}`."""
    missing: str = "none"  # one of `MISSING_RULES`
    invalid_action: float = 0.0  # reward of an invalid action or a hollow answer
    stage_components: tuple[str, ...] = ()  # components from custom stages

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
        """The components of a policy that answers directly, without action and search."""
        others = [name for weights in self.weights.values() for name in weights if name.startswith(OTHER_RUBRIC)]
        return tuple(dict.fromkeys(("judge", "margin", types.REFERENCE, *others, *self.stage_components)))

    def rubrics(self, branch: str) -> dict[str, str]:
        """The verdicts a branch needs: component -> rubric."""
        weights = self.weights[branch]
        main = {"judge": branch} if {"judge", "margin"} & weights.keys() else {}
        others = {name: name.removeprefix(OTHER_RUBRIC) for name in weights if name.startswith(OTHER_RUBRIC)}
        return {**main, **others}

    def with_stages(self, stages: Sequence[RewardStage]) -> "Scoring":
        """Add these stages' components. Raises `ConfigError` for an absent, malformed or duplicate name."""
        names: list[str] = [*Stage]
        components = [*COMPONENTS, types.REFERENCE]
        for stage in stages:
            if not isinstance(stage, RewardStage):
                raise ConfigError(f"a stage of the reward is a {type(stage).__name__}. Expected a `RewardStage`.")
            given = [(getattr(stage, "name", None), names), *((each, components) for each in stage.components)]
            for name, taken in given:
                if not isinstance(name, str) or not _NAME.fullmatch(name) or name in taken:
                    raise ConfigError(
                        f"the stage {type(stage).__name__} has the name or a component {name!r}. Expected lower-case "
                        f"letters, digits and _, 40 at most, and none of {', '.join(taken)}, {OTHER_RUBRIC}*."
                    )
                taken.append(name)
        return replace(self, stage_components=tuple(name for stage in stages for name in stage.components))

    def score(self, case: Case) -> Reward:
        """The reward of an answered action, from verdicts and stage components."""
        weights, main = self.weights[case.row.branch], case.verdicts.get("judge")
        reference = None if main is None else main.reference
        scores = {name: None if verdict is None else verdict.candidate for name, verdict in case.verdicts.items()}
        judged = {
            "judge": None,
            types.REFERENCE: reference,
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
        if case.reference is not None:  # scored the same way; its margin over itself is 0
            scores = {name: None if verdict is None else verdict.reference for name, verdict in case.verdicts.items()}
            judged = {"judge": None, "margin": None if scores.get("judge") is None else 0.0, **scores}
            of_the_reference = self._components(case, case.reference, judged, case.reference_components)
            of_reference = self._combine(weights, of_the_reference)
        return Reward(outcome=Outcome.OK, value=value, components=components, reference_value=of_reference)

    def score_invalid(self, action: InvalidAction) -> Reward:
        """The reward of an invalid action: the policy's fault, hence a real, low number."""
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
                types.FORMAT: 1.0,
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
