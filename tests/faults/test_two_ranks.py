"""A reward that raises on one rank and one that hangs on the other."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.seconds import check_seconds

ROOT = Path(__file__).parents[2]
DEADLINE_S = 2.0


@pytest.mark.slow
@pytest.mark.alone
def test_a_reward_that_raises_and_one_that_hangs_end_the_step_by_its_deadline_on_both_ranks(policy_path, tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command += [str(ROOT / "tests/faults/two_ranks.py"), str(policy_path), str(tmp_path), str(DEADLINE_S)]
    paths = os.pathsep.join((str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")))
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    raised, hung = (json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2))
    print(f"deadline {DEADLINE_S} s; steps on the rank that raises {raised['seconds']}, that hangs {hung['seconds']}")
    assert {each["reason"] for each in raised["rewards"]} == {"raised_ValueError"}
    assert {each["reason"] for each in hung["rewards"]} == {"deadline"}
    most = max(*raised["seconds"], *hung["seconds"])
    check_seconds(most, most=DEADLINE_S + 1.0 + 0.5)  # what cancelled calls are given to end, and the step itself
    for logs in (raised["log"], hung["log"]):
        steps = [entry for entry in logs if "outcome/infra" in entry]
        assert [entry["outcome/infra"] for entry in steps] == [1.0, 1.0]  # the other rank's are counted too
        assert [entry["reward"] for entry in steps] == [None, None]
    assert "raised ValueError at" in done.stderr
    assert "a customer's words" not in done.stderr
