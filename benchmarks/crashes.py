"""Is anything lost? Runs that are killed, signalled, or that meet a full disk or damaged checkpoints, and go on.

    python -m benchmarks.crashes kills --kills 100                    # bit for bit, one process
    python -m benchmarks.crashes kills --kills 100 --lookahead 2 --save_rollouts
    python -m benchmarks.crashes kills --kills 100 --processes 2
    python -m benchmarks.crashes signals --times 20                   # two processes, launched by accelerate
    python -m benchmarks.crashes damages --times 20
    python -m benchmarks.crashes full_disk --times 20                 # mounts a small disk: needs the right to do so
    python -m benchmarks.crashes ledger --kills 20                    # what a service with a ledger was asked twice

The run is the debug recipe's, with the packaged policy, transformers generating, and a service of this module whose
verdicts depend on the answer. It writes down the prompts of each micro-batch.
"""

import argparse
import asyncio
import collections
import contextlib
import hashlib
import itertools
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
STEPS = 60
SETTINGS = {
    "use_cpu": True, "use_vllm": False, "per_device_train_batch_size": 8, "num_generations": 4,
    "max_train_rows": 90, "max_steps": STEPS, "save_strategy": "steps", "save_steps": 3, "save_total_limit": 3,
    "max_completion_length": 48, "eval_steps": 7, "eval_strategy": "steps", "max_eval_rows": 4,
    "num_generations_eval": 1, "held_out_eval": False, "quick_eval_steps": 5, "quick_eval_rows": 4, "heartbeat_s": 0,
    "report_to": "none", "seed": 7, "reward_deadline_s": 30,
}  # fmt: skip
RESUMABLE, KILLED = 75, 137
TRAINED = "trained.rank{}.jsonl"


def main() -> None:
    """Run what the arguments say."""
    if sys.argv[1] == "run":
        _run(sys.argv[2:])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["serve", "kills", "signals", "damages", "full_disk", "ledger"])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--lookahead", type=int, default=0)
    parser.add_argument("--signals", nargs="+", default=["SIGINT", "SIGTERM", "SIGUSR1", "SIGHUP"])
    parser.add_argument("--save_rollouts", action="store_true")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/crashes"))
    arguments = parser.parse_args()
    if arguments.what == "serve":
        _serve(arguments.port)
    else:
        {
            "kills": kills, "signals": signals, "damages": damages, "full_disk": full_disk, "ledger": ledger,
        }[arguments.what](arguments)  # fmt: skip


# The run, and the service


def _run(argv: Sequence[str]) -> None:
    from salesrl_trl.run.launcher import begin_run

    begin_run()
    import salesrl_trl.trainer
    from salesrl_trl import train

    class Recorded(salesrl_trl.trainer.SalesGRPOTrainer):
        """Writes down what it trains on."""

        def _compute_loss(self, model: Any, inputs: Any) -> Any:
            if self.model.training:
                padded = zip(inputs["prompt_ids"], inputs["prompt_mask"], strict=True)
                rows = sorted(ids[mask.bool()].tolist() for ids, mask in padded)  # TRL shuffles a batch
                prompts = hashlib.sha256(repr(rows).encode()).hexdigest()[:12]
                with Path(self.args.output_dir, TRAINED.format(self.args.process_index)).open("a") as file:
                    file.write(json.dumps({"done": self.state.global_step, "prompts": prompts}) + "\n")
            return super()._compute_loss(model, inputs)

    salesrl_trl.trainer.SalesGRPOTrainer = Recorded  # type: ignore[misc]
    given = [part for name, value in SETTINGS.items() for part in (f"--{name}", str(value).lower())]
    train.main(ROOT / "recipes/debug.yaml", [*given, *argv])


