"""What a user would write: stages, judges and reward functions, with nothing but the package's public names."""

import asyncio
import math

from salesrl_trl.errors import BudgetSpent, JudgeInvalid, ServiceError, ServiceRejected
from salesrl_trl.judged.judge import Judge
from salesrl_trl.judged.scoring import Added, Case, Missing, RewardStage
from salesrl_trl.reward.functions import per_completion, per_group
from salesrl_trl.types import InvalidAction, Outcome, Reward, Verdict

LONG = 400
"""Characters of an answer that is not brief."""


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """As one writes it for verl."""
    if solution_str == "number":
        return 0.5
    assert data_source == "sums" and isinstance(extra_info, dict)
    return {"score": float(solution_str == ground_truth), "length": len(solution_str), "answer": solution_str}


class Brevity(RewardStage):
    """Adds a component before the judge, also for the reference."""

    name = "brevity"
    components = ("brevity",)

    async def run(self, case):
        reference = {} if case.reference is None else {"brevity": self.of_text(case.reference.text)}
        return Added(components={"brevity": self.of_text(case.answer.text)}, reference=reference)

    @staticmethod
    def of_text(text):
        return max(0.0, 1 - len(text) / LONG)


class Gate(RewardStage):
    """Refuses by the action's query: `"invalid"` is the policy's fault, `"missing"` nobody's, `"raises"` ours."""

    name = "gate"

    async def run(self, case):
        match case.action.query:
            case "invalid":
                return InvalidAction(reason="gate_closed")
            case "missing":
                return Missing(reason="gate_broken")
            case "raises":
                raise RuntimeError("a customer's words")
            case "unknown component":
                return Added(components={"width": 1.0})
            case "no code":
                return Missing(reason="A customer's words")
        return Added()


class Doubt(RewardStage):
    """Reads the verdict, and what the stages before the judge have found."""

    name = "doubt"
    components = ("doubt", "certainty")
    after_judge = True

    async def run(self, case: Case):
        verdict = case.verdicts["judge"]
        if verdict is None or "unsure" in verdict.reason:
            return Added(components={"doubt": None})
        return Added(components={"doubt": -verdict.candidate, "certainty": case.components.get("brevity")})


class Nameless(RewardStage):
    """Has no name."""

    async def run(self, case):
        return Added()


class SecondJudge(Nameless):
    """Has the name of a stage of the chain."""

    name = "judge"


class Needy(Brevity):
    """Can't be made without an argument."""

    def __init__(self, limit):
        self.limit = limit


class ByLength(Judge):
    """A rule in place of a model. An answer of six words is beyond it."""

    async def judge(self, rubric, row, action, candidate, reference):
        if len(candidate.text.split()) == 6:
            raise JudgeInvalid("no rule for six words", "judge_six_words")
        return Verdict(
            candidate=min(len(candidate.text) / LONG, 1.0),
            reference=None if reference is None else min(len(reference.text) / LONG, 1.0),
            reason=rubric,
        )


class Deaf(Judge):
    """Answers nothing but an error."""

    async def judge(self, rubric, row, action, candidate, reference):
        raise JudgeInvalid("it is deaf", "judge_deaf")


@per_completion
async def shortness(prompt, completion, limit=10):
    """A number, parts and a reason, nothing, and every fault that a function may have."""
    text = completion if isinstance(completion, str) else completion[0]["content"]
    match text:
        case "raises":
            raise ValueError("a customer's words")
        case "exits":
            raise SystemExit("a customer's words")
        case "cancelled inside":
            raise asyncio.CancelledError
        case "no connection":
            raise ConnectionRefusedError("a customer's words")
        case "hangs":
            await asyncio.sleep(60)
        case "nan":
            return math.nan
        case "beyond float32":
            return -1e39
        case "a string":
            return "0.5"
        case "none":
            return None
        case "gone":
            return Reward.missing("judge_busy")
        case "gone with words":
            return Reward.missing("the customer said no")
        case "gone with a word of the package":
            return Reward(outcome=Outcome.INFRA, value=None, reason="budget_spent")
        case "raises a word of the package":
            raise ServiceError("does not apply", "not_applicable")
        case "raises that a budget is spent":
            raise BudgetSpent("says a function")
        case "raises a code of its own":
            raise ServiceRejected("no such model", "my_judge_no_model")
        case "parts":
            return Reward.scored(0.5, reason="brief", brevity=0.75)
    return 1 / len(text) if len(text) <= limit else Reward.missing("too_long")


@per_group
def ranks(prompt, completions):
    """The longest of a group is the best. Not async."""
    order = sorted(completions, key=len)
    return [order.index(each) for each in completions]


def of_trl(completions, answer, **kwargs):
    """A function of TRL's signature, for a batch."""
    kwargs["log_extra"]("asked", kwargs["prompts"])
    kwargs["log_metric"]("mean_length", sum(map(len, completions)) / len(completions))
    return [float(each in text) for each, text in zip(answer, completions, strict=True)]
