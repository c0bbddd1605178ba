"""The budget of a run's folder: its limits by the settings, and whether anything of them is left."""

from pathlib import Path

from salesrl_trl.build.checks.reward import JUDGE
from salesrl_trl.config import JudgeProviderConfig, RewardConfig
from salesrl_trl.errors import ConfigError
from salesrl_trl.names import SPENT_FILE
from salesrl_trl.reward.service.account import CALLS, USD, Limit, read_account
from salesrl_trl.reward.service.budget import Budget
from salesrl_trl.update.spending import reported


def budget_of(config: RewardConfig, output_dir: Path, processes: int = 1) -> Budget | None:
    """The budget of a run in this folder. `None` where nothing is limited and nothing has a price."""
    providers = config.parsed_judge_providers()
    places: list[tuple[str, str | None, RewardConfig | JudgeProviderConfig]] = [("", None, config)]
    places += [(f"judge_providers[{each.name}].", f"{JUDGE}_{each.name}", each) for each in providers]
    limits = [
        Limit(name=f"{prefix}max_{kind}", kind=kind, most=most, service=service)
        for prefix, service, settings in places
        for kind, most in ((CALLS, settings.max_calls), (USD, settings.max_usd))
        if most is not None
    ]
    rates = [config.judge_tokens_per_minute, *(each.tokens_per_minute for each in providers)]
    if not limits and not any(rates) and not any(each.has_price for each in providers):
        return None
    return Budget(output_dir / SPENT_FILE, limits, processes)


def check_budget_left(config: RewardConfig, output_dir: Path) -> None:
    """Refuse a run whose requests, or those to every judge, would all be refused.

    Raises `ConfigError` where an earlier run in this folder ended at a limit that is not larger now, or its account
    can't be read.
    """
    budget = budget_of(config, output_dir)
    if budget is None:
        return
    account = read_account(budget.path)
    # blocks of processes that were killed stay taken: their requests may have left
    reached = [
        limit
        for limit in budget.limits
        if limit in account.reached([limit]) or account.taken.get(limit.name, 0.0) >= limit.most
    ]
    of_all = {limit.kind for limit in reached if limit.service is None}
    of_one = {limit.service for limit in reached}
    providers = config.parsed_judge_providers()
    asked = [
        each for each in providers if f"{JUDGE}_{each.name}" not in of_one and not (each.has_price and USD in of_all)
    ]
    if CALLS in of_all or (providers and not asked):
        raise ConfigError(
            f"the budget is spent: {reported(account, reached)}. Expected limits above what earlier runs in this "
            f"folder spent. Raise them; or delete {budget.path}, to begin with nothing spent."
        )
