"""What a run has spent by the account that the rewards' processes write: figures with a forecast, and messages."""

import logging
from collections.abc import Sequence

from salesrl_trl.errors import ConfigError
from salesrl_trl.names import BUDGET_CALLS, BUDGET_FORECAST, BUDGET_USD
from salesrl_trl.reward.service.budget import Account, Budget, Limit, read_account
from salesrl_trl.telemetry.step_lines import calls_and_usd

logger = logging.getLogger(__name__)


class Spending:
    """The spending of a run. A run without a budget has no figures."""

    def __init__(self, budget: Budget | None) -> None:
        self._budget = budget
        self._limits = () if budget is None else budget.limits
        self._account = Account()
        self._first: tuple[int, Account] | None = None  # steps done, and the account then

    def account(self) -> Account:
        """What has been spent so far, by the file; as it was at the last look if the file can't be read."""
        try:
            if self._budget is not None:
                self._account = read_account(self._budget.path)
        except ConfigError as error:
            logger.warning(str(error))
        return self._account

    def figures(self, step: int, last_step: int) -> dict[str, float]:
        """The figures of a log line after `step` optimizer steps. The forecast is the largest of all limits, with u
        used by now and u_0 used at the run's first line: (u + (u - u_0) / (step - step_0) * (last_step - step)) /
        limit."""
        if self._budget is None:
            return {}
        account = self.account()
        total = account.total()
        figures = {BUDGET_CALLS: total.calls, BUDGET_USD: total.usd}
        if self._limits:
            if self._first is None or step <= self._first[0]:
                self._first = (step, account)
            began, first = self._first
            to_come = (last_step - step) / max(step - began, 1)
            used = [(account.used(limit), first.used(limit), limit.most) for limit in self._limits]
            figures[BUDGET_FORECAST] = max((now + (now - then) * to_come) / most for now, then, most in used)
        return figures

    def reported(self) -> str:
        account = self.account()
        return reported(account, account.reached(self._limits))

    def is_reached(self) -> bool:
        return bool(self.account().reached(self._limits))


def reported(account: Account, reached: Sequence[Limit]) -> str:
    """`1,000 calls, 0.42 USD were spent; reached: max_calls 1,000`."""
    total = account.total()
    names = ", ".join(f"`{limit.name}` {limit.most:,g}" for limit in reached)
    return f"{calls_and_usd(total.calls, total.usd)} were spent; reached: {names}"
