"""What a user would write: stages, judges and a reward, with nothing but the package's public names."""

from salesrl_trl.errors import JudgeInvalid
from salesrl_trl.reward.base import BatchedReward
from salesrl_trl.reward.judge.base import Judge
from salesrl_trl.reward.scoring import missing
from salesrl_trl.reward.stage import Added, Case, Missing, RewardStage
from salesrl_trl.types import InvalidAction, Outcome, Reward, Verdict

LONG = 400
"""Characters of an answer that is not brief."""


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


class Shortness(BatchedReward):
    """A reward of its own, without services."""

    async def score(self, index, completion, stages):
        length = await stages.timed(self.length_of(completion), "count")
        if length > 10:
            return missing(Outcome.INFRA, "too_long", stages.seconds)
        return Reward(outcome=Outcome.OK, value=1 / length, seconds=stages.seconds)

    def branch_of(self, index):
        return "fairness"

    async def length_of(self, completion):
        if completion == "raises":
            raise ValueError("a customer's words")
        return len(completion)
