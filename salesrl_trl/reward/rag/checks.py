"""The checks of an answer or a verdict from a service, and the stricter ones of a kept one.

Each check raises a `ServiceError` for what it refuses. Pure: no services, no clock.
"""

from salesrl_trl.errors import BadServiceResponse, JudgeInvalid
from salesrl_trl.reward.empty_answers import is_hollow
from salesrl_trl.types import Answer, Verdict


def check_8b(answer: Answer) -> None:
    """Refuse an empty text beside passages. The service is at fault, not the policy."""
    if answer.passages and not answer.text.strip():
        raise BadServiceResponse("rag_8b found passages and answered nothing", code="rag_8b_empty_answer")


def check_32b(answer: Answer) -> None:
    """Refuse a reference that says nothing."""
    if is_hollow(answer.text):
        raise BadServiceResponse("rag_32b's answer says nothing", code="rag_32b_hollow_answer")


def check_passages(answer: Answer) -> None:
    """Refuse to keep an answer without passages. A busy service or an index that is being loaded may answer so."""
    if not answer.passages:
        raise BadServiceResponse("an answer from no passages", code="rag_no_passages")


def check_kept_8b(answer: Answer) -> None:
    """Refuse to keep an 8B answer without passages or text."""
    check_passages(answer)
    check_8b(answer)


def check_kept_32b(answer: Answer) -> None:
    """Refuse to keep a 32B answer without passages, or one that says nothing."""
    check_passages(answer)
    check_32b(answer)


def check_verdict(expect_reference: bool, verdict: Verdict) -> None:
    """Refuse a verdict that scores a reference where there was none, or lacks the score of one."""
    if (verdict.reference is not None) != expect_reference:
        raise JudgeInvalid("the verdict is of other material", code="judge_no_reference")
