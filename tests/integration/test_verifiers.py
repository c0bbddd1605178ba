"""The example that trains in an environment of verifiers, with a stand-in for the package that has the names which the
example uses. Six steps with verifiers 0.4.0 itself: VERIFIERS_PYTHON names its interpreter, VERIFIERS_ENV the taskset.
"""

import os
import runpy
import sys
from pathlib import Path

import pytest
from support.keyed import make_calling_policy
from support.scripted import steps_of

EXAMPLE = Path(__file__).parents[2] / "examples/verifiers_environment.py"
STAND_IN = """
import types

class ModelContext(types.SimpleNamespace):
    pass

EvalClientConfig = ModelContext
"""
CONFIGS = """
def agent_config_fields(config):
    return {"player": None}
"""
LOADERS = """
import types
import openai

def resolve_env_config(given):
    assert given["taskset"] == {"id": "sums", "most": 4}
    return given

def load_environment(config):
    assert config["player"]["harness"] == {"id": "null"}
    return SingleAgentEnv(config["taskset"]["most"])

def task(idx):
    return types.SimpleNamespace(data=types.SimpleNamespace(idx=idx, prompt=f"What is {idx}?"))

class SingleAgentEnv:
    def __init__(self, most):
        self.taskset = [task(idx) for idx in range(most)]

    def serving(self):
        import contextlib
        return contextlib.AsyncExitStack()

    async def run_episode(self, task, context):
        import os
        print("not a result")
        key = os.environ[context.client.api_key_var]
        async with openai.AsyncOpenAI(base_url=context.client.base_url, api_key=key, max_retries=0) as client:
            asked = [{"role": "user", "content": task.data.prompt}]
            stream = await client.chat.completions.create(model=context.model, messages=asked, stream=True)
            text = "".join([event.choices[0].delta.content or "" async for event in stream if event.choices])
        errors = [types.SimpleNamespace(type="ToolError")] if task.data.idx == 0 else []
        trace = types.SimpleNamespace(reward=float(len(text)), errors=errors)
        return types.SimpleNamespace(traces=[trace], errors=[], ok=not errors)
"""


def trained(example, tmp_path, monkeypatch):
    """The trainer of the example, once it has trained."""
    from salesrl_trl import SalesGRPOTrainer

    made, finish = [], SalesGRPOTrainer.finish
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MODEL", str(make_calling_policy(tmp_path / "policy", hidden_size=64)))
    monkeypatch.setattr(SalesGRPOTrainer, "finish", lambda trainer: made.append(trainer) or finish(trainer))
    runpy.run_path(str(example), run_name="__main__")
    return made[0]


def test_the_example_trains_on_the_environments_rewards_and_leaves_failed_episodes_out(tmp_path, monkeypatch):
    package = tmp_path / "verifiers/v1"
    for folder in (package / "configs", package / "utils"):
        folder.mkdir(parents=True)
    (package / "__init__.py").write_text(STAND_IN)
    (package / "configs/env.py").write_text(CONFIGS)
    (package / "utils/loaders.py").write_text(LOADERS)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setenv("VERIFIERS_ENV", "sums")
    monkeypatch.setenv("VERIFIERS_TASKSET", '{"most": 4}')
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE)])
    text = EXAMPLE.read_text()
    assert text.count("max_completion_length=512") == 1
    example = tmp_path / EXAMPLE.name
    example.write_text(text.replace("max_completion_length=512", "max_completion_length=16"))
    trainer = trained(example, tmp_path, monkeypatch)
    lines = steps_of(trainer)
    assert len(lines) == 6
    # one prompt a step, of four rows; row 0's episodes fail, which is one or two of six steps
    assert {line["outcome/ok"] for line in lines} == {0.0, 1.0}
    reasons = {name for line in trainer.state.log_history for name in line if name.startswith("failures/reason/")}
    assert reasons == {"failures/reason/environment_raised_RuntimeError"}


@pytest.mark.slow
@pytest.mark.skipif(
    "VERIFIERS_PYTHON" not in os.environ, reason="VERIFIERS_PYTHON names no interpreter with verifiers"
)
def test_an_environment_of_verifiers_itself_trains_for_six_steps(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE)])
    assert all(line["outcome/ok"] == 1.0 for line in steps_of(trained(EXAMPLE, tmp_path, monkeypatch)))
