"""What SECURITY.md says of the source. Ruff's rules (pyproject.toml) refuse what is unpickled, evaluated or given to a
shell, and ports that are open to others. And the tests that the page names are there."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from trl import ModelConfig

from salesrl_trl.config import SalesGRPOConfig
from salesrl_trl.data.files import read_yaml
from salesrl_trl.ground.command_line import parser_of

ROOT = Path(__file__).parents[2]
SOURCES = [
    path
    for part in ("salesrl_trl", "recipes", "scripts", "benchmarks", "examples")
    for path in ROOT.glob(f"{part}/**/*.py")
]
UNSAFE = {
    "S102": "exec(text)",
    "S104": "host = '0.0.0.0'",
    "S301": "import pickle; pickle.loads(text)",
    "S302": "import marshal; marshal.loads(text)",
    "S307": "eval(text)",
    "S506": "import yaml; yaml.load(text)",
    "S602": "import subprocess; subprocess.run(text, shell=True)",
    "S605": "import os; os.system(text)",
    "S612": "import logging.config; logging.config.listen()",
}


def test_ruff_refuses_what_runs_a_files_text_or_listens_to_the_network():
    command = [sys.executable, "-m", "ruff", "check", "-q", "--no-cache", "--config", str(ROOT / "pyproject.toml")]
    command += ["--output-format", "concise", "-"]
    source = "\n".join(UNSAFE.values())
    found = subprocess.run(command, input=source, capture_output=True, text=True, check=False)
    assert set(re.findall(r"\bS\d+\b", found.stdout)) == {*UNSAFE}


def test_no_source_turns_a_librarys_own_guard_off():
    guards = re.compile(r"weights_only=False|allow_pickle=True|trust_remote_code(: bool)? ?= ?True|read_pickle|joblib")
    assert len(SOURCES) > 200
    assert [path for path in SOURCES if guards.search(path.read_text("utf-8"))] == []


def test_code_of_a_model_s_repository_is_run_only_when_it_is_asked_for(tmp_path):
    assert SalesGRPOConfig(str(tmp_path), use_cpu=True, bf16=False).trust_remote_code is False
    assert getattr(ModelConfig(), "trust_remote_code", False) is False
    settings = [*ROOT.glob("recipes/*.yaml"), *ROOT.glob("salesrl_trl/launch/presets/*.yaml")]
    assert len(settings) > 8
    for path in settings:
        assert "trust_remote_code" not in path.read_text("utf-8"), path


def test_embedded_services_listen_on_the_loopback_unless_they_are_told():
    parser = parser_of("demo.services")
    assert parser.parse_args([]).host == "127.0.0.1"
    assert parser.parse_args(["--host", "10.0.0.7"]).host == "10.0.0.7"


def test_a_file_of_settings_builds_no_object_of_python(tmp_path):
    (tmp_path / "recipe.yaml").write_text("seed: !!python/object/apply:os.getpid []")
    with pytest.raises(yaml.YAMLError, match="could not determine a constructor"):
        read_yaml(tmp_path / "recipe.yaml")


def test_the_tests_that_the_page_names_are_there():
    page = (ROOT / "SECURITY.md").read_text("utf-8")
    named = re.findall(r"`(tests/[\w/.]+)(?:::(\w+))?`", page)
    assert len(named) > 15
    for path, test in named:
        assert (ROOT / path).exists(), path
        assert not test or f"def {test}(" in (ROOT / path).read_text("utf-8"), f"{path}::{test}"
    assert "SECURITY.md" in (ROOT / "README.md").read_text("utf-8")
