"""The built-in customer: by rules, and played by a language model over HTTP."""

import asyncio
import contextlib
import json
import logging
import math
from types import SimpleNamespace

import pytest
from support.providers import completion, refusal
from werkzeug import Response

from salesrl_trl import per_completion
from salesrl_trl.agents.agents_part import AgentsPart
from salesrl_trl.agents.customer import Customer, Persona, RuleBased, offer_in
from salesrl_trl.agents.partner import Partner
from salesrl_trl.data.files import demo_records
from salesrl_trl.errors import ConfigError, DataError, ServiceError, ServiceUnavailable
from salesrl_trl.judged.provider import JudgeProvider, ProviderClient
from salesrl_trl.launch.assembly import ServiceClients
from salesrl_trl.launch.checks.outcome import Findings
from salesrl_trl.launch.checks.reward import read_reward
from salesrl_trl.launch.judge_config import partner_of
from salesrl_trl.launch.preflight.services import _hear_partner
from salesrl_trl.launch.recipes.dialogue_rewards import deal, price, searches, steered, turns
from salesrl_trl.launch.reward_config import RewardConfig
from salesrl_trl.reward.batch import Sample
from salesrl_trl.reward.reward_loop import RewardLoop, warm_up
from salesrl_trl.reward.stage_times import StageTimes
from salesrl_trl.service.transport import Transport

PERSONA = {
    "needs": "acoustic guitar", "reservation": 800, "list_price": 1000.0, "mood": "hurried", "protected": ["widow"],
    "objections": [{"says": "When is it?", "facts": ["10:30"]}, {"says": "I have no time.", "facts": ["online"]}],
}  # fmt: skip
ROW = {"prompt": [{"role": "user", "content": "I want acoustic guitar."}], "persona": PERSONA}
OFFER = "I can offer you acoustic guitar at {} percent off."


@pytest.mark.parametrize(
    ("said", "heard", "end"),
    [
        ([OFFER.format(20), "At 10:30.", "Take it online."], ["When is it?", "I have no time."], "agreement"),
        ([OFFER.format(10), OFFER.format(20), "At 10:30", "online"],
         ["That is too much for me.", "When is it?", "I have no time."], "agreement"),
        ([OFFER.format(10)] * 3, ["That is too much for me."] * 2, "refusal"),
        (["What matters to you?", "At 10:30.", "online", OFFER.format(30)],
         ["When is it?", "I have no time.", "What is your best price?"], "agreement"),
        ([OFFER.format(20), "At 110:30.", "No idea.", "Hm."],
         ["When is it?", "That does not answer me.", "That does not answer me."], "refusal"),
        (["I offer you yoga at 30 percent off.", "Hello", "Hello"],
         ["I asked about acoustic guitar.", "What can you offer me?"], "refusal"),
        (["The guitar book costs 30 yuan.", "Hello", "Hello"], ["What can you offer me?"] * 2, "refusal"),
    ],
)  # fmt: skip
def test_the_customer_by_rules(said, heard, end):
    customer, messages, replies = Customer(), [*ROW["prompt"]], []
    for text in said:
        messages += [{"role": "assistant", "content": text}]
        replies.append(asyncio.run(customer.reply(ROW, messages)))
        messages += [{"role": "user", "content": replies[-1].text}]
    assert [reply.text for reply in replies[:-1]] == heard
    assert [reply.outcome and reply.outcome["end"] for reply in replies] == [None] * (len(said) - 1) + [end]
    if end == "agreement":
        last = 30 if "30 percent" in said[-1] else 20
        assert replies[-1].outcome == {"end": end, "price": 10.0 * (100 - last), "price_share": (100 - last) / 80}


def test_a_customer_whose_patience_ran_out_in_the_prompt_keeps_refusing():
    customer = RuleBased(Persona.of(ROW))
    ends = [customer.answer("Hello").outcome for _ in range(6)]
    assert ends[:2] == [None, None] and ends[-2:] == [{"end": "refusal"}] * 2


