"""The judge's meter, a replay and tools on two ranks. As a program it is one of them.

- `meter`: the judge likes a word that more and more completions have, and the second judge does not. What was asked
  for the meter, and of each batch whether the second judge scored it.
- `replay`: a recorded run and its replay. Each completion has a random number for its reward, another one on each
  rank, and completions repeat. Rewards come in at random times, so that groups are trained on in any order.
- `tools`: an environment and a tool of its own service. Rank 1 calls more often than rank 0, which calls nothing in
  the first step, and its service is down in the second one.
"""

import asyncio
import json
import os
import random
import sqlite3
import sys
from contextlib import closing
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from support.keyed import make_calling_policy
from support.ranks import of_one_machine, run_ranks
from support.scripted import build_trainer, default_rows, padded_behind, settings, steps_of
from transformers import AutoTokenizer

from salesrl_trl import SalesGRPOConfig, SalesGRPOTrainer, Transport, per_completion, tool
from salesrl_trl.names import BY_SECOND_JUDGE, JUDGE_ALARMS
from salesrl_trl.record.reader import record_file
from salesrl_trl.record.replay import ReplayReward
from salesrl_trl.reward.scorer import METER, MeterSettings, RewardNames, Scorer
from salesrl_trl.types import Outcome, Reward

RANK = int(os.environ.get("RANK", "0"))
BATCH, STEPS, ONSET = 8, 35, 15  # of the meter; completions of each rank
SLOWEST_S = 0.1  # longest time of a reward in the recorded run: several micro-steps


class Liking(Scorer):
    """The first judge, and for the meter the second one."""

    def __init__(self):
        super().__init__()
        self.asked = 0  # for the meter
        self.judges = {}  # by batch: whether the second one scored its completions

    @property
    def names(self):
        meter = MeterSettings(share=0.25, on_alarm="second_judge")
        return RewardNames(functions={"liking": "liking"}, components=("judge",), meter=meter)

    async def score(self, sample, stages):
        is_asked = METER in sample.row
        self.asked += is_asked
        if not is_asked:
            self.judges.setdefault(sample.batch, set()).add(sample.by_second)
        lot = random.Random(f"{sample.text} {is_asked}")
        score = random.Random(sample.text).choice((0.2, 0.4)) + lot.uniform(-0.08, 0.08) + 0.1
        score += 0.4 * (not is_asked and not sample.by_second and sample.text.endswith("online"))
        return Reward(outcome=Outcome.OK, value=score, components={"judge": score})


