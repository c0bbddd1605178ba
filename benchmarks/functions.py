"""Step times with a slow reward function of a user's own, in each form that it may have: TRL's trainer and this one.

    .venv/bin/python -m benchmarks.functions [--rounds 2] [--latency 3.0] [--json FILE]

On the CPU, with a tiny policy and vLLM in this process. A function scores a completion by its text, and takes a time
for it as if it asked a slow service. Its forms:

- `sync`: of a batch as TRL calls it; asks for all completions from as many threads, and waits for the last;
- `async`: of a batch as TRL calls it; gathers all calls;
- `per_group`: with `@per_group`; gathers the calls of a prompt's completions;
- `per_completion`: with `@per_completion`; makes one call.

The arms:

- `stock` is TRL's own trainer with the async function of a batch. It is the best that TRL can do: all calls of a step
  are in flight at once, and the step waits for the slowest. Every ratio is to it;
- `stock_sync` is the same with the sync function;
- `FORM/N` is this package's trainer with a function of this form and `rollout_lookahead: N`;
- `floor` is `per_completion/0` with calls that take no time.

The same for every arm:

- weights at the start of a block, optimizer and vLLM engine; 16 completions a step, 8 for each prompt;
- lengths and seeds of completions depend on the prompt and the number of the sample alone. So TRL and an exact arm see
  the same completions, and their rewards and losses are compared step by step;
- a call's time depends on the prompt and the number of the sample alone: log-normal around `--latency`, as in
  `benchmarks.pipeline`. The slowest of a step's 16 takes 1.7 to 1.8 times that. A call sleeps in this process.

The order and the count:

- All arms are in one run. A round has a turn for each form: stock, then the form with each lookahead. Every other
  round goes backwards. A ratio is to the block of stock in the same turn.
- With a lookahead, steps that wait and steps that do not take turns. So a block's figure is the mean over whole rounds
  of waiting, without the steps in which rollouts pile up at first or run out at last. An arm's figure is the median
  over its blocks.
- `exposed` and `hidden` are the log's `time/reward_exposed_s` and `time/reward_hidden_s` over the counted steps. TRL
  has no such figures: it waits for all of it.
- `reward off by` and `loss off by` are the largest differences to TRL in one step. Those of rewards are 0. Losses
  differ by the rounding of sums in another order.
"""

import argparse
import asyncio
import itertools
import math
import statistics
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import trl.trainer.grpo_trainer as upstream
from datasets import Dataset
from transformers import Qwen2ForCausalLM, set_seed
from trl import GRPOConfig, GRPOTrainer

import salesrl_trl.wiring.policy as colocated
from benchmarks.common import parser, quiet, rows_of, save_model, set_lookahead, write_json
from benchmarks.lengths import fix_lengths
from benchmarks.pipeline import Clock, window
from benchmarks.service import GENERATIONS, latency_s
from salesrl_trl.config import SalesGRPOConfig
from salesrl_trl.demo.packaged import packaged_tokenizer
from salesrl_trl.ground.process import patched
from salesrl_trl.names import REWARD_EXPOSED, REWARD_HIDDEN, outcome_of
from salesrl_trl.reward.functions import per_completion, per_group
from salesrl_trl.telemetry.instruments import Instruments, InstrumentSettings
from salesrl_trl.trainer import SalesGRPOTrainer
from salesrl_trl.types import Outcome

FORMS = ("sync", "async", "per_group", "per_completion")
LOOKAHEAD = (0, 1, 2, 4)
TOKENS = 16
"""Longest completion. The shortest is a quarter of it."""
MICRO_BATCH, MICRO_BATCHES = GENERATIONS, 2
STEPS = 2
"""Counted steps of a block without a lookahead, each with prompts of its own."""
COMPARED = ("reward", "reward_std", "loss", "grad_norm")


class Calls:
    """The functions, and the times of their calls."""

    def __init__(self) -> None:
        self.median_s = 0.0
        self._asked: Counter[int] = Counter()

    def restart(self, median_s: float) -> None:
        """From now on a call takes about this many seconds. The next sample of each prompt is its first."""
        self.median_s = median_s
        self._asked.clear()

    def functions(self) -> dict[str, Callable[..., Any]]:
        """By form, a function of its own."""

        def in_threads(completions: list[Any], row: list[int], **_: Any) -> list[float]:
            def call(completion: Any, seconds: float) -> float:
                time.sleep(seconds)
                return score(completion)

            with ThreadPoolExecutor(len(row)) as pool:
                return list(pool.map(call, completions, self._seconds(row)))

        async def gathered(completions: list[Any], row: list[int], **_: Any) -> list[float]:
            return await asyncio.gather(*map(self._call, completions, self._seconds(row)))

        @per_group
        async def group(completions: list[Any], row: int) -> list[float]:
            return await asyncio.gather(*map(self._call, completions, self._seconds([row] * len(completions))))

        @per_completion
        async def one(completion: Any, row: int) -> float:
            sample = self._asked[row] % GENERATIONS
            self._asked[row] += 1
            return await self._call(completion, latency_s(row, sample, "judge", self.median_s))

        return dict(zip(FORMS, (in_threads, gathered, group, one), strict=True))

    def _seconds(self, rows: Sequence[int]) -> list[float]:
        """How long each call takes: samples of a prompt are told apart by their order."""
        places: Counter[int] = Counter()
        seconds = []
        for row in rows:
            seconds.append(latency_s(row, places[row], "judge", self.median_s))
            places[row] += 1
        return seconds

    async def _call(self, completion: Any, seconds: float) -> float:
        await asyncio.sleep(seconds)
        return score(completion)


