"""What SECURITY.md says of the source: nothing is unpickled, evaluated or given to a shell, and nothing listens to the
network, but in the places that are named here. And the tests that it names are there."""

import re
from pathlib import Path

import pytest
import yaml
from support.unsafe import findings
from trl import ModelConfig

from salesrl_trl.config import SalesGRPOConfig
from salesrl_trl.data.files import read_yaml
from salesrl_trl.ground.command_line import parser_of

ROOT = Path(__file__).parents[2]
ALLOWED = {
    # Limits and defaults of settings, written in the package's own source, which it reads without importing it.
    "salesrl_trl/launch/settings_help.py": ["eval"],
    # Between the trainer and the child that it started, through a socket without a name.
    "salesrl_trl/reward/remote.py": ["pickle.loads"],
}
SOURCES = sorted(
    path
    for part in ("salesrl_trl", "recipes", "scripts", "benchmarks", "examples")
    for path in ROOT.glob(f"{part}/**/*.py")
)


def test_no_source_runs_what_a_file_says_or_listens_to_the_network():
    found = {}
    for path in SOURCES:
        if lines := list(findings(path.read_text("utf-8"))):
            found[str(path.relative_to(ROOT))] = [line.partition(": ")[2] for line in lines]
    assert len(SOURCES) > 200
    assert found == ALLOWED


@pytest.mark.parametrize(
    "source",
    [
        "import torch; torch.load(path)",
        "import torch as t; t.load(path, weights_only=False)",
        "from torch import load as read; read(path, map_location='cpu')",
        "torch.load(path, weights_only=chosen)",
        "import pickle; pickle.load(file)",
        "from pickle import loads; loads(content)",
        "import pickle; reader = pickle.Unpickler(file)",
        "import joblib; joblib.load(path)",
        "import numpy as np; np.load(path, allow_pickle=True)",
        "import yaml; yaml.load(text)",
        "import yaml; yaml.load(text, Loader=yaml.Loader)",
        "import yaml; yaml.load(text, getattr(yaml, 'CLoader', yaml.SafeLoader))",
        "import yaml; yaml.unsafe_load(text)",
        "eval(text)",
        "exec(text)",
        "import os; os.system(line)",
        "import subprocess; subprocess.run(line, shell=True)",
        "from subprocess import Popen; Popen(line, shell=chosen)",
        "AutoModel.from_pretrained(name, trust_remote_code=True)",
        "def load(name, trust_remote_code=True): ...",
        "def load(name, *, trust_remote_code=True): ...",
        "class C:\n    trust_remote_code: bool = True",
        "where['trust_remote_code'] = True",
        "sock.bind(('', port))",
        "socket.create_server(('0.0.0.0', port))",
        "import uvicorn; uvicorn.run(app, host='0.0.0.0')",
        "web.TCPSite(runner, '::', 0)",
        "parser.add_argument('--host', default='0.0.0.0')",
        "parser.add_argument('--host')",
    ],
)
def test_each_kind_of_it_would_be_found(source):
    assert len(list(findings(source))) == 1


@pytest.mark.parametrize(
    "source",
    [
        "import torch; torch.load(path, map_location=device, weights_only=True)",
        "import json, pickle; json.load(file); pickle.dumps(value)",
        "import yaml; yaml.safe_load(text); yaml.load(text, yaml.SafeLoader)",
        "import yaml; yaml.load(text, Loader=getattr(yaml, 'CSafeLoader', yaml.SafeLoader))",
        "model.eval(); trainer.eval(step)",
        "import subprocess; subprocess.run(words); subprocess.run(words, shell=False)",
        "load(name, trust_remote_code=training.trust_remote_code)",
        "def load(name, trust_remote_code=False): ...",
        "socket.create_server((host, port)); sock.bind(('127.0.0.1', 0))",
    ],
)
def test_what_is_safe_is_left_alone(source):
    assert list(findings(source)) == []


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
