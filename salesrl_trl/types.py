"""Values exchanged between packages: rows, actions, answers, verdicts, rewards. Standard library only. They are frozen
so that the trainer's thread and the reward's event loop can share them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

NOT_APPLICABLE = "not_applicable"
"""Reason code for a completion to which a function returned `None`."""
RESERVED_REASONS = frozenset({"budget_spent", "deadline", "no_passages", NOT_APPLICABLE})
"""Reason codes with a special meaning in the package; user code may not use them."""


FORMAT = "format"  # component: 1 if the action is valid
REFERENCE = "reference"
"""Component: the reference's score by the branch's rubric. Logged but never weighted."""


class Outcome(StrEnum):
    """How scoring a completion ended. Only the first two yield a number."""

    OK = "ok"
    """The services answered and the judge returned a valid verdict."""
    INVALID_ACTION = "invalid_action"
    """The action is invalid or its answer is empty. This is the policy's fault, so the low reward counts."""
    JUDGE_INVALID = "judge_invalid"
    """The judge's answer did not match the schema. Unscored."""
    INFRA = "infra"
    """A service failed, timed out or rejected the request. Unscored."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Message:
    """One turn of a sales conversation: `Message(role="customer", content="And the price?")`."""

    role: str
    """`"customer"` or `"seller"`."""
    content: str


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestIds:
    """The owners of a conversation, for RAG services that separate tenants and customers."""

    tenant_id: str = ""
    """The seller's organisation: `"t-01"`."""
    contact_id: str = ""
    """The customer."""
    account_id: str = ""
    """The customer's account."""
    message_id: str = ""
    """The conversation's last message."""

    def as_dict(self) -> dict[str, str]:
        return {name: getattr(self, name) for name in RequestIds.__slots__}


@dataclass(frozen=True, kw_only=True, slots=True)
class Picture:
    """An image in a row: a file or its content."""

    path: str = ""
    """The file: `"/data/images/0001.png"`. Empty if the dataset holds the content."""
    content: bytes | None = None
    """The content of a PNG, JPEG or other format supported by Pillow."""


Prompt: TypeAlias = str | list[dict[str, Any]]
"""The policy's prompt in TRL's format: a text, used verbatim, or messages for the model's chat template."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Criterion:
    """A requirement for a good answer to a row: `Criterion(text="names the price", weight=2.0)`. Raises `ValueError`
    unless it has a text and a weight above 0."""

    text: str
    """The requirement, in the judge's language."""
    weight: float = 1.0
    """Its share of the score, relative to the row's other criteria."""
    name: str = ""
    """Its name in metrics: `rewards/judge/<name>`. An unnamed criterion's score is only recorded."""

    def __post_init__(self) -> None:
        if not isinstance(self.text, str) or not self.text.strip() or not isinstance(self.name, str):
            raise ValueError("a criterion lacks its text")
        if not (type(self.weight) in (int, float) and 0 < self.weight < math.inf):
            raise ValueError("a criterion's weight is not a number above 0")


@dataclass(frozen=True, kw_only=True, slots=True)
class SalesRow(RequestIds):
    """A dataset row: a prompt, or a sales conversation awaiting the seller's next answer, with its owners. Raises
    `ValueError` for a row with neither."""

    row_id: str
    """Identifies the row in logs and caches: `"train-0007"`."""
    branch: str
    """The branch (rubric, metrics and KL coefficient) the row belongs to: `"fairness"`."""
    conversation: tuple[Message, ...] = ()
    """Oldest turn first; the last turn is the customer's. Empty for a row with a prompt."""
    prompt: Prompt | None = field(default=None, compare=False)
    """The row's own prompt. `None` if a template builds it from the conversation."""
    documents: tuple[str, ...] = ()
    """Texts of documents known to answer the row, shown to the judge. Empty if none are labelled."""
    images: tuple[Picture, ...] = ()
    """Images shown to the policy before the conversation. Services and the judge only see text."""
    criteria: tuple[Criterion, ...] = ()
    """Criteria that the judge scores one by one instead of the whole answer. May be empty."""
    columns: Mapping[str, Any] = field(default_factory=dict, compare=False)
    """Additional dataset columns, for reward functions."""
    line: int | None = field(default=None, compare=False)
    """Its line number in a file of lines, for messages."""

    def __post_init__(self) -> None:
        if self.prompt is None and not self.conversation:
            raise ValueError(f"row {self.row_id!r} has neither a prompt nor a conversation")

    @property
    def ids(self) -> RequestIds:
        """The four identifiers sent with every request."""
        return RequestIds(**self.as_dict())

    @property
    def context(self) -> str:
        """The conversation as text, a line per turn: `"customer: ...\\nseller: ..."`; else the prompt."""
        if self.conversation or self.prompt is None:
            return "\n".join(f"{message.role}: {message.content}" for message in self.conversation)
        if isinstance(self.prompt, str):
            return self.prompt
        lines = []
        for message in self.prompt:
            content = message.get("content")
            parts: list[Example] = content if isinstance(content, list) else [{"text": content}]  # pictures have none
            lines.append(f"{message['role']}: {' '.join(part['text'] for part in parts if part.get('text'))}")
        return "\n".join(lines)