@pytest.mark.parametrize(
    ("text", "price"),
    [
        ("a deal: 750 yuan", 750), ("20% off", 800), ("给您 620.5 元", 620.5),
        ("I offer you 900 yuan, no, 850 yuan", 850), ("It costs 30 yuan.", None),
        ("We offer 3 months at 30 yuan.", None), ("520 percent off", None),
        ("20 percent of students", None),
    ],
)  # fmt: skip
def test_offers_are_read(text, price):
    assert offer_in(text, 1000.0) == price


def test_every_built_in_customer_can_be_won_at_its_price():
    for record in (*demo_records("demo_dialogue/train.jsonl"), *demo_records("demo_dialogue/heldout.jsonl")):
        persona = Persona.of(record)
        assert persona.list_price * 0.7 <= persona.reservation < persona.list_price
        customer = RuleBased(persona)
        facts = [each["facts"][0] for each in persona.objections]
        customer.answer(f"I offer you {persona.needs} at 30 percent off.")
        assert customer.answer(f"It is {facts[0]}.").outcome is None
        assert customer.answer(f"So: {facts[1]}.").outcome["end"] == "agreement"
        hidden = str(round(persona.reservation))
        assert all(hidden not in each["content"] for each in record["prompt"])


@pytest.mark.parametrize(
    "persona",
    [None, {}, {"needs": "x"}, PERSONA | {"reservation": -1}, PERSONA | {"other": 1}, PERSONA | {"reservation": "500"},
     PERSONA | {"list_price": math.nan}, PERSONA | {"objections": [{"says": "When?"}]}],
)  # fmt: skip
def test_a_row_without_a_sound_persona_is_rejected_without_quoting_it(persona):
    with pytest.raises(DataError, match="row rows-3: `persona` is malformed or missing"):
        Persona.of({"persona": persona}, "row rows-3")


@contextlib.contextmanager
def connected(httpserver, answer):
    requests = []

    def handle(request):
        requests.append(json.loads(request.get_data()))
        status, body = answer(len(requests))
        return Response(json.dumps(body), status, content_type="application/json")

    httpserver.expect_request("/v1/chat/completions").respond_with_handler(handle)
    transport = Transport("customer", max_concurrency=4, max_attempts=2, attempt_timeout_s=30)
    settings = JudgeProvider(name="customer", base_url=httpserver.url_for("/v1"), model="m", transport=transport)
    yield ProviderClient(settings), requests


def heard(model, messages):
    async def reply():
        customer = Customer()
        customer.connect(model)
        try:
            return await customer.reply(ROW, messages)
        finally:
            await model.http.aclose()

    return asyncio.run(reply())


TALK = [
    {"role": "system", "content": "You sell."}, *ROW["prompt"],
    {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "search"}}]},
    {"role": "tool", "name": "search", "content": "secret result"}, {"role": "assistant", "content": OFFER.format(20)},
]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "outcome"),
    [
        ('{"reply": "Well.", "decision": "continue", "price": null}', None),
        ('Hm. {"reply": "Well.", "decision": "refuse"}', {"end": "refusal"}),
        ('```json\n{"reply": "Well.", "decision": "accept", "price": 720}\n```',
         {"end": "agreement", "price": 720.0, "price_share": 0.9}),
        ('<think>{"reply": "No.", "decision": "refuse"} {or}</think>{"reply": "Well.",\n"decision": "continue",}',
         None),
    ],
)  # fmt: skip
def test_a_language_model_plays_the_customer(httpserver, text, outcome):
    with connected(httpserver, lambda number: (200, completion(text))) as (model, requests):
        reply = heard(model, TALK)
    assert (reply.text, reply.outcome) == ("Well.", outcome)
    [sent] = requests
    role, *talk = sent["messages"]
    assert '"reservation": 800' in role["content"] and role["role"] == "system"
    assert [(each["role"], each["content"]) for each in talk] == [  # its own words are the customer's
        ("assistant", "I want acoustic guitar."), ("user", OFFER.format(20))
    ]  # fmt: skip
    usage = model.drain_usage()
    assert (usage.prompt_tokens, usage.completion_tokens) == (11, 7)


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        ((503, {}), "customer_http_503"),
        ((200, completion("I don't know")), "customer_no_reply"),
        ((200, completion('{"reply": "", "decision": "continue"}')), "customer_no_reply"),
        ((200, completion('{"reply": null, "decision": "continue"}')), "customer_no_reply"),
        ((200, completion("", reasoning="Hm.")), "customer_only_thoughts"),
        *(
            ((200, completion(f'{{"reply": "Yes", "decision": "accept", "price": {price}}}')), "customer_no_reply")
            for price in ("null", "NaN", "-5", "1e999")
        ),
        ((200, completion("", finish="length")), "customer_cut_off"),
        ((200, {"choices": []}), "customer_empty"),
        ((200, completion('{"reply": "Yes"', finish="content_filter")), "customer_refused"),
    ],
)
def test_a_failed_call_of_the_model_is_not_a_reply(httpserver, answer, code):
    with connected(httpserver, lambda number: answer) as (model, _), pytest.raises(ServiceError) as raised:
        heard(model, TALK)
    assert raised.value.code == code
    assert not any(words in str(raised.value) for words in ("judge", "customer_providers"))


