"""Reports the spending of a run with a budget."""

from collections.abc import Mapping

from accelerate.logging import get_logger

from salesrl_trl.errors import ConfigError
from salesrl_trl.judged.budget import Account, Budget, read_account
from salesrl_trl.names import BUDGET_CALLS, BUDGET_USD
from salesrl_trl.wiring.part import Part, PartContext

logger = get_logger(__name__)


class Spending(Part):
    def connect(self, run: PartContext) -> None:
        budget = run.reward_loop.reward.budget
        assert isinstance(budget, Budget)
        self._budget, self._account = budget, Account()
        run.run_control.spending = self

    def account(self) -> Account:
        """The spending so far, from the file or, if it is unreadable, the last known account."""
        try:
            self._account = read_account(self._budget.path)
        except ConfigError as error:
            logger.warning(str(error))
        return self._account

    def figures(self, mode: str) -> Mapping[str, float]:
        total = self.account().total()
        return {BUDGET_CALLS: total.calls, BUDGET_USD: total.usd} if mode == "train" else {}

    def in_words(self) -> str:
        return self.account().in_words()

    def reported(self) -> str:
        """`1,000 calls, 0.42 USD were spent; reached: max_calls 1,000`."""
        reached = (f"`{limit.name}` {limit.most:,g}" for limit in self.account().reached(self._budget.limits))
        return f"{self._account.in_words()} were spent; reached: {', '.join(reached)}"

    def is_reached(self) -> bool:
        return bool(self.account().reached(self._budget.limits))