Example: TypeAlias = Mapping[str, Any]
"""A dataset row inside the trainer: `prompt`, optionally `images`, and any other columns."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ActionFormat:
    """The fields of an action."""

    fields: tuple[str, ...] = ("user_profile", "rewritten_query", "history_summary")
    """Names of its texts, in prompt order. By default:

    - relevant facts about the customer: `"office worker, free in the evenings"`;
    - the customer's question, understandable without context: `"Python data analysis price"`;
    - a summary of the conversation so far: `"asked about Python data analysis"`.
    """
    query: str = "rewritten_query"
    """The field with the search query, which must not be empty."""


DEFAULT_FORMAT = ActionFormat()
SALES = "sales"
"""The built-in reward pipeline, as named in `reward_funcs`."""
JUDGE = "judge"
"""The built-in judge for policies that answer directly, as named in `reward_funcs`; also a judge's service name."""
SEARCH = "search"
"""The built-in tool that queries the RAG service, as named in `tools`."""
MCP = "mcp:"  # begins an entry of `tools` that names an MCP server
CUSTOMER, SELLER = "customer", "seller"
"""The built-in partner, as named in `partner`, and the policy, as named in conversations."""
AGREEMENT, REFUSAL, LENGTH = "agreement", "refusal", "length"
"""How a conversation with a partner ends; `length` is neither of the partner's two."""
ALL = "all"
"""The only branch if neither the settings nor the dataset define branches."""
DEFAULT_BRANCHES = ("fairness", "hallucination")
"""Branches of a recipe that defines none: those of the built-in demo."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Action:
    """The policy's output, from which the 8B endpoint answers."""

    fields: Mapping[str, str]
    """The texts by name: `{"user_profile": "", "rewritten_query": "Python price", "history_summary": ""}`."""
    query_field: str = DEFAULT_FORMAT.query
    """Name of the field with the search query."""

    @property
    def query(self) -> str:
        return self.fields[self.query_field]

    @property
    def others(self) -> list[str]:
        return [text for name, text in self.fields.items() if name != self.query_field]

    def as_dict(self) -> dict[str, str]:
        return dict(self.fields)


NOTHING_WRITTEN = Action(fields={}, query_field="")
"""The empty action of a policy that answers directly."""


@dataclass(frozen=True, kw_only=True, slots=True)
class InvalidAction:
    """A completion that is not a valid action."""

    reason: str
    """One of `salesrl_trl.judged.parsing.INVALID_REASONS`; never the text, which may quote a customer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Passage:
    """One retrieved passage."""

    id: str
    """The document's id in the service's index."""
    text: str
    score: float
    """Relevance in [0, 1], normalised by the service."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """A RAG endpoint's answer."""

    text: str
    """Text for the customer."""
    passages: tuple[Passage, ...]
    """The passages used for the answer, best first."""
    took_ms: float
    """Milliseconds, as measured by the service."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """The judge's scores for an answer and for its reference. Raises `ValueError` unless each is in [0, 1]."""

    candidate: float
    """Score in [0, 1] of the answer generated from the policy's action."""
    reference: float | None
    """Score in [0, 1] of the frozen 32B endpoint's answer; `None` without one."""
    reason: str
    """The judge's explanation. It may quote the customer, so it must not be logged."""
    provider: str = ""
    """The provider, if there are several."""
    criteria: Sequence[float] = ()
    """The candidate's scores for the row's criteria, in order."""

    def __post_init__(self) -> None:
        scores = (self.candidate, *(() if self.reference is None else (self.reference,)), *self.criteria)
        if not all(type(score) in (int, float) and 0 <= score <= 1 for score in scores):
            raise ValueError("a verdict's score is not a number in [0, 1]")


