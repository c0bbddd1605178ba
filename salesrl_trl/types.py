"""The carriers that travel between the parts: rows, actions, answers, verdicts, rewards.

Owns the vocabulary and nothing else: no parsing, no I/O, standard library only. Everything here is frozen, so a value
may be shared between the trainer's thread and the reward loop's.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class Outcome(StrEnum):
    """How the scoring of one completion ended. Only the first two carry a number."""

    OK = "ok"
    """The services answered and the judge's verdict was valid."""
    INVALID_ACTION = "invalid_action"
    """The policy wrote no valid action, or one that led to a hollow answer: its own fault, so a real, low reward."""
    JUDGE_INVALID = "judge_invalid"
    """The judge answered, but not with a verdict inside the schema. No number."""
    INFRA = "infra"
    """A service failed, timed out or refused. No number."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Message:
    """One turn of a sales conversation: `Message(role="customer", content="And the price?")`."""

    role: str
    """`"customer"` or `"seller"`."""
    content: str
    """What was said."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestIds:
    """Whose conversation it is, for a RAG service that keeps tenants and customers apart."""

    tenant_id: str = ""
    """The seller's organisation: `"t-01"`."""
    contact_id: str = ""
    """The customer."""
    account_id: str = ""
    """The customer's account."""
    message_id: str = ""
    """The conversation's last message."""

    def as_dict(self) -> dict[str, str]:
        """By field name."""
        return {
            "tenant_id": self.tenant_id,
            "contact_id": self.contact_id,
            "account_id": self.account_id,
            "message_id": self.message_id,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class SalesRow:
    """One row of the dataset: a conversation waiting for the seller's next answer."""

    row_id: str
    """Identifies the row in logs and caches: `"train-0007"`."""
    branch: str
    """The KL branch and judge rubric the row belongs to: `"fairness"`."""
    conversation: tuple[Message, ...]
    """Oldest turn first; the last one is the customer's."""
    tenant_id: str = ""
    """The seller's organisation, passed to the RAG service: `"t-01"`."""
    contact_id: str = ""
    """The customer, passed to the RAG service."""
    account_id: str = ""
    """The customer's account, passed to the RAG service."""
    message_id: str = ""
    """The last message, passed to the RAG service."""
    documents: tuple[str, ...] = ()
    """Texts of the documents known to answer the row, shown to the judge. Empty where nobody marked them."""

    @property
    def ids(self) -> RequestIds:
        """The four identifiers that travel with every request."""
        return RequestIds(
            tenant_id=self.tenant_id,
            contact_id=self.contact_id,
            account_id=self.account_id,
            message_id=self.message_id,
        )

    @property
    def context(self) -> str:
        """The conversation as text, a line per turn: `"customer: ...\\nseller: ..."`."""
        return "\n".join(f"{message.role}: {message.content}" for message in self.conversation)


@dataclass(frozen=True, kw_only=True, slots=True)
class ActionFormat:
    """What an action consists of."""

    fields: tuple[str, ...] = ("user_profile", "rewritten_query", "history_summary")
    """The names of its texts, in the order the policy is asked for them. By default what matters about the customer
    (`"office worker, free in the evenings"`), the customer's question, able to stand alone (`"Python data analysis
    price"`), and what was said before (`"asked about Python data analysis"`)."""
    query: str = "rewritten_query"
    """The one that is searched with. It is never empty."""


DEFAULT_FORMAT = ActionFormat()


@dataclass(frozen=True, kw_only=True, slots=True)
class Action:
    """What the policy writes, and what the 8B endpoint answers from."""

    fields: Mapping[str, str]
    """The texts by name: `{"user_profile": "", "rewritten_query": "Python price", "history_summary": ""}`."""
    query_field: str = DEFAULT_FORMAT.query
    """The name of the one that is searched with."""

    @property
    def query(self) -> str:
        """What is searched with."""
        return self.fields[self.query_field]

    @property
    def others(self) -> list[str]:
        """The other texts, in their order."""
        return [text for name, text in self.fields.items() if name != self.query_field]

    def as_dict(self) -> dict[str, str]:
        """By field name, as the policy writes it."""
        return dict(self.fields)


@dataclass(frozen=True, kw_only=True, slots=True)
class InvalidAction:
    """A completion that is no action."""

    reason: str
    """One of `salesrl_trl.reward.parsing.INVALID_REASONS`; never the text itself, which may be a customer's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Passage:
    """One retrieved passage."""

    id: str
    """The document's id in the service's index."""
    text: str
    """The passage."""
    score: float
    """Relevance, normalised by the service to [0, 1]."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What a RAG endpoint answered."""

    text: str
    """The answer for the customer."""
    passages: tuple[Passage, ...]
    """What it was written from, best first."""
    took_ms: float
    """The service's own time, in milliseconds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """What the judge said of one answer and of the reference beside it.

    Raises:
        `ValueError`: for a score that is no number in [0, 1], wherever it comes from.
    """

    candidate: float
    """Score of the answer made from the policy's action, in [0, 1]."""
    reference: float | None
    """Score of the frozen 32B endpoint's answer, in [0, 1]; `None` when there was none to judge."""
    reason: str
    """The judge's words. Free text that may quote the customer: not for logs."""

    def __post_init__(self) -> None:
        scores = (self.candidate,) if self.reference is None else (self.candidate, self.reference)
        if not all(type(score) in (int, float) and 0 <= score <= 1 for score in scores):
            raise ValueError("a verdict's score is no number in [0, 1]")


@dataclass(frozen=True, kw_only=True, slots=True)
class Reward:
    """The end of the chain for one completion.

    Raises:
        `ValueError`: if `value` and `outcome` disagree: a failed call is never a number, and a scored one always is;
            or if a number is infinite or NaN.
    """

    outcome: Outcome
    """How it ended."""
    value: float | None
    """The number for GRPO; `None` for `JUDGE_INVALID` and `INFRA`."""
    reason: str = ""
    """Why there is no verdict, as a short code that is safe in logs and metric names: `"rag_8b_timeout"`."""
    components: Mapping[str, float | None] = field(default_factory=dict)
    """What the value was made of; `None` for a component that could not be had."""
    reference_value: float | None = None
    """What the frozen 32B endpoint's answer to the row would have been worth by the same law; `None` without one."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Wall time of each stage that ran, in seconds: `{"rag_8b": 0.8, "rag_32b": 1.1, "judge": 2.0}`."""

    def __post_init__(self) -> None:
        if (self.value is not None) != (self.outcome in (Outcome.OK, Outcome.INVALID_ACTION)):
            raise ValueError(f"outcome {self.outcome.value!r} does not go with value {self.value!r}")
        numbers = (self.value, self.reference_value, *self.components.values())
        if not all(number is None or math.isfinite(number) for number in numbers):
            raise ValueError("a reward, or a part of it, is no finite number")
