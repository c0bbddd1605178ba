"""The values that pass between packages: rows, actions, answers, verdicts, rewards. Standard library only. All are
frozen, so that the trainer's thread and the thread of the reward's event loop may share them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

NOT_APPLICABLE = "not_applicable"
"""Reason of a completion for which a function returned `None`."""
RESERVED_REASONS = frozenset({"budget_spent", "deadline", "no_passages", NOT_APPLICABLE})
"""Reasons by which the package decides something, or says what to do. Code of a user's own may not give them."""


FORMAT = "format"  # component of an action: 1 for a valid one
REFERENCE = "reference"
"""Component: the reference's own score by the branch's rubric. Logged beside the others, never weighed."""


class Outcome(StrEnum):
    """How the scoring of one completion ended. Only the first two have a number."""

    OK = "ok"
    """The services answered and the judge's verdict was valid."""
    INVALID_ACTION = "invalid_action"
    """No valid action, or one whose answer says nothing. It is the policy's fault, so the low reward is real."""
    JUDGE_INVALID = "judge_invalid"
    """The judge's answer was no verdict of the schema. No number."""
    INFRA = "infra"
    """A service failed, timed out or refused. No number."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Message:
    """One turn of a sales conversation: `Message(role="customer", content="And the price?")`."""

    role: str
    """`"customer"` or `"seller"`."""
    content: str


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestIds:
    """The owners of a conversation, for a RAG service that separates tenants and customers."""

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
    """A picture of a row: a file, or the content of one."""

    path: str = ""
    """The file: `"/data/images/0001.png"`. Empty if the dataset holds the content."""
    content: bytes | None = None
    """The content of a PNG, JPEG or other file that Pillow reads."""


Prompt: TypeAlias = str | list[dict[str, Any]]
"""What the policy reads, as TRL has it: a text, which is used as it is, or messages for the model's chat template."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Criterion:
    """Something that a good answer to a row does: `Criterion(text="names the price", weight=2.0)`. Raises
    `ValueError` for one without a text, or with a weight that is no number above 0."""

    text: str
    """What is asked for, in the judge's language."""
    weight: float = 1.0
    """Its share of the score, relative to the row's other criteria."""
    name: str = ""
    """Its name in metrics: `rewards/judge/<name>`. Without one only the record has its score."""

    def __post_init__(self) -> None:
        if not isinstance(self.text, str) or not self.text.strip() or not isinstance(self.name, str):
            raise ValueError("a criterion has no text")
        if not (type(self.weight) in (int, float) and 0 < self.weight < math.inf):
            raise ValueError("a criterion's weight is no number above 0")


