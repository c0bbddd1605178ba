"""The cost of a step: stock TRL, streamed rewards, rollouts that are 1, 2 and 4 steps ahead, shared prompts or not.

    .venv/bin/python -m benchmarks.pipeline [--shape 0.5b|7b|tiny] [--latency 5.6 3.2] [--json FILE]
    .venv/bin/python -m benchmarks.pipeline --shape 7b --prompt_tokens 128 1024 3072 --latency 0 0
    .venv/bin/python -m benchmarks.pipeline --device cpu    # a tiny policy, within three minutes
    CUDA_VISIBLE_DEVICES=0 .venv/bin/python -m benchmarks.pipeline --server 1    # vLLM's server on another GPU
    .venv/bin/python -m benchmarks.pipeline --shape 7b --lora --lengths heavy --prompt_tokens 512 --latency 0 0 \
      --steps 8 --arms exact partial_3 both_3

The arms:

- `stock` is TRL's own trainer, with one async reward function that gathers all calls of the batch;
- `exact` is this package's trainer, which scores each completion when it ends;
- `lookahead_N` is the same with `rollout_lookahead: N`;
- `partial_N` is `lookahead_N` with `partial_rollouts: 0.5`, `stale_N` with `max_staleness: 2 N`, `both_N` with both;
- `floor` is `exact` with a service that answers at once: the time that is left when nobody waits for a reward;
- `stock_16`, `stock_32` and `stock_64` are stock with larger micro-batches, which take more memory;
- an arm with `_off` behind its name has `shared_prompts: off`;
- `floor_recorded` is `floor` with `record: true`.

The same for every arm:

- random weights of a real shape; one policy, reference, optimizer and vLLM engine for all arms;
- 64 completions a step, 8 for each prompt (16 with the tiny policy); their lengths depend on the prompt and the number
  of the sample alone (`benchmarks.lengths`);
- a reward is two HTTP calls to a service in a process of its own; the time of an answer depends on the same two:
  log-normal around the two figures of `--latency`, which may be given several times;
- one client with the same limits; on a GPU this package's arms use it from a process of their own, as in training
  (`reward_process`).

The order and the count:

- The arms take turns in one run: stock, exact and floor, then each lookahead once, then floor, exact, stock. The
  differences of a lookahead are large, so once is enough.
- A step lasts from its predecessor's end to its own, with the device synchronised there.
- Steps in which rollouts pile up at first, or run out at last, are not counted.
- The prompts are those of `--steps` steps and repeat. Every measured block has each of them equally often.
- With a lookahead of N, steps that wait and steps that do not may take turns. So it is measured over at least two
  rounds of N + 1 steps, and all figures are means.
- `hidden` is the share of the rewards' makespan in which nobody waited for them.
- `peak` is PyTorch's peak in GiB above what lies there between blocks: weights, reference, optimizer, vLLM.
- Phases are those of this package's log lines, for `floor` and `floor_off`.
- `decoding` is the mean number of vLLM's steps in this process in a step.
- The floor by calculation (`benchmarks.floor`) is printed first.
- `--lora` trains an adapter of rank 16 without a KL penalty, as in `benchmarks.peers`; the default is all weights.
- `--liger` has TRL put Liger's kernels into the model, which all arms share.
"""

import argparse
import asyncio
import contextlib
import copy
import itertools
import math
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import trl.trainer.grpo_trainer as upstream
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import Qwen2ForCausalLM, TrainerCallback, set_seed
from trl import GRPOConfig, GRPOTrainer

