"""The bench of what measuring costs: it turns the instruments on and off in one run and gives medians of rounds."""

import json
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "scripts/bench_timing.py"


@pytest.mark.slow
def test_the_bench_measures_both_and_gives_the_median_of_its_rounds(tmp_path):
    out = tmp_path / "figures.json"
    command = [sys.executable, str(SCRIPT), "--shape", "tiny", "--updates", "3", "--rounds", "2", "--json", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    figures = json.loads(out.read_text())
    assert len(figures["ratios"]) == 2
    assert figures["ratio"] == statistics.median(figures["ratios"])
    assert f"ratio {figures['ratio']:.4f}" in done.stdout
    # measuring is some calls of Python: never nothing, and nowhere near a tenth of a second
    assert 0 < figures["own_s"] < 0.1
    assert figures["trace_bytes"] > 1000
    assert figures["mfu"] == {"perf/mfu_model": 0.0, "perf/mfu_step": 0.0}  # a CPU
