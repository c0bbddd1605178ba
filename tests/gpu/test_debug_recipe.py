"""The debug recipe on a GPU: vLLM with CUDA graphs, tied and untied policies, the pushed weights sampled from."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.mark.parametrize("eager", ["true", "false"])
def test_the_pushed_weights_are_the_ones_sampled_from(tmp_path, eager):
    command = [sys.executable, "-m", "accelerate.commands.launch"]
    command += ["--config_file", f"{ROOT}/accelerate_configs/debug.yaml", f"{ROOT}/recipes/debug.py"]
    command += ["--max_steps", "3", "--held_out_eval", "false"]
    command += ["--vllm_engine_kwargs", f'{{"enforce_eager": {eager}}}', "--output_dir", str(tmp_path / "run")]
    environment = {**os.environ, "SALESRL_CACHE_DIR": str(tmp_path / "cache")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    (events,) = (tmp_path / "run").glob("runs/*/events.out.tfevents.*")
    accumulator = EventAccumulator(str(events))
    accumulator.Reload()
    differences = [item.value for item in accumulator.Scalars("train/sampling/sampling_logp_difference/mean")]
    assert len(differences) == 3
    assert max(differences) < 0.02
