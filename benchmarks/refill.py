"""Groups of equal rewards that are replaced: `refill_groups`.

    .venv/bin/python -m benchmarks.refill                                # on a CPU: seconds of a step, four minutes
    .venv/bin/python -m benchmarks.refill --learning                     # on a CPU: learning at equal steps and calls
    .venv/bin/python -m benchmarks.refill --device cuda --model 1.5b

- 8 groups of 8 completions a step, two generation batches in flight, rewards of a log-normal time.
- The arms take turns in one run, on one policy: all rows teach; half of them do; the same with groups replaced, at
  most 3 times as many as a step trains on. On a CPU tokens are drawn at random, so that generation costs nothing.
- `--learning`: the policy, rows and reward of `recipes/own.py`: 1 for the right answer, else 0. Three runs a seed:
  without replaced groups, with them for equally many steps, and with them for equally many completions.
"""

import argparse
import random
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import SHAPES, device_name, parser, write_json
from benchmarks.service import InstantReward
from benchmarks.staleness import BEFORE, GROUPS, Bench, LateReward, trained
from salesrl_trl.data.files import ARITHMETIC, FILES, demo_records
from salesrl_trl.names import EQUAL, REFILLED
from salesrl_trl.reward.batch import Sample
from salesrl_trl.reward.scorer import RewardNames
from salesrl_trl.reward.stage_times import StageTimes
from salesrl_trl.types import Reward

AHEAD = 2
MOST = 3
"""The setting: so many times as many groups as a step trains on."""


class SomeEqual(LateReward):
    """The same number for all completions of the share of rows that does not teach."""

    equal = 0.0

    async def score(self, sample: Sample, stages: StageTimes) -> Reward:
        scored = await super().score(sample, stages)
        return Reward.scored(0.5) if random.Random(f"{sample.row['row']}").random() < self.equal else scored


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """The seconds of a step of each arm."""
    where = torch.device("cuda", 0) if args.device == "cuda" else torch.device("cpu")
    figures: dict[str, Any] = {"device": device_name(where), "model": args.model, "arms": {}}
    with tempfile.TemporaryDirectory() as scratch:
        reward = SomeEqual()
        bench = Bench(where, args.model, Path(scratch), reward, AHEAD, refill_groups=MOST)

        def arm(equal: float, refill: int, median_s: float, steps: int, oldest: int = AHEAD) -> dict[str, float]:
            reward.equal = equal
            told = bench.arm(oldest, median_s, 0.35, steps, refill)
            lines = [entry for entry in bench.trainer.state.log_history if EQUAL in entry][BEFORE:-AHEAD]
            told["teach"] = GROUPS * statistics.mean(1 - entry["frac_reward_zero_std"] for entry in lines)
            return told | {"refilled": statistics.mean(entry[REFILLED] for entry in lines) if refill else 0.0}

        arm(0.0, 0, 0.0, 4)  # kernels, pools
        compute_s = arm(0.0, 0, 0.0, 12)["mean_s"]
        median_s = args.latency or args.times * compute_s
        print(f"{figures['device']}, {args.model}: without rewards {compute_s:.2f} s, a reward {median_s:.2f} s")
        arms = [("all teach", 0.0, 0, AHEAD), ("half teach", 0.5, 0, AHEAD)]
        arms += [(f"replaced, N = {oldest}", 0.5, MOST, oldest) for oldest in args.bounds]
        for name, equal, refill, oldest in arms:
            told = figures["arms"][name] = arm(equal, refill, median_s, args.steps, oldest)
            first = figures["arms"]["all teach"]
            print(
                f"{name:15}: {told['mean_s']:.2f} s a step ({told['mean_s'] / first['mean_s']:.2f}), "
                f"{told['teach']:.2f} of {GROUPS} groups teach, {told['mean_s'] / told['teach']:.3f} s for each "
                f"({told['mean_s'] / told['teach'] / first['mean_s'] * first['teach']:.2f}), "
                f"{told['refilled']:.1f} generated beside them, age {told['age']:.2f}, oldest {told['oldest']:.0f}",
                flush=True,
            )
        bench.trainer.finish()
    return figures


