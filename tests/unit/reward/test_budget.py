"""The budget: its law without a file, its account under several processes, and a transport that obeys it."""

import asyncio
import json
import pickle
import sqlite3
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import virtual_time
from support.in_memory import Network, Reply
from support.loopback import row

from salesrl_trl.errors import BudgetSpent, ConfigError, DeadlineExceeded, ServiceError, ServiceUnavailable
from salesrl_trl.reward.judge.provider import JudgeProvider, Material, ProviderClient
from salesrl_trl.reward.service.budget import (
    CALLS,
    NOTHING_SPENT,
    USD,
    Account,
    BudgetShare,
    Limit,
    Price,
    Spent,
    Terms,
    TokenRate,
    granted,
)
from salesrl_trl.reward.service.deadline import deadline, now
from salesrl_trl.reward.service.meter import FREE, Budget
from salesrl_trl.reward.service.spent_file import Return, SpentFile, read_account
from salesrl_trl.reward.service.transport import Transport
from salesrl_trl.types import Action, Answer

MAX_CALLS = Limit(name="max_calls", kind=CALLS, most=100)
PRICE = Price(prompt_token=1e-6, completion_token=2e-6, max_completion_tokens=100)


@given(most=st.integers(1, 10**7), used=st.floats(0, 1e7), request=st.floats(0, 10))
def test_a_part_is_never_more_than_what_is_left_and_never_nothing_while_something_is(most, used, request):
    for kind in (CALLS, USD):
        part = granted(Limit(name="x", kind=kind, most=most), used, request)
        assert 0 <= part <= max(most - used, 0)
        assert (part > 0) == (most - used >= 1 if kind == CALLS else most > used)
        assert kind == USD or part == int(part)


def test_no_minute_has_more_tokens_than_the_limit():
    rate, sent, moment = TokenRate(6000), [], 0.0
    while moment < 300:
        moment += rate.wait_s(moment, 100)
        assert rate.wait_s(moment, 100) == pytest.approx(0, abs=1e-9)
        rate.take(100)
        sent.append(moment)
    for begin in sent:
        assert 100 * sum(begin <= each < begin + 60 for each in sent) <= 6000 + 100
    assert 100 * len(sent) >= 0.9 * 300 / 60 * 6000


def test_parts_come_back_and_a_limit_that_is_new_in_an_old_run_begins_with_what_was_spent(tmp_path):
    file = SpentFile(tmp_path / "b.sqlite")
    assert file.exchange({"judge": Spent(calls=30, usd=0.5)}, []) == {}
    assert file.exchange({}, [Return(MAX_CALLS, 0.0, True)]) == {"max_calls": 1.0}
    with_more = Limit(name="max_calls", kind=CALLS, most=6430)
    part = file.exchange({}, [Return(with_more, 0.0, True)])["max_calls"]
    assert part == (6430 - 31) // 64
    file.exchange({"judge": Spent(calls=9)}, [Return(with_more, part - 9, False)])
    assert file.exchange({}, [Return(Limit(name="max_calls", kind=CALLS, most=40), 0.0, True)]) == {"max_calls": 0.0}
    account = read_account(file.path)
    assert (account.total().calls, account.total().usd, account.total("rag_8b").calls) == (39, 0.5, 0)
    assert account.reached([Limit(name="max_calls", kind=CALLS, most=40)])
    assert not account.reached([Limit(name="max_calls", kind=CALLS, most=41)])
    assert account.reached([Limit(name="new", kind=CALLS, most=39)])  # no request met it, and none would pass
    assert account.most == {"max_calls": 40}
    file.close()


def test_what_no_file_or_a_broken_one_says(tmp_path):
    assert read_account(tmp_path / "none.sqlite") == NOTHING_SPENT
    (tmp_path / "broken.sqlite").write_text("no database " * 100)
    with pytest.raises(ConfigError, match="can't be read"):
        read_account(tmp_path / "broken.sqlite")


