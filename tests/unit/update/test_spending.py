"""The forecast of a run's spending, and its words."""

from salesrl_trl.reward.service.budget import CALLS, USD, Account, Limit, Spent
from salesrl_trl.telemetry.step_lines import spent
from salesrl_trl.update.spending import Evaluations, Spending, forecast, told


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
    assert within == "by the first 4 steps, about 19 calls and 0:15 in all; no limit is reached"


def test_a_forecast_counts_the_evaluations_to_come():
    # 20 calls a step; at steps 5 and 10 quick evaluations as large as two steps, and one as large as 25 at the end
    evaluations = Evaluations(every=5, quick=2.0, last=25.0)
    steps, seconds = (1, 4, 12), (30.0, 100.0)
    line = forecast(LIMITS, account(100, 0.0), account(160, 0.0), steps, seconds, evaluations)
    assert line == "by the first 4 steps, about 900 calls and 7:50 in all; no limit is reached"
    line = forecast(LIMITS, account(300, 0.0), account(360, 0.0), steps, seconds, evaluations)
    assert line.endswith(
        "about 1,100 calls and 7:50 in all; max_calls is reached in the evaluation after the last step"
    )
    # 140 calls for five steps and step 5's evaluation, which is in the mean already
    line = forecast((), account(100, 0.0), account(240, 0.0), (4, 9, 12), seconds, Evaluations(every=5, quick=2.0))
    assert line.startswith("by the first 9 steps, about 346 calls")


def test_what_was_spent_is_told_where_there_is_a_budget():
    assert spent({"budget/calls": 1234.0, "budget/usd": 0.417}) == "spent 1,234 calls, 0.42 USD"
    assert spent({"budget/calls": 9.0, "budget/usd": 0.0031}) == "spent 9 calls, 0.0031 USD"
    assert spent({"reward": 1.0}) == ""
    assert Spending(None).figures() == {}
    found = account(1000, 0.42, max_calls=1000.0)
    assert told(found, found.reached(LIMITS)) == "1,000 calls, 0.42 USD were spent; reached: `max_calls` 1,000"