class Right(InstantReward):
    """1 for the right answer, else 0."""

    asked = 0

    @property
    def names(self) -> RewardNames:
        return RewardNames(functions={self.own_name: self.own_name})

    async def score(self, sample: Sample, stages: StageTimes) -> Reward:
        self.asked += sample.origin is not None and sample.origin.mode == "train"
        return Reward.scored(float(sample.text.strip() == sample.row["answer"]))


def learn(most: int, ahead: int, seed: int, steps: int, scratch: Path) -> dict[str, Any]:
    """The held-out reward of a run, and the completions that it scored."""
    reward = Right()
    train, held_out = (
        [{"prompt": row["prompt"], "answer": row["answer"]} for row in demo_records(f"{ARITHMETIC}/{FILES[part]}")]
        for part in ("train", "heldout")
    )
    before, after, history = trained(reward, train, held_out, seed, scratch / f"{most}-{steps}-{seed}",
                                     rollout_lookahead=ahead, refill_groups=most, max_steps=steps)  # fmt: skip
    equal = [entry["frac_reward_zero_std"] for entry in history if "frac_reward_zero_std" in entry]
    return {
        "refill_groups": most, "seed": seed, "steps": steps, "before": before, "after": after, "asked": reward.asked,
        "equal_trained_on": statistics.mean(equal),
    }  # fmt: skip


def learning(args: argparse.Namespace) -> dict[str, Any]:
    """All seeds of all arms, and the paired differences to the runs without replaced groups."""
    runs: dict[str, list[dict[str, Any]]] = {"plain": [], "equal steps": [], "equal calls": []}
    with tempfile.TemporaryDirectory() as scratch:
        for seed in args.seeds:
            steps, most = args.steps, 0
            for name, done in runs.items():
                done.append(learn(most, args.ahead, seed, steps, Path(scratch)))
                told, plain, most = done[-1], runs["plain"][-1], MOST
                print(f"seed {seed}, {name}: {told}", flush=True)
                steps = args.steps if name == "plain" else round(args.steps * plain["asked"] / told["asked"])
    for name, done in runs.items():
        won = [own["after"] - plain["after"] for own, plain in zip(done, runs["plain"], strict=True)]
        error = statistics.stdev(won) / len(won) ** 0.5 if len(won) > 1 else float("nan")
        mean = {figure: statistics.mean(own[figure] for own in done) for figure in done[0]}
        print(
            f"{name}: held-out {mean['before']:.3f} to {mean['after']:.3f}, {mean['steps']:.0f} steps, "
            f"{mean['asked']:.0f} completions, {mean['equal_trained_on']:.2f} of groups teach nothing; "
            f"{statistics.mean(won):+.3f} +- {error:.3f} (standard error)"
        )
    return runs


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print."""
    made = parser(__doc__)
    made.add_argument("--device", choices=("cuda", "cpu"), default="cpu")
    made.add_argument("--model", default="tiny", help=f"{', '.join(sorted(SHAPES))} with random weights, or a folder")
    made.add_argument("--latency", type=float, help="median seconds of a reward")
    made.add_argument("--times", type=float, default=1.5, help="the same, in steps without rewards")
    made.add_argument("--steps", type=int, help="counted steps of an arm; of a run with --learning")
    made.add_argument("--bounds", type=int, nargs="+", default=[AHEAD, AHEAD + 2], help="max_staleness")
    made.add_argument("--learning", action="store_true")
    made.add_argument("--ahead", type=int, default=0, help="the lookahead, with --learning")
    made.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    args = made.parse_args(argv)
    args.steps = args.steps or (100 if args.learning else 40)
    write_json(args.json, learning(args) if args.learning else measure(args))


if __name__ == "__main__":
    main()
