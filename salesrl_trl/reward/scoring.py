"""From a verdict to the number GRPO trains on.

Pure: no services, no clock. One combined value per completion, because TRL counts a missing one of several as 0.
"""

from salesrl_trl.types import InvalidAction, Outcome, Reward, Verdict


def score(verdict: Verdict, seconds: dict[str, float]) -> Reward:
    """The reward of a judged action: the judge's score of the candidate.

    The reference's score is kept as a component; it does not enter the value.
    """
    components = {"candidate": verdict.candidate, "reference": verdict.reference}
    return Reward(outcome=Outcome.OK, value=verdict.candidate, components=components, seconds=seconds)


def score_invalid(action: InvalidAction, invalid_action_reward: float) -> Reward:
    """The reward of a completion that is no action: the policy's own fault, so a real, low number."""
    return Reward(outcome=Outcome.INVALID_ACTION, value=invalid_action_reward, reason=action.reason)


def missing(outcome: Outcome, reason: str, seconds: dict[str, float]) -> Reward:
    """No number: a service or the judge failed. Out of the group's baseline, the loss and the reward metrics."""
    return Reward(outcome=outcome, value=None, reason=reason, seconds=seconds)
