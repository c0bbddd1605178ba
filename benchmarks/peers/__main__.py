"""Runs the arms one after the other, each in a process of its own, and prints a line for each.

    python -m benchmarks.peers --arms stock ours_2 --python verl=/tmp/verl/bin/python --json FILE

- Makes the weights and the prompts once; every arm reads them.
- `--python ARM=PATH` names the interpreter of an arm's environment, `--site ARM=FOLDERS` stands in place of its
  `PYTHONPATH`. ARM is the beginning of an arm's name: `verl` stands for all arms of verl.
- An arm that fails, takes longer than `--limit` or is stopped with the bench leaves its steps and the end of its log.
- `async_N`, TRL's AsyncGRPO, and `ours_server_N` use vLLM's server on another GPU (`--server_gpu`), and get one of
  their own. `--server_options "--data-parallel-size 2"` with two such GPUs makes it data-parallel.
- The log of an arm, and of this package's arms the run's folder `ARM.run`, are in `--logs`.
- `pair_N` is this package in two processes, a card and an engine each, with twice the completions of a step.
"""

import argparse
import contextlib
import json
import math
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.floor import told
from benchmarks.lengths import KINDS
from benchmarks.peers.task import GROUP, PROMPTS, Plan, prompts_of, write_whole
from benchmarks.processes import sigterm_afterwards
from benchmarks.vllm_server import for_training, vllm_server

ROOT = Path(__file__).parents[2]
MODULES = {
    "stock": "trl_arm",
    "ours": "trl_arm",
    "pair": "trl_arm",
    "async": "async_arm",
    "verl": "verl_arm",
    "unsloth": "unsloth_arm",
}
"""By the beginning of an arm's name."""
PACKAGES = {"verl": "verl", "unsloth": "unsloth"}
"""Of arms that need another environment."""
LAUNCH = ("--config_file", "accelerate_configs/debug.yaml", "--multi_gpu", "--num_processes")
TOKENS = {"short": 256, "heavy": 4096}
TINY_TOKENS = 24
STOPPED = "stopped"
"""The end of an arm whose bench got SIGTERM."""
WORDS = ("price", "delivery", "refund", "价格", "发货", "退款", "warranty", "保修", "尺寸", "discount")


def kind(arm: str) -> str:
    """The beginning of an arm's name."""
    return arm.split("_")[0]


def make_weights(shape: str, folder: Path, prompt_tokens: int, steps: int) -> None:
    """Random weights, the tokenizer and the texts of so many steps. In a process of its own, so that the GPU is free
    afterwards."""
    from benchmarks.common import SHAPES, device, save_model
    from salesrl_trl.demo.packaged import packaged_tokenizer

    if not (folder / "config.json").is_file():
        save_model(shape, folder, device())
        name_all_tokens(folder)
    there = json.loads((folder / "config.json").read_text())
    if other := {name: there[name] for name, size in SHAPES[shape].items() if there.get(name, size) != size}:
        raise SystemExit(f"{folder} has a model of another shape than {shape}: {other}")
    draw, tokenizer, texts = random.Random(0), packaged_tokenizer(), []
    for _ in range(PROMPTS * steps):
        ids = tokenizer(" ".join(draw.choices(WORDS, k=prompt_tokens)))["input_ids"]
        texts.append(tokenizer.decode(ids[:prompt_tokens], skip_special_tokens=True))
    write_whole(folder / "texts.json", texts)  # another bench may read the same ones
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
        )
        for text in texts
    ]  # fmt: skip
    write_whole(folder / "prompts.json", prompts)


def name_all_tokens(folder: Path) -> None:
    """Give each row of the model's head a token. verl samples from those of the tokenizer alone, and takes log-probs
    over all rows. No text has the new ones."""
    path, rows = folder / "tokenizer.json", json.loads((folder / "config.json").read_text())["vocab_size"]
    tokenizer = json.loads(path.read_text())
    named = tokenizer["model"]["vocab"]
    known = {*named.values(), *(each["id"] for each in tokenizer["added_tokens"])}
    named |= {f"token{row}": row for row in range(rows) if row not in known}
    path.write_text(json.dumps(tokenizer))


