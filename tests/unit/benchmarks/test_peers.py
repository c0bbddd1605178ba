"""The bench of peers: what would end an arm minutes later is refused before the first one."""

import json
import signal
import subprocess
import sys
import time

import pytest

from benchmarks.common import SHAPES
from benchmarks.peers import __main__ as peers


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--arms", "ours_0", "theirs_2"], "unknown arm theirs_2"),
        (["--arms", "ours_0", "ours_partial"], "ours_partial has no number"),
        (["--arms", "ours_0", "verl_sync"], "has no verl, which verl_sync needs"),
        (["--arms", "ours_0", "--micro_batch", "7"], "--micro_batch 7 does not divide"),
    ],
)
def test_an_arm_that_can_not_run_is_refused_before_the_first_one(words, message, tmp_path, monkeypatch):
    monkeypatch.setattr(peers, "run_arm", None)  # nothing is started
    with pytest.raises(SystemExit, match=message):
        peers.main([*words, "--logs", str(tmp_path / "logs"), "--shape", "tiny"])
    assert not (tmp_path / "logs").exists()


def test_weights_of_another_shape_are_not_measured_by_its_name(tmp_path):
    (tmp_path / "config.json").write_text('{"hidden_size": 7}')
    with pytest.raises(SystemExit, match=r"another shape than tiny: {'hidden_size': 7}"):
        peers.make_weights("tiny", tmp_path, 8, 1)


ARM = """#!/bin/sh
echo '{"arm": "ours_0", "blocks": [{"latency_s": [0, 0], "mean_s": 2.0, "counted": 3}]}' > "$4"
kill -TERM $PPID
exec sleep 60
"""
"""Makes some steps, and the bench is stopped."""


@pytest.mark.parametrize("start_s", [0.0, 0.3])  # the latter is stopped before it has the arm's process
def test_a_bench_that_is_stopped_keeps_the_steps_of_the_arm_it_stops(start_s, tmp_path, monkeypatch, capsys):
    class Slow(subprocess.Popen):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            time.sleep(start_s)

    monkeypatch.setattr(subprocess, "Popen", Slow)
    for name, found in {"config": SHAPES["tiny"], "texts": ["Hi"], "prompts": [[1, 2]]}.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(found))
    (tmp_path / "python").write_text(ARM)
    (tmp_path / "python").chmod(0o755)
    monkeypatch.setattr(peers, "ROOT", tmp_path)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: None)  # the weights are there
    words = ["--arms", "ours_0", "ours_1", "--shape", "tiny", "--python", f"ours={tmp_path / 'python'}"]
    words += ["--model", str(tmp_path), "--logs", str(tmp_path / "logs"), "--json", str(tmp_path / "found")]
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(peers.STOPPED))
    try:
        with pytest.raises(SystemExit, match="stopped"):
            peers.main(words)
    finally:
        signal.signal(signal.SIGTERM, before)
    [found] = map(json.loads, (tmp_path / "found").read_text().splitlines())  # and no second arm
    assert [found["arm"], found["ended"]] == ["ours_0", "stopped"]
    assert "ours_0: 0 + 0 s: 2.0 s of 3" in capsys.readouterr().out
