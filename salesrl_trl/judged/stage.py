"""The seam for a stage of one's own: what a completion's reward passes through beside the answers and the judge.

    class Brevity(RewardStage):
        name = "brevity"
        components = ("brevity",)

        async def run(self, case: Case) -> Added:
            return Added(components={"brevity": 1.0 if len(case.answer.text) < 400 else 0.0})

Owns what a stage is given, what it may return, and the check of both. The chain owns the order of stages, the
scoring what a component is worth.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from salesrl_trl.errors import ConfigError
from salesrl_trl.types import (
    RESERVED_REASONS,
    Action,
    Answer,
    InvalidAction,
    Outcome,
    SalesRow,
    Verdict,
)

_NAME = re.compile(r"[a-z][a-z0-9_]{0,39}")
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


Result: TypeAlias = Added | InvalidAction | Missing
"""The results of a stage. `InvalidAction` is the policy's own fault: the reward is `invalid_action_reward`."""


class RewardStage(ABC):
    """A stage of the reward: one class, handed to `SalesReward` as an object, or named by its dotted path in
    `reward_stages`.

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
            `InvalidAction` or `Missing`: stop here, for this reason.
        """

    async def aclose(self) -> None:  # noqa: B027  for those that have something to close
        """Close what belongs to the running event loop."""

    def of(self, case: Case, result: Result) -> Case | InvalidAction | Missing:
        """The case with what the stage found, or its refusal. Raises `ValueError` for a component that the stage does
        not name, and for a reason that is no short code."""
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


def check_stages(stages: Sequence[RewardStage], taken: Sequence[str], known: Sequence[str]) -> None:
    """Raise `ConfigError` for a name that is missing, no short code, or one of the chain's own: `taken` are those of
    its stages, `known` those of its components."""
    names, components = [*taken], [*known]
    for stage in stages:
        if not isinstance(stage, RewardStage):
            raise ConfigError(f"a stage of the reward is a {type(stage).__name__}. Expected a `RewardStage`.")
        _check_name(f"the stage {type(stage).__name__}", getattr(stage, "name", None), names)
        names.append(stage.name)
        for component in stage.components:
            _check_name(f"a component of stage {stage.name!r}", component, components)
            components.append(component)


def _check_name(what: str, name: object, taken: Sequence[str]) -> None:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ConfigError(f"{what} is named {name!r}. Expected lower-case letters, digits and _, 40 at most.")
    if name in taken or name.startswith("judge_"):
        raise ConfigError(f"{what} is named {name!r}, a name that is taken. Taken: {', '.join(taken)}, judge_*.")
