"""Settings of the judges, of how they judge, and of the meter over them. A part of `launch.reward_config`."""

import re
from dataclasses import dataclass, field
from typing import Annotated

from salesrl_trl.config.checks import (
    Count,
    NotNegative,
    Positive,
    Share,
    check,
    check_settings,
    check_url,
    entry_of,
    structure,
)
from salesrl_trl.judged.budget import Price
from salesrl_trl.judged.judge import AGGREGATIONS
from salesrl_trl.judged.meter import SECOND_JUDGE, STOP, WARN
from salesrl_trl.judged.provider import RESPONSE_FORMATS
from salesrl_trl.types import JUDGE

NAME = "[A-Za-z0-9_-]+"
EMBEDDED_MODEL = "salesrl-judge"
"""Name of the embedded judge's model."""


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
    """Verdicts for each answer, with the mode `single`."""
    orders: Count = 2
    """Calls for each group, with the mode `group`: each shows the answers in another order, every second one the
    order before it turned round."""
    aggregation: Annotated[str, (*AGGREGATIONS,)] = "mean"
    """The one score of several verdicts: their `mean`, `median` or `min`."""

    @property
    def orders_of_groups(self) -> int:
        """`orders`, or 0 where each completion is judged by itself."""
        return self.orders if self.mode == "group" else 0


@dataclass(kw_only=True)
class JudgeProviderConfig:
    """One entry of `judge_providers`."""

    name: str
    """Name of the provider in metrics, logs and reason codes."""
    base_url: Annotated[str, check_url]
    """OpenAI-style address, `/v1` included."""
    model: str
    """Name of the model."""
    api_key_env: str | None = None
    """Name of the environment variable that holds the key."""
    weight: NotNegative = 1.0
    """Share of the verdicts, relative to the other providers' weights. 0 for a provider that is only a fallback."""
    max_concurrency: Count | None = None
    """Most calls in flight, of all processes together. Defaults to `judge_max_concurrency`."""
    timeout_s: Positive | None = None
    """Seconds that one attempt may take. Defaults to `judge_timeout_s`."""
    response_format: Annotated[str, RESPONSE_FORMATS] = "auto"
    """`json_schema` enforces the verdict's schema. `text` describes it in the prompt. `auto` tries the first and falls
    back to the second."""
    temperature: NotNegative | None = 0.0
    """Sampling temperature. `null` sends none. A provider that refuses it gets none either."""
    max_completion_tokens: Count = 512
    """Most tokens of the verdict, a reasoning model's thoughts included. `max_tokens` in `extra_body` replaces it."""
    extra_body: dict[str, object] = field(default_factory=dict)
    """Further fields of every request, for example `{"chat_template_kwargs": {"enable_thinking": false}}`."""
    usd_per_million_prompt_tokens: NotNegative = 0.0
    """Price in US dollars, for the cost metrics."""
    usd_per_million_completion_tokens: NotNegative = 0.0
    """Price in US dollars, for the cost metrics."""
    max_calls: Count | None = None
    """Most requests of the run and its resumes. The other providers are asked then."""
    max_usd: Positive | None = None
    """Most US dollars of the run and its resumes, by the prices above."""
    tokens_per_minute: Count | None = None
    """Most tokens of any minute, of prompts and answers, of all processes together. Requests wait for them."""
    requests_per_minute: Count | None = None
    """Most requests of any minute, retries included, of all processes together. Further ones wait."""

    @property
    def price(self) -> Price:
        return Price(
            prompt_token=self.usd_per_million_prompt_tokens / 1e6,
            completion_token=self.usd_per_million_completion_tokens / 1e6,
            max_completion_tokens=self.max_completion_tokens,
        )

    def __post_init__(self) -> None:
        where = f"judge_providers[{self.name}]"
        check(
            bool(re.fullmatch(NAME, str(self.name))),
            "a provider of `judge_providers` has a name with other characters. Expected letters, digits, - and _.",
        )
        check_settings(self, f"{where}.")
        check(
            self.max_usd is None or not self.price.is_free,
            f"`{where}.max_usd` is given, and the provider has no price. Expected `usd_per_million_prompt_tokens` "
            "or `usd_per_million_completion_tokens`: without one nothing is ever spent.",
        )


@dataclass(frozen=True, kw_only=True)
class Judges:
    """`judge_providers`, checked."""

    providers: tuple[JudgeProviderConfig, ...] = ()  # none without an address
    own: str | None = None  # the dotted path of a class of the user's own
    are_several: bool = False  # whether they are a list, and have names

    def place_of(self, provider: JudgeProviderConfig) -> str:
        return f"judge_providers[{provider.name}]" if self.are_several else "judge_providers"

    def service_of(self, provider: JudgeProviderConfig) -> str:
        """The name of a provider's service, in metrics and reason codes."""
        return f"{JUDGE}_{provider.name}" if self.are_several else JUDGE


def judges_of(given: object) -> Judges:
    """The judges of the setting `judge_providers`. Raises `ConfigError` for an entry that lacks a field, has an
    unknown one, or does not fit the others."""
    if isinstance(given, str) and not given.startswith(("{", "[")):
        return Judges(own=given)
    if not isinstance(given, list) and not str(given).startswith("["):
        entry = structure("judge_providers", given or {}, dict)
        of_embedded = {"name": JUDGE, "model": EMBEDDED_MODEL, "base_url": "http://embedded/v1"}
        judge = entry_of("judge_providers", JudgeProviderConfig, of_embedded | entry)
        return Judges(providers=(judge,) * ("base_url" in entry))
    providers = []
    for index, entry in enumerate(structure("judge_providers", given, list)):
        name = str(entry.get("name", "")) if isinstance(entry, dict) else ""
        path = f"judge_providers[{name if re.fullmatch(NAME, name) else index}]"
        providers.append(entry_of(path, JudgeProviderConfig, entry))
    names = [provider.name for provider in providers]
    check(
        bool(names) and len(set(names)) == len(names) and any(provider.weight for provider in providers),
        f"`judge_providers` names {names}. Expected at least one provider, each name once, one with a weight.",
    )
    return Judges(providers=tuple(providers), are_several=True)
