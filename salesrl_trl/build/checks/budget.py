"""Whether a run in this folder has anything left to spend."""

from pathlib import Path

from salesrl_trl.config import RewardConfig
from salesrl_trl.errors import ConfigError
from salesrl_trl.reward.service.budget import CALLS, USD
from salesrl_trl.reward.service.spent_file import read_account
from salesrl_trl.build.assembly import budget_of
from salesrl_trl.build.checks.reward import JUDGE
from salesrl_trl.update.spending import told


def check_budget_left(config: RewardConfig, output_dir: Path) -> None:
    """Refuse a run whose requests, or those to every judge, would all be refused.

    Args:
        config (`RewardConfig`):
            Settings of the services.
        output_dir (`Path`):
            The run's folder.

    Raises:
        `ConfigError`: an earlier run in this folder ended at a limit that is not larger now, or its account can't be
            read.
    """
    budget = budget_of(config, output_dir)
    if budget is None:
        return
    account = read_account(budget.terms.path)
    # what was held by processes that were killed stays used: their requests may have left
    reached = [
        limit
        for limit in budget.terms.limits
        if limit in account.reached([limit]) or account.taken.get(limit.name, 0.0) >= limit.most
    ]
    of_all, of_one = {each.kind for each in reached if each.service is None}, {each.service for each in reached}
    providers = config.parsed_judge_providers()
    asked = [
        each for each in providers if f"{JUDGE}_{each.name}" not in of_one and not (each.has_price and USD in of_all)
    ]
    if CALLS in of_all or (providers and not asked):
        raise ConfigError(
            f"the budget is spent: {told(account, reached)}. Expected limits above what earlier runs in this folder "
            f"spent. Raise them; or delete {budget.terms.path}, to begin with nothing spent."
        )