@dataclass(frozen=True, kw_only=True, slots=True)
class SalesRow(RequestIds):
    """One row of the dataset: a prompt, or a sales conversation waiting for the seller's next answer, with its owners.
    Raises `ValueError` for a row with neither."""

    row_id: str
    """Identifies the row in logs and caches: `"train-0007"`."""
    branch: str
    """The KL branch and judge rubric the row belongs to: `"fairness"`."""
    conversation: tuple[Message, ...] = ()
    """Oldest turn first; the last one is the customer's. Empty for a row that gives its prompt."""
    prompt: Prompt | None = field(default=None, compare=False)
    """The policy's prompt as the row gives it. `None` if a template makes it from the conversation."""
    documents: tuple[str, ...] = ()
    """Texts of documents that are known to answer the row. The judge sees them. Empty if nobody marked any."""
    images: tuple[Picture, ...] = ()
    """Pictures that the policy reads before the conversation. Services and judge see the text alone."""
    criteria: tuple[Criterion, ...] = ()
    """What the judge scores one by one, in place of the answer as a whole. Empty for a row without any."""
    columns: Mapping[str, Any] = field(default_factory=dict, compare=False)
    """Further columns of the dataset, for reward functions."""
    line: int | None = field(default=None, compare=False)
    """Its line in a file of lines, for messages."""

    def __post_init__(self) -> None:
        if self.prompt is None and not self.conversation:
            raise ValueError(f"row {self.row_id!r} has neither a prompt nor a conversation")

    @property
    def ids(self) -> RequestIds:
        """The four identifiers of every request."""
        return RequestIds(**self.as_dict())

    @property
    def context(self) -> str:
        """The conversation as text, a line per turn: `"customer: ...\\nseller: ..."`. Without one, the prompt."""
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
"""A row of the dataset that goes through the trainer: `prompt`, perhaps `images`, and any further columns."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ActionFormat:
    """The fields of an action."""

    fields: tuple[str, ...] = ("user_profile", "rewritten_query", "history_summary")
    """Names of its texts, in the order of the prompt. By default:

    - relevant facts about the customer: `"office worker, free in the evenings"`;
    - the customer's question, without need of its context: `"Python data analysis price"`;
    - a summary of the conversation so far: `"asked about Python data analysis"`.
    """
    query: str = "rewritten_query"
    """The field with the search query. It is never empty."""


DEFAULT_FORMAT = ActionFormat()
SALES = "sales"
"""The packaged reward chain, in the setting `reward_funcs`."""
JUDGE = "judge"
"""The packaged judge of a policy that answers directly, in the setting `reward_funcs`; the service name of a judge."""
SEARCH = "search"
"""The packaged tool that asks the RAG service, in the setting `tools`."""
ALL = "all"
"""The branch of all rows, where neither the settings nor the dataset name any."""
DEFAULT_BRANCHES = ("fairness", "hallucination")
"""Branches of a recipe that names none: those of the packaged demo."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Action:
    """The policy's output. The 8B endpoint answers from it."""

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
"""The action of a policy that answers directly."""


@dataclass(frozen=True, kw_only=True, slots=True)
class InvalidAction:
    """A completion that is no valid action."""

    reason: str
    """One of `salesrl_trl.judged.parsing.INVALID_REASONS`; never the text itself, which may quote a customer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Passage:
    """One retrieved passage."""

    id: str
    """The document's id in the service's index."""
    text: str
    score: float
    """Relevance, normalised by the service to [0, 1]."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """The answer of a RAG endpoint."""

    text: str
    """Text for the customer."""
    passages: tuple[Passage, ...]
    """The passages behind the answer, best first."""
    took_ms: float
    """Time that the service measured, in milliseconds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """The judge's scores for one answer and for the reference beside it. Raises `ValueError` if a score is no number
    in [0, 1].
    """

    candidate: float
    """Score of the answer made from the policy's action, in [0, 1]."""
    reference: float | None
    """Score of the frozen 32B endpoint's answer, in [0, 1]; `None` without such an answer."""
    reason: str
    """The judge's words. Free text that may quote the customer: not for logs."""
    provider: str = ""
    """The provider that gave it, where there are several."""
    criteria: Sequence[float] = ()
    """The candidate's scores by the row's criteria, in their order."""

    def __post_init__(self) -> None:
        scores = (self.candidate, *(() if self.reference is None else (self.reference,)), *self.criteria)
        if not all(type(score) in (int, float) and 0 <= score <= 1 for score in scores):
            raise ValueError("a verdict's score is no number in [0, 1]")