from benchmarks.common import (
    BETA,
    allocated,
    device_name,
    dtype,
    now,
    parser,
    peak,
    quiet,
    rows_of,
    save_model,
    set_lookahead,
    write_json,
)
from benchmarks.floor import told
from benchmarks.lengths import KINDS, completion_tokens, fix_lengths, fix_server_lengths
from benchmarks.pipeline_figures import figures_of, hidden_share, table
from benchmarks.service import GENERATIONS, SlowReward, service, set_medians
from benchmarks.timing import Meter
from benchmarks.vllm_server import for_training, vllm_server
from salesrl_trl.config import SalesGRPOConfig
from salesrl_trl.config.rollouts import passes_of
from salesrl_trl.demo.packaged import packaged_tokenizer
from salesrl_trl.ground.process import patched
from salesrl_trl.names import GPU_PEAK, Phase, time_of
from salesrl_trl.record.reader import record_file
from salesrl_trl.record.recorder import RecorderPart
from salesrl_trl.record.writer import Recorder
from salesrl_trl.reward.batch import BatchReport, BatchResult, RewardBatch
from salesrl_trl.reward.remote import RemoteReward
from salesrl_trl.reward.scorer import Scorer
from salesrl_trl.rollout.buffer import policy_of
from salesrl_trl.rollout.rollout_scoring import CompletedBatch
from salesrl_trl.telemetry.instruments import Instruments, InstrumentSettings
from salesrl_trl.trainer import SalesGRPOTrainer

TOKENS = {"0.5b": 256, "7b": 256, "tiny": 24}
"""Longest completion, where lengths are `short`."""
HEAVY_TOKENS = {"0.5b": 4096, "7b": 4096, "tiny": 256}
"""The same where they are `heavy`."""
MICRO_BATCHES = {"0.5b": (8, 8), "7b": (8, 8), "tiny": (8, 2)}
"""Completions of a micro-batch, and micro-batches of an update."""
PROMPT_TOKENS = {"0.5b": 128, "7b": 128, "tiny": 40}
WORDS = ("price", "delivery", "refund", "价格", "发货", "退款", "warranty", "保修", "尺寸", "discount")
TEMPLATE = 64
"""More tokens than the chat template adds."""
MEASURED = 3
"""Counted steps of a block."""
LOOKAHEAD = {
    "exact": 0, "lookahead_1": 1, "lookahead_2": 2, "lookahead_3": 3, "lookahead_4": 4, "partial_1": 1, "partial_2": 2,
    "partial_3": 3, "stale_2": 2, "stale_3": 3, "both_2": 2, "both_3": 3, "floor": 0,
}  # fmt: skip
DEFAULT_ARMS = ("stock", "exact", "lookahead_1", "lookahead_2", "lookahead_4", "partial_1", "partial_2", "floor")
STOCK = {"stock": None, "stock_16": 16, "stock_32": 32, "stock_64": 64}
"""Completions of a micro-batch, where it is another."""
OFF = "_off"
RECORDED = "_recorded"
ARMS = (*STOCK, *LOOKAHEAD, *(f"{arm}{OFF}" for arm in LOOKAHEAD), f"floor{RECORDED}")


