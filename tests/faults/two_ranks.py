"""One rank's reward raises, the other's hangs and does not take being cancelled. Launched with two processes:

    python -m torch.distributed.run --nproc_per_node 2 tests/faults/two_ranks.py POLICY OUT DEADLINE_S

Each rank writes how long each of its steps took.
"""

import asyncio
import json
import os
import sys
import time
from pathlib import Path
from types import MappingProxyType

from support.loopback import action, build_reward
from support.scripted import build_trainer, default_rows
from transformers import TrainerCallback

from salesrl_trl.types import Answer


class Raises:
    """A backend with a fault in its code."""

    identity = "raises"
    transports = MappingProxyType({})

    async def chat_8b(self, *_, **__):
        raise ValueError("a customer's words")

    async def chat(self, *_, **__):
        return Answer(text="reference", passages=(), took_ms=0.0)

    async def aclose(self):
        pass


class Hangs(Raises):
    """A backend that never answers, and goes on when it is cancelled."""

    identity = "hangs"

    async def chat_8b(self, *_, **__):
        while True:
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                continue


class Times(TrainerCallback):
    def __init__(self):
        self.seconds = []

    def on_step_begin(self, args, state, control, **_):
        self.begun = time.monotonic()

    def on_step_end(self, args, state, control, **_):
        self.seconds.append(time.monotonic() - self.begun)


def main(policy, out, deadline_s):
    rank = int(os.environ["RANK"])
    rows = default_rows()
    reward = build_reward("http://127.0.0.1:9", rows, deadline_s=float(deadline_s))
    reward._rag = (Raises, Hangs)[rank]()
    times = Times()
    texts = [action(query=f"q{index}") for index in range(64)]
    trainer = build_trainer(
        policy, reward, texts, rows, out, max_steps=2, min_valid_reward_fraction=0.0, ddp_backend="gloo"
    )
    trainer.add_callback(times)
    trainer.train()
    told = [{"outcome": each.outcome.value, "reason": each.reason} for each in reward.last]
    report = {"seconds": times.seconds, "rewards": told, "log": trainer.state.log_history}
    Path(out, f"rank{rank}.json").write_text(json.dumps(report))
    trainer.finish()


if __name__ == "__main__":
    main(*sys.argv[1:])
