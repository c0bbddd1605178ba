"""Reward functions for a process that ends while they are under way."""

import asyncio
import os

from salesrl_trl.reward.functions import per_completion, per_group

POISON = "poison"
SLOW = "slow"


@per_completion
async def poisoned(completion):
    """1 for a text, after a moment in which the process may end. One text ends it."""
    if completion == POISON:
        os._exit(1)
    await asyncio.sleep(0.5)
    return 1.0


@per_group
async def together(completions):
    """For each completion the number of those that are scored with it."""
    return [float(len(completions))] * len(completions)


@per_completion
async def one_by_one(completion):
    """0, for one text later than for others."""
    await asyncio.sleep(1.0 if completion == SLOW else 0.0)
    return 0.0


@per_completion
def everything(**columns):
    """The number of columns."""
    return float(len(columns))
