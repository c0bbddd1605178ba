"""The limits of a run's spending, from the settings of its services.

Owns the checks of these settings, and the names under which limits are kept and told.
"""

from collections.abc import Sequence
from typing import Protocol

from salesrl_trl.config.checks import check
from salesrl_trl.config.judge import JudgeProviderConfig
from salesrl_trl.reward.service.budget import CALLS, USD, Limit


class SpendingLimits(Protocol):
    """The settings of `RewardConfig` that limit what a run spends."""

    max_calls: int | None
    max_usd: float | None
    judge_tokens_per_minute: int | None
    judge: str | None

    @property
    def uses_services(self) -> bool: ...

    def parsed_judge_providers(self) -> Sequence[JudgeProviderConfig]: ...


def check_budget(config: SpendingLimits, providers: Sequence[JudgeProviderConfig]) -> None:
    """Refuse limits that limit nothing. Raises `ConfigError`.

    Args:
        config (`SpendingLimits`):
            Settings of the services.
        providers (`Sequence[JudgeProviderConfig]`):
            Its `judge_providers`.
    """
    given = [name for name in ("max_calls", "max_usd", "judge_tokens_per_minute") if getattr(config, name) is not None]
    for name in given:
        check(getattr(config, name) > 0, f"`{name}` is {getattr(config, name)}. Expected more than 0, or nothing.")
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


def limits_of(config: SpendingLimits, service_of: str) -> tuple[Limit, ...]:
    """All limits of calls and money.

    Args:
        config (`SpendingLimits`):
            Settings of the services.
        service_of (`str`):
            A provider's service is named so, with an underscore and its name behind it.
    """
    of_all = {"max_calls": (CALLS, config.max_calls), "max_usd": (USD, config.max_usd)}
    limits = [Limit(name=name, kind=kind, most=most) for name, (kind, most) in of_all.items() if most is not None]
    for each in config.parsed_judge_providers():
        own = {"max_calls": (CALLS, each.max_calls), "max_usd": (USD, each.max_usd)}
        limits += [
            Limit(
                name=f"judge_providers[{each.name}].{name}", kind=kind, most=most, service=f"{service_of}_{each.name}"
            )
            for name, (kind, most) in own.items()
            if most is not None
        ]
    return tuple(limits)
