"""The budget: the law of its blocks, a transport that obeys it, and what the account keeps."""

import asyncio
import json
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.in_memory import Network, Reply
from support.loopback import row

from salesrl_trl.errors import BudgetSpent, ConfigError, DeadlineExceeded, ServiceError, ServiceUnavailable
from salesrl_trl.judged.budget import (
    CALLS,
    FREE,
    USD,
    Account,
    Budget,
    Limit,
    Price,
    Rate,
    Spent,
    open_account,
    read_account,
)
from salesrl_trl.judged.provider import JudgeProvider, Material, ProviderClient
from salesrl_trl.service.event_loop import deadline, now
from salesrl_trl.service.transport import Transport
from salesrl_trl.types import Action, Answer

MAX_CALLS = Limit(name="max_calls", kind=CALLS, most=100)
PRICE = Price(prompt_token=1e-6, completion_token=2e-6, max_completion_tokens=100)


@given(
    most=st.integers(1, 10**6),
    processes=st.integers(1, 8),
    moves=st.lists(st.tuples(st.integers(0, 7), st.sampled_from(["ask", "settle", "is killed"])), max_size=300),
)
def test_processes_never_send_more_than_the_limit_whichever_is_killed(most, processes, moves):
    limit, account = Limit(name="max_calls", kind=CALLS, most=most), Account()
    held, sent = [0.0] * processes, 0
    for place, move in moves:
        place %= processes
        if move == "is killed":
            held[place] = 0.0  # and its requests may have left
        elif move == "settle" or held[place] < 1:
            account.give_back(limit, held[place])
            held[place] = (account.take(limit, 1, processes) or 0.0) if move == "ask" else 0.0
        if move == "ask" and held[place] >= 1:
            held[place], sent = held[place] - 1, sent + 1
            account.services.setdefault("judge", Spent()).add(Spent(calls=1))
        assert sent + sum(held) <= account.taken.get("max_calls", 0.0) <= most


def test_what_an_account_says_of_limits_that_are_new_raised_or_lowered(tmp_path):
    path = tmp_path / "b.json"
    assert read_account(path) == Account()
    with open_account(path) as account:
        account.services = {"judge_a": Spent(calls=30, usd=0.5), "rag_8b": Spent(calls=70)}
        account.give_back(MAX_CALLS, 0.0)
        assert account.take(MAX_CALLS, 1, 1) is None  # a limit that is new in an old run
    account = read_account(path)
    assert account.reached([MAX_CALLS]) and account.taken == account.most == {"max_calls": 100}
    assert not account.reached([Limit(name="max_calls", kind=CALLS, most=101)])
    assert account.reached([Limit(name="new", kind=CALLS, most=99)])  # no request met it, and none would pass
    assert account.used(Limit(name="x", kind=USD, most=1, service="judge_a")) == 0.5
    path.write_text('{"services"')
    with pytest.raises(ConfigError, match="can't be read"):
        read_account(path)


@pytest.fixture
def limited(tmp_path):
    """Make a transport with a budget, and the budget: `limited(limits, **settings)`."""

    def make(*limits, price=FREE, tokens_per_minute=None, requests_per_minute=None, path=tmp_path / "b.json", **more):
        budget = Budget(path, limits)
        defaults = {"max_concurrency": 4, "attempt_timeout_s": 60.0, "max_attempts": 3, "hedge_fraction": 0.0}
        transport = Transport("judge", **{**defaults, **more})
        transport.count_by(budget.quota("judge", price, tokens_per_minute, requests_per_minute))
        return transport, budget

    return make


async def test_attempts_retries_and_hedges_count_and_a_refusal_says_nothing_about_the_service(limited, tmp_path):
    sent = 0

    async def attempt():
        nonlocal sent
        sent += 1
        if sent % 3 == 0:
            raise ServiceUnavailable("down for once", "judge_http_500")
        await asyncio.sleep(30 if sent > 50 and sent % 8 == 0 else 1.0)

    transport, budget = limited(Limit(name="max_calls", kind=CALLS, most=300), hedge_fraction=1.0)
    results = await asyncio.gather(*(transport.call(attempt) for _ in range(400)), return_exceptions=True)
    assert {error.code for error in results if error is not None} == {"budget_spent"}
    traffic = transport.drain_traffic()
    assert sent == traffic["sent"] == 300
    assert traffic["held_back"] == 0
    assert min(traffic["retries"], traffic["hedges"]) > 5
    budget.settle()
    assert read_account(tmp_path / "b.json").total().calls == 300


async def test_a_resume_begins_with_what_was_spent_and_a_kill_forgets_nothing(limited, tmp_path):
    async def ask(most, count, is_killed=False):
        made = limited(Limit(name="max_calls", kind=CALLS, most=most))
        transport, budget = pickle.loads(pickle.dumps(made))  # as for a process of the reward's own
        calls = (transport.call(lambda: asyncio.sleep(0, "ok")) for _ in range(count))
        results = await asyncio.gather(*calls, return_exceptions=True)
        if not is_killed:
            budget.settle()
        return results.count("ok")

    assert await ask(20_000, 3) == 3
    assert read_account(tmp_path / "b.json").taken == {"max_calls": 3}
    assert await ask(10, 20) == 7
    assert await ask(20, 4, is_killed=True) == 4
    assert await ask(20, 20) == 6
    assert await ask(1000, 40, is_killed=True) == 40
    assert 1000 - 60 - 30 <= await ask(1000, 2000) <= 1000 - 60  # a block of 980 / 32 calls stays taken


