"""Whether a run in this folder has anything left to spend. `train` checks it before anything is loaded."""

from pathlib import Path

from salesrl_trl.build.assembly import budget_of
from salesrl_trl.build.checks.reward import JUDGE
from salesrl_trl.config import RewardConfig
from salesrl_trl.errors import ConfigError
from salesrl_trl.reward.service.budget import CALLS, USD, read_account
from salesrl_trl.update.spending import reported


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
        judge
        for judge in providers
        if f"{JUDGE}_{judge.name}" not in of_one and not (judge.has_price and USD in of_all)
    ]
    if CALLS in of_all or (providers and not asked):
        raise ConfigError(
            f"the budget is spent: {reported(account, reached)}. Expected limits above what earlier runs in this "
            f"folder spent. Raise them; or delete {budget.path}, to begin with nothing spent."
        )
