"""What the README tells a user to write runs as it stands there."""

import json
import re
import subprocess
from pathlib import Path

import pytest
import yaml
from support.forked import python

README = Path(__file__).parents[2] / "README.md"


def test_the_readmes_library_snippet_trains_as_it_stands(tmp_path):
    [snippet] = re.findall(
        r"^## As a library\n.*?^```python\n(.*?)^```", README.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE
    )
    done = subprocess.run([python(), "-c", snippet], cwd=tmp_path, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr[-4000:]
    assert (tmp_path / "runs/library/model.safetensors").is_file()
    state = json.loads((tmp_path / "runs/library/checkpoint-3/trainer_state.json").read_text("utf-8"))
    assert state["global_step"] == 3
    steps = [each for each in state["log_history"] if "outcome/ok" in each]
    assert len(steps) == 3
    assert max(each["outcome/ok"] for each in steps) > 0  # some actions are valid, and both services answered
    assert [each["outcome/infra"] for each in steps] == [0, 0, 0]


@pytest.mark.slow
def test_the_command_trains_in_a_folder_without_a_recipe(tmp_path):
    few = ["--max_steps", "1", "--use_vllm", "false", "--rollout_lookahead", "0", "--held_out_eval", "false"]
    code = "from salesrl_trl.__main__ import main; main()"
    command = [python(), "-c", code, "train", *few, "--output_dir", "mine"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr[-4000:]
    assert "[Run] the policy is in mine" in done.stderr  # a line of the module that ran as `__main__`
    assert (tmp_path / "mine/model.safetensors").is_file()
    record = json.loads((tmp_path / "mine/run.json").read_text("utf-8"))
    assert record["command"] == ["python -m salesrl_trl.launch.train", *few, "--output_dir", "mine"]
    settings = yaml.safe_load((tmp_path / "mine/config.yaml").read_text("utf-8"))
    assert (settings["vllm_max_model_length"], settings["save_steps"]) == (320, 15)  # of full.yaml's `small_policy`
