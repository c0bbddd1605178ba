"""Processes that train together."""

import json
import os
import signal
import subprocess
from pathlib import Path

from benchmarks.vllm_server import held_port
from support.forked import Program

ROOT = Path(__file__).parents[2]


def of_one_machine():
    """For each of two ranks, the variables that torch's launcher gives it, besides a port. The launcher itself imports
    torch."""
    common = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    return [{**common, "RANK": rank, "LOCAL_RANK": rank} for rank in range(2)]


def run_ranks(launchers, arguments, out, limit_s, **env):
    """Launch `python -m LAUNCHER ARGUMENTS` for each launcher at once; together they make two ranks. In the place of a
    launcher may be a `dict`, the variables of a rank that starts without one. Launchers and ranks are forks. Returns
    what each rank wrote to `OUT/rankN.json`; messages are in `OUT/stderrN.txt`."""
    paths = os.pathsep.join((str(ROOT), str(ROOT / "tests"), str(ROOT / "scripts"), os.environ.get("PYTHONPATH", "")))
    logs = [out / f"stderr{number}.txt" for number in range(len(launchers))]
    started = []
    with held_port() as port:
        for launcher, log in zip(launchers, logs, strict=True):
            own, words = (launcher, ()) if isinstance(launcher, dict) else ({}, ("-m", *launcher))
            with log.open("w") as stderr:
                given = {**os.environ, "PYTHONPATH": paths, "MASTER_PORT": port, **env, **own}
                command = [*words, *map(str, arguments)]
                started.append(Program(command, env=given, stdout=subprocess.DEVNULL, stderr=stderr))
        try:
            for each, log in zip(started, logs, strict=True):
                assert each.wait(timeout=limit_s) == 0, log.read_text()[-6000:]
        finally:
            for each in started:
                if each.poll() is None:
                    os.killpg(each.pid, signal.SIGKILL)  # the ranks too, not the launcher alone
    return [json.loads((out / f"rank{rank}.json").read_text()) for rank in range(2)]
