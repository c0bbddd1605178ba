"""Conversations with a customer, under ten kinds of faults, against a ledger; and whose tokens train.

CONVERSATIONS=10000 python -m pytest tests/faults/test_conversations.py -s
"""

import asyncio
import json
import os
import re
from collections import Counter
from itertools import chain
from pathlib import Path

import pytest
from datasets import Dataset
from faults.conftest import FaultServer
from faults.wrong_customer import CUSTOMERS, FAULTS, OTHERS, SAYS, planned
from support.keyed import make_calling_policy
from support.scripted import settings, trained_by
from support.talking import Scripted
from transformers import AutoTokenizer

from salesrl_trl.agents.customer import Customer
from salesrl_trl.agents.tools import tool
from salesrl_trl.config import SalesGRPOConfig
from salesrl_trl.judged.budget import Budget, Limit
from salesrl_trl.judged.provider import JudgeProvider, ProviderClient
from salesrl_trl.reward.functions import per_completion
from salesrl_trl.service.breaker import Breaker
from salesrl_trl.service.transport import Transport
from salesrl_trl.trainer import SalesGRPOTrainer

MANY = int(os.environ.get("CONVERSATIONS", "120"))
AT_ONCE = 1250
DEADLINE_S = 5.0
"""Of the verdict on a conversation. A verdict that is not late needs milliseconds."""


class HTTPError(Exception):
    status = 503