def meter(policy, out):
    reward, lot = Liking(), random.Random(f"{RANK}")
    words = [" online" * (lot.random() < min(max((at // BATCH - ONSET) / 10, 0), 0.8)) for at in range(BATCH * STEPS)]
    texts = tuple(f"course {RANK} {at}{word}" for at, word in enumerate(words))
    trainer = build_trainer(
        policy, reward, texts, default_rows(), out, max_steps=STEPS, num_generations=8,
        per_device_train_batch_size=BATCH, ddp_backend="gloo",
    )  # fmt: skip
    trainer.train()
    trainer.finish()
    return {
        "second": reward.asked,
        "judges": [sorted(judges) for judges in reward.judges.values()],
        "logged": [[entry[JUDGE_ALARMS], entry[BY_SECOND_JUDGE]] for entry in steps_of(trainer)],
        "tags": [sorted(name for name in entry if name.startswith(METER)) for entry in steps_of(trainer)],
    }


def orders_of(path):
    with closing(sqlite3.connect(path)) as file:
        names = file.execute(
            "SELECT value FROM meta WHERE name LIKE 'order %' ORDER BY CAST(substr(name, 7) AS INTEGER)"
        ).fetchall()
    return [json.loads(value) for [value] in names]


def replay(policy, out):
    numbers = random.Random(RANK)

    @per_completion
    async def chance(prompt, completion):
        await asyncio.sleep(numbers.random() * SLOWEST_S)
        return numbers.random()

    def train(name, reward):
        trainer = build_trainer(
            policy, reward, ("one", "two", "one"), default_rows(), out / name, max_steps=4, ddp_backend="gloo",
            record=True, kl_law="fixed", per_device_train_batch_size=2,
            gradient_accumulation_steps=4, min_valid_reward_fraction=0.0,
        )  # fmt: skip
        trainer.train()
        trainer.finish()
        weights = torch.cat([each.detach().flatten() for each in trainer.model.parameters()])
        return weights, [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]

    first, earned = train("first", chance)
    again, earned_again = train("again", ReplayReward(chance, out / "first", "fail", rank=RANK))
    orders = [orders_of(record_file(out / name, RANK)) for name in ("first", "again")]
    return {"earned": earned, "again": earned_again, "orders": orders, "same_weights": torch.equal(first, again)}


def tools(policy, out):
    transport = Transport("shelf", max_concurrency=4, attempt_timeout_s=5, max_attempts=1)
    tokenizer, batch = AutoTokenizer.from_pretrained(policy), 4

    class Down(Exception):
        status_code = 503

    class Basket:
        """An environment whose method asks a service."""

        def reset(self, **row):
            self.count = 0
            return "Count."

        @tool(transport=transport)
        async def put(self, number: int) -> int:
            """Puts things into the basket.

            Args:
                number: How many.

            Returns:
                How many there are.
            """
            if RANK and trainer.state.global_step == 1:
                raise Down
            self.count += number
            return self.count

    @tool(transport=transport)
    def price(number: int) -> int:
        """Says what things cost.

        Args:
            number: How many.

        Returns:
            The price.
        """
        return 10 * number

    @per_completion
    async def filled(completion, environments):
        return float(environments.count)

    def turns(prompts):
        """Of each completion the next turn: a call of each tool, and then an end."""
        asks = RANK == 1 or trainer.state.global_step > 0
        for place, prompt in enumerate(prompts):
            done = prompt.count("<tool_response>")
            name = ("put", "price")[done] if asks and done < 1 + place % 2 else None
            call = {"name": name, "arguments": {"number": place + 1}}
            yield f"<tool_call>\n{json.dumps(call)}\n</tool_call>" if name else f"Done {RANK} {place}!"

    args = SalesGRPOConfig(**settings(
        out, beta=0.0, max_steps=3, per_device_train_batch_size=batch, num_generations=batch,
        max_completion_length=256, ddp_backend="gloo", min_valid_reward_fraction=0.0,
    ))  # fmt: skip
    rows = Dataset.from_list([{"prompt": [{"role": "user", "content": f"Basket {place}?"}]} for place in range(8)])
    trainer = SalesGRPOTrainer(policy, [filled], args, rows, tools=[price], environment_factory=Basket)
    trainer.model.generate = lambda input_ids, **_: padded_behind(
        input_ids, turns(tokenizer.batch_decode(input_ids)), tokenizer
    )
    trainer.train()
    trainer.finish()
    return steps_of(trainer)


pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def told(out):
    policy = make_calling_policy(out / "policy", max_position_embeddings=2048)
    one, other = run_ranks(of_one_machine(), (__file__, policy, out), out, 240, OMP_NUM_THREADS="1")
    return {name: (one[name], other[name]) for name in one}


def test_they_ask_for_their_own_completions_and_change_to_the_second_judge_with_the_same_batch(told):
    one, two = told["meter"]
    assert one["judges"] == two["judges"]
    since = one["judges"].index([True])
    assert ONSET < since < STEPS - 1 and one["judges"] == [[False]] * since + [[True]] * (STEPS - since)
    assert one["tags"] == two["tags"] and one["logged"] == two["logged"]
    assert one["second"] > 0 and two["second"] > 0


def test_a_replay_ends_with_the_same_weights(told):
    for rank in told["replay"]:
        assert len(set(rank["earned"])) == len(rank["earned"]) == 4
        assert rank["again"] == rank["earned"]
        assert rank["same_weights"]
        orders, again = rank["orders"]
        assert len({str(order) for order in orders if order[0]}) > 1  # as rewards came in
        assert again == orders


def test_an_environment_and_its_services_are_counted_alike(told, out):
    one, other = told["tools"]
    for mine, theirs in zip(one, other, strict=True):
        same = {name for name in mine if not name.startswith(("time/", "perf/"))} - {"step_time"}
        assert mine.keys() == theirs.keys() == one[0].keys()
        assert {name: mine[name] for name in same} == pytest.approx({name: theirs[name] for name in same}, nan_ok=True)
    # rank 1 puts four times and asks two prices; rank 0 from the second step on
    counts = {name: [line[name] for line in one] for name in one[0] if name.startswith(("tools/p", "services/"))}
    assert counts["tools/put/calls"] == [4, 8, 8]
    assert counts["tools/put/failures"] == [0, 4, 0]
    assert counts["tools/price/calls"] == [2, 2, 4]
    assert counts["services/shelf/calls"] == [6, 10, 12]
    failed = [counts[f"services/shelf/{name}"] for name in ("failures", "held_back")]
    assert [sum(each) for each in zip(*failed, strict=True)] == [0, 4, 0]
    assert [line["outcome/infra"] for line in one] == [0, 0.5, 0]
    said = (out / "stderr0.txt").read_text()
    assert all(words in said for words in ("failures tool_put_http_503=4", "tool         put", "tool         price"))


if __name__ == "__main__":
    policy, out = sys.argv[1:]
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    told = {run.__name__: run(policy, Path(out, run.__name__)) for run in (meter, replay, tools)}
    Path(out, f"rank{RANK}.json").write_text(json.dumps(told))
