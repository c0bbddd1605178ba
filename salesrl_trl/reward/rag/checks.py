"""What is no answer, whether it comes off the wire or out of a cache, and what is an answer but not to be kept.

Each check raises for what it refuses. Pure: no services, no clock.
"""

from salesrl_trl.errors import BadServiceResponse, JudgeInvalid
from salesrl_trl.reward.empty_answers import is_hollow
from salesrl_trl.types import Answer, Verdict


def check_8b(answer: Answer) -> None:
    """One that is empty although passages were found is the service's fault, not the policy's."""
    if answer.passages and not answer.text.strip():
        raise BadServiceResponse("rag_8b found passages and answered nothing", code="rag_8b_empty_answer")


def check_32b(answer: Answer) -> None:
    """A reference that says nothing is none."""
    if is_hollow(answer.text):
        raise BadServiceResponse("rag_32b's answer says nothing", code="rag_32b_hollow_answer")


def check_passages(answer: Answer) -> None:
    """One without passages is not kept: it may be how a busy service answers, or an index that is being loaded."""
    if not answer.passages:
        raise BadServiceResponse("an answer from no passages", code="rag_no_passages")


def check_kept_8b(answer: Answer) -> None:
    """What an 8B answer has to be to be kept."""
    check_passages(answer)
    check_8b(answer)


def check_kept_32b(answer: Answer) -> None:
    """What a 32B answer has to be to be kept."""
    check_passages(answer)
    check_32b(answer)


def check_verdict(expect_reference: bool, verdict: Verdict) -> None:
    """It scores the reference where there is one, and only there."""
    if (verdict.reference is not None) != expect_reference:
        raise JudgeInvalid("the verdict is of other material", code="judge_no_reference")
