"""The forecast of a run's spending, and its words."""

from salesrl_trl.reward.service.budget import CALLS, USD, Account, Limit, Spent
from salesrl_trl.telemetry.step_lines import spent
from salesrl_trl.update.spending import Spending, forecast, told


def account(calls, usd, **refused):
    return Account(services={"judge_a": Spent(calls=calls, usd=usd)}, refused=refused)


LIMITS = (
    Limit(name="max_calls", kind=CALLS, most=1000),
    Limit(name="judge_providers[a].max_usd", kind=USD, most=100, service="judge_a"),
)


def test_a_forecast_leaves_the_start_out_and_names_the_step_of_the_limit():
    line = forecast(LIMITS, account(100, 1.0), account(160, 4.0), (1, 4, 60), (30.0, 100.0))
    assert line == (
        "by the first 4 steps, about 1,280 calls, 60.00 USD and 11:00 in all; max_calls is reached after step 46 of 60"
    )
    within = forecast(LIMITS, account(10, 0.0), account(13, 0.0), (1, 4, 10), (3.0, 9.0))
    assert within == "by the first 4 steps, about 19 calls, 0.00 USD and 0:15 in all; no limit is reached"


def test_what_was_spent_is_told_where_there_is_a_budget():
    assert spent({"budget/calls": 1234.0, "budget/usd": 0.417}) == "spent 1,234 calls, 0.42 USD"
    assert spent({"reward": 1.0}) == ""
    assert Spending(None).figures() == {}
    found = account(1000, 0.42, max_calls=1000.0)
    assert told(found, found.reached(LIMITS)) == "1,000 calls were made, for 0.42 USD; reached: `max_calls` 1,000"
