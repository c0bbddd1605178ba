"""The errors that this package raises on purpose.

A message says what was found, what was expected, and what to do. It never contains a key or a customer's text.
"""

import difflib
from collections.abc import Iterable


class SalesRLError(Exception):
    """Base of every error this package raises on purpose."""

    is_resumable = False
    """Whether the same command goes on where the run ended."""


class ConfigError(SalesRLError, ValueError):
    """A setting, recipe or accelerate configuration that cannot work."""


class DataError(SalesRLError, ValueError):
    """A dataset that is empty, lacks a column or holds a bad row."""


class ModelNotFoundError(SalesRLError, FileNotFoundError):
    """The policy's path or hub name does not exist."""


class ServiceError(SalesRLError):
    """A RAG service or judge failed.

    Args:
        message (`str`):
            What was found, what was expected, and what to do.
        code (`str`, *optional*):
            Short code for metrics and logs, for example `"rag_8b_timeout"`. Defaults to the code of the class.
    """

    default_code = "service"
    worth_retrying = False
    """Whether the same call may succeed the next time."""

    def __init_subclass__(cls, *, code: str | None = None, worth_retrying: bool | None = None) -> None:
        """A subclass without a code, or a word on retries, has those of its base."""
        if code is not None:
            cls.default_code = code
        if worth_retrying is not None:
            cls.worth_retrying = worth_retrying

    def __init__(self, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.code = code or self.default_code
        self.status: int | None = None
        """Status of the HTTP answer, if this was the failure."""


class ServiceUnavailable(ServiceError, code="unavailable", worth_retrying=True):
    """Refused, unreachable or 5xx."""


class ServiceOverloaded(ServiceUnavailable, code="overloaded"):
    """The service asks for fewer or later calls: after `retry_after_s` seconds, if it said so."""

    request: int | None = None  # its number in the limit of the service
    is_outage = False
    """Whether the service is down and says when it expects to be back. If not, it limits calls."""

    def __init__(self, message: str, code: str | None = None, *, retry_after_s: float | None = None) -> None:
        super().__init__(message, code)
        self.retry_after_s = retry_after_s


class ServiceTimeout(ServiceError, code="timeout", worth_retrying=True):
    """No complete answer in time."""


class DeadlineExceeded(ServiceTimeout, code="deadline", worth_retrying=False):
    """The deadline of the reward came first. This says nothing about the service."""

    @classmethod
    def before_answer_of(cls, service: str) -> "DeadlineExceeded":
        return cls(f"the deadline came before {service}'s answer")


class ServiceRejected(ServiceError, code="rejected"):
    """A 4xx that a retry does not repair: the request, the key or the address is wrong."""

    marks: frozenset[str] = frozenset()
    """The `code`, `type` and `status` that its body states, in lower case."""
    refused: frozenset[str] = frozenset()
    """The request's fields that the service does not take, by its own words."""


class AccessDenied(ServiceRejected, code="access_denied", worth_retrying=True):
    """The key is refused or the quota is used up.

    A single one between answers is a mistake of the service, and a retry may succeed. With several in a row, every
    call will fail alike. The breaker decides which case it is.
    """


class BudgetSpent(ServiceError, code="budget_spent"):
    """The request was not sent, as a limit of the run's spending is reached. This says nothing about a service."""


class FunctionError(ServiceError, code="function_error"):
    """A reward function raised an error, or returned what is no reward. This says nothing about a service."""


class BadServiceResponse(ServiceError, code="bad_response"):
    """An answer that breaks the service's contract."""


class ForeignReply(BadServiceResponse, code="foreign_reply", worth_retrying=True):
    """Not, or not only, the reply to this request. Its connection is closed. A retry on another one may succeed."""


class ErrorInAnswer(BadServiceResponse, code="error_in_answer", worth_retrying=True):
    """A 200 whose content says that it is an error. The rest of its content is no answer."""


class JudgeInvalid(BadServiceResponse, code="invalid_verdict"):
    """The judge's answer is no verdict of the schema."""


class ForeignVerdict(JudgeInvalid, ForeignReply, code="foreign_verdict"):
    """A verdict with the nonce of another request. A retry has its own nonce."""


class WeightSyncError(SalesRLError, RuntimeError):
    """vLLM samples from other weights than the ones in training."""


class DivergedError(SalesRLError, ArithmeticError):
    """Gradients or the KL are no usable numbers any more, several log lines in a row."""


class JudgeAlarm(SalesRLError, RuntimeError):
    """The judge's score does not mean any more what it meant, and `judge_meter` ends the run then."""


class TooFewRewardsError(SalesRLError, RuntimeError):
    """Too few completions could be scored, several steps in a row. The run has saved its state. After its last
    step the same command would learn nothing more, and `is_resumable` is `False`."""

    is_resumable = True


class CheckpointError(SalesRLError, OSError):
    """A checkpoint could not be saved, for example on a full disk. The ones before it are whole."""


class RunStopped(SalesRLError):
    """The run was told to stop, or an error in a step stopped it. Its state is saved, or there is none yet."""

    is_resumable = True


class StopRequested(KeyboardInterrupt):
    """A signal asks this process to stop. Raised in its main thread, wherever it is."""


def nearest(name: str, known: Iterable[str]) -> str:
    """For a message: `" Did you mean 'branch'?"`, with the space before it; empty if no known name is near."""
    near = difflib.get_close_matches(name, [*known], n=1, cutoff=0.5)
    return f" Did you mean {near[0]!r}?" if near else ""
