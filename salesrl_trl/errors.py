"""Everything this package raises on purpose.

    SalesRLError
    ├── ConfigError            a setting, recipe or accelerate configuration that cannot work
    ├── DataError              a dataset that is empty, lacks a column or holds a bad row
    ├── ModelNotFoundError     the policy's path or hub name leads nowhere
    ├── ServiceError           a RAG service or judge did not do its part
    │   ├── ServiceUnavailable     refused, unreachable, 5xx
    │   │   └── ServiceOverloaded      429, or an error that says when to come back
    │   ├── ServiceTimeout         no complete answer in time
    │   │   └── DeadlineExceeded       the reward phase's own deadline came first
    │   ├── ServiceRejected        4xx that no retry will mend
    │   │   └── AccessDenied           key refused or quota used up; a lone one is asked again
    │   └── BadServiceResponse     an answer outside its contract
    │       ├── ForeignReply           not, or not only, the reply to this request
    │       ├── ErrorInAnswer          a 200 that says of itself that it is an error
    │       └── JudgeInvalid           a verdict outside its schema
    │           └── ForeignVerdict         with another request's nonce; a ForeignReply too
    ├── WeightSyncError        vLLM samples from other weights than the ones in training
    ├── TooFewRewardsError     too few completions could be scored, several steps in a row
    └── RunStopped             the run was told to stop, and has saved its state

A message says what was got, what was expected, and what to do. It never holds a key or a customer's text.
"""


class SalesRLError(Exception):
    """Base of every error this package raises on purpose."""


class ConfigError(SalesRLError, ValueError):
    """A setting, recipe or accelerate configuration that cannot work."""


class DataError(SalesRLError, ValueError):
    """A dataset that is empty, lacks a column or holds a bad row."""


class ModelNotFoundError(SalesRLError, FileNotFoundError):
    """The policy's path or hub name leads nowhere."""


class ServiceError(SalesRLError):
    """A RAG service or judge did not do its part.

    Args:
        message (`str`):
            What was got, what was expected, what to do.
        code (`str`, *optional*):
            Short code for metrics and logs, for example `"rag_8b_timeout"`. Defaults to the class's own.
    """

    default_code = "service"
    worth_retrying = False
    """Whether the same call may go well the next time."""

    def __init__(self, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.code = code or self.default_code
        self.out_of_time = False
        """Only the deadline kept the call from being tried again: somebody with more time may."""
        self.status: int | None = None
        """Of the HTTP answer, where it was what went wrong."""


class ServiceUnavailable(ServiceError):
    """Refused, unreachable or 5xx."""

    default_code = "unavailable"
    worth_retrying = True


class ServiceOverloaded(ServiceUnavailable):
    """Wants fewer or later calls. `retry_after_s` is its own wish in seconds, if it had one."""

    default_code = "overloaded"
    retry_after_s: float | None = None
    is_outage = False
    """Whether it is no limit on calls that speaks but a service that is down and says when it hopes to be back."""


class ServiceTimeout(ServiceError):
    """No complete answer in time."""

    default_code = "timeout"
    worth_retrying = True


class DeadlineExceeded(ServiceTimeout):
    """The reward phase's own deadline came first: says nothing about the service."""

    default_code = "deadline"
    worth_retrying = False


class ServiceRejected(ServiceError):
    """A 4xx that no retry will mend: the request, the key or the address is wrong."""

    default_code = "rejected"


class AccessDenied(ServiceRejected):
    """The key is refused or the quota is used up. One among answers is a slip of the service, which a retry may mend;
    several in a row are meant, and every other call will meet the same: the breaker tells."""

    default_code = "access_denied"
    worth_retrying = True


class BadServiceResponse(ServiceError):
    """An answer outside the service's contract."""

    default_code = "bad_response"


class ForeignReply(BadServiceResponse):
    """Not, or not only, the reply to this request. Its connection is closed; on another one a retry may mend it."""

    default_code = "foreign_reply"
    worth_retrying = True


class ErrorInAnswer(BadServiceResponse):
    """A 200 that says of itself that it is an error. Whatever else it holds is no answer."""

    default_code = "error_in_answer"
    worth_retrying = True


class JudgeInvalid(BadServiceResponse):
    """The judge answered, but not with a verdict inside the schema."""

    default_code = "invalid_verdict"


class ForeignVerdict(JudgeInvalid, ForeignReply):
    """A verdict with another request's nonce. A retry has a nonce of its own."""

    default_code = "foreign_verdict"


class WeightSyncError(SalesRLError, RuntimeError):
    """vLLM samples from other weights than the ones in training."""


class TooFewRewardsError(SalesRLError, RuntimeError):
    """Too few completions could be scored, several steps in a row."""


class RunStopped(SalesRLError):
    """The run was told to stop, for example by SIGTERM, and has saved its state."""
