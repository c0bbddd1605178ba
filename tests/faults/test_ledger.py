"""Every number of a reward is compared with a ledger of the true numbers, while services mix up their replies.

LEDGER_CHAINS=10000 python -m pytest tests/faults/test_ledger.py -s
"""

import asyncio
import json
import os
from collections import Counter
from itertools import chain
from pathlib import Path

import pytest
from faults.conftest import FaultServer
from faults.mixed_up import BY_BYTES, FAULTS, truth
from support.loopback import action, build_reward

from salesrl_trl.types import Message, Outcome, SalesRow

CHAINS = int(os.environ.get("LEDGER_CHAINS", "400"))
GROUP = 8
WAVE = 400
"""Chains that are in flight together."""
SHARE = 0.05


def rows(count):
    return [
        SalesRow(
            row_id=f"r{index}",
            branch="fairness",
            conversation=(Message(role="customer", content=f"Tell me all about row-{index}."),),
            message_id=f"m{index}",
        )
        for index in range(count)
    ]


def wrong_numbers(index, reward):
    """The names of the numbers that are not the true ones of this completion's item and row."""
    judge, passage = truth("candidate", index), truth("passage", index)
    figures = {
        "value": (reward.value, 0.75 * judge + 0.25 * passage),
        "judge": (reward.components.get("judge"), judge),
        "retrieval": (reward.components.get("retrieval"), passage),
        "reference": (reward.components.get("reference"), truth("reference", index // GROUP)),
        "reference_value": (
            reward.reference_value,
            0.75 * truth("reference", index // GROUP) + 0.25 * truth("", index // GROUP),
        ),
    }
    return [name for name, (got, said) in figures.items() if got is not None and abs(got - said) > 1e-7]


def rewards_of(url):
    """The rewards of actions, in waves."""
    reward = build_reward(
        url,
        rows(-(-CHAINS // GROUP)),
        attempts=4,
        timeout_s=20.0,
        weights={"fairness": {"judge": 0.75, "retrieval": 0.25}},
        limits={"max_concurrency": 64, "initial_concurrency": 64, "hedge_fraction": 0.05},
    )

    async def all_waves():
        rewards = []
        for start in range(0, CHAINS, WAVE):
            wave = range(start, min(start + WAVE, CHAINS))
            examples = [{"row": number // GROUP} for number in wave]
            rewards += (await reward.score_all(examples, [action(query=f"item-{number}") for number in wave])).rewards
        await reward.aclose()
        return rewards

    return asyncio.run(all_waves())


@pytest.mark.parametrize(
    ("faults", "returns_ids"), [(FAULTS, True), (BY_BYTES, False)], ids=["all faults", "a service without ids"]
)
def test_no_number_is_anothers(faults, returns_ids):
    settings = {"share": SHARE, "faults": faults, "returns_ids": returns_ids}
    server = FaultServer(settings, Path(__file__).with_name("mixed_up.py"))
    try:
        rewards = rewards_of(server.url)
        stats = server.stats
    finally:
        server.stop()
    wrong = {index: names for index, each in enumerate(rewards) if (names := wrong_numbers(index, each))}
    missing = Counter(each.reason for each in rewards if each.outcome is not Outcome.OK)
    del stats["connections"]
    faulty = sum(stats.values()) - stats["none"]
    print(
        f"{len(rewards)} chains, {sum(stats.values())} replies, of them {faulty} at fault {json.dumps(stats)}: "
        f"{len(wrong)} chains with numbers that are another's {dict(Counter(chain.from_iterable(wrong.values())))}; "
        f"{len(rewards) - missing.total()} scored, missing {dict(missing)}"
    )
    assert wrong == {}
    assert faulty > 0.5 * SHARE * sum(stats.values())
    assert missing.total() < 2 * SHARE * len(rewards)
