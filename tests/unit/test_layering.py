"""Imports go one way, along the list in docs/background/architecture.md, and the cheap modules stay cheap.

A parameter of type `Any` hides an import. So nothing outside of trainer.py may take a trainer for `Any`, or use its
private members.
"""

import ast
import json
import os
import shutil
import subprocess
import sys
from importlib import import_module

import pytest
from support import house
from support.forked import COLD_PYTHON, FORGET, python
from support.scripted import settings

from salesrl_trl import moved

CORE = (
    "moved", "errors", "timing", "types", "ground", "names", "data", "telemetry", "generation", "shared_prompts", "kl",
    "service", "reward", "update", "rollout", "config", "checkpoint", "wiring", "parts", "trainer",
)  # fmt: skip
LAYERS = ("judged", "record", "agents", "demo", "launch", "record.rejudge")
"""Each imports the core, and the layers before it. Within `launch` modules alone have an order."""
ORDER = ("moved", *CORE, *LAYERS, "__main__")
FOLDERS = set(house.LAYERS)
TRAINING = """
import json, sys
absent = ("bm25s", "rjieba", "fastapi", "uvicorn", "openai", "httpx2", "vllm")  # packages of the layers
sys.modules.update(dict.fromkeys(absent))
from datasets import Dataset
from salesrl_trl import SalesGRPOConfig
from salesrl_trl.errors import ConfigError
from salesrl_trl.trainer import SalesGRPOTrainer

policy, folder, settings = sys.argv[1:]

def length(completions, **_):
    return [len(completion[0]["content"]) % 17 / 17 for completion in completions]

rows = Dataset.from_list([{"prompt": [{"role": "user", "content": f"row {place}"}]} for place in range(8)])
settings = json.loads(settings)
try:
    asks = SalesGRPOConfig(**settings | {"record": True}, output_dir=folder)
    SalesGRPOTrainer(policy, length, asks, train_dataset=rows, eval_dataset=rows)
except ConfigError as error:
    print(error)
args = SalesGRPOConfig(**settings, output_dir=folder)
trainer = SalesGRPOTrainer(policy, length, args, train_dataset=rows, eval_dataset=rows.select(range(4)))
trainer.train()
trainer.finish()
layers = sorted(name for name in sys.modules if name.startswith("salesrl_trl.") and name.split(".")[1] in FOLDERS)
assert (trainer.state.global_step, layers) == (2, []), layers
"""


def _package(module: str) -> str:
    """The name in `ORDER` that stands for a module: the longest."""
    name = module.removeprefix("salesrl_trl.")
    return max((entry for entry in ORDER if f"{name}.".startswith(f"{entry}.")), key=len, default=name)


def test_no_module_imports_itself_by_way_of_others():
    assert house.circles(house.imports()) == []


def test_a_circle_of_modules_is_seen(tmp_path):
    for path, text in {
        "__init__.py": "",
        "low.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from salesrl_trl.high import High\n",
        "high/__init__.py": "from salesrl_trl.high import middle\n",
        "high/middle.py": "def f():\n    from salesrl_trl import low\n",
        "alone.py": "import salesrl_trl.low\n",
    }.items():
        file = tmp_path / "salesrl_trl" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    assert house.circles(house.imports(tmp_path)) == [
        ["salesrl_trl.high", "salesrl_trl.high.middle", "salesrl_trl.low"]
    ]


def test_every_module_has_a_place_in_the_order():
    assert {_package(module) for module in house.imports() if module != "salesrl_trl"} == set(ORDER)


def test_the_core_imports_no_layer():
    assert house.layered(house.imports(), FOLDERS) == []


def test_an_import_of_a_layer_is_seen(tmp_path):
    package = tmp_path / "salesrl_trl"
    (package / "agents").mkdir(parents=True)
    for name in ("__init__", "agents/__init__", "agents/tools"):
        (package / f"{name}.py").write_text("")
    (package / "reward.py").write_text("def f():\n    from salesrl_trl.agents.tools import tool\n")
    assert house.layered(house.imports(tmp_path), FOLDERS) == [("salesrl_trl.reward", "salesrl_trl.agents.tools")]