def plain(arm: str) -> str:
    """An arm's name without what is behind it."""
    return arm.removesuffix(OFF).removesuffix(RECORDED)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print."""
    made = parser(__doc__)
    made.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    made.add_argument("--shape", choices=sorted(TOKENS), help="default: 0.5b; tiny on a CPU")
    made.add_argument(
        "--latency", nargs=2, type=float, action="append", metavar=("RAG_S", "JUDGE_S"),
        help="median seconds of the two calls; default: 5.6 3.2; 1.0 0.6 on a CPU",
    )  # fmt: skip
    made.add_argument("--arms", nargs="+", choices=ARMS, default=DEFAULT_ARMS)
    made.add_argument("--prompt_tokens", nargs="+", type=int, help="default: 128; 40 on a CPU")
    made.add_argument("--lengths", choices=KINDS, default="short", help="of completions (benchmarks.lengths)")
    made.add_argument("--tokens", type=int, help="longest completion; default: 256; 4,096 if heavy; less on a CPU")
    made.add_argument("--micro_batch", type=int, help="completions of a micro-batch, of as many a step; default: 8")
    made.add_argument("--lora", action="store_true", help="train an adapter of rank 16")
    made.add_argument("--pass_tokens", type=int, help="the number in `shared_prompts`")
    made.add_argument("--liger", action="store_true", help="`use_liger_kernel`")
    made.add_argument("--quantization", help="vLLM's `quantization`, of the engine that all arms share")
    made.add_argument("--steps", type=int, default=MEASURED, help="counted steps of a block, each with other prompts")
    made.add_argument("--rounds", type=int, default=1, help="how often all arms take their turns")
    made.add_argument(
        "--server", metavar="GPU", help="`vllm_mode: server`, on the GPU of this name in `CUDA_VISIBLE_DEVICES`"
    )
    made.add_argument("--trace", type=Path, help="folder for the trace of this package's arms")
    args = made.parse_args(argv)
    on_cpu = args.device == "cpu"
    if args.server is not None and on_cpu:
        made.error("--server needs two GPUs: weights are pushed into a server by NCCL")
    args.shape = args.shape or ("tiny" if on_cpu else "0.5b")
    args.latency = args.latency or [(1.0, 0.6) if on_cpu else (5.6, 3.2)]
    args.prompt_tokens = args.prompt_tokens or [PROMPT_TOKENS[args.shape]]
    args.tokens = args.tokens or {"short": TOKENS, "heavy": HEAVY_TOKENS}[args.lengths][args.shape]
    micro_batch, micro_batches = MICRO_BATCHES[args.shape]
    args.batch = micro_batch * micro_batches
    args.micro_batch = args.micro_batch or micro_batch
    measure(args)


def window(ahead: int, steps: int) -> tuple[int, int, int]:
    """Steps of a block with a lookahead of `ahead`: those before the counted ones, the counted ones, those behind.

    The counted ones are whole rounds of waiting, and whole rounds of the prompts of `steps` steps.
    """
    if not ahead:
        return 1, steps, 0
    round_ = math.lcm(ahead + 1, steps)
    return ahead + 1, round_ * math.ceil(2 * (ahead + 1) / round_), ahead


class Clock(TrainerCallback):
    """The end of each step, and what `count` said then."""

    def __init__(self) -> None:
        self.ends: list[float] = []
        self.counts: list[int] = []
        self.count: Callable[[], int] = int

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.ends.clear()
        self.counts.clear()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.ends.append(now())
        self.counts.append(self.count())


class RecorderAtTimes(RecorderPart):
    """Records to one recorder while it `is_on`."""

    is_on = False

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def begin(self, resumed: str | None, run_id: str) -> None:
        """Keep the recorder."""

    def on_batch(self, batch: CompletedBatch) -> Mapping[str, float]:
        return super().on_batch(batch) if self.is_on else {}


class Bench:
    """Two trainers, TRL's and this package's, that share all large parts.

    Args:
        args (`argparse.Namespace`):
            The command line.
        url (`str`):
            Address of the service.
        scratch (`Path`):
            Folder for the model.
        servers (`contextlib.ExitStack`):
            Ends the server that samples, if there is one.
    """

    def __init__(self, args: argparse.Namespace, url: str, scratch: Path, servers: contextlib.ExitStack) -> None:
        self._args = args
        self._url = url
        self._batches: list[RewardBatch] = []
        """Batches that were waited for, oldest first."""
        self._note_results()
        self._device = torch.device("cuda", 0) if args.device == "cuda" else torch.device("cpu")
        on_cpu, most = args.device == "cpu", args.tokens
        self._rewards: dict[str, Scorer] = {
            "stock": SlowReward(url),
            **{
                name: reward if on_cpu else RemoteReward(reward)
                for name, reward in {"ours": SlowReward(url), "recorded": SlowReward(url, records=True)}.items()
            },
        }
        self._recorder = RecorderAtTimes(Recorder(record_file(scratch / "out", 0)))
        self._clock = Clock()
        set_seed(0)
        folder = save_model(args.shape, scratch / "model", self._device)
        engine: dict[str, Any] = {"vllm_mode": "colocate"}
        if args.server is not None:
            options = ("--dtype", "bfloat16", "--gpu-memory-utilization", "0.5", *for_training(1024))
            server = vllm_server(folder, scratch / "server.log", *options, CUDA_VISIBLE_DEVICES=args.server)
            engine = {
                "vllm_mode": "server",
                "vllm_server_base_url": servers.enter_context(server),
                "generation_kwargs": {"seed": 0},  # the number of a sample
            }
        self._model: Any = Qwen2ForCausalLM.from_pretrained(folder, dtype=dtype(self._device))
        if args.lora:
            self._model = get_peft_model(self._model, LoraConfig(r=16, target_modules="all-linear"))
        self._beta = 0.0 if args.lora else BETA
        trained = [weight for weight in self._model.parameters() if weight.requires_grad]
        self._optimizer = torch.optim.AdamW(trained, lr=1e-6, fused=not on_cpu)
        micro_batch, micro_batches = args.micro_batch, args.batch // args.micro_batch
        longest = max(args.prompt_tokens) + most + TEMPLATE
        self._rows = {tokens: self._of_length(tokens) for tokens in args.prompt_tokens}
        self._settings = quiet(
            self._device,
            str(scratch / "out"),
            per_device_train_batch_size=micro_batch,
            gradient_accumulation_steps=micro_batches,
            max_completion_length=most,
            use_vllm=True,
            vllm_gpu_memory_utilization=0.35 if args.lora else 0.25,
            vllm_max_model_length=longest,
            use_liger_kernel=args.liger,
            gradient_checkpointing=not on_cpu,
            lr_scheduler_type="constant",
            loss_type="dapo",
            shuffle_dataset=False,
            dataloader_pin_memory=False,
            **engine,
        )
        self._instruments = Instruments(
            InstrumentSettings(trace_steps=range(2**62 if args.trace else 0), heartbeat_s=0.0), self._device,
            args.trace or scratch / "out",
        )  # fmt: skip
        config = SalesGRPOConfig(
            beta=self._beta, held_out_eval=False, max_sampling_logp_difference=math.inf,
            shared_prompts=args.pass_tokens or "auto", **self._settings,
            vllm_engine_kwargs=None if args.server is not None else {
                "quantization": args.quantization, "max_num_seqs": micro_batch * micro_batches * 3 // 2,
            },
        )  # fmt: skip
        ours = self._built(
            SalesGRPOTrainer, self._rewards["ours"], config, instruments=self._instruments, parts=[self._recorder]
        )
        if args.server is None:
            fix_lengths(ours.vllm_generation.llm, most, args.lengths)
            self._count_decoding(ours.vllm_generation.loop)
        else:
            fix_server_lengths(ours.vllm_generation.vllm_client, most, args.lengths)
        self._meter = Meter()
        self._meter.watch_instruments(self._instruments)
        self._measured_s = self._inside_s = 0.0
        self._in_groups = ours.components.in_groups
        without = copy.copy(ours.args)  # making another one would reset the accelerator's state
        without.shared_prompts = "off"
        off = passes_of(without, ours.accelerator, self._model, ours.components.ledger, None)
        self._passes = {False: ours.components.passes, True: off}
        """By whether shared prompts are off."""
        self._trainers = {"ours": ours}
        for arm, size in STOCK.items():
            if arm in args.arms or arm == "stock":
                sizes = {} if size is None else {
                    "per_device_train_batch_size": size,
                    "gradient_accumulation_steps": micro_batch * micro_batches // size,
                }  # fmt: skip
                self._trainers[arm] = self._build_stock(ours, **sizes)

    def _count_decoding(self, loop: Any) -> None:
        numbers, step = itertools.count(1), loop._step
        latest = [0]

        def counted() -> Any:
            latest[0] = next(numbers)
            return step()

        loop._step, self._clock.count = counted, lambda: latest[0]

    def floor(self, tokens: int) -> str:
        """By calculation, for prompts of this length."""
        tokenizer, args = packaged_tokenizer(), self._args
        prompts = [
            tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, return_dict=False)
            for row in self._rows[tokens]
        ]
        lengths = [
            completion_tokens(prompt, sample, args.tokens, args.lengths)
            for prompt in prompts
            for sample in range(GENERATIONS)
        ]
        batches = [lengths[first : first + args.batch] for first in range(0, len(lengths), args.batch)]
        config = self._model.config.to_dict()
        on_gpu = args.device != "cpu"
        return told(config, batches, len(prompts[0]), full=not args.lora, checkpointing=on_gpu)

    def _note_results(self) -> None:
        """Adds each batch, of whichever arm, to `_batches` once it has its result."""
        result = RewardBatch.result

        def noted(batch: RewardBatch, *drained: BatchReport) -> BatchResult:
            self._batches.append(batch)
            return result(batch, *drained)

        RewardBatch.result = noted  # type: ignore[method-assign]

    def _build_stock(self, ours: GRPOTrainer, **sizes: int) -> GRPOTrainer:
        """TRL's trainer, with the reference and the engine of `ours`."""
        config = GRPOConfig(beta=0.0, **{**self._settings, **sizes})
        with patched(upstream, "VLLMGeneration", lambda **_: ours.vllm_generation):
            stock = self._built(GRPOTrainer, self._rewards["stock"], config)
        stock.beta, stock.ref_model = self._beta, ours.ref_model
        return stock

    def _of_length(self, tokens: int) -> Dataset:
        """Rows whose texts have this many tokens."""
        draw, tokenizer = random.Random(0), packaged_tokenizer()
        texts = []
        for _ in range(self._args.steps * self._args.batch // GENERATIONS):
            ids = tokenizer(" ".join(draw.choices(WORDS, k=tokens)))["input_ids"]
            texts.append(tokenizer.decode(ids[:tokens], skip_special_tokens=True))
        return Dataset.from_list(rows_of(texts))

    def _built(self, kind: type[GRPOTrainer], reward: Scorer, config: GRPOConfig, **more: Any) -> GRPOTrainer:
        return kind(
            self._model, reward, args=config, train_dataset=next(iter(self._rows.values())), callbacks=[self._clock],
            processing_class=packaged_tokenizer(), optimizers=(self._optimizer, None), **more,
        )  # fmt: skip

    def _leave_unfinished(self, trainer: Any, is_partial: bool) -> None:
        """As `partial_rollouts: 0.5` does, or not."""
        size = trainer.args.per_device_train_batch_size * trainer.args.steps_per_generation
        if self._args.server is None:
            trainer.vllm_generation.loop.most_unfinished = size // 2 if is_partial else 0

    def close(self) -> None:
        """Close connections and instruments."""
        self._instruments.close()
        self._recorder.close()
        loop = self._trainers["ours"].components.reward_loop
        loop._batches.run(self._rewards["recorded"].aclose())
        loop.reward = self._rewards["ours"]
        self._trainers["ours"].finish()
        stock = self._trainers["stock"].async_loop  # all of stock's arms share the reward
        asyncio.run_coroutine_threadsafe(self._rewards["stock"].aclose(), stock).result()  # type: ignore[attr-defined]

    def instruments_share(self) -> float | None:
        """The share of the floor's time that the host spent in the instruments."""
        return self._inside_s / self._measured_s if self._measured_s else None

    def block(self, arm: str, latency: Sequence[float], tokens: int, steps: int) -> dict[str, Any]:
        """Some steps of an arm: seconds and lengths of the counted ones, shares of reward time hidden, failures."""
        own = plain(arm)
        ahead = LOOKAHEAD.get(own, 0)
        before, steps, after = window(ahead, steps)
        counted = slice(before, before + steps)
        trainer = self._trainers["ours" if own in LOOKAHEAD else arm]
        set_medians(self._url, (0.0, 0.0) if own == "floor" else latency)
        self._batches.clear()
        if own in LOOKAHEAD:
            set_lookahead(trainer, ahead)
            self._leave_unfinished(trainer, own.startswith(("partial", "both")))
            buffer = trainer.components.pipeline.buffer
            buffer.policy = policy_of(ahead, 2 * ahead if own.startswith(("stale", "both")) else 0)
            trainer.components.in_groups = self._in_groups and not buffer.chooses
            trainer.components.passes = self._passes[arm.endswith(OFF)]
            is_recorded = arm.endswith(RECORDED)
            trainer.components.reward_loop.reward = self._rewards["recorded" if is_recorded else "ours"]
            self._recorder.is_on = is_recorded
        trainer.args.max_steps = before + steps + after
        trainer.train_dataset = self._rows[tokens]
        resident = allocated() / 2**30
        inside, started = self._meter.seconds, time.perf_counter()
        trainer.train()
        if arm == "floor":
            self._measured_s += time.perf_counter() - started
            self._inside_s += self._meter.seconds - inside
        seconds = [math.nan, *(end - start for start, end in itertools.pairwise(self._clock.ends))]
        rewards = [reward for batch in self._batches for reward in batch.rewards]
        history = [entry for entry in trainer.state.log_history if "loss" in entry]
        lengths = [entry.get("completions/mean_length") for entry in history]
        seconds_of = [[entry.get(time_of(phase)) or 0.0 for phase in Phase] for entry in history]
        return {
            "step_s": seconds[counted],
            "hidden": [hidden_share(batch) for batch in self._batches[counted]],
            "failures": [sum(reward is None or reward.value is None for reward in rewards)],
            "lengths": [length for length in lengths[counted] if length is not None],
            "peak_gib": [max([peak() / 2**30, *(entry.get(GPU_PEAK) or 0.0 for entry in history)]) - resident],
            "phases": seconds_of[counted],
            "decoding": [end - start for start, end in itertools.pairwise([0, *self._clock.counts])][counted],
        }


def measure(args: argparse.Namespace) -> None:
    """The figures of all arms, printed and written after each latency."""
    arms = [arm for arm in ARMS if arm in args.arms]
    figures: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch, service() as url, contextlib.ExitStack() as servers:
        bench = Bench(args, url, Path(scratch), servers)
        for tokens, latency in itertools.product(args.prompt_tokens, args.latency):
            print(bench.floor(tokens), flush=True)
            if latency is args.latency[0]:
                for arm in dict.fromkeys(arm if arm in STOCK else f"exact{OFF * arm.endswith(OFF)}" for arm in arms):
                    bench.block(arm, (0.0, 0.0), tokens, 0)  # to warm up: kernels, pools, connections
            figures.append(_measure_one(bench, arms, latency, tokens, args))
            print(table(figures[-1]), flush=True)
            first, *others = figures
            write_json(args.json, {**first, "others": others} if others else first)
        bench.close()


def _measure_one(
    bench: Bench, arms: Sequence[str], latency: Sequence[float], tokens: int, args: argparse.Namespace
) -> dict[str, Any]:
    """The figures of all arms with one latency and one length of prompts."""
    blocks: dict[str, list[dict[str, list[float]]]] = {arm: [] for arm in arms}
    twice = [arm for arm in arms if not LOOKAHEAD.get(plain(arm))]
    round_ = [*twice, *(arm for arm in arms if arm not in twice), *reversed(twice)]
    for arm in round_ * args.rounds:
        blocks[arm].append(bench.block(arm, latency, tokens, args.steps))
        latest = blocks[arm][-1]
        print(f"{arm}: {', '.join(f'{each:.2f}' for each in latest['step_s'])} s", flush=True)
    figures = figures_of(blocks)
    floor = figures.get("floor")
    return {
        "shape": args.shape,
        "vllm": "colocate" if args.server is None else "server",
        "device": device_name(torch.device(args.device)),
        "latency_s": list(latency),
        "prompt_tokens": tokens,
        "arms": figures,
        "floor_s": None if floor is None else floor["step_s_mean"],
        "floor": floor,
        "instruments_share": bench.instruments_share(),
    }


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # ends its child processes too
    main()