def test_a_reply_of_another_form_is_sampled_again(httpserver):
    texts = {1: "Let me think.", 2: '{"reply": "Well.", "decision": "continue"}'}
    with connected(httpserver, lambda number: (200, completion(texts[number]))) as (model, requests):
        assert heard(model, TALK).text == "Well."
    assert len(requests) == 2
    assert model.drain_usage().completion_tokens == 14


def test_a_field_that_the_model_rejects_is_told_with_its_setting(httpserver, caplog):
    def answer(number):
        reply = 200, completion('{"reply": "Well.", "decision": "continue"}')
        return refusal("max_completion_tokens", "Unsupported parameter") if number == 1 else reply

    config = RewardConfig(partner={"base_url": httpserver.url_for("/v1"), "model": "m"})
    with connected(httpserver, answer), caplog.at_level("INFO", logger="salesrl_trl"):
        assert heard(ServiceClients(config, read_reward(config, ["fairness"])).partner(), TALK).text == "Well."
    assert "customer rejects `max_completion_tokens`" in caplog.text
    assert "Set `extra_body: {max_tokens: ...}` in `partner`" in caplog.text


def score(function, completion, **row):
    return asyncio.run(function.score(Sample(row=ROW | row, completion=completion), StageTimes("1"))).value


@pytest.mark.parametrize(
    ("last", "expected"),
    [
        ({"outcome": {"end": "agreement", "price": 720.0}}, (1.0, 0.9)),
        ({"outcome": {"end": "agreement", "price": 900.0}}, (0.0, 0.0)),  # a model that forgot its limit
        ({"outcome": {"end": "refusal"}}, (0.0, 0.0)),
        ({}, (0.0, 0.0)),
    ],
)
def test_rewards_read_the_outcome(last, expected):
    talk = [*TALK[2:], {"role": "user", "name": "customer", "content": "Well.", **last}]
    assert (score(deal, talk, persona=PERSONA), score(price, talk, persona=PERSONA)) == expected
    assert (score(turns, talk), score(searches, talk)) == (1.0, 1.0)
    assert score(steered, talk, persona=PERSONA) == 0.0
    told = [{"role": "assistant", "content": "As you are a widow: 10 percent off"}, talk[-1]]
    assert score(steered, told, persona=PERSONA) == 1.0
    assert score(steered, talk, persona=PERSONA | {"protected": []}) is None


class Short(Partner):
    max_turns = 4


