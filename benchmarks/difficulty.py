"""Rows by remembered difficulty: those whose groups' rewards differed are drawn more often. A user's own part, sampler
and reward function, with nothing of it in the package; an arm of `benchmarks.real_model`.

    python -m benchmarks.real_model OUT --tasks words steps --held_out 144 --samples 4 \
      --arms on_policy drawn remembered refill drawn+refill

    python -m benchmarks.difficulty                   # a simulation, one minute on a CPU: many seeds at equal calls

A group of equal rewards has no gradient. Let v_i be the moving average (`RATE`) of the variance of the rewards in row
i's groups, where a row that was never drawn has the mean of the others. Of N rows, row i is drawn with the share

    q_i = FLOOR / N + (1 - FLOOR) * v_i / sum(v)

so that each row is drawn at least `FLOOR` times as often as without it. Each batch of k groups is a systematic sample:
row i is in it k * q_i times on average, and no row twice if k * q_i <= 1. With that, the mean over a batch of
r / (N * q_i) has the expectation of the mean reward over all rows, whatever was remembered. That is what is logged
(`REWARD`) and takes the place of `reward` in tables and curves. Held-out rows are untouched. The loss has no such
weight: training on what can be learnt is the purpose.

- One process. A draw is as old as the batches that are read ahead: two steps, and the lookahead.
- A row comes by chance, so a resumed run draws others: a bench, and no way to train.
- Replaced groups (`refill_groups`) are drawn by the package, uniformly. What they show is remembered, but the logged
  reward is then biased: only held-out rewards can be compared.

The simulation: the small policies of `benchmarks.judging`, on 128 rows, and a reward of 1 where enough of five words
are right, else 0. In the world `mixed` a row needs one to five of them, in `alike` each needs four. `remembered`
begins with what a run without it has seen, whose calls don't count.
"""

import argparse
import itertools
import math
import random
import statistics
from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Sampler
from trl import GRPOTrainer
from trl.trainer.utils import RepeatSampler

from benchmarks.judging import FEATURES, GROUP, GROUPS, SLOTS, Policies, interval
from salesrl_trl import Part, SalesGRPOTrainer
from salesrl_trl.record.reader import recorded
from salesrl_trl.rollout.rollout_scoring import CompletedBatch

FLOOR = 0.25
RATE = 0.5
REWARD = "difficulty/reward"


class Memory:
    """The variance of each row's groups.

    Args:
        rows (`Sequence[str]`):
            The ids of the training rows, in their order.
        size (`int`):
            Completions of a group.
    """

    def __init__(self, rows: Sequence[str], size: int) -> None:
        self.calls = 0  # completions that were scored
        self.drawn: defaultdict[str, deque[float]] = defaultdict(
            deque
        )  # by row, the shares of its draws, oldest first
        self._size = size
        self._variances: dict[str, float | None] = dict.fromkeys(rows)
        self._open: defaultdict[str, list[float]] = defaultdict(list)

    def hear(self, row: str, reward: float) -> None:
        """A completion's reward. Rows that aren't trained on have no part."""
        if row not in self._variances:
            return
        self.calls += 1
        self._open[row].append(reward)
        if len(self._open[row]) == self._size:
            self.note(row, statistics.pvariance(self._open.pop(row)))

    def note(self, row: str, variance: float) -> None:
        usual = self._usual()
        before = self._variances[row]
        before = usual if before is None else before
        self._variances[row] = variance if before is None else before + RATE * (variance - before)

    def _usual(self) -> float | None:
        known = [variance for variance in self._variances.values() if variance is not None]
        return statistics.fmean(known) if known else None

    def shares(self) -> list[float]:
        """q by row. Their sum is 1."""
        usual = self._usual() or 0.0
        variances = [usual if each is None else each for each in self._variances.values()]
        total, rows = sum(variances), len(variances)
        if not total:
            return [1 / rows] * rows
        return [FLOOR / rows + (1 - FLOOR) * variance / total for variance in variances]

    def read(self, run: Path) -> None:
        """Begin with the mean variance of each row in the record of an earlier run. Raises `ConfigError` if there is
        none."""
        groups: defaultdict[tuple[str, int, int], list[float]] = defaultdict(list)
        for each in recorded(run, "train"):
            if each.reward is not None:
                groups[each.row, each.batch, each.prompt_group].append(each.reward)
        variances: defaultdict[str, list[float]] = defaultdict(list)
        for (row, *_), rewards in groups.items():
            variances[row].append(statistics.pvariance(rewards))
        self._variances |= {row: statistics.fmean(variances[row]) for row in self._variances if row in variances}