def paid_by(folder):
    """A transport whose budget covers about half of the calls that are asked for, and how many those are."""
    asked = sum(planned(place)[1] == "budget" for place in range(MANY))
    budget = Budget(folder / "budget.json", [Limit(name="max_calls", kind="calls", most=max(asked // 2, 1))])
    transport = Transport(
        "paid", max_concurrency=64, attempt_timeout_s=60, max_attempts=1, hedge_fraction=0.0,
        quota=budget.quota("paid"),
    )  # fmt: skip
    return transport, max(asked // 2, 1)


class Ledger:
    """The seller's turns, as tokens that their text is not encoded to, and what was asked for."""

    def __init__(self, tokenizer, folder):
        self.tokenizer = tokenizer
        self.asked, self.scored, self.paid = Counter(), {}, set()
        self.sampled = {}  # token ids of each turn, by place
        self.transport, self.affordable = paid_by(folder)

    @property
    def tools(self):
        async def search(way: str, number: str) -> str:
            """Searches.

            Args:
                way: How it ends.
                number: Which one.
            """
            if way == "tool raises":
                raise HTTPError("key=secret")
            if way == "tool too slow":
                await asyncio.sleep(60)
            return f"found {number}"

        async def paid(number: str) -> str:
            """Asks a paid service.

            Args:
                number: Which one.
            """
            self.paid.add(int(number.split("-")[0]))
            return f"found {number}"

        return [tool(deadline_s=0.5)(search), tool(transport=self.transport)(paid)]

    def generate(self, ids):
        return [self.next(text) for text in self.tokenizer.batch_decode(ids)], None

    def next(self, prompt):
        """The next turn of the conversation with this prompt, which has what went before and no more."""
        place = int(re.search(r"Conversation (\d+)\.", prompt)[1])
        steps, fault, at, *_ = planned(place)
        step = self.asked[place]
        self.asked[place] += 1
        heard = {"say": ["Seller", "Customer"], "call": ["found"]}
        wanted = [(who, f"{place}-{number}") for kind, number in steps[:step] for who in heard[kind]]
        assert re.findall(r"(Seller|Customer|found) (\d+-\d+)", prompt) == wanted, place
        assert "secret" not in prompt
        kind, number = steps[step]
        own = f"{place}-{number}"
        text = f"Seller {own}. {SAYS[(place * 3 + number) % 2]}"
        if kind == "call" and fault == "budget" and step == at:
            text = f'<tool_call>\n{{"name": "paid", "arguments": {{"number": "{own}"}}}}\n</tool_call>'
        elif kind == "call":
            way = fault if fault in OTHERS and step == at else "ok"
            arguments = json.dumps({"way": way, "number": own})
            text = f'<tool_call>\n{{"name": "search", "arguments": {arguments}}}\n</tool_call>'
        ids = tokens_of(self.tokenizer, text)
        self.sampled.setdefault(place, []).append(ids)
        return ids


def tokens_of(tokenizer, text):
    """Tokens that the text is not encoded to: one for each character but those of marks."""
    pieces = [piece for piece in re.split(r"(</?tool_call>)", text) if piece]
    split = [[piece] if piece.startswith(("<tool_call", "</tool_call")) else piece for piece in pieces]
    own = [token for part in split for each in part for token in tokenizer(each)["input_ids"]]
    return [*own, tokenizer.eos_token_id]


class Talking(SalesGRPOTrainer):
    ledger = None

    def _generate_single_turn(self, ids, images, fields, group, *args, **kwargs):
        return self._made.tokens(ids, group) if self._made.tokens is not None else self.ledger.generate(ids)


def customer_at(url):
    transport = Transport(
        "customer", max_concurrency=64, initial_concurrency=64, attempt_timeout_s=0.8, max_attempts=2,
        hedge_fraction=0.0, breaker=Breaker(float("inf")),
    )  # fmt: skip
    customer = Customer(deadline_s=20.0)
    settings = JudgeProvider(name="customer", base_url=f"{url}/v1", model="m", transport=transport)
    customer.connect(ProviderClient(settings))
    return customer


def persona(place):
    return {"needs": f"item-{place}", "reservation": 600.0, "list_price": 800.0}


@per_completion(deadline_s=DEADLINE_S)
async def verdict(completion):
    said = {int(place) for each in completion for place in re.findall(r" (\d+)-\d", str(each.get("content")))}
    [place] = said
    if planned(place)[1] == "deadline":
        await asyncio.sleep(60)
    return place / MANY


def check(place, reward, tokens, mask, messages, ledger):
    """One conversation against the ledger. Returns its reason, or how it ended."""
    steps, fault, at, stays, end = planned(place)
    paid_for = fault == "budget" and place in ledger.paid
    fails = fault is not None and stays and not paid_for
    ended = at if fails and fault != "deadline" else len(steps) - 1
    # 1. the engine was asked for the turns up to the fault, and no more
    assert ledger.asked[place] == ended + 1 == len(ledger.sampled[place]), (place, fault)
    # 2. its tokens are those that were sampled, and what others said is masked and opens no turn
    assert [token for token, own in zip(tokens, mask, strict=True) if own] == [*chain(*ledger.sampled[place])], place
    starts = ledger.tokenizer.convert_tokens_to_ids("<|im_start|>")
    answers = ended + 1 - (1 if not fails or fault == "deadline" else 0)
    assert tokens.count(starts) in (2 * answers, 2 * (answers - 1)), (place, fault)
    # 3. it has no turn of another conversation, and each of its own up to the fault
    said = [each for message in messages for each in re.findall(r"Customer (\d+-\d+)", str(message.get("content")))]
    heard = [number for kind, number in steps[: ended if fails and fault != "deadline" else None] if kind == "say"]
    assert said == [f"{place}-{number}" for number in heard], (place, fault)
    # 4. its number is its own, or it has the reason of its fault
    if fails:
        assert reward.value is None and reward.reason == FAULTS[fault], (place, fault, reward)
        return f"{fault}: {reward.reason}"
    assert reward.value == pytest.approx(place / MANY), (place, fault, reward)
    assert messages[-1]["outcome"]["end"] == {"accept": "agreement", "refuse": "refusal"}[end]
    if end == "accept":
        assert messages[-1]["outcome"]["price"] == 1 + place % 500
    return "scored"


@pytest.mark.timeout(3000)
def test_no_conversation_has_anothers_turn_or_is_lost_without_its_reason(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    policy = make_calling_policy(tmp_path / "policy", max_position_embeddings=8192)
    server = FaultServer({}, Path(__file__).with_name("wrong_customer.py"))
    rows = [
        {"prompt": [{"role": "user", "content": f"Conversation {place}."}], "persona": persona(place)}
        for place in range(MANY)
    ]
    args = SalesGRPOConfig(**settings(tmp_path / "run", max_completion_length=4096, beta=0.0))
    ledger = Ledger(AutoTokenizer.from_pretrained(policy), tmp_path)
    counts, faults, customer = Counter(), Counter(), customer_at(server.url)
    try:
        trainer = Talking(str(policy), [verdict], args, Dataset.from_list(rows), tools=ledger.tools, partner=customer)
        trainer.ledger, pipeline = ledger, trainer.components.pipeline

        for first in range(0, MANY, AT_ONCE):
            places = range(first, min(first + AT_ONCE, MANY))
            rollout = pipeline.evaluate([rows[place] for place in places], 0, group=1)
            sampled = rollout.sampled
            rewards = trainer.components.reward_loop.result(rollout.rewards, sampled.completions).rewards
            columns = sampled.completion_ids, sampled.generated[2], sampled.completions
            for place, reward, *rest in zip(places, rewards, *columns, strict=True):
                counts[check(place, reward, *rest, ledger)] += 1
                faults[planned(place)[1]] += 1
            print(f"{places.stop}: {dict(counts)}", flush=True)
        customer.close()
        trainer.finish()
        stats = server.stats
    finally:
        server.stop()
    turns = sum(ledger.asked.values())
    print(
        f"\n{MANY} conversations, {turns} turns, planned faults {json.dumps({str(k): n for k, n in faults.items()})}"
    )
    print(f"the customer's server: {json.dumps(stats)}")
    print(f"ends: {json.dumps(dict(sorted(counts.items())))}")
    assert counts.total() == MANY
    assert stats["foreign"] == 0
    assert {name.split(":")[0] for name in counts} == {"scored", *FAULTS}
    assert len(ledger.paid) == ledger.affordable
    assert all(stats[name] > 0 for name in CUSTOMERS)
    assert "secret" not in caplog.text


class Turns:
    """Turns of a seller, each with a number of its own, by the conversation's first."""

    def __init__(self, tokenizer):
        self.tokenizer, self.sampled, self.count = tokenizer, {}, 0

    def generate(self, ids):
        return [self.next(text) for text in self.tokenizer.batch_decode(ids)], None

    def next(self, prompt):
        before = [int(number) for number in re.findall(r"Turn (\d+)\.", prompt)]
        self.count += 1
        first = before[0] if before else self.count
        turns = self.sampled.setdefault(first, {})
        assert [*turns] == before  # it reads its own turns, and no other's
        turns[self.count] = tokens_of(self.tokenizer, f"Turn {self.count}. {SAYS[self.count % 2]}")
        return turns[self.count]


@pytest.mark.timeout(3000)
def test_the_tokens_that_train_are_those_that_were_sampled_whatever_customers_say(tmp_path, monkeypatch):
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    policy = make_calling_policy(tmp_path / "policy", max_position_embeddings=8192)
    replies = Counter()

    def says(row, messages):
        replies[text := SAYS[(len(messages) + replies.total()) % len(SAYS)]] += 1
        return f"{replies.total()} {text}"

    @per_completion
    async def by_number(completion):
        return int(re.search(r"Turn (\d+)", completion[0]["content"])[1]) % 7 / 7

    batch = 48 if MANY > 1000 else 8
    steps = -(-MANY // (6 * batch))
    args = SalesGRPOConfig(
        **settings(tmp_path / "run", max_completion_length=4096, beta=0.0, per_device_train_batch_size=batch,
                   max_steps=steps, learning_rate=1e-5)
    )  # fmt: skip
    rows = [{"prompt": [{"role": "user", "content": f"Hello {place}."}]} for place in range(batch)]
    trainer = Talking(str(policy), [by_number], args, Dataset.from_list(rows), partner=Scripted(says, max_turns=6))
    trainer.ledger = turns = Turns(AutoTokenizer.from_pretrained(policy))
    trained, reasons, _ = trained_by(trainer)
    trainer.train()
    trainer.finish()
    sampled = sorted([*chain(*of.values())] for of in turns.sampled.values())
    print(f"\n{turns.count} turns of {len(turns.sampled)} conversations, {len(trained)} trained, "
          f"{sum(map(len, trained))} tokens of the policy; replies {dict(replies)}")  # fmt: skip
    assert turns.count == 6 * batch * steps == replies.total() >= MANY
    assert sorted(trained) == sampled
    assert reasons == {}
    assert replies.keys() == {*SAYS}