async def test_us_dollars_end_at_the_limit_with_all_that_is_under_way(limited, tmp_path):
    cost = PRICE.of(80, 20)
    transport, budget = limited(Limit(name="max_usd", kind=USD, most=200.5 * cost), price=PRICE, max_concurrency=64)

    async def attempt():
        with transport.bill() as bill:
            await asyncio.sleep(1)
            bill.count(80, 20)
        return "ok"

    results = await asyncio.gather(*(transport.call(attempt) for _ in range(400)), return_exceptions=True)
    budget.settle()
    assert results.count("ok") == 200
    account = read_account(tmp_path / "b.json")
    assert account.total().usd == pytest.approx(200 * cost)
    assert account.reached(budget.limits)


@pytest.mark.parametrize("began", [0.0, 3_587.1, 1e6 / 7, 1e9 / 7])
def test_a_wait_for_tokens_is_long_enough_whatever_the_clock_shows(began):
    rate, moment = Rate(1200), began
    for _ in range(400):
        moment += rate.wait_s(moment, 100)
        assert not rate.wait_s(moment, 100)  # else a clock that can't show so short a time stands still
        rate.take(100)
    assert moment - began == pytest.approx(400 * 100 / 1200 * 60, rel=0.1)


async def test_tokens_per_minute_delay_requests_and_fail_none(limited):
    transport, budget = limited(price=PRICE, tokens_per_minute=1200)

    async def attempt():
        with transport.bill() as bill:
            bill.count(80, 20)
        return now()

    began = now()
    ends = await asyncio.gather(*(transport.call(attempt) for _ in range(60)))
    assert all(sum(begin <= each < begin + 60 for each in ends) <= 12 + 2 for begin in ends)
    assert max(ends) - began <= 60 * 60 / 12 * 1.2
    with deadline(1.0), pytest.raises(DeadlineExceeded):
        await asyncio.gather(*(transport.call(attempt) for _ in range(10)))
    assert transport.drain_traffic()["failures"] == 0
    budget.settle()


async def test_requests_per_minute_delay_requests_with_their_retries_and_fail_none(limited):
    sent = []

    async def attempt():
        sent.append(now())
        with transport.bill() as bill:
            bill.count(80, 20)
            if len(sent) % 7 == 0:
                raise ServiceUnavailable("down for once", "judge_http_500")
            await asyncio.sleep(1.0)

    rates = {"tokens_per_minute": 600_000, "requests_per_minute": 60}
    transport, budget = limited(**rates, max_concurrency=64, max_attempts=9)
    await asyncio.gather(*(transport.call(attempt) for _ in range(200)))
    budget.settle()
    assert len(sent) == 200 + transport.drain_traffic()["retries"] > 220
    assert all(sum(begin <= each < begin + 60 for each in sent) <= 60 for begin in sent)
    assert max(sent) - min(sent) <= len(sent) * 1.2


async def test_an_account_that_can_t_be_used_fails_requests_with_a_limit_alone(limited, tmp_path, caplog):
    (tmp_path / "file").write_text("")
    path = tmp_path / "file" / "b.json"
    transport, budget = limited(MAX_CALLS, path=path)
    without_limit, _ = limited(path=path)
    for _ in range(2):
        with pytest.raises(ServiceError) as failed:
            await transport.call(lambda: pytest.fail("it was sent"))
        assert failed.value.code == "budget_unknown" and not isinstance(failed.value, BudgetSpent)
    assert await without_limit.call(lambda: asyncio.sleep(0, "ok")) == "ok"
    budget.settle()
    assert sum("can't be used" in line for line in caplog.messages) == 2  # once for each budget


USAGE = {"prompt_tokens": 100, "completion_tokens": 50}


@pytest.mark.parametrize(
    ("status", "said", "calls", "tokens"),
    [
        (200, {"usage": USAGE, "choices": []}, 2, (200, 100)),  # by schema, then in words
        (500, {}, 1, (0, 0)),
        (200, {"choices": []}, 2, (2000, 200)),  # no usage: as much as it may have been
    ],
    ids=["stated", "refused by status", "not stated"],
)
async def test_every_request_to_a_judge_is_billed_also_the_second_of_an_attempt(
    limited, monkeypatch, tmp_path, status, said, calls, tokens
):
    async def answer(request):
        return Reply(json.dumps(said).encode(), status)

    url = Network(monkeypatch).serve(answer)
    transport, budget = limited(price=PRICE, max_attempts=1)
    client = ProviderClient(JudgeProvider(name="judge", base_url=url, model="m", transport=transport))
    action = Action(fields={"rewritten_query": "price"})
    material = Material("fairness", "Judge.", row(), [(action, Answer(text="5980", passages=(), took_ms=1.0))], None)
    with pytest.raises(ServiceError):
        await client.ask(material, order=(0,), patient=True)
    await client.http.aclose()
    budget.settle()
    total = read_account(tmp_path / "b.json").total("judge")
    assert (total.calls, total.prompt_tokens, total.completion_tokens) == (calls, *tokens)
    assert total.usd == pytest.approx(PRICE.of(*tokens))