def _serve(port: int) -> None:
    """RAG and judge by one port. `/ledger` returns each call's path, its key, when it came and was answered."""
    from aiohttp import web

    from salesrl_trl.fencing import read_nonce

    calls: list[tuple[str, str, float, float]] = []

    def digest(body: bytes) -> str:
        return hashlib.sha256(re.sub(rb"[0-9a-f]{16}", b"", body)).hexdigest()  # without the nonce of a request

    async def answer(request: web.Request) -> web.Response:
        body, came = await request.read(), time.time()
        await asyncio.sleep(0.05)
        if "chat" in request.path:
            message = json.loads(body)["messages"][-1]["content"]
            score = int(digest(message.encode())[:4], 16) / 0xFFFF
            verdict = {"nonce": read_nonce(message), "candidate": score, "reference": 0.5, "reason": "by its digest"}
            choice = {"index": 0, "finish_reason": "stop",
                      "message": {"role": "assistant", "content": json.dumps(verdict)}}  # fmt: skip
            given: Any = {"id": "c", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]}
        else:
            passages = [{"id": "d1", "text": "A passage.", "score": 0.5}]
            given = {"answer": f"An answer: {digest(body)}", "passages": passages, "took_ms": 1.0}
        response = web.json_response(given)
        with contextlib.suppress(ConnectionResetError):  # of a process that was killed: not counted as sent
            await response.prepare(request)
            await response.write_eof()
            calls.append((request.path, digest(body), came, time.time()))
        return response

    async def told(request: web.Request) -> web.Response:
        return web.json_response(calls)

    async def well(request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "m"}]})

    app = web.Application(client_max_size=2**26)
    app.add_routes([web.get("/ledger", told), web.get("/healthz", well), web.get("/v1/models", well)])
    app.add_routes([web.post(path, answer) for path in ("/v1/rag/8b", "/v1/rag/32b", "/v1/chat/completions")])
    web.run_app(app, host="127.0.0.1", port=port, print=lambda *_: None)


@contextlib.contextmanager
def _services(port: int) -> Iterator[str]:
    """The address of the service, in a process of its own."""
    process = subprocess.Popen([sys.executable, "-m", "benchmarks.crashes", "serve", "--port", str(port)], cwd=ROOT)
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(100):
            try:
                urllib.request.urlopen(f"{url}/healthz").read()
                break
            except OSError:
                time.sleep(0.2)
        yield url
    finally:
        process.terminate()
        process.wait()


class Runs:
    """Starts of one run, in one folder."""

    def __init__(self, folder: Path, url: str, processes: int = 1, **settings: object) -> None:
        self.folder = folder.resolve()
        self.processes = processes
        answers = {"rag_base_url": url, "judge_base_url": f"{url}/v1", "judge_model": "m",
                   "reference_cache": self.folder.parent / f"{folder.name}.references.sqlite"}  # fmt: skip
        self._settings = {**answers, "output_dir": self.folder, **settings}
        self._number = itertools.count()
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        Path(answers["reference_cache"]).unlink(missing_ok=True)

    def start(self, **settings: object) -> subprocess.Popen[bytes]:
        """Start it, or go on with it, in a session of its own."""
        given = {**self._settings, "resume_from_checkpoint": "auto", **settings}
        several = ["--multi_gpu", "--num_processes", str(self.processes)] if self.processes > 1 else []
        launch = [sys.executable, "-m", "accelerate.commands.launch", "--config_file",
                  "accelerate_configs/debug.yaml", *several, "-m", "benchmarks.crashes"]  # fmt: skip
        direct = [sys.executable, "-m", "benchmarks.crashes"]
        command = [*(launch if self.processes > 1 else direct), "run"]
        command += [part for name, value in given.items() for part in (f"--{name}", str(value).lower()
                    if isinstance(value, bool) else str(value))]  # fmt: skip
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        if self.processes > 1:
            environment |= {"MASTER_PORT": str(29500 + random.randrange(2000))}
        self.log = self.folder.parent / f"{self.folder.name}.{next(self._number)}.log"
        with self.log.open("wb") as log:
            return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log, start_new_session=True)

    def finish(self) -> None:
        """Let it go on until it has finished."""
        while (code := self.start().wait()) == RESUMABLE:
            pass
        if code:
            raise SystemExit(f"exit code {code}; the end of {self.log}:\n{self.log.read_text()[-3000:]}")

    def trained(self) -> list[dict[int, list[str]]]:
        """For each rank: by the steps before it, the prompts of each micro-batch, in the order of training."""
        ranks = []
        for rank in range(self.processes):
            path = self.folder / TRAINED.format(rank)
            by_step: dict[int, list[str]] = collections.defaultdict(list)
            for line in path.read_text().splitlines() if path.exists() else ():
                try:
                    read = json.loads(line)
                except ValueError:  # the kill came while it was written
                    continue
                by_step[read["done"]].append(read["prompts"])
            ranks.append(dict(by_step))
        return ranks

    def weights(self) -> str:
        """A digest of the policy at the end."""
        return hashlib.sha256((self.folder / "model.safetensors").read_bytes()).hexdigest()[:16]

    def processes_left(self) -> list[int]:
        """Process ids of this run, on this machine."""
        return [int(each) for each in subprocess.run(
            ["pgrep", "-f", f"benchmarks.crashes run .*{self.folder} "], capture_output=True, text=True, check=False,
        ).stdout.split() if int(each) != os.getpid()]  # fmt: skip


