"""What the README tells a user to write runs as it stands there."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

from salesrl_trl.demo import policy

README = Path(__file__).parents[2] / "README.md"


def test_the_readmes_library_snippet_trains_as_it_stands(policy_path, tmp_path):
    [snippet] = re.findall(
        r"^## As a library\n.*?^```python\n(.*?)^```", README.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE
    )
    steps, seed = re.search(r"cached_policy\(steps=(\d+), seed=(\d+)\)", snippet).groups()
    # The policy that it names is there already, as after a first run; its warm start is test_policy's.
    environment = {**os.environ, "SALESRL_CACHE_DIR": str(tmp_path / "cache")}
    named = tmp_path / "cache/policies" / policy._policy_folder(int(steps), int(seed)).name
    named.parent.mkdir(parents=True)
    named.symlink_to(policy_path)

    done = subprocess.run(
        [sys.executable, "-c", snippet], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )

    assert done.returncode == 0, done.stderr[-4000:]
    assert (tmp_path / "runs/library/model.safetensors").is_file()
    state = json.loads((tmp_path / "runs/library/checkpoint-3/trainer_state.json").read_text("utf-8"))
    assert state["global_step"] == 3
    steps = [each for each in state["log_history"] if "outcome/ok" in each]
    assert len(steps) == 3
    assert max(each["outcome/ok"] for each in steps) > 0  # some actions are valid, and both services answered
    assert [each["outcome/infra"] for each in steps] == [0, 0, 0]
