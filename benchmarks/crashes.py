"""Is anything lost? Runs that are killed, signalled, or that meet a full disk or damaged checkpoints, and go on.

    python -m benchmarks.crashes kills --kills 100                    # bit for bit, one process
    python -m benchmarks.crashes kills --kills 100 --lookahead 2 --save_rollouts
    python -m benchmarks.crashes kills --kills 100 --processes 2
    python -m benchmarks.crashes signals --times 20                   # two processes, launched by accelerate
    python -m benchmarks.crashes damages --times 20
    python -m benchmarks.crashes full_disk --times 20                 # mounts a small disk: needs the right to do so
    python -m benchmarks.crashes ledger --kills 20                    # what a service with a ledger was asked twice

The run and its service are those of `benchmarks.crash_runs`.
"""

import argparse
import collections
import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import tempfile
import time
import urllib.request
from pathlib import Path

from benchmarks.crash_runs import RESUMABLE, Runs, services, wait_until_gone


def main() -> None:
    """Run what the arguments say."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["kills", "signals", "damages", "full_disk", "ledger"])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--lookahead", type=int, default=0)
    parser.add_argument("--signals", nargs="+", default=["SIGINT", "SIGTERM", "SIGUSR1", "SIGHUP"])
    parser.add_argument("--save_rollouts", action="store_true")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("runs/crashes"))
    arguments = parser.parse_args()
    {
        "kills": kills, "signals": signals, "damages": damages, "full_disk": full_disk, "ledger": ledger,
    }[arguments.what](arguments)  # fmt: skip


def kills(arguments: argparse.Namespace) -> None:
    """SIGKILL at random moments; each is gone on with."""
    rng = random.Random(arguments.seed)
    name = f"kills_{arguments.processes}_{arguments.lookahead}_{arguments.save_rollouts}"
    given = {"rollout_lookahead": arguments.lookahead, "save_rollouts": arguments.save_rollouts}
    with services(18200 + 10 * arguments.processes + arguments.lookahead + 50 * arguments.save_rollouts) as url:
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
            wait_until_gone(runs)
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
    with services(18301) as url:
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
                wait_until_gone(runs)
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
    with services(18302) as url:
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
    with services(18303) as url:
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
    with services(18304) as url:
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
            wait_until_gone(runs)
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
