"""The branches' KL beside stock TRL's one coefficient, on a GPU: what a step costs."""

import json
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(900)]


def test_a_step_costs_at_most_a_hundredth_more(tmp_path):
    figures = tmp_path / "figures.json"
    subprocess.run([sys.executable, "-m", "benchmarks.kl", "--json", str(figures)], check=True)
    assert json.loads(figures.read_text())["ratio"] <= 1.01
