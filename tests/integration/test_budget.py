"""A run whose budget is spent in the middle ends resumable, and goes on with a larger limit."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.keyed import make_tiny_policy
from support.run_until_stopped import STEPS

from salesrl_trl.config import RewardConfig
from salesrl_trl.errors import ConfigError
from salesrl_trl.run.checks.budget import check_budget_left
from salesrl_trl.tidy_end import EXIT_RESUMABLE

ROOT = Path(__file__).parents[2]
MOST = 40


@pytest.mark.timeout(240)
def test_a_run_ends_at_its_limit_and_goes_on_with_a_larger_one(tmp_path, services):
    out = tmp_path / "run"

    def run(most, resumed):
        settings = {
            "model_name_or_path": str(make_tiny_policy(tmp_path / "policy")),
            "rag_base_url": services.url,
            "judge_base_url": f"{services.url}/v1",
            "reference_cache": str(tmp_path / "references.sqlite"),
            "reward_process": "true",
            "rollout_lookahead": "0",
            "output_dir": str(out),
            "max_calls": str(most),
            "resume_from_checkpoint": resumed,
        }
        arguments = [part for name, value in settings.items() for part in (f"--{name}", value)]
        paths = os.pathsep.join((str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")))
        environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, str(ROOT / "tests/support/run_until_stopped.py"), *arguments]
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        return ended.returncode, ended.stderr

    def requests():
        return sum(map(len, services.asked.values()))

    code, said = run(MOST, "false")
    assert code == EXIT_RESUMABLE, said
    assert requests() == MOST
    assert f"RunStopped: the budget is spent: {MOST} calls were made, for 0.00 USD; reached: `max_calls` 40" in said
    assert "| spent 35 calls, 0.00 USD |" in said
    assert (out / "checkpoint-3/model.safetensors").is_file()
    with pytest.raises(ConfigError, match=r"the budget is spent: 40 calls .* Raise it"):
        check_budget_left(RewardConfig(max_calls=MOST), out)
    check_budget_left(RewardConfig(max_calls=MOST + 1), out)

    code, said = run(400, "auto")
    assert code == 0, said
    assert f"spent in this folder so far: {MOST} calls" in said
    assert "[Run] forecast     by the first 7 steps, about " in said
    assert f"spent {requests()} calls" in said
    steps = [json.loads(line)["done"] for line in (out / "trained.jsonl").read_text(encoding="utf-8").splitlines()]
    assert steps == [0, 1, 2, 3, *range(3, STEPS)]  # the step that was not scored came again