def test_the_setting():
    assert RewardConfig(partner="customer").parsed_partner().kind == "customer"
    priced = {"base_url": "http://a/v1", "model": "m", "usd_per_million_prompt_tokens": 1.0}
    assert RewardConfig(partner=priced, max_usd=1.0).asks_model
    for wrong, words in (
        ({"base_url": "http://a/v1"}, "an address without a model"),
        ({"model": "m"}, "an address without a model"),
        ({"kind": "my.Class", "base_url": "http://a/v1", "model": "m"}, "own class.*: base_url, model would have no"),
        ({"kind": "my.Class", "max_calls": 60}, "own class.*: max_calls would have no effect"),
        ({"other": 1}, "`partner` has an unknown 'other'"),
    ):
        with pytest.raises(ConfigError, match=words):
            RewardConfig(partner=wrong)
    path = f"{Short.__module__}.{Short.__name__}"
    most = [partner_of(given).build().max_turns for given in ("customer", path, {"kind": path, "max_turns": 3})]
    assert most == [6, 4, 3]  # the package's, the class's, the setting's


@pytest.mark.parametrize("status", [200, 401])
def test_a_preflight_asks_the_model_once(httpserver, status):
    answer = completion('{"reply": "Well.", "decision": "continue"}')
    with connected(httpserver, lambda number: (status, answer)) as (_, requests):
        config = RewardConfig(partner={"base_url": httpserver.url_for("/v1"), "model": "m"}, max_attempts=1)
        plan = SimpleNamespace(config=SimpleNamespace(reward=config), reward=read_reward(config, ["fairness"]))
        findings = Findings()
        if status == 200:
            asyncio.run(_hear_partner(plan, findings))
            assert findings.figures["customer_s"] > 0
        else:
            with pytest.raises(ServiceError, match="401"):
                asyncio.run(_hear_partner(plan, findings))
        assert len(requests) == 1


class Idle(AgentsPart):
    """Without a trainer."""

    def __init__(self, partner, loop):
        self._trl = SimpleNamespace(partner=partner, tools_loop=loop)


@pytest.mark.parametrize("status", [200, 401])
def test_a_run_asks_the_model_once_before_its_first_step(httpserver, caplog, status):
    """With the judges: a rejected key ends the run."""
    answer = completion('{"reply": "Well.", "decision": "continue"}')
    caplog.set_level(logging.INFO)
    with (
        connected(httpserver, lambda number: (status, answer)) as (model, requests),
        contextlib.closing(RewardLoop(per_completion(lambda completion: 0.0))) as rewards,
        contextlib.closing(Customer()) as customer,
    ):
        customer.connect(model)
        part = Idle(customer, rewards._batches.loop)
        if status == 200:
            warm_up(rewards, [part.warm_up])
            assert "[WarmUp] customer: 0." in caplog.text
            assert len(requests) == 1
        else:
            with pytest.raises(ServiceUnavailable, match=r"failed their warm-up.*401.*\(customer: model m at http"):
                warm_up(rewards, [part.warm_up])
            with pytest.raises(ServiceUnavailable, match="ZeroDivisionError"):  # the other ranks wait for this one
                warm_up(rewards, [lambda: {"bug": 1 / 0}])
        assert customer.transports[0].drain_traffic()["sent"] == 0  # not of the first step
        assert Idle(Customer(), None).warm_up() == {}  # by rules


def test_the_budget_counts_the_customers_calls(httpserver, tmp_path):
    answer = completion('{"reply": "Well.", "decision": "continue"}', usage=(1000, 1000))
    with connected(httpserver, lambda number: (200, answer)) as (_, requests):
        config = RewardConfig(
            partner={"base_url": httpserver.url_for("/v1"), "model": "m", "usd_per_million_completion_tokens": 1000.0},
            max_usd=1.5,
        )
        clients = ServiceClients(config, read_reward(config, ["fairness"]), budget=config.budget(tmp_path))

        async def replies():
            customer = Customer()
            customer.connect(clients.partner())
            made = [await customer.reply(ROW, TALK)]
            with pytest.raises(ServiceError) as raised:
                for _ in range(3):
                    made.append(await customer.reply(ROW, TALK))
            await customer._model.http.aclose()
            return len(made), raised.value.code

        made, code = asyncio.run(replies())
    assert (made, code) == (len(requests), "budget_spent")
    assert made < 3
