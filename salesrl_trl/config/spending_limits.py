"""The checks of the settings that limit a run's spending. `RewardConfig` calls them."""

from collections.abc import Sequence
from typing import Protocol

from salesrl_trl.config.checks import check
from salesrl_trl.config.judge import JudgeProviderConfig


class SpendingLimits(Protocol):
    """The settings of `RewardConfig` that limit what a run spends."""

    max_calls: int | None
    max_usd: float | None
    judge_tokens_per_minute: int | None
    judge: str | None

    @property
    def uses_services(self) -> bool: ...


def check_budget(config: SpendingLimits, providers: Sequence[JudgeProviderConfig]) -> None:
    """Refuse limits that limit nothing. Raises `ConfigError`. `providers`: the entries of `judge_providers`."""
    for name in ("max_calls", "max_usd", "judge_tokens_per_minute"):
        value = getattr(config, name)
        if value is None:
            continue
        check(value > 0, f"`{name}` is {value}. Expected more than 0, or nothing.")
        check(
            config.uses_services,
            f"`{name}` is given, and `reward_funcs` asks no service of this package. Expected `sales` among them: "
            "what functions of your own ask is not counted.",
        )
    check(
        config.max_usd is None or any(each.has_price for each in providers),
        "`max_usd` is given, and no judge has a price. Expected `usd_per_million_prompt_tokens` or "
        "`usd_per_million_completion_tokens` for a provider of `judge_providers`: without one nothing is ever spent.",
    )
    check(
        config.judge_tokens_per_minute is None or (not providers and config.judge is None),
        "`judge_tokens_per_minute` is given beside `judge_providers` or `judge`. Expected it for the one judge of "
        "`judge_base_url`: a provider has `tokens_per_minute`.",
    )
