"""What a run with a budget has spent, for its lines and its end."""

from collections.abc import Mapping

from accelerate.logging import get_logger

from salesrl_trl.errors import ConfigError
from salesrl_trl.judged.budget import Account, Budget, read_account, reported
from salesrl_trl.names import BUDGET_CALLS, BUDGET_FORECAST, BUDGET_USD
from salesrl_trl.wiring.part import Part, PartContext

logger = get_logger(__name__)


class Spending(Part):
    def connect(self, run: PartContext) -> None:
        budget = run.reward_loop.reward.budget
        assert isinstance(budget, Budget)
        self._trl, self._budget, self._limits = run.trl, budget, budget.limits
        run.run_control.spending = self
        self._account = Account()
        self._first: tuple[int, Account] | None = None  # steps done, and the account then

    def account(self) -> Account:
        """What has been spent so far, by the file; as it was at the last look if the file can't be read."""
        try:
            self._account = read_account(self._budget.path)
        except ConfigError as error:
            logger.warning(str(error))
        return self._account

    def figures(self, mode: str) -> Mapping[str, float]:
        """The forecast is the largest of all limits, with u used by now and u_0 used at the run's first line:
        (u + (u - u_0) / (step - step_0) * (last_step - step)) / limit."""
        if mode != "train":
            return {}
        step, last_step = self._trl.step(), self._trl.last_step()
        account = self.account()
        total = account.total()
        figures = {BUDGET_CALLS: total.calls, BUDGET_USD: total.usd}
        if self._limits:
            if self._first is None or step <= self._first[0]:
                self._first = (step, account)
            began, first = self._first
            to_come = (last_step - step) / max(step - began, 1)
            used = [(account.used(limit), first.used(limit), limit.most) for limit in self._limits]
            figures[BUDGET_FORECAST] = max((now + (now - then) * to_come) / cap for now, then, cap in used)
        return figures

    def in_words(self) -> str:
        return self.account().in_words()

    def reported(self) -> str:
        account = self.account()
        return reported(account, account.reached(self._limits))

    def is_reached(self) -> bool:
        return bool(self.account().reached(self._limits))