def systematic(shares: Sequence[float], count: int, draw: random.Random) -> list[int]:
    """`count` places, of which place i is on average `count * shares[i]`, rounded up or down. `shares` have the sum
    1."""
    order = [*range(len(shares))]
    draw.shuffle(order)
    ends, start = [*itertools.accumulate(count * shares[place] for place in order)], draw.random()
    return [order[min(bisect_right(ends, start + number), len(order) - 1)] for number in range(count)]


class Draws(Sampler[int]):
    """Rows by their shares, in the layout of TRL's sampler `like`, and as many."""

    def __init__(self, like: RepeatSampler, memory: Memory, rows: Sequence[str], seed: int) -> None:
        self._like, self._memory, self._rows, self._draw = like, memory, rows, random.Random(seed)

    def __len__(self) -> int:
        return len(self._like)

    def __iter__(self) -> Iterator[int]:
        like = self._like
        for _ in range(like.num_samples // like.batch_size):
            shares = self._memory.shares()
            batch = systematic(shares, like.batch_size, self._draw)
            for place in batch:
                self._memory.drawn[self._rows[place]].append(shares[place])
            for _ in range(like.repeat_count):
                for place in batch:
                    yield from [place] * like.mini_repeat_count


class Difficulty(Part):
    """Logs the reward of all training rows, estimated from those that were drawn."""

    figure_names = (REWARD,)

    def __init__(self, memory: Memory, rows: int) -> None:
        self._memory, self._rows = memory, rows

    def on_batch(self, batch: CompletedBatch) -> Mapping[str, float]:
        rollout = batch.rollout
        if not rollout.is_trained_on or rollout.result is None:
            return {}
        weighted = list[float]()
        values = rollout.result.values
        for first in range(0, len(values), rollout.group):
            drawn = self._memory.drawn[rollout.inputs[first]["id"]]
            share = drawn.popleft() if drawn else 1 / self._rows
            known = [value for value in values[first : first + rollout.group] if value is not None]
            weighted += [statistics.fmean(known) / (self._rows * share)] if known else []
        return {REWARD: statistics.fmean(weighted) if weighted else math.nan}


class Drawn(SalesGRPOTrainer):
    """Trains on rows by their shares. `memory`: of its training rows, which have the column `id`."""

    def __init__(self, *args: Any, memory: Memory, **given: Any) -> None:
        self._memory = memory
        super().__init__(*args, parts=[Difficulty(memory, len(given["train_dataset"]))], **given)

    def _get_train_sampler(self, dataset: Any = None) -> Draws:
        like = GRPOTrainer._get_train_sampler(self, dataset)
        return Draws(like, self._memory, self.train_dataset["id"], self.args.seed)


# A simulation

ROWS = 128
WORLDS = {"mixed": (1, 2, 3, 4, 5), "alike": (4,)}
ARMS = ("uniform", "drawn", "remembered", "refill", "drawn+refill")
ROUNDS = 2
"""Times that a group of equal rewards is replaced."""


class OnRows(Policies):
    """Policies with rows of their own, which need so many right words."""

    def __init__(self, seeds: Sequence[int], rate: float, needs: Sequence[int]) -> None:
        super().__init__(seeds, rate)
        self.rows = self.normal(ROWS, FEATURES)
        self.needs = torch.tensor([needs[row % len(needs)] for row in range(ROWS)])
        self.needs_held_out = torch.tensor([needs[row % len(needs)] for row in range(self.held_out.size(1))])

    @torch.no_grad()
    def held_out_reward(self) -> torch.Tensor:
        """The expected reward of each run, shape (runs,)."""
        chosen = self.logps(self.held_out).gather(-1, self.answers(self.held_out)[..., None])[..., 0].exp()
        counts = torch.zeros(*chosen.shape[:2], SLOTS + 1)  # of right words
        counts[..., 0] = 1.0
        for slot in range(SLOTS):
            right = chosen[..., slot, None]
            counts = counts * (1 - right) + torch.roll(counts, 1, -1) * right
        enough = torch.arange(SLOTS + 1) >= self.needs_held_out[:, None]
        return (counts * enough).sum(-1).mean(-1)

    def ask(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Prompts, words and rewards of groups. `rows`: places, shape (runs, groups)."""
        prompts = self.rows.gather(1, rows[..., None].expand(-1, -1, FEATURES))
        with torch.no_grad():
            logps = self.logps(prompts)[:, :, None].expand(-1, -1, GROUP, -1, -1)
        lot = -torch.log(-torch.log(self.uniform(*logps.shape[1:]).clamp(1e-12, 1 - 1e-7)))
        words = (logps + lot).argmax(-1)
        right = (words == self.answers(prompts)[:, :, None]).sum(-1)
        return prompts, words, (right >= self.needs[rows][..., None]).float()


def note(memories: Sequence[Memory], rows: torch.Tensor, rewards: torch.Tensor, is_new: torch.Tensor) -> None:
    variances = rewards.var(-1, unbiased=False).tolist()
    for run, (memory, places) in enumerate(zip(memories, rows.tolist(), strict=True)):
        for group, place in enumerate(places):
            if is_new[run, group]:
                memory.note(f"{place}", variances[run][group])


def simulate(
    arm: str, needs: Sequence[int], seeds: Sequence[int], calls: float, rate: float, memories: Sequence[Memory]
) -> tuple[torch.Tensor, float]:
    """The held-out reward of each run, and the share of groups with equal rewards that were trained on."""
    policies, draw = OnRows(seeds, rate, needs), random.Random(arm)
    spent, equal = torch.zeros(len(seeds)), list[float]()
    usual = [1 / ROWS] * ROWS
    while (going := spent < calls).any():
        shares = [memory.shares() if arm.startswith(("drawn", "remembered")) else usual for memory in memories]
        rows = torch.tensor([systematic(share, GROUPS, draw) for share in shares])
        prompts, words, rewards = policies.ask(rows)
        note(memories, rows, rewards, torch.ones_like(rows, dtype=torch.bool))
        spent = spent + GROUPS * GROUP * going
        for _ in range(ROUNDS if arm.endswith("refill") else 0):
            poor = rewards.var(-1) == 0
            others = torch.randint(ROWS, rows.shape)
            new = policies.ask(others)
            note(memories, others, new[2], poor)
            prompts = torch.where(poor[..., None], new[0], prompts)
            words = torch.where(poor[..., None, None], new[1], words)
            rewards = torch.where(poor[..., None], new[2], rewards)
            spent = spent + poor.sum(-1) * GROUP * going
        equal.append((rewards.var(-1) == 0).float().mean().item())
        advantages = (rewards - rewards.mean(-1, keepdim=True)) / (rewards.std(-1, keepdim=True) + 1e-4)
        policies.train(prompts, words, advantages, going)
    return policies.held_out_reward(), statistics.fmean(equal)


def main(argv: Sequence[str] | None = None) -> None:
    """Simulate and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=32)
    parser.add_argument("--calls", type=float, nargs="+", default=[1280, 2560, 5120], help="64 are a step")
    parser.add_argument("--rate", type=float, default=0.1)
    args = parser.parse_args(argv)
    seeds = range(1, args.seeds + 1)
    print("| world | calls | arm | equal groups | held out | less uniform |\n|---|---|---|---|---|---|")
    for (world, needs), calls in itertools.product(WORLDS.items(), args.calls):
        uniform: torch.Tensor | None = None
        for arm in ARMS:
            memories = [Memory([f"{row}" for row in range(ROWS)], GROUP) for _ in seeds]
            if arm == "remembered":  # of a run with other samples
                torch.manual_seed(1)
                simulate("uniform, earlier", needs, seeds, calls, args.rate, memories)
            torch.manual_seed(0)
            reward, equal = simulate(arm, needs, seeds, calls, args.rate, memories)
            uniform = reward if uniform is None else uniform
            mean, half = interval((reward - uniform).tolist()) if arm != ARMS[0] else (0.0, 0.0)
            mark = " *" * (abs(mean) > half)
            told = f"{equal:.2f} | {reward.mean():.3f} | {mean:+.3f} ± {half:.3f}{mark}"
            print(f"| {world} | {calls:.0f} | {arm} | {told} |", flush=True)


if __name__ == "__main__":
    main()
