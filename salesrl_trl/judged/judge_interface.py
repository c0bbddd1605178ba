"""The seam for a judge: one class with one method scores answers, whatever it asks. It is handed to `SalesReward` as
an object, or named by its dotted path in the setting `judge_providers`:

    class Shortest(Judge):
        async def judge(self, rubric, row, action, candidate, reference):
            score = 1 / (1 + len(candidate.text) / 400)
            return Verdict(candidate=score, reference=None if reference is None else 0.5, reason="by length")
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TypeAlias

from salesrl_trl.errors import JudgeInvalid, ServiceError
from salesrl_trl.judged.cache import cache_key
from salesrl_trl.service.event_loop import seconds_or_error
from salesrl_trl.service.transport import Transport
from salesrl_trl.types import Action, Answer, JudgeRecord, ProviderUsage, SalesRow, Verdict

Candidates: TypeAlias = Sequence[tuple[Action, Answer]]  # answers to score, and what the policy wrote for each


class Judge(ABC):
    """Scores answers. Only `judge` has to be written. One with `orders` has `judge_group` too.

    One object serves all completions, many at a time, on one event loop. Work that blocks, such as a model on this
    machine, belongs into `asyncio.to_thread`. The object must be picklable, because the reward may run in a process of
    its own. So load a model at the first call, not at construction.
    """

    orders: int = 0  # calls for the completions of a prompt together; 0: each completion is judged alone
    provider_names: tuple[str, ...] = ()
    """Everything with usage of its own, in a fixed order."""
    transports: Mapping[str, Transport] = MappingProxyType({})
    """Everything with traffic of its own, by service name. Their requests count in the run's budget."""

    async def judge_group(
        self, rubric: str, row: SalesRow, candidates: Candidates, reference: Answer | None
    ) -> Sequence[Verdict]:
        """Score several candidates to one row together, each with the reference beside it: as `judge`, a verdict for
        each candidate. Where it raises a `ServiceError` they are judged one by one, in the time that is left."""
        raise NotImplementedError(f"{type(self).__name__} has `orders`. Expected a method `judge_group`.")

    @abstractmethod
    async def judge(
        self, rubric: str, row: SalesRow, action: Action, candidate: Answer, reference: Answer | None
    ) -> Verdict:
        """Score the candidate and, beside it, the reference.

        Args:
            rubric (`str`):
                What to judge by: the branch's name, or `<rubric>` of a component `judge_<rubric>`.
            row (`SalesRow`):
                The conversation, its branch and the documents known to answer it.
            action (`Action`):
                What the policy wrote.
            candidate (`Answer`):
                The 8B endpoint's answer to the action.
            reference (`Answer`, *optional*):
                The 32B endpoint's answer, where there is one. It has a score exactly where it is there.

        Raises:
            `JudgeInvalid`: answers that are no verdict.
            `ServiceError`: no answer.
        """

    def identity(self, rubric: str) -> str:
        """A hash of everything that decides a verdict beside the material, for cache keys. No credential. By default
        the class and the rubric's name: one whose verdicts depend on more, such as a model's file, adds it."""
        return cache_key("judge", *self.places.values(), rubric)

    @property
    def places(self) -> Mapping[str, str]:
        """The model and address of each service, by its name, for messages. Reason codes begin with that name."""
        return {"judge": f"{type(self).__module__}.{type(self).__qualname__}"}

    def drain_usage(self) -> dict[str, ProviderUsage]:
        """Usage by provider, since the last time."""
        return {}

    def drain_records(self) -> Sequence[JudgeRecord]:
        """Every valid verdict since the last time."""
        return ()

    async def warm_up(self, row: SalesRow, action: Action, answer: Answer) -> Mapping[str, float | ServiceError]:
        """Ask for one verdict. Returns by service name the seconds it took, or what went wrong."""
        asked = await seconds_or_error(lambda: self.judge(row.branch, row, action, answer, answer))
        return dict.fromkeys(self.places, asked)

    async def aclose(self) -> None:  # noqa: B027  for those that have something to close
        """Close what belongs to the running event loop. The next call opens it again."""


async def judged(
    judge: Judge, rubric: str, row: SalesRow, candidates: Candidates, reference: Answer | None
) -> Sequence[Verdict]:
    """The verdicts on one alone, or on several together. Raises as `Judge.judge` does."""
    if len(candidates) > 1:
        verdicts = await judge.judge_group(rubric, row, candidates, reference)
    else:
        verdicts = [await judge.judge(rubric, row, *candidates[0], reference)]
    check_verdicts(len(candidates), reference is not None, verdicts)
    return verdicts


def check_verdicts(count: int, expect_reference: bool, verdicts: Sequence[Verdict]) -> None:
    if len(verdicts) != count:
        raise JudgeInvalid(f"{len(verdicts)} verdicts on {count} candidates", code="judge_wrong_candidates")
    if any((verdict.reference is not None) != expect_reference for verdict in verdicts):
        raise JudgeInvalid("the verdict is of other material", code="judge_no_reference")
