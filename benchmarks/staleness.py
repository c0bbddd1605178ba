"""A step that waits for no straggler: `max_staleness` above `rollout_lookahead`.

    .venv/bin/python -m benchmarks.staleness                                   # on a CPU, four minutes
    .venv/bin/python -m benchmarks.staleness --learning                        # on a CPU: learning with late rows
    .venv/bin/python -m benchmarks.staleness --device cuda --model 1.5b --sigma 0.35

- 8 groups of 8 completions a step, 4 generation batches in flight.
- A reward takes a log-normal time. Its median is 4 times a step without rewards, or `--latency`. It depends on the
  row, the step that launches it, and the place alone: all arms wait for the same.
- The arms take turns in one run, on one policy. An arm is the bound of ages. The first one keeps the order of rows,
  and has `scored_groups_first`. Not counted are the first 12 steps of an arm, and the last 4, which launch nothing.
- Beside each arm stands the simulation of the same law, with the measured seconds of a step without rewards.
- On a GPU vLLM generates in the trainer's process, with lengths that depend on the prompt and the sample alone. On a
  CPU tokens are drawn at random, and a step sleeps for half a second of its time.
- `--learning`: the policy, rows and reward of `recipes/own.py`, five seeds. Half of the rows are late. Where groups
  go by themselves, their rewards come 7 steps after their launch, and the others' at once: ages are far apart.
"""

import argparse
import asyncio
import itertools
import math
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed

from benchmarks.common import (
    SHAPES,
    RandomTokens,
    device_name,
    dtype,
    parser,
    quiet,
    rows_of,
    save_model,
    write_json,
)
from benchmarks.lengths import fix_lengths
from benchmarks.pipeline import Clock
from benchmarks.service import InstantReward
from salesrl_trl.config import SalesGRPOConfig
from salesrl_trl.data.files import ARITHMETIC, FILES, demo_records
from salesrl_trl.demo.packaged import ARITHMETIC_POLICY
from salesrl_trl.names import STALENESS, STALENESS_MAX
from salesrl_trl.reward.batch import Sample
from salesrl_trl.reward.scorer import RewardNames
from salesrl_trl.reward.stage_times import StageTimes
from salesrl_trl.rollout.buffer import first_in, policy_of
from salesrl_trl.trainer import SalesGRPOTrainer
from salesrl_trl.types import Reward

AHEAD = 4
BOUNDS = (4, 5, 8)
GROUPS = 8
SIZE = 8
LATENCY = 4.0
"""Median seconds of a reward over those of a step without rewards: 8.8 s with 2.2 s."""
BEFORE = 12
"""Steps of an arm that are not counted: until ages have settled."""
LATE = 7
STUCK_S = 6.0
"""Where too many rows are late, a step waits this long, and then has them."""
PAUSE_S = 0.5
"""Seconds of a step on a CPU in which it sleeps. What else runs on the machine changes these not."""


def simulate(oldest: int, median_s: float, sigma: float, compute_s: float, steps: int = 2000) -> dict[str, float]:
    """The same law without a trainer: each step launches a batch, waits for its groups, and computes."""
    draw, now, began = random.Random(0), 0.0, list[float]()
    flight = list[tuple[int, float]]()  # the launch, and when it is in

    def launch(step: int) -> None:
        for _ in range(GROUPS):
            flight.append((step, now + median_s * math.exp(sigma * max(draw.gauss(0, 1) for _ in range(SIZE)))))

    ages = list[int]()
    for _ in range(AHEAD):
        launch(0)
    for step in range(steps):
        launch(step)
        latest, following = [launched + oldest for launched, _ in flight], range(step + 1, step + AHEAD + 2)
        for at in sorted({now, *(ends for _, ends in flight if ends > now)}):
            if oldest > AHEAD:
                chosen = first_in(latest, [ends <= at for _, ends in flight], following, GROUPS)
            else:
                chosen = [*range(GROUPS)] if all(ends <= at for _, ends in flight[:GROUPS]) else []
            if chosen:
                break
        ages += [step - flight[group][0] for group in chosen]
        flight[:] = [group for number, group in enumerate(flight) if number not in chosen]
        began.append(at)
        now = at + compute_s
    seconds = [end - start for start, end in itertools.pairwise(began)][30:]
    return {**figures_of(seconds), "age": statistics.mean(ages[30 * GROUPS :]), "oldest": max(ages)}


