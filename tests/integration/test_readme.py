"""The code of README and of pages that show a whole script runs as it stands there."""

import json
import re
import subprocess
from pathlib import Path

import pytest
import yaml
from support.forked import python

ROOT = Path(__file__).parents[2]


def run_section(page, title, folder):
    """Run the first Python block below a heading."""
    text = (ROOT / page).read_text("utf-8")
    snippet = re.search(rf"^#+ {title}\n.*?^```python\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)[1]
    done = subprocess.run([python(), "-c", snippet], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stderr


def test_the_readmes_ten_lines_train_as_they_stand(tmp_path):
    told = run_section("README.md", "Ten lines that run", tmp_path)
    assert "[Step 3/3]" in told and "scored 100%" in told


@pytest.mark.parametrize(
    ("page", "title", "steps"),
    [
        ("own-rewards", "Reward functions", 2),
        ("agents-and-tools", "Tools", 2),
        ("agents-and-tools", "Your own agent", 2),
    ],
)
def test_the_scripts_of_the_how_to_pages_train_as_they_stand(page, title, steps, tmp_path):
    told = run_section(f"docs/how-to/{page}.md", title, tmp_path)
    assert f"[Step {steps}/{steps}]" in told and "failures none" in told


def test_the_sales_examples_python_trains_as_it_stands(tmp_path):
    run_section("docs/sales.md", "From Python", tmp_path)
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
