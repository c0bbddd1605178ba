"""The figures of a run's spending, and its words."""

import pytest

from salesrl_trl.reward.service.budget import CALLS, USD, Account, Budget, Limit, Spent, open_account
from salesrl_trl.telemetry.step_lines import spent
from salesrl_trl.update.spending import Spending, reported

LIMITS = (
    Limit(name="max_calls", kind=CALLS, most=1000),
    Limit(name="judge_providers[a].max_usd", kind=USD, most=100, service="judge_a"),
)


def test_the_forecast_is_of_the_nearest_limit_and_leaves_the_start_out(tmp_path):
    spending = Spending(Budget(tmp_path / "b.json", LIMITS))

    def line(step, calls, usd):
        with open_account(tmp_path / "b.json") as account:
            account.services = {"judge_a": Spent(calls=calls, usd=usd)}
        return spending.figures(step, 60)

    assert line(1, 100, 1.0) == {"budget/calls": 100, "budget/usd": 1.0, "budget/forecast": pytest.approx(0.1)}
    # 20 calls and 1 USD a step, 56 steps to come: 1,280 calls of 1,000, and 60 USD of 100
    assert line(4, 160, 4.0)["budget/forecast"] == pytest.approx(1.28)
    assert line(60, 400, 90.0)["budget/forecast"] == pytest.approx(0.9)
    assert Spending(None).figures(4, 60) == {}
    assert [*Spending(Budget(tmp_path / "b.json")).figures(4, 60)] == ["budget/calls", "budget/usd"]


def test_what_was_spent_is_said_where_there_is_a_budget():
    assert spent({"budget/calls": 1234.0, "budget/usd": 0.417}) == "spent 1,234 calls, 0.42 USD"
    assert spent({"budget/calls": 9.0, "budget/usd": 0.0031}) == "spent 9 calls, 0.0031 USD"
    assert spent({"budget/calls": 9.0, "budget/forecast": 1.28}) == "spent 9 calls, at the end 128% of the limit"
    assert spent({"reward": 1.0}) == ""
    account = Account(services={"judge_a": Spent(calls=1000, usd=0.42)}, refused={"max_calls": 1000.0})
    assert reported(account, account.reached(LIMITS)) == (
        "1,000 calls, 0.42 USD were spent; reached: `max_calls` 1,000"
    )