def _wait_until_gone(runs: Runs, seconds: float = 60) -> float:
    began = time.monotonic()
    while runs.processes_left():
        if time.monotonic() - began > seconds:
            raise SystemExit(f"processes left after {seconds} s: {runs.processes_left()}")
        time.sleep(0.1)
    return time.monotonic() - began


# What is shown


def kills(arguments: argparse.Namespace) -> None:
    """SIGKILL at random moments; each is gone on with."""
    rng = random.Random(arguments.seed)
    name = f"kills_{arguments.processes}_{arguments.lookahead}_{arguments.save_rollouts}"
    given = {"rollout_lookahead": arguments.lookahead, "save_rollouts": arguments.save_rollouts}
    with _services(18200 + 10 * arguments.processes + arguments.lookahead + 50 * arguments.save_rollouts) as url:
        whole = Runs(arguments.out / f"{name}_whole", url, arguments.processes, **given)
        began = time.monotonic()
        whole.finish()
        lasts = time.monotonic() - began
        print(f"uninterrupted: {lasts:.0f} s, weights {whole.weights()}", flush=True)
        expected = whole.trained()
        runs = Runs(arguments.out / name, url, arguments.processes, **given)
        killed, moments = 0, collections.Counter[str]()
        while killed < arguments.kills:
            process = runs.start()
            time.sleep(rng.uniform(0.2, 13.0 + 3.0 * (arguments.processes - 1)))
            if process.poll() is not None:
                if process.returncode:
                    raise SystemExit(f"exit code {process.returncode}; {runs.log}:\n{runs.log.read_text()[-3000:]}")
                shutil.rmtree(runs.folder)  # it has finished: from the start again
                moments["finished before the kill"] += 1
                continue
            moments[_moment(runs)] += 1
            _kill(runs, process, rng)
            killed += 1
            _wait_until_gone(runs)
            _check(runs, expected)
            if killed % 10 == 0:
                print(f"{killed} kills: {dict(moments)}; newest {_newest(runs)}", flush=True)
        runs.finish()
        _check(runs, expected)
        lines = [sum(len(each) for each in rank.values()) for rank in runs.trained()]
        print(f"{killed} kills while: {dict(moments)}")
        print(f"micro-batches trained on, some again after a kill: {lines}; uninterrupted: "
              f"{[sum(map(len, rank.values())) for rank in expected]}")  # fmt: skip
        done = [set(rank) for rank in runs.trained()]
        assert done == [set(rank) for rank in expected], "steps are missing"
        print(f"prompts of every step: the same, in the same order; weights {runs.weights()}, uninterrupted "
              f"{whole.weights()}: {'the same' if runs.weights() == whole.weights() else 'others'}")  # fmt: skip