def figures_of(seconds: Sequence[float]) -> dict[str, float]:
    """The mean, and the time in which 95 % of steps are done."""
    return {"mean_s": statistics.mean(seconds), "p95_s": sorted(seconds)[int(0.95 * len(seconds))]}


class LateReward(InstantReward):
    """A number and a time by chance."""

    median_s = 0.0
    sigma = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.deadline_s = 600.0

    async def score(self, sample: Sample, stages: StageTimes) -> Reward:
        step = 0 if sample.origin is None else sample.origin.step
        draw = random.Random(f"{sample.row['row']} {step} {sample.place}")
        await stages.timed(asyncio.sleep(self.median_s * math.exp(self.sigma * draw.gauss(0, 1))), "judge")
        return Reward.scored(draw.random())


class OnCPU(RandomTokens, SalesGRPOTrainer):
    """Trains on random tokens."""

    length = 24

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        time.sleep(PAUSE_S / GROUPS)
        return super().training_step(*args, **kwargs)  # type: ignore[no-any-return]


class Bench:
    """One trainer for all arms. `model`: a shape with random weights, a folder or an id. `given`: settings."""

    def __init__(
        self, where: torch.device, model: str, scratch: Path, reward: LateReward, ahead: int = AHEAD, **given: Any
    ) -> None:
        self._ahead = ahead
        on_cpu = where.type == "cpu"
        set_seed(0)
        folder = save_model(model, scratch / "model", where) if model in SHAPES else model
        self._clock, self._reward = Clock(), reward
        self._ends = list[float]()
        config = SalesGRPOConfig(
            **quiet(
                where,
                str(scratch / "out"),
                per_device_train_batch_size=SIZE,
                gradient_accumulation_steps=GROUPS,
                max_completion_length=OnCPU.length if on_cpu else 256,
                beta=0.0,
                held_out_eval=False,
                rollout_lookahead=ahead,
                lr_scheduler_type="constant",
                dataloader_pin_memory=False,
                gradient_checkpointing=not on_cpu,
                max_sampling_logp_difference=math.inf,
                vllm_importance_sampling_mode="token_truncate",
                use_vllm=not on_cpu,
                vllm_mode="colocate",
                vllm_gpu_memory_utilization=0.25,
                vllm_max_model_length=1024,
                **given,
            )
        )
        rows = rows_of([f"Question {number}: what does it cost?" for number in range(100 * GROUPS)])
        self.trainer = (OnCPU if on_cpu else SalesGRPOTrainer)(
            AutoModelForCausalLM.from_pretrained(folder, dtype=dtype(where)),
            self._reward,
            args=config,
            train_dataset=Dataset.from_list(rows),
            processing_class=AutoTokenizer.from_pretrained(folder),
            callbacks=[self._clock],
        )
        if not on_cpu:
            fix_lengths(self.trainer.vllm_generation.llm, 256)

    def arm(self, oldest: int, median_s: float, sigma: float, steps: int, refill: int = 0) -> dict[str, float]:
        """The figures of `steps` steps."""
        components = self.trainer.components
        components.pipeline.buffer.policy = policy_of(self._ahead, oldest if oldest > self._ahead else 0, refill)
        components.in_groups = not components.pipeline.buffer.chooses
        self._reward.median_s, self._reward.sigma = median_s, sigma
        self.trainer.args.max_steps = BEFORE + steps + self._ahead
        self.trainer.train()
        seconds = [end - start for start, end in itertools.pairwise(self._clock.ends)]
        logged = [entry for entry in self.trainer.state.log_history if STALENESS in entry][BEFORE : -self._ahead]
        return {
            **figures_of(seconds[BEFORE - 1 : -self._ahead]),
            "age": statistics.mean(entry[STALENESS] for entry in logged),
            "oldest": max(entry[STALENESS_MAX] for entry in logged),
        }


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """The figures of all arms, by sigma and bound."""
    where = torch.device("cuda", 0) if args.device == "cuda" else torch.device("cpu")
    figures: dict[str, Any] = {"device": device_name(where), "model": args.model, "arms": []}
    with tempfile.TemporaryDirectory() as scratch:
        bench = Bench(where, args.model, Path(scratch), LateReward())
        bench.arm(AHEAD, 0.0, 0.0, 4)  # kernels, pools
        compute_s = figures["compute_s"] = bench.arm(AHEAD, 0.0, 0.0, 12)["mean_s"]
        median_s = figures["median_s"] = args.latency or LATENCY * compute_s
        print(
            f"{figures['device']}, {args.model}: a step without rewards {compute_s:.2f} s, a reward {median_s:.2f} s"
        )
        for sigma in args.sigma:
            first: dict[str, dict[str, float]] = {}
            for oldest in args.bounds:
                arm = {
                    "measured": bench.arm(oldest, median_s, sigma, args.steps),
                    "simulated": simulate(oldest, median_s, sigma, compute_s),
                }
                first = first or arm
                figures["arms"].append({"sigma": sigma, "oldest": oldest, **arm})
                for name, told in arm.items():
                    ratios = [told[each] / first[name][each] for each in ("mean_s", "p95_s")]
                    print(
                        f"sigma {sigma}, N = {oldest}, {name:9}: {told['mean_s']:.2f} s a step "
                        f"({ratios[0]:.2f} of the first), p95 {told['p95_s']:.2f} s ({ratios[1]:.2f}), "
                        f"age {told['age']:.2f}, oldest {told['oldest']:.0f}",
                        flush=True,
                    )
        bench.trainer.finish()
    return figures