def check(args: argparse.Namespace) -> None:
    """Find now what would end an arm minutes later. Raises `SystemExit`."""
    if PROMPTS * GROUP % args.micro_batch:
        raise SystemExit(
            f"--micro_batch {args.micro_batch} does not divide the {PROMPTS * GROUP} completions of a step"
        )
    for arm in args.arms:
        if kind(arm) not in MODULES:
            raise SystemExit(f"unknown arm {arm}. Expected one that begins with: {', '.join(MODULES)}")
        if ("partial" in arm or "stale" in arm) and not re.search(r"_[1-9]\d*$", arm):
            raise SystemExit(f"the arm {arm} has no number of steps ahead, as {arm}_2 has")
        if (package := PACKAGES.get(kind(arm))) is not None:
            python = args.python.get(kind(arm), sys.executable)
            find = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({package!r}) is None)"
            if subprocess.run(
                [python, "-c", find], env=environment_of(arm, args.site, args.gpu), check=False
            ).returncode:
                raise SystemExit(f"{python} has no {package}, which {arm} needs. Name another by --python or --site.")


def environment_of(arm: str, sites: dict[str, str], gpus: str | None) -> dict[str, str]:
    """The variables of an arm's process."""
    paths = [str(ROOT), sites.get(kind(arm), os.environ.get("PYTHONPATH", ""))]
    own = {"PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    return {**os.environ, **own} | ({} if gpus is None else {"CUDA_VISIBLE_DEVICES": gpus})


def run_arm(plan: Plan, args: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """The figures of an arm, whatever became of it."""
    path, out, log = scratch / "plan.json", scratch / "result.json", args.logs / f"{plan.arm}.log"
    out.unlink(missing_ok=True)
    began = time.perf_counter()
    ended: int | str
    with contextlib.ExitStack() as stack:
        gpus = None if plan.processes > 1 else args.gpu
        if "server" in plan.arm or kind(plan.arm) == "async":
            options = ("--dtype", "bfloat16", "--gpu-memory-utilization", "0.8", *for_training(plan.longest))
            server = vllm_server(
                Path(plan.folder), args.logs / f"{plan.arm}.server.log", *options, *args.server_options.split(),
                CUDA_VISIBLE_DEVICES=args.server_gpu,
            )  # fmt: skip
            plan = Plan(**{**_fields(plan), "url": stack.enter_context(server)})
        plan.write(path)
        python = args.python.get(kind(plan.arm), sys.executable)
        launch = ["-m", "accelerate.commands.launch", *LAUNCH, str(plan.processes)] if plan.processes > 1 else []
        command = [python, *launch, "-m", f"benchmarks.peers.{MODULES[kind(plan.arm)]}", str(path), str(out)]
        with log.open("wb") as stream:
            try:
                with sigterm_afterwards():
                    process = subprocess.Popen(
                        command, stdout=stream, stderr=stream, cwd=ROOT, env=environment_of(plan.arm, args.site, gpus)
                    )
                ended = process.wait(args.limit)
            except (subprocess.TimeoutExpired, SystemExit) as error:
                ended = STOPPED if isinstance(error, SystemExit) else f"cut off after {args.limit} s"
                process.send_signal(signal.SIGTERM)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(20)
                process.kill()
    found = json.loads(out.read_text()) if out.is_file() else {"arm": plan.arm, "blocks": []}
    found |= {"ended": ended, "wall_s": round(time.perf_counter() - began)}
    if ended != 0:
        found["log"] = log.read_text(errors="replace")[-args.tail :]
    return found


def _fields(plan: Plan) -> dict[str, Any]:
    return {name: getattr(plan, name) for name in Plan.__dataclass_fields__}


def line(found: dict[str, Any]) -> str:
    """An arm's figures for people."""
    blocks = [
        f"{block['latency_s'][0]:g} + {block['latency_s'][1]:g} s: {block['mean_s']} s of {block['counted']}"
        for block in found["blocks"]
    ]
    ended = "" if found["ended"] == 0 else f"; ended: {found['ended']}\n{found['log']}"
    return f"{found['arm']}: {'; '.join(blocks)}; {found['wall_s']} s in all{ended}"


def main(argv: Sequence[str] | None = None) -> None:
    """Run the arms."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument(
        "--arms", nargs="+", default=["stock", "ours_2"], help="the number is how far rollouts are ahead"
    )
    made.add_argument("--shape", default="7b")
    made.add_argument("--prompt_tokens", type=int, default=1024)
    made.add_argument("--lengths", choices=KINDS, default="short", help="of completions (benchmarks.lengths)")
    made.add_argument("--tokens", type=int, help="longest completion; default: 256, 4,096 where heavy, 24 where tiny")
    made.add_argument("--micro_batch", type=int, default=8, help="completions of a micro-batch")
    made.add_argument("--latency", nargs=2, type=float, action="append", metavar=("RAG_S", "JUDGE_S"))
    made.add_argument("--full", action="store_true", help="train all weights; the default is LoRA of rank 16")
    made.add_argument("--dtype", default="bfloat16", help="of the trainer's weights, on a GPU")
    made.add_argument("--measured", type=int, default=3, help="counted steps of a block of an arm that waits")
    made.add_argument("--measured_ahead", type=int, default=6, help="the same for an arm that reads ahead")
    made.add_argument("--warm", type=int, default=3)
    made.add_argument("--limit", type=int, default=240, help="seconds of an arm")
    made.add_argument("--tail", type=int, default=1500, help="characters of a failed arm's log")
    made.add_argument("--python", nargs="*", default=[], metavar="ARM=PATH")
    made.add_argument("--site", nargs="*", default=[], metavar="ARM=FOLDERS")
    made.add_argument("--model", type=Path, help="folder of weights made before, or where they are to be kept")
    made.add_argument("--gpu", default="0", help="of an arm of one process")
    made.add_argument("--server_gpu", default="1")
    made.add_argument("--server_options", default="", help="more words for vLLM's server")
    made.add_argument("--logs", type=Path, default=Path(tempfile.mkdtemp()))
    made.add_argument("--json", type=Path, help="a line of JSON for each arm is added to this file")
    made.add_argument("--only_weights", action="store_true", help=argparse.SUPPRESS)
    args = made.parse_args(argv)
    if args.only_weights:
        return make_weights(args.shape, args.model, args.prompt_tokens, math.lcm(args.measured, args.measured_ahead))
    args.python, args.site = (dict(word.split("=", 1) for word in words) for words in (args.python, args.site))
    check(args)
    args.logs.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.model or Path(scratch) / "model"
        command = [sys.executable, "-m", "benchmarks.peers", "--only_weights", "--shape", args.shape]
        command += ["--model", str(folder), "--prompt_tokens", str(args.prompt_tokens)]
        command += ["--measured", str(args.measured), "--measured_ahead", str(args.measured_ahead)]
        subprocess.run(command, check=True, cwd=ROOT, env=environment_of("ours", {}, None))
        for arm in args.arms:
            number = re.search(r"\d+$", arm)
            ahead = int(number[0]) if number else 0
            plan = Plan(
                arm=arm, folder=str(folder), prompt_tokens=args.prompt_tokens, lengths=args.lengths,
                tokens=args.tokens or (TINY_TOKENS if args.shape == "tiny" else TOKENS[args.lengths]),
                micro_batch=args.micro_batch, latencies=args.latency or [[0.0, 0.0]], ahead=ahead, warm=args.warm,
                full=args.full,
                measured=args.measured_ahead if ahead else args.measured, dtype=args.dtype,
                processes=2 if kind(arm) == "pair" else 1, run=str(args.logs / f"{arm}.run"),
            )  # fmt: skip
            if arm == args.arms[0]:
                config = json.loads((folder / "config.json").read_text())
                print(told(config, plan.batches(), len(prompts_of(plan.folder)[0]), full=plan.full), flush=True)
            found = run_arm(plan, args, Path(scratch)) | {"shape": args.shape}
            print(line(found), flush=True)
            if args.json:
                with args.json.open("a") as stream:
                    stream.write(json.dumps(found) + "\n")
            if found["ended"] == STOPPED:
                sys.exit(STOPPED)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(STOPPED))  # ends its arms too
    main()