def _kill(runs: Runs, process: subprocess.Popen[bytes], rng: random.Random) -> None:
    """All processes of a run; of several also the launcher alone, or one of the others. The rest ends by itself."""
    below = [each for each in runs.processes_left() if each != process.pid]
    targets = {"all": [process.pid, *below], "launcher": [process.pid], "one": below[-1:] or [process.pid]}
    for each in targets["all" if runs.processes == 1 else rng.choice(list(targets))]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(each, signal.SIGKILL)
    process.wait()


def _check(runs: Runs, expected: list[dict[int, list[str]]]) -> None:
    for mine, theirs in zip(runs.trained(), expected, strict=True):
        for step, prompts in mine.items():
            for number, one in enumerate(prompts):
                assert one == theirs[step][number % len(theirs[step])], f"step {step} had other prompts"


def _moment(runs: Runs) -> str:
    """What the run was doing."""
    text = runs.log.read_text(errors="replace")
    steps = re.findall(r"\[Step (\d+)/", text)
    if not steps:
        return "start-up"
    if (runs.folder / ".saving").is_dir() and any((runs.folder / ".saving").iterdir()):
        return "save"
    last = int(steps[-1])
    return "evaluation or the step after it" if last % 5 == 0 or last % 7 == 0 else "training"


def _newest(runs: Runs) -> str:
    from salesrl_trl.checkpoint.whole import newest

    return str(found.name if (found := newest(runs.folder)) else None)


def signals(arguments: argparse.Namespace) -> None:
    """Each signal at a random moment after the first step, to the launcher of two processes."""
    rng = random.Random(arguments.seed)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under `nohup` a run does not heed it
    with _services(18301) as url:
        for number in map(signal.Signals.__getitem__, arguments.signals):
            good, seconds = 0, []
            for _ in range(arguments.times):
                runs = Runs(arguments.out / f"signals_{number.name}", url, 2, save_steps=1000)
                process = runs.start()
                while "[Step 1/" not in runs.log.read_text(errors="replace"):
                    time.sleep(0.1)
                    if process.poll() is not None:
                        raise SystemExit(runs.log.read_text()[-3000:])
                time.sleep(rng.uniform(0.5, 6.0))
                began = time.monotonic()
                process.send_signal(number)
                code = process.wait(timeout=60)
                _wait_until_gone(runs)
                seconds.append(time.monotonic() - began)
                saved = list(runs.folder.glob("checkpoint-*"))
                good += code == RESUMABLE and len(saved) == 1 and _newest(runs) == saved[0].name
                if code != RESUMABLE or len(saved) != 1:
                    print(f"{number.name}: exit code {code}, {saved}\n{runs.log.read_text()[-2000:]}", flush=True)
            print(f"{number.name}: {good} of {arguments.times}: exit code {RESUMABLE}, one whole checkpoint, both "
                  f"processes gone after {min(seconds):.1f} to {max(seconds):.1f} s", flush=True)  # fmt: skip


def damages(arguments: argparse.Namespace) -> None:
    """Random damages of the newest of three checkpoints: refused when it is named, and passed over by `auto`."""
    from salesrl_trl.checkpoint.whole import fault_of, find, folders
    from salesrl_trl.errors import ConfigError

    rng = random.Random(arguments.seed)
    with _services(18302) as url:
        runs = Runs(arguments.out / "damages", url, max_steps=9)
        runs.finish()
        good = 0
        for number in range(arguments.times):
            with tempfile.TemporaryDirectory() as temporary:
                folder = Path(temporary, "run")
                shutil.copytree(runs.folder, folder)
                before, last = folders(folder)[-2:]
                file = rng.choice([each for each in last.rglob("*") if each.is_file()])
                kind = ("bit", "cut", "missing", "foreign")[number % 4]
                _damage(file, kind, rng)
                fault = fault_of(last)
                try:
                    find(str(last), str(folder))
                    refused = False
                except ConfigError:
                    refused = True
                taken = find("auto", str(folder))
                good += refused and taken == before
                print(f"{kind} in {file.name}: {fault}; taken: {taken.name if taken else None}", flush=True)
        print(f"{good} of {arguments.times}: refused with the reason, and the one before it was taken")