LARGEST_REWARD = 1e18
"""TRL squares float32 rewards for a group's standard deviation; a reward that overflows there would corrupt the
advantages of its whole group."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reward:
    """The reward pipeline's result for one completion.

    Raises `ValueError` if `value` and `outcome` disagree (scored completions have a number, failed ones never do), or
    if a number is NaN, infinite or beyond `LARGEST_REWARD`.
    """

    outcome: Outcome
    """How scoring ended."""
    value: float | None
    """The reward for GRPO; `None` for `JUDGE_INVALID` and `INFRA`."""
    reason: str = ""
    """Short code for why it is unscored, safe for logs and metric names: `"rag_8b_timeout"`."""
    components: Mapping[str, float | None] = field(default_factory=dict)
    """The value's components; `None` for one that is unavailable."""
    reference_value: float | None = None
    """Reward of the frozen 32B endpoint's answer, computed the same way; `None` without one."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Wall time in seconds of each stage that ran: `{"rag_8b": 0.8, "rag_32b": 1.1, "judge": 2.0}`."""
    by_function: Mapping[str, float | None] = field(default_factory=dict)
    """With several reward functions: each function's unweighted number, or `None` if it does not apply to the
    completion."""
    columns: Mapping[str, object] = field(default_factory=dict)
    """Values a function logged for this completion with `log_extra`."""
    metrics: tuple[tuple[str, float], ...] = ()
    """Values a function logged with `log_metric`, attached to the call's first completion."""
    breach: str = ""
    """The bug in its reward function that left it unscored. Never quotes a customer."""

    @classmethod
    def scored(cls, value: float, *, reason: str = "", **components: float) -> "Reward":
        """A number with its components: `Reward.scored(0.7, style=0.4, facts=1.0)`."""
        return cls(outcome=Outcome.OK, value=value, reason=reason, components=components)

    @classmethod
    def missing(cls, reason: str) -> "Reward":
        """An unscored completion: `Reward.missing("judge_busy")`. The reason is a short code. Raises `ValueError` for
        one of `RESERVED_REASONS`.
        """
        if reason in RESERVED_REASONS:
            raise ValueError(f"{reason!r} is reserved by the package. Expected another code.")
        return cls(outcome=Outcome.INFRA, value=None, reason=reason)

    def __post_init__(self) -> None:
        if (self.value is not None) != (self.outcome in (Outcome.OK, Outcome.INVALID_ACTION)):
            raise ValueError(f"outcome {self.outcome.value!r} is inconsistent with value {self.value!r}")
        numbers = (self.value, self.reference_value, *self.components.values())
        if not all(number is None or abs(number) <= LARGEST_REWARD for number in numbers):
            raise ValueError(f"a reward or component is not a number of at most {LARGEST_REWARD:g}")


@dataclass(kw_only=True, slots=True)
class ProviderUsage:
    """A provider's usage since the last report."""

    verdicts: int = 0
    prompt_tokens: int = 0  # as counted by the provider; 0 if it reports none
    completion_tokens: int = 0  # as counted by the provider, reasoning included
    usd: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class JudgeRecord:
    """One valid verdict, for measuring the judge's position bias."""

    score: float
    candidate_first: bool | None
    """Whether it was shown before the reference, or in the first half of a group; `None` in the middle or alone."""


class EvaluatedCompletion(NamedTuple):
    """An evaluated completion with its prompt: texts or lists of messages, as in TRL. It may quote a customer, so it
    is only logged on request. `reward` is `None` if unscored. Metrics read `text` and its row's `columns`."""

    prompt: object
    completion: object
    reward: float | None
    text: str = ""
    columns: Example = MappingProxyType({})


@dataclass(frozen=True, kw_only=True, slots=True)
class Answered:
    """A held-out row and the policy's greedy answer."""

    branch: str
    text: str  # without special tokens. It may quote a customer: not for logs
    reward: Reward
    tokens: int
    truncated: bool  # whether it reached `max_completion_length` before an end token
    kl: float | None = None
    """KL to the reference policy, summed over the answer's tokens, in nats. `None` without a reference."""
    kl_tokens: int = 0
    columns: Example = field(default_factory=dict)  # the row's columns, without prompt and images


def missing(outcome: Outcome, reason: str) -> Reward:
    """An unscored completion: a service or the judge failed. Excluded from baseline, loss and reward metrics."""
    return Reward(outcome=outcome, value=None, reason=reason)
