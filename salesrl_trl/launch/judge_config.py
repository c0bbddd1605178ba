"""Settings of the judges, the judging mode and the judge drift monitor. Used by `launch.reward_config`."""

import re
from dataclasses import dataclass, field
from typing import Annotated

from salesrl_trl.agents.customer import Customer
from salesrl_trl.agents.partner import Partner
from salesrl_trl.config.checks import (
    Count,
    NotNegative,
    Positive,
    Share,
    build_object,
    check,
    check_settings,
    check_url,
    entry_of,
    structure,
)
from salesrl_trl.demo.services.launcher import EMBEDDED_MODEL
from salesrl_trl.judged.budget import Price
from salesrl_trl.judged.judge import AGGREGATIONS
from salesrl_trl.judged.meter import SECOND_JUDGE, STOP, WARN
from salesrl_trl.judged.provider import RESPONSE_FORMATS
from salesrl_trl.types import CUSTOMER, JUDGE

NAME = "[A-Za-z0-9_-]+"
NO_ADDRESS = "http://nobody.invalid/v1"  # of a partner without a model


@dataclass(frozen=True, kw_only=True)
class JudgeMeterSettings:
    """`judge_meter`, checked."""

    second: str
    share: Share = 0.02
    on_alarm: Annotated[str, (WARN, STOP, SECOND_JUDGE)] = WARN
    rubric_dir: str | None = None


@dataclass(frozen=True, kw_only=True)
class JudgeModeSettings:
    """`judge_mode`, checked."""

    mode: Annotated[str, ("single", "group")] = "single"
    repeats: Count = 1
    """Verdicts per answer in the mode `single`."""
    orders: Count = 2
    """Calls per group in the mode `group`: each shows the answers in another order, every second one in the reverse of
    the order before it."""
    aggregation: Annotated[str, (*AGGREGATIONS,)] = "mean"
    """How to combine several verdicts: `mean`, `median` or `min`."""

    @property
    def orders_of_groups(self) -> int:
        """`orders`, or 0 if each completion is judged separately."""
        return self.orders if self.mode == "group" else 0


@dataclass(kw_only=True)
class JudgeProviderConfig:
    """One entry of `judge_providers`."""

    name: str
    """Name of the provider in metrics, logs and reason codes."""
    base_url: Annotated[str, check_url]
    """OpenAI-compatible address, including `/v1`."""
    model: str
    """Name of the model."""
    api_key_env: str | None = None
    """Name of the environment variable with the API key."""
    weight: NotNegative = 1.0
    """Share of the verdicts, relative to the other providers' weights; 0 for a fallback only."""
    max_concurrency: Count | None = None
    """Concurrency limit, over all processes. Defaults to `judge_max_concurrency`."""
    timeout_s: Positive | None = None
    """Timeout of one attempt, in seconds. Defaults to `judge_timeout_s`."""
    response_format: Annotated[str, RESPONSE_FORMATS] = "auto"
    """`json_schema` enforces the verdict's schema. `text` describes it in the prompt. `auto` tries the first and falls
    back to the second."""
    temperature: NotNegative | None = 0.0
    """Sampling temperature. `null` omits it; it is also omitted once a provider rejects it."""
    max_completion_tokens: Count = 512
    """Token limit of the verdict, including reasoning. `max_tokens` in `extra_body` replaces it."""
    extra_body: dict[str, object] = field(default_factory=dict)
    """Additional fields of every request, e.g. `{"chat_template_kwargs": {"enable_thinking": false}}`."""
    usd_per_million_prompt_tokens: NotNegative = 0.0
    """Price in US dollars, for cost metrics and limits."""
    usd_per_million_completion_tokens: NotNegative = 0.0
    """Price in US dollars, for cost metrics and limits."""
    max_calls: Count | None = None
    """Request limit for the run and its resumes. At the limit, the other providers take over."""
    max_usd: Positive | None = None
    """Spending limit in US dollars for the run and its resumes, by the prices above."""
    tokens_per_minute: Count | None = None
    """Rate limit in tokens of prompts and answers, over all processes. Requests wait when it is reached."""
    requests_per_minute: Count | None = None
    """Rate limit in requests, including retries, over all processes. Further requests wait."""

    @property
    def price(self) -> Price:
        return Price(
            prompt_token=self.usd_per_million_prompt_tokens / 1e6,
            completion_token=self.usd_per_million_completion_tokens / 1e6,
            max_completion_tokens=self.max_completion_tokens,
        )

    def __post_init__(self) -> None:
        where = f"judge_providers[{self.name}]"
        message = "a provider of `judge_providers` has an invalid name. Expected letters, digits, - and _."
        check(bool(re.fullmatch(NAME, str(self.name))), message)
        check_settings(self, f"{where}.")
        expected = "Expected `usd_per_million_prompt_tokens` or `usd_per_million_completion_tokens`."
        is_priced = self.max_usd is None or not self.price.is_free
        check(is_priced, f"`{where}.max_usd` is set without a price. {expected}")


