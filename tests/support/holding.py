"""Reward functions that never give back what they hold: an event loop, or a thread."""

import asyncio
import contextlib
import time

from salesrl_trl.reward.functions import per_completion

FOREVER_S = 3600.0


@per_completion(deadline_s=20.0)
async def spins(prompt, completion):
    print("HOLDS", flush=True)
    while True:
        pass


@per_completion(deadline_s=20.0)
async def swallows(prompt, completion):
    print("HOLDS", flush=True)
    while True:
        with contextlib.suppress(Exception):
            time.sleep(0.01)


@per_completion(deadline_s=20.0)
async def blocks(prompt, completion):
    print("HOLDS", flush=True)
    time.sleep(FOREVER_S)


@per_completion(deadline_s=20.0)
async def blocks_a_pool(prompt, completion):
    print("HOLDS", flush=True)
    await asyncio.to_thread(time.sleep, FOREVER_S)


@per_completion(deadline_s=20.0)
def blocks_its_thread(prompt, completion):
    print("HOLDS", flush=True)
    time.sleep(FOREVER_S)
