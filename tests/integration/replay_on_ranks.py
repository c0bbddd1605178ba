"""A recorded run and its replay on every rank. Started with several processes: POLICY OUT.

Each completion has a random number for its reward, another one on each rank, and completions repeat. Rewards come in
at random times, so that groups of an update are trained on in any order. Each rank writes to OUT what the runs earned,
in which orders they trained, and whether they ended with the same weights.
"""

import asyncio
import json
import os
import random
import sqlite3
import sys
from contextlib import closing
from pathlib import Path

import torch
from support.scripted import build_trainer, default_rows

from salesrl_trl.record.reader import record_file
from salesrl_trl.record.replay import ReplayReward
from salesrl_trl.reward.functions import per_completion

SLOWEST_S = 0.1  # longest time of a reward: several micro-steps


def orders_of(path):
    with closing(sqlite3.connect(path)) as file:
        names = file.execute(
            "SELECT value FROM meta WHERE name LIKE 'order %' ORDER BY CAST(substr(name, 7) AS INTEGER)"
        ).fetchall()
    return [json.loads(value) for [value] in names]


def main(policy, out):
    rank = int(os.environ["RANK"])
    numbers = random.Random(rank)

    @per_completion
    async def chance(prompt, completion):
        await asyncio.sleep(numbers.random() * SLOWEST_S)
        return numbers.random()

    def train(name, reward):
        trainer = build_trainer(
            policy, reward, ("one", "two", "one"), default_rows(), Path(out, name), max_steps=4, ddp_backend="gloo",
            record=True, kl_law="fixed", per_device_train_batch_size=2,
            gradient_accumulation_steps=4, min_valid_reward_fraction=0.0,
        )  # fmt: skip
        trainer.train()
        trainer.finish()
        weights = torch.cat([each.detach().flatten() for each in trainer.model.parameters()])
        return weights, [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]

    first, earned = train("first", chance)
    again, earned_again = train("again", ReplayReward(chance, Path(out, "first"), "fail", rank=rank))
    orders = [orders_of(record_file(Path(out, name), rank)) for name in ("first", "again")]
    told = {"earned": earned, "again": earned_again, "orders": orders, "same_weights": torch.equal(first, again)}
    Path(out, f"rank{rank}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main(*sys.argv[1:])
