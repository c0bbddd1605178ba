"""Processes that train together."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run_ranks(launcher, arguments, out, limit_s, **env):
    """Launch `python -m LAUNCHER ARGUMENTS` on two ranks. Returns what each of them wrote to `OUT/rankN.json`; their
    messages are in `OUT/stderr.txt`."""
    paths = os.pathsep.join((str(ROOT), str(ROOT / "tests"), str(ROOT / "scripts"), os.environ.get("PYTHONPATH", "")))
    started = subprocess.Popen(
        [sys.executable, "-m", *launcher, *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": paths, **env},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        _, stderr = started.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        os.killpg(started.pid, signal.SIGKILL)  # the ranks too, not the launcher alone
        raise
    (out / "stderr.txt").write_text(stderr)
    assert started.returncode == 0, stderr[-6000:]
    return [json.loads((out / f"rank{rank}.json").read_text()) for rank in range(2)]