def test_the_core_trains_evaluates_and_saves_without_the_layers_and_refuses_what_needs_one(tmp_path, tiny):
    core = tmp_path / "core" / "salesrl_trl"
    shutil.copytree(house.ROOT / "salesrl_trl", core, ignore=shutil.ignore_patterns("__pycache__"))
    for layer in FOLDERS:
        shutil.rmtree(core / layer)
    of_a_save = {"max_steps": 2, "save_strategy": "steps", "save_steps": 2}
    given = settings(tmp_path / "run", max_completion_length=8, eval_strategy="steps", eval_steps=1, **of_a_save)
    code = f"FOLDERS = {sorted(FOLDERS)}\n{FORGET}{TRAINING}"
    done = subprocess.run(
        [python(), "-c", code, str(tiny), given.pop("output_dir"), json.dumps(given)],
        env={**os.environ, "PYTHONPATH": str(core.parent)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert "`record` needs the layer `salesrl_trl.record`" in done.stdout
    assert "off: HeldOut, because" in done.stderr + done.stdout
    assert (tmp_path / "run" / "checkpoint-2" / "README.md").is_file()


def test_a_module_imports_only_from_packages_before_its_own():
    late = [
        f"{module} imports {other}"
        for module, others in house.imports().items()
        for other in others
        if module != "salesrl_trl" and ORDER.index(_package(other)) > ORDER.index(_package(module))
    ]
    assert late == []


def test_a_name_stands_for_one_class():
    assert house.given_twice(house.class_names(house.modules())) == []


LIGHT = {
    # where vLLM is in the same process: JAX, if bm25s brings it, takes the GPU for itself
    "salesrl_trl.demo.services.services_app": "bm25s",
    "salesrl_trl.demo.services.__main__": "openai torch transformers trl",
    **dict.fromkeys(
        (
            "salesrl_trl.names",
            "salesrl_trl.ground.fencing",
            "salesrl_trl.judged.chain",
            "salesrl_trl.launch.preflight.services",
            "salesrl_trl.record.view.__main__",
            "salesrl_trl.launch.env",
            "salesrl_trl.launch.preflight",
            "salesrl_trl.launch.evaluate",
        ),
        "torch",
    ),
}
LIGHT_BESIDE_TORCH = {
    # scripts/test_components.py needs neither, and is to answer within seconds
    "salesrl_trl.agents.episodes": "openai",
    "salesrl_trl.launch.preflight.runner": "vllm",
}


@pytest.mark.parametrize(("python_of", "before", "modules"), [
    (lambda: COLD_PYTHON, "import sys\n", LIGHT), (python, FORGET, LIGHT_BESIDE_TORCH)
], ids=["cold", "beside torch"])  # fmt: skip
def test_modules_do_not_drag_in_what_they_do_not_need(python_of, before, modules):
    code = before + "".join(
        f"import {module}\nif {set(heavy.split())} & sys.modules.keys(): sys.exit('{module} imports {heavy}')\n"
        for module, heavy in modules.items()
    )
    done = subprocess.run([python_of(), "-c", code], stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


CIRCLES = """
class Evaluator:
    def __init__(self, trainer: "Any | None", t: SalesGRPOTrainer, accelerator: Any) -> None:
        self._trainer: typing.Any = trainer
        self.sampler = t._sampler

    def evaluate(self):
        with replaced(self._trainer, "_metrics", {}):
            self._trainer.state, self.owner.trainer._step, self._private, trl.trainer._module
        return lambda trainer: trainer._mode + trainer.__class__.__name__
"""


def test_a_circle_without_an_import_is_seen():
    tree = ast.parse("import trl.trainer\n" + CIRCLES)
    assert sorted(house.untyped_trainers(tree)) == ["_trainer", "trainer"]
    assert house.private(house.members_of_trainer(tree)) == {"_sampler", "_metrics", "_step", "_mode"}


def test_outside_of_the_trainer_nothing_takes_it_for_any_or_uses_its_private_members():
    trees = {path: tree for path, tree in house.modules().items() if path not in house.OF_THE_TRAINER}
    untyped = {path: found for path, tree in trees.items() if (found := house.untyped_trainers(tree))}
    private = {path: found for path, tree in trees.items() if (found := house.private(house.members_of_trainer(tree)))}
    assert (untyped, private) == ({}, {})


@pytest.mark.filterwarnings("ignore:.*the next release removes the old path:FutureWarning")
def test_paths_that_documents_of_the_last_release_named_lead_to_todays_modules():
    for old, now in moved.MOVED.items():
        assert import_module(f"salesrl_trl.{old}") is import_module(f"salesrl_trl.{now}"), old
    del sys.modules["salesrl_trl.report"]
    with pytest.warns(FutureWarning, match=r"is now `salesrl_trl\.record\.report`; the next release removes"):
        import_module("salesrl_trl.report")