def score(completion: Any) -> float:
    """By the text alone: the same in every arm."""
    return zlib.crc32(completion[-1]["content"].encode()) % 101 / 100


class Bench:
    """A trainer for each form and TRL's two. They share the policy, the optimizer and the engine.

    Args:
        forms (`Sequence[str]`):
            The forms to measure.
        scratch (`Path`):
            Folder for the model.
    """

    def __init__(self, forms: Sequence[str], scratch: Path) -> None:
        self._calls, self._clock = Calls(), Clock()
        self._scratch, cpu = scratch, torch.device("cpu")
        set_seed(0)
        folder = save_model("tiny", scratch / "model", cpu)
        self._model = Qwen2ForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self._first = {name: weights.clone() for name, weights in self._model.state_dict().items()}
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-6)
        self._settings = quiet(
            cpu,
            str(scratch / "out"),
            per_device_train_batch_size=MICRO_BATCH,
            gradient_accumulation_steps=MICRO_BATCHES,
            max_completion_length=TOKENS,
            beta=0.0,
            use_vllm=True,
            vllm_mode="colocate",
            vllm_gpu_memory_utilization=0.25,
            vllm_max_model_length=256,
            gradient_checkpointing=False,
            lr_scheduler_type="constant",
            shuffle_dataset=False,
            dataloader_pin_memory=False,
        )
        config = SalesGRPOConfig(held_out_eval=False, max_sampling_logp_difference=math.inf, **self._settings)
        functions = self._calls.functions()
        first, *others = forms
        ours = self._ours(functions[first], config)
        engine = ours.vllm_generation
        fix_lengths(engine.llm, TOKENS, seeded=True)
        self._trainers: dict[str, GRPOTrainer] = {first: ours}
        with patched(colocated, "SalesVLLMGeneration", lambda *_, **__: engine):
            self._trainers |= {form: self._ours(functions[form], config) for form in others}
        with patched(upstream, "VLLMGeneration", lambda **_: engine):
            stock = GRPOConfig(**self._settings)
            self._trainers["stock"] = self._built(GRPOTrainer, functions["async"], stock)
            self._trainers["stock_sync"] = self._built(GRPOTrainer, functions["sync"], stock)

    def _ours(self, function: Callable[..., Any], config: SalesGRPOConfig) -> SalesGRPOTrainer:
        settings = InstrumentSettings(trace_steps=range(0), heartbeat_s=0.0)
        instruments = Instruments(settings, torch.device("cpu"), self._scratch / "out")
        return self._built(SalesGRPOTrainer, function, config, instruments=instruments)

    def _built(self, kind: type[Any], function: Callable[..., Any], config: GRPOConfig, **more: Any) -> Any:
        prompts = STEPS * MICRO_BATCH * MICRO_BATCHES // GENERATIONS
        rows = rows_of([f"What is the price of number {number}, and when is it here?" for number in range(prompts)])
        return kind(
            self._model, function, args=config, train_dataset=Dataset.from_list(rows), callbacks=[self._clock],
            processing_class=packaged_tokenizer(), optimizers=(self._optimizer, None), **more,
        )  # fmt: skip

    def close(self) -> None:
        """Close this package's trainers."""
        for trainer in self._trainers.values():
            if isinstance(trainer, SalesGRPOTrainer):
                trainer.finish()

    def block(self, arm: str, median_s: float, steps: int = STEPS) -> dict[str, Any]:
        """Some steps of an arm: seconds of each counted one, and figures of all."""
        form, _, number = arm.partition("/")
        ahead = int(number or 0)
        before, steps, after = window(ahead, steps)
        trainer = self._trainers[form]
        self._model.load_state_dict(self._first)
        self._optimizer.state.clear()
        self._calls.restart(median_s)
        if isinstance(trainer, SalesGRPOTrainer):
            set_lookahead(trainer, ahead)
        trainer._last_loaded_step = -1  # the engine has another trainer's weights
        trainer.args.max_steps = before + steps + after
        trainer.train()
        seconds = [math.nan, *(end - start for start, end in itertools.pairwise(self._clock.ends))]
        lines = [line for line in trainer.state.log_history if "loss" in line]
        counted = slice(before, before + steps)
        share = [1.0 - line.get(outcome_of(Outcome.OK), 1.0) for line in lines]
        exposed, hidden = (
            [line.get(name, math.nan) for line in lines[counted]] for name in (REWARD_EXPOSED, REWARD_HIDDEN)
        )
        return {
            "step_s": seconds[counted],
            "mean_s": statistics.mean(seconds[counted]),
            "exposed_s": statistics.mean(exposed),
            "hidden_s": statistics.mean(hidden),
            "failures": round(sum(share) * MICRO_BATCH * MICRO_BATCHES),
            "lines": [{name: line[name] for name in COMPARED} for line in lines],
        }