KILLED = """
import os, signal, sqlite3, sys
file = sqlite3.connect(sys.argv[1], isolation_level=None)
file.execute("PRAGMA cache_size = 1")
file.execute("BEGIN IMMEDIATE")
file.executemany("INSERT INTO spent VALUES (?, 1, 1, 1, 1)", ((f"{n:0200}",) for n in range(999)))
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_kill_in_the_middle_of_a_transaction_leaves_the_account_as_it_was_before(tmp_path):
    file = SpentFile(tmp_path / "b.sqlite")
    file.exchange({"judge": Spent(calls=7)}, [])
    file.close()
    subprocess.run([sys.executable, "-S", "-c", KILLED, str(file.path)], check=False)
    assert (tmp_path / "b.sqlite-journal").stat().st_size  # half of it is in the file
    assert read_account(file.path).services == {"judge": Spent(calls=7)}


def test_a_part_that_was_not_waited_for_when_it_was_asked_for_refuses_nothing():
    part = BudgetShare(MAX_CALLS)
    part.receive(0.0, is_needed=False)  # the last of the part before was used meanwhile
    assert not part.is_refused
    part.receive(0.0, is_needed=True)
    assert part.is_refused


@pytest.fixture
def metered(tmp_path):
    """Make a transport with a budget, and the budget: `metered(limits, **meter)`."""

    def make(*limits, price=FREE, tokens_per_minute=None, path=tmp_path / "b.sqlite", **settings):
        budget = Budget(Terms(path=path, limits=limits))
        defaults = {"max_concurrency": 4, "attempt_timeout_s": 60.0, "max_attempts": 3, "hedge_fraction": 0.0}
        meter = budget.meter("judge", price, tokens_per_minute)
        return Transport("judge", **{**defaults, **settings}, meter=meter), budget

    return make


def test_first_attempts_and_retries_count_and_what_is_refused_says_nothing_about_the_service(metered, tmp_path):
    sent = 0

    async def attempt():
        nonlocal sent
        sent += 1
        if sent % 2:
            raise ServiceUnavailable("down for once", "judge_http_500")

    transport, budget = metered(MAX_CALLS)

    async def scene():
        results = await asyncio.gather(*(transport.call(attempt) for _ in range(80)), return_exceptions=True)
        refused = [each for each in results if isinstance(each, BudgetSpent)]
        assert sent == 100
        assert len(refused) == 80 - sent // 2
        assert {each.code for each in refused} == {"budget_spent"}
        assert transport.drain_traffic()["held_back"] == 0
        await budget.aclose()

    virtual_time.run(scene())
    assert read_account(tmp_path / "b.sqlite").total().calls == 100


def test_a_resume_begins_with_what_was_spent_and_a_close_gives_back_what_was_not(metered, tmp_path):
    def ask(most, count):
        transport, budget = metered(Limit(name="max_calls", kind=CALLS, most=most))
        transport, budget = pickle.loads(pickle.dumps((transport, budget)))  # as for a process of the reward's own

        async def scene():
            results = await asyncio.gather(
                *(transport.call(lambda: asyncio.sleep(0, "ok")) for _ in range(count)), return_exceptions=True
            )
            await budget.aclose()
            return results.count("ok")

        return virtual_time.run(scene())

    assert ask(20_000, 3) == 3
    [(used,)] = sqlite3.connect(tmp_path / "b.sqlite").execute("SELECT used FROM limits")
    assert used == 3
    assert ask(10, 20) == 7
    assert ask(12, 20) == 2


def test_hedges_count_and_none_is_sent_at_the_limit(metered, tmp_path):
    late = set(range(40, 200, 4))
    numbers = iter(range(1000))

    async def attempt():
        await asyncio.sleep(30 if next(numbers) in late else 1.0)

    transport, budget = metered(Limit(name="max_calls", kind=CALLS, most=150), hedge_fraction=1.0)

    async def scene():
        await asyncio.gather(*(transport.call(attempt) for _ in range(200)), return_exceptions=True)
        traffic = transport.drain_traffic()
        assert traffic["hedges"] > 10
        assert traffic["sent"] == next(numbers) == 150
        await budget.aclose()

    virtual_time.run(scene())


def test_tokens_per_minute_delay_requests_and_fail_none(metered):
    async def scene():
        transport, budget = metered(price=PRICE, tokens_per_minute=1200)

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
        await budget.aclose()

    virtual_time.run(scene())


def test_a_transport_of_ones_own_counts_with_a_meter_that_it_is_given_later(metered, tmp_path):
    _, budget = metered(Limit(name="max_calls", kind=CALLS, most=5))
    own = Transport("mine", max_concurrency=4, attempt_timeout_s=1.0, max_attempts=1)
    own.count_by(budget.meter("mine"))

    async def scene():
        calls = (own.call(lambda: asyncio.sleep(0, "ok")) for _ in range(8))
        assert (await asyncio.gather(*calls, return_exceptions=True)).count("ok") == 5
        await budget.aclose()

    virtual_time.run(scene())
    assert read_account(tmp_path / "b.sqlite").total("mine").calls == 5


def test_an_account_that_can_t_be_used_fails_requests_and_no_request_passes(metered, tmp_path):
    (tmp_path / "file").write_text("")
    transport, budget = metered(MAX_CALLS, path=tmp_path / "file" / "b.sqlite")

    async def scene():
        with pytest.raises(ServiceError) as failed:
            await transport.call(lambda: pytest.fail("it was sent"))
        assert failed.value.code == "budget_unknown"
        await budget.aclose()

    virtual_time.run(scene())


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
def test_every_request_to_a_judge_is_billed_also_the_second_of_an_attempt(
    metered, monkeypatch, tmp_path, status, said, calls, tokens
):
    async def answer(request):
        return Reply(json.dumps(said).encode(), status)

    url = Network(monkeypatch).serve(answer)
    transport, budget = metered(price=PRICE, max_attempts=1)
    client = ProviderClient(JudgeProvider(name="judge", base_url=url, model="m", transport=transport))
    action = Action(fields={"rewritten_query": "price"})
    material = Material("fairness", "Judge.", row(), action, Answer(text="5980", passages=(), took_ms=1.0), None)

    async def scene():
        with pytest.raises(ServiceError):
            await client.ask(material, candidate_first=True, patient=True)
        await client.http.aclose()
        await budget.aclose()

    virtual_time.run(scene())
    total = read_account(tmp_path / "b.sqlite").total("judge")
    assert (total.calls, total.prompt_tokens, total.completion_tokens) == (calls, *tokens)
    assert total.usd == pytest.approx(PRICE.of(*tokens))


def test_what_an_account_says_of_a_limit():
    account = Account(services={"judge_a": Spent(calls=3, usd=0.25), "rag_8b": Spent(calls=4)}, refused={})
    assert account.used(MAX_CALLS) == 7
    assert account.used(Limit(name="x", kind=USD, most=1, service="judge_a")) == 0.25
