"""Errors raised by the package.

Each message states what was found, what was expected and what to do. It never contains keys or customers' texts.
"""

import difflib
from collections.abc import Iterable


class SalesRLError(Exception):
    """Base class of the package's errors."""

    is_resumable = False
    """Whether rerunning the same command resumes the run."""


class ConfigError(SalesRLError, ValueError):
    """A setting, recipe or accelerate configuration is invalid."""


class DataError(SalesRLError, ValueError):
    """A dataset is empty, lacks a column or has an invalid row."""


class ModelNotFoundError(SalesRLError, FileNotFoundError):
    """The policy's path or hub name does not exist."""


class ServiceError(SalesRLError):
    """A RAG service or judge failed.

    Args:
        message (`str`):
            What was found, what was expected and what to do.
        code (`str`, *optional*):
            Short code for metrics and logs, e.g. `"rag_8b_timeout"`. Defaults to the class's code.
    """

    default_code = "service"
    worth_retrying = False
    """Whether retrying the same call may succeed."""

    def __init_subclass__(cls, *, code: str | None = None, worth_retrying: bool | None = None) -> None:
        """Subclasses inherit `code` and `worth_retrying` unless they set them."""
        if code is not None:
            cls.default_code = code
        if worth_retrying is not None:
            cls.worth_retrying = worth_retrying

    def __init__(self, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.code = code or self.default_code
        self.status: int | None = None
        """HTTP status code, if the failure has one."""


class ServiceUnavailable(ServiceError, code="unavailable", worth_retrying=True):
    """Connection refused, host unreachable, or a 5xx response."""


class ServiceOverloaded(ServiceUnavailable, code="overloaded"):
    """The service asks for fewer or later requests (429), after `retry_after_s` seconds if it sent Retry-After."""

    request: int | None = None  # its number in the service's concurrency limit
    is_outage = False
    """Whether the service is down and announced when it will be back, rather than limiting the rate."""

    def __init__(self, message: str, code: str | None = None, *, retry_after_s: float | None = None) -> None:
        super().__init__(message, code)
        self.retry_after_s = retry_after_s


class ServiceTimeout(ServiceError, code="timeout", worth_retrying=True):
    """No complete response before the timeout."""


class DeadlineExceeded(ServiceTimeout, code="deadline", worth_retrying=False):
    """The reward's deadline passed first. Not evidence against the service."""

    @classmethod
    def before_answer_of(cls, service: str) -> "DeadlineExceeded":
        return cls(f"the deadline passed before {service} answered")


class ServiceRejected(ServiceError, code="rejected"):
    """A 4xx that retrying cannot fix: the request, the key or the address is wrong."""

    marks: frozenset[str] = frozenset()
    """The `code`, `type` and `status` from the response body, in lower case."""
    refused: frozenset[str] = frozenset()
    """The request fields that the service reports as unsupported."""


class AccessDenied(ServiceRejected, code="access_denied", worth_retrying=True):
    """The key is rejected or the quota exhausted.

    A single one among successful calls is a glitch worth retrying; after several in a row every call would fail. The
    circuit breaker distinguishes the two.
    """


class BudgetSpent(ServiceError, code="budget_spent"):
    """The request was not sent because the run's budget is spent. Not evidence against the service."""


class FunctionError(ServiceError, code="function_error"):
    """A reward function raised an error or returned an invalid reward. Not evidence against a service."""


class BadServiceResponse(ServiceError, code="bad_response"):
    """The response violates the service's contract."""


class ForeignReply(BadServiceResponse, code="foreign_reply", worth_retrying=True):
    """The response belongs to another request. The connection is closed; a retry on a new one may succeed."""


class ErrorInAnswer(BadServiceResponse, code="error_in_answer", worth_retrying=True):
    """A 200 whose body contains an error instead of an answer."""


class JudgeInvalid(BadServiceResponse, code="invalid_verdict"):
    """The judge's answer does not match the verdict schema."""


class ForeignVerdict(JudgeInvalid, ForeignReply, code="foreign_verdict"):
    """A verdict with another request's nonce. Each retry uses a new nonce."""


class WeightSyncError(SalesRLError, RuntimeError):
    """vLLM samples from weights other than those being trained."""


class DivergedError(SalesRLError, ArithmeticError):
    """The gradient norm or the KL diverged for several log lines in a row."""


class JudgeAlarm(SalesRLError, RuntimeError):
    """The judge's scores drifted, and `judge_meter` is set to end the run."""


class TooFewRewardsError(SalesRLError, RuntimeError):
    """Too few completions could be scored for several steps in a row. A checkpoint was saved. After the last step no
    training is left, so `is_resumable` is `False`."""

    is_resumable = True


class CheckpointError(SalesRLError, OSError):
    """A checkpoint could not be saved, e.g. because the disk is full. Earlier checkpoints are intact."""


class RunStopped(SalesRLError):
    """The run was asked to stop, or an error in a step ended it. A checkpoint was saved if any step was done."""

    is_resumable = True


class StopRequested(KeyboardInterrupt):
    """A signal asked this process to stop. Raised in the main thread at any point."""


def nearest(name: str, known: Iterable[str]) -> str:
    """Text for a message, e.g. `" Did you mean 'branch'?"` with its leading space; empty without a similar name."""
    near = difflib.get_close_matches(name, [*known], n=1, cutoff=0.5)
    return f" Did you mean {near[0]!r}?" if near else ""
