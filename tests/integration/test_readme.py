"""What the README tells a user to write runs as it stands there."""

import json
import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parents[2] / "README.md"


def test_the_readmes_library_snippet_trains_as_it_stands(tmp_path):
    [snippet] = re.findall(
        r"^## As a library\n.*?^```python\n(.*?)^```", README.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE
    )
    done = subprocess.run([sys.executable, "-c", snippet], cwd=tmp_path, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr[-4000:]
    assert (tmp_path / "runs/library/model.safetensors").is_file()
    state = json.loads((tmp_path / "runs/library/checkpoint-3/trainer_state.json").read_text("utf-8"))
    assert state["global_step"] == 3
    steps = [each for each in state["log_history"] if "outcome/ok" in each]
    assert len(steps) == 3
    assert max(each["outcome/ok"] for each in steps) > 0  # some actions are valid, and both services answered
    assert [each["outcome/infra"] for each in steps] == [0, 0, 0]