def _damage(file: Path, kind: str, rng: random.Random) -> None:
    if kind == "bit":
        content = bytearray(file.read_bytes())
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        file.write_bytes(content)
    elif kind == "cut":
        os.truncate(file, rng.randrange(file.stat().st_size))
    elif kind == "missing":
        file.unlink()
    else:
        (file.parent / "optimizer_0.pt").write_bytes(b"x")


def full_disk(arguments: argparse.Namespace) -> None:
    """A disk that is full at a random byte of a save."""
    rng = random.Random(arguments.seed)
    disk = (arguments.out / "disk").resolve()
    disk.mkdir(parents=True, exist_ok=True)
    with _services(18303) as url:
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1500m", "tmpfs", disk], check=True)
        try:
            good = 0
            for _ in range(arguments.times):
                runs = Runs(disk / "run", url, save_steps=2, max_steps=6, quick_eval_steps=0, eval_strategy="no")
                process = runs.start()
                while not (runs.folder / "checkpoint-2").is_dir():
                    time.sleep(0.05)
                    if process.poll() is not None:
                        raise SystemExit(runs.log.read_text()[-3000:])
                size = sum(each.stat().st_size for each in (runs.folder / "checkpoint-2").rglob("*"))
                room = rng.randrange(int(0.98 * size))
                with (disk / "filler").open("wb") as filler:
                    os.posix_fallocate(filler.fileno(), 0, shutil.disk_usage(disk).free - room)
                code = process.wait(timeout=120)
                text = runs.log.read_text()
                whole = _newest(runs) == "checkpoint-2" and not (runs.folder / "checkpoint-4").exists()
                said = "checkpoint-4 could not be saved" in text and "checkpoint-2 is whole" in text
                (disk / "filler").unlink()
                runs.finish()
                good += code == 3 and whole and said and _newest(runs) == "checkpoint-6"
                end = re.findall("CheckpointError: .*", text)[-1][:150] if said else text[-600:]
                full = f"full after {room / 2**20:.1f} of {size / 2**20:.1f} MiB"
                print(f"{full}: exit code {code}; {end}", flush=True)
                for each in disk.iterdir():
                    shutil.rmtree(each) if each.is_dir() else each.unlink()
            print(f"{good} of {arguments.times}: told, the checkpoint before is whole, and the run went on from it")
        finally:
            subprocess.run(["umount", disk], check=True)


def ledger(arguments: argparse.Namespace) -> None:
    """What the services were asked twice, after kills."""
    rng = random.Random(arguments.seed)
    with _services(18304) as url:
        runs = Runs(
            arguments.out / "ledger",
            url,
            rollout_lookahead=arguments.lookahead,
            save_rollouts=arguments.save_rollouts,
        )
        moments = []
        while len(moments) < arguments.kills:
            process = runs.start()
            time.sleep(rng.uniform(6.0, 13.0))
            if process.poll() is not None:
                raise SystemExit(f"exit code {process.returncode}: {runs.log.read_text()[-2000:]}")
            os.killpg(process.pid, signal.SIGKILL)
            moments.append(time.time())
            process.wait()
            _wait_until_gone(runs)
        runs.finish()
        calls = json.loads(urllib.request.urlopen(f"{url}/ledger").read())
    first: dict[tuple[str, str], float] = {}
    ages = collections.defaultdict[str, list[float]](list)
    for path, key, came, sent in sorted(calls, key=lambda call: call[3]):
        if any(came <= moment <= sent for moment in moments):  # nobody was there to get the answer
            continue
        answered = first.setdefault((path, key), sent)
        if came > answered:  # not a hedge beside it
            kill = next((moment for moment in moments if moment > answered), float("inf"))
            ages[path].append(round(kill - answered, 2))
    print(f"{len(moments)} kills, {len(calls)} calls: {dict(collections.Counter(call[0] for call in calls))}")
    print("asked again, by the seconds from the answer to the kill:")
    for path, seconds in ages.items():
        print(f"    {path}: {sorted(seconds)}")


if __name__ == "__main__":
    main()
