"""Reward functions that never give back what they hold: an event loop, or a thread."""

import asyncio
import sys
import time

from salesrl_trl.reward.functions import per_completion

FOREVER_S = 3600.0
HOLDS = "from now on it holds"


@per_completion(deadline_s=20.0)
async def spins(prompt, completion):
    sys.stderr.write(f"{HOLDS}\n")
    while True:
        pass


@per_completion(deadline_s=20.0)
async def blocks(prompt, completion):
    sys.stderr.write(f"{HOLDS}\n")
    time.sleep(FOREVER_S)


@per_completion(deadline_s=20.0)
async def blocks_a_pool(prompt, completion):
    sys.stderr.write(f"{HOLDS}\n")
    await asyncio.to_thread(time.sleep, FOREVER_S)