def differences(one: Sequence[Mapping[str, float]], other: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The largest difference of each compared figure, over the steps of two blocks."""
    return {name: max(abs(mine[name] - its[name]) for mine, its in zip(one, other, strict=True)) for name in COMPARED}


def turns(forms: Sequence[str], lookahead: Sequence[int], rounds: int) -> list[list[str]]:
    """The arms of each turn. The first is stock, whichever way the others go."""
    found = []
    for number in range(rounds):
        for form in forms if number % 2 == 0 else reversed(forms):
            arms = [*(["stock_sync"] if form == "sync" else []), *(f"{form}/{ahead}" for ahead in lookahead)]
            found.append(["stock", *(arms if number % 2 == 0 else reversed(arms))])
    return found


def measure(forms: Sequence[str], lookahead: Sequence[int], rounds: int, median_s: float) -> dict[str, Any]:
    """The figures of all arms."""
    blocks: dict[str, list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        bench = Bench(forms, Path(scratch))
        for arm in ("stock", "stock_sync", *(f"{form}/0" for form in forms)):
            bench.block(arm, 0.0, 1)  # to warm up: kernels, pools, the check of the engine's weights
        for arms in turns(forms, lookahead, rounds):
            stock: dict[str, Any] = {}
            for arm in arms:
                found = bench.block(arm, median_s)
                stock = stock or found
                found["ratio"] = found["mean_s"] / stock["mean_s"]
                if arm == "stock_sync" or arm.endswith("/0"):
                    found["differences"] = differences(found["lines"], stock["lines"])
                blocks.setdefault(arm, []).append(found)
                print(f"{arm}: {', '.join(f'{each:.2f}' for each in found['step_s'])} s", flush=True)
        floor = bench.block(f"{forms[-1]}/0", 0.0)["mean_s"]
        bench.close()
    return {
        "latency_s": median_s,
        "floor_s": floor,
        "arms": {arm: _figures(blocks[arm]) for arm in sorted(blocks, key=lambda arm: _order(arm, forms))},
    }


def _order(arm: str, forms: Sequence[str]) -> tuple[int, str]:
    form = arm.partition("/")[0]
    return (-1 if form.startswith("stock") else forms.index(form), arm)


def _figures(blocks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The figures of an arm."""
    middle = {name: statistics.median(block[name] for block in blocks) for name in ("mean_s", "ratio")}
    compared = [block["differences"] for block in blocks if "differences" in block]
    exposed, hidden = (sum(block[name] for block in blocks) / len(blocks) for name in ("exposed_s", "hidden_s"))
    return {
        "mean_s": middle["mean_s"],
        "ratio": middle["ratio"],
        "ratios": [block["ratio"] for block in blocks],
        "exposed_s": None if math.isnan(exposed) else exposed,
        "hidden_s": None if math.isnan(hidden) else hidden,
        "hidden": None if math.isnan(exposed) else hidden / (exposed + hidden),
        "failures": sum(block["failures"] for block in blocks),
        "differences": {name: max(each[name] for each in compared) for name in COMPARED} if compared else None,
        "step_s": [block["step_s"] for block in blocks],
    }


def table(figures: Mapping[str, Any]) -> str:
    """The figures for people."""
    lines = [
        f"cpu, tiny, calls of {figures['latency_s']:g} s; without them a step takes {figures['floor_s']:.2f} s",
        f"{'arm':18}{'step, s':>9}{'of stock':>10}{'exposed, s':>12}{'hidden, s':>11}{'hidden':>8}{'failures':>10}"
        f"{'reward off by':>15}{'loss off by':>13}",
    ]
    for arm, each in figures["arms"].items():
        seconds, share = "-".rjust(12) + "-".rjust(11), "-".rjust(8)
        if each["hidden"] is not None:
            seconds, share = f"{each['exposed_s']:12.2f}{each['hidden_s']:11.2f}", f"{each['hidden']:8.0%}"
        off = "-".rjust(15) + "-".rjust(13)
        if each["differences"] is not None:
            off = f"{each['differences']['reward']:15.1e}{each['differences']['loss']:13.1e}"
        lines.append(f"{arm:18}{each['mean_s']:9.2f}{each['ratio']:10.3f}{seconds}{share}{each['failures']:10d}{off}")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print."""
    made = parser(__doc__)
    made.add_argument("--out", dest="json", type=Path, default=argparse.SUPPRESS, help="the same as --json")
    made.add_argument("--rounds", type=int, default=2, help="how often all arms take their turns")
    made.add_argument("--latency", type=float, default=3.0, help="median seconds of a call")
    made.add_argument("--forms", nargs="+", choices=FORMS, default=FORMS)
    made.add_argument("--lookahead", nargs="+", type=int, default=LOOKAHEAD)
    args = made.parse_args(argv)
    figures = measure(args.forms, args.lookahead, args.rounds, args.latency)
    print(table(figures))
    write_json(args.json, figures)


if __name__ == "__main__":
    main()
