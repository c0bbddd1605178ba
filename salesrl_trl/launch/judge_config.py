"""Settings of one judge among several, and of the meter over them. `config.reward` reads them."""

import re
from dataclasses import dataclass, field
from typing import Annotated

from salesrl_trl.config.checks import check, check_path, check_url
from salesrl_trl.config.ranges import Count, NotNegative, Positive, Share, check_settings
from salesrl_trl.errors import Refusals
from salesrl_trl.judged.meter import SECOND_JUDGE, STOP, WARN
from salesrl_trl.judged.provider import RESPONSE_FORMATS

NAME = "[A-Za-z0-9_-]+"


@dataclass(frozen=True, kw_only=True)
class JudgeMeterSettings:
    """`judge_meter`, checked."""

    second: str
    share: Share = 0.02
    anchor_steps: Count = 50
    on_alarm: Annotated[str, (WARN, STOP, SECOND_JUDGE)] = WARN
    rubric_dir: Annotated[str, check_path] | None = None


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
    def has_price(self) -> bool:
        return self.usd_per_million_prompt_tokens > 0 or self.usd_per_million_completion_tokens > 0

    def __post_init__(self) -> None:
        where = f"judge_providers[{self.name}]"
        check(
            bool(re.fullmatch(NAME, str(self.name))),
            "a provider of `judge_providers` has a name with other characters. Expected letters, digits, - and _.",
        )
        refused = Refusals()
        refused.each(lambda: check_settings(self, f"{where}."))
        refused.check(
            lambda: isinstance(self.extra_body, dict),
            f"`{where}.extra_body` is no mapping. Expected fields of a request.",
        )
        refused.check(
            lambda: self.max_usd is None or self.has_price,
            f"`{where}.max_usd` is given, and the provider has no price. Expected `usd_per_million_prompt_tokens` "
            "or `usd_per_million_completion_tokens`: without one nothing is ever spent.",
        )
        refused.tell(self)