@dataclass(kw_only=True)
class PartnerSettings(JudgeProviderConfig):
    """`partner`, checked: the fields of `JudgeProviderConfig`, and its own."""

    name: str = CUSTOMER
    base_url: Annotated[str, check_url] = NO_ADDRESS
    model: str = ""
    temperature: NotNegative | None = 1.0
    kind: str = CUSTOMER
    """`customer`, or the dotted path of your own class."""
    max_turns: Count | None = None
    """Turns of the policy in a conversation, without those that call tools. By default your class's, or 6."""

    @property
    def is_model(self) -> bool:
        return self.base_url != NO_ADDRESS

    def build(self) -> Partner:
        is_own, deadline_s = self.kind != CUSTOMER, max(60.0, 2 * (self.timeout_s or 0.0))
        partner = build_object(self.kind, "partner", Partner) if is_own else Customer(deadline_s=deadline_s)
        partner.max_turns = self.max_turns or partner.max_turns
        return partner


def partner_of(given: object) -> PartnerSettings:
    """The setting `partner`. Raises `ConfigError` for unknown fields, and for fields that contradict each other."""
    partner = entry_of("partner", PartnerSettings, given, text="kind")
    check(
        partner.is_model == bool(partner.model),
        "`partner` has an address without a model, or a model without an address. Expected both or neither.",
    )
    usual = PartnerSettings(kind=partner.kind, max_turns=partner.max_turns)
    extra = [name for name, value in vars(partner).items() if value != vars(usual)[name]]
    check(
        partner.kind == CUSTOMER or not extra,
        f"`partner` is your own class, which calls its own services: {', '.join(extra)} would have no effect. Remove "
        "the class, or these.",
    )
    return partner


@dataclass(frozen=True, kw_only=True)
class Judges:
    """`judge_providers`, checked."""

    providers: tuple[JudgeProviderConfig, ...] = ()  # none without an address
    own: str | None = None  # dotted path of the user's own class
    are_several: bool = False  # whether they are a list, with names

    def place_of(self, provider: JudgeProviderConfig) -> str:
        return f"judge_providers[{provider.name}]" if self.are_several else "judge_providers"

    def service_of(self, provider: JudgeProviderConfig) -> str:
        """The name of a provider's service, in metrics and reason codes."""
        return f"{JUDGE}_{provider.name}" if self.are_several else JUDGE


def judges_of(given: object) -> Judges:
    """The judges of the setting `judge_providers`. Raises `ConfigError` for missing or unknown fields, and for entries
    that contradict each other."""
    if isinstance(given, str) and not given.startswith(("{", "[")):
        return Judges(own=given)
    if not isinstance(given, list) and not str(given).startswith("["):
        entry = structure("judge_providers", given or {}, dict)
        of_embedded = {"name": JUDGE, "model": EMBEDDED_MODEL, "base_url": "http://embedded/v1"}
        judge = entry_of("judge_providers", JudgeProviderConfig, of_embedded | entry)
        return Judges(providers=(judge,) if "base_url" in entry else ())
    providers = []
    for index, entry in enumerate(structure("judge_providers", given, list)):
        name = str(entry.get("name", "")) if isinstance(entry, dict) else ""
        path = f"judge_providers[{name if re.fullmatch(NAME, name) else index}]"
        providers.append(entry_of(path, JudgeProviderConfig, entry))
    names = [provider.name for provider in providers]
    is_valid = names and len(set(names)) == len(names) and any(provider.weight for provider in providers)
    expected = "Expected at least one provider, each name once, one with a weight."
    check(bool(is_valid), f"`judge_providers` names {names}. {expected}")
    return Judges(providers=tuple(providers), are_several=True)