LARGEST_REWARD = 1e18
"""TRL has rewards in float32, and squares them for a group's standard deviation. A reward that becomes infinite there
spoils the advantages of its whole group."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reward:
    """The result of the chain for one completion.

    Raises `ValueError` if `value` and `outcome` disagree (a failed call never has a number, and a scored one always
    has), or if a number is NaN, infinite or beyond `LARGEST_REWARD`.
    """

    outcome: Outcome
    """How it ended."""
    value: float | None
    """The number for GRPO; `None` for `JUDGE_INVALID` and `INFRA`."""
    reason: str = ""
    """Short code for a missing verdict, safe in logs and metric names: `"rag_8b_timeout"`."""
    components: Mapping[str, float | None] = field(default_factory=dict)
    """The components of the value; `None` for a missing component."""
    reference_value: float | None = None
    """Reward of the frozen 32B endpoint's answer to the row, by the same law; `None` without such an answer."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Wall time of each stage that ran, in seconds: `{"rag_8b": 0.8, "rag_32b": 1.1, "judge": 2.0}`."""
    by_function: Mapping[str, float | None] = field(default_factory=dict)
    """Where several reward functions make the value: the number of each, without its weight; `None` from a function
    that does not apply to the completion."""
    columns: Mapping[str, object] = field(default_factory=dict)
    """What a function logged for this completion by `log_extra`."""
    metrics: tuple[tuple[str, float], ...] = ()
    """What a function logged by `log_metric`. The first completion of a call has it."""
    breach: str = ""
    """What is wrong with the code of its function, where that left it without a number. Quotes no customer."""

    @classmethod
    def scored(cls, value: float, *, reason: str = "", **components: float) -> "Reward":
        """A number, with its parts: `Reward.scored(0.7, style=0.4, facts=1.0)`."""
        return cls(outcome=Outcome.OK, value=value, reason=reason, components=components)

    @classmethod
    def missing(cls, reason: str) -> "Reward":
        """No number, because it could not be had: `Reward.missing("judge_busy")`. The reason is a short code. Raises
        `ValueError` for one of `RESERVED_REASONS`.
        """
        if reason in RESERVED_REASONS:
            raise ValueError(f"{reason!r} is a reason of the package's own. Expected another code.")
        return cls(outcome=Outcome.INFRA, value=None, reason=reason)

    def __post_init__(self) -> None:
        if (self.value is not None) != (self.outcome in (Outcome.OK, Outcome.INVALID_ACTION)):
            raise ValueError(f"outcome {self.outcome.value!r} does not go with value {self.value!r}")
        numbers = (self.value, self.reference_value, *self.components.values())
        if not all(number is None or abs(number) <= LARGEST_REWARD for number in numbers):
            raise ValueError(f"a reward, or a part of it, is no number of at most {LARGEST_REWARD:g}")


@dataclass(kw_only=True, slots=True)
class ProviderUsage:
    """The usage of one provider since the last report."""

    verdicts: int = 0
    prompt_tokens: int = 0  # as the provider counts them; 0 if it does not
    completion_tokens: int = 0  # as the provider counts them, thoughts included
    usd: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class JudgeRecord:
    """One valid verdict, to check whether the judge likes anything else than quality."""

    score: float
    candidate_first: bool | None
    """Whether it stood before the reference, or of a group in the first half; `None` in the middle, or alone."""


class EvaluatedCompletion(NamedTuple):
    """A completion of an evaluation, with its prompt. It may quote a customer: not for logs, unless asked for. Both
    are texts or lists of messages, as TRL has them. `reward` is `None` if it could not be scored. `text` and `columns`
    are what figures read of it and of its row."""

    prompt: object
    completion: object
    reward: float | None
    text: str = ""
    columns: Example = MappingProxyType({})


@dataclass(frozen=True, kw_only=True, slots=True)
class Answered:
    """One held-out row and the policy's greedy answer to it."""

    branch: str
    text: str  # the policy's answer, without special tokens. It may quote a customer: not for logs.
    reward: Reward
    tokens: int
    truncated: bool  # whether it reached `max_completion_length` without an end
    kl: float | None = None
    """Sum of the KL to the reference policy over the answer's tokens, in nats. `None` without a reference."""
    kl_tokens: int = 0
    columns: Example = field(default_factory=dict)  # the row's columns, without prompt and pictures


def missing(outcome: Outcome, reason: str) -> Reward:
    """No number: a service or the judge failed. Out of the group's baseline, the loss and the reward metrics."""
    return Reward(outcome=outcome, value=None, reason=reason)