class LateRows(InstantReward):
    """1 for the right answer, else 0. Those of `late` rows come late in a run of so many steps, 0 for at once."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self._steps = steps
        self.noted: list[tuple[int, bool, float]] = []  # the launch, whether it is late, and the number

    @property
    def names(self) -> RewardNames:
        return RewardNames(functions={self.own_name: self.own_name})

    async def score(self, sample: Sample, stages: StageTimes) -> Reward:
        state, late = sample.row["trainer_state"], sample.row["late"]
        began, value = state.global_step, float(sample.text.strip() == sample.row["answer"])
        if late is not None:  # else it is held out
            self.noted.append((began, late, value))
        # 5 batches are launched at once, and 2 steps take all of them that are not late
        until = min(began + (LATE if began else 2), self._steps - AHEAD) if late else 0
        step, moved = began, time.monotonic()
        while step < until and time.monotonic() - moved < STUCK_S:
            await asyncio.sleep(0.005)
            if state.global_step != step:
                step, moved = state.global_step, time.monotonic()
        return Reward.scored(value)


Rows = list[dict[str, Any]]


def trained(
    reward: InstantReward, train: Rows, held_out: Rows, seed: int, out: Path, **given: Any
) -> tuple[float, float, Rows]:
    """Train the policy of `recipes/own.py`. Returns the held-out reward before and after, and what was logged.
    `given`: settings."""
    set_seed(seed)
    trainer = SalesGRPOTrainer(
        AutoModelForCausalLM.from_pretrained(ARITHMETIC_POLICY),
        reward,
        args=SalesGRPOConfig(
            **quiet(
                torch.device("cpu"),
                str(out),
                per_device_train_batch_size=GROUPS * SIZE,
                num_generations_eval=4,
                per_device_eval_batch_size=64,
                max_completion_length=8,
                beta=0.0,
                held_out_eval=False,
                seed=seed,
                **given,
            )
            | {"learning_rate": 5e-4, "lr_scheduler_type": "linear"}
        ),
        train_dataset=Dataset.from_list(train),
        eval_dataset=Dataset.from_list(held_out[:128]),
        processing_class=AutoTokenizer.from_pretrained(ARITHMETIC_POLICY),
    )
    before = trainer.evaluate()["eval_reward"]
    trainer.train()
    after = trainer.evaluate()["eval_reward"]
    trainer.finish()
    return before, after, trainer.state.log_history


def learn(oldest: int, seed: int, steps: int, scratch: Path) -> dict[str, Any]:
    """The held-out reward of a run, and the mean rewards of rows that are late and of others, by fifths of it."""
    reward = LateRows(steps if oldest > AHEAD else 0)
    draw = random.Random(0)
    train, held_out = (
        [
            {"prompt": row["prompt"], "answer": row["answer"], "late": late()}
            for row in demo_records(f"{ARITHMETIC}/{file}")
        ]
        for file, late in ((FILES["train"], lambda: draw.random() < 0.5), (FILES["heldout"], lambda: None))
    )

    before, after, history = trained(reward, train, held_out, seed, scratch / f"{oldest}-{seed}",
                                     rollout_lookahead=AHEAD, max_staleness=oldest, max_steps=steps)  # fmt: skip
    fifths: dict[str, list[float]] = {}
    for name, is_late in (("others", False), ("late", True)):
        fifths[name] = [
            statistics.mean(v for at, late, v in reward.noted if late is is_late and part <= 5 * at / steps < part + 1)
            for part in range(5)
        ]
    ages = [entry[STALENESS] for entry in history if STALENESS in entry]
    oldest_seen = max(entry.get(STALENESS_MAX, 0.0) for entry in history)
    return {
        "oldest": oldest, "seed": seed, "before": before, "after": after, **fifths,
        "age": statistics.mean(ages[BEFORE:]), "oldest_seen": oldest_seen,
    }  # fmt: skip


def learning(args: argparse.Namespace) -> dict[str, Any]:
    """All seeds of both arms."""
    runs = []
    with tempfile.TemporaryDirectory() as scratch:
        for seed, oldest in itertools.product(args.seeds, (AHEAD, 2 * AHEAD)):
            runs.append(learn(oldest, seed, args.steps, Path(scratch)))
            told = runs[-1]
            parts = {name: " ".join(f"{value:.2f}" for value in told[name]) for name in ("others", "late")}
            print(
                f"seed {seed}, N = {oldest}: held-out {told['before']:.3f} to {told['after']:.3f}; others "
                f"{parts['others']}; late {parts['late']}; age {told['age']:.2f}, oldest {told['oldest_seen']:.0f}",
                flush=True,
            )
    for oldest in (AHEAD, 2 * AHEAD):
        after = [run["after"] for run in runs if run["oldest"] == oldest]
        spread = statistics.stdev(after) if len(after) > 1 else math.nan
        print(f"N = {oldest}: held-out {statistics.mean(after):.3f} (standard deviation {spread:.3f})")
    return {"runs": runs}


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print."""
    made = parser(__doc__)
    made.add_argument("--device", choices=("cuda", "cpu"), default="cpu")
    made.add_argument("--model", default="tiny", help=f"{', '.join(sorted(SHAPES))} with random weights, or a folder")
    made.add_argument("--latency", type=float, help="median seconds of a reward")
    made.add_argument("--sigma", type=float, nargs="+", default=[0.35, 0.6])
    made.add_argument("--bounds", type=int, nargs="+", default=[AHEAD, 2 * AHEAD])
    made.add_argument("--steps", type=int, help="counted steps of an arm; of a run with --learning")
    made.add_argument("--learning", action="store_true")
    made.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    args = made.parse_args(argv)
    args.steps = args.steps or (200 if args.learning else 50)
    write_json(args.json, learning(args) if args.learning else measure(args))


if __name__ == "__main__":
    main()
