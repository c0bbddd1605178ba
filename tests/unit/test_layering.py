"""Imports go one way, along the list in docs/ARCHITECTURE.md, and the cheap modules stay cheap.

A parameter of type `Any` hides an import. So nothing outside of trainer.py may take a trainer for `Any`, or use its
private members.
"""

import ast
import subprocess

from support import house
from support.forked import COLD_PYTHON

ORDER = (
    *("moved", "errors", "timing", "types", "ground", "names"),
    *("data", "record", "telemetry", "generation", "shared_prompts", "demo", "kl", "service", "reward", "judged"),
    *("agents", "update", "rollout", "config", "checkpoint", "wiring", "parts", "trainer", "launch", "__main__"),
)
WHOLE_RUN = {"build", "run", "preflight", "train", "env", "evaluate", "rejudge", "translate", "__main__"}
"""Above the trainer the packages are for readers. Their modules form no circle, as all others."""


def _package(module: str) -> str:
    return module.split(".")[1]


IMPORTS = house.imports()


def test_no_module_imports_itself_by_way_of_others():
    assert house.circles(IMPORTS) == []


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
    assert {_package(module) for module in IMPORTS if module != "salesrl_trl"} == set(ORDER)


def test_a_module_imports_only_from_packages_before_its_own():
    late = [
        f"{module} imports {other}"
        for module, others in IMPORTS.items()
        for other in others
        if module != "salesrl_trl" and ORDER.index(_package(other)) > ORDER.index(_package(module))
        if not {_package(module), _package(other)} <= WHOLE_RUN
    ]
    assert late == []


def test_a_name_stands_for_one_class():
    assert house.given_twice(house.class_names(house.modules())) == []


LIGHT = {
    # where vLLM is in the same process: JAX, if bm25s brings it, takes the GPU for itself
    "salesrl_trl.demo.services.judge_app": "bm25s",
    **dict.fromkeys(
        (
            "salesrl_trl.names",
            "salesrl_trl.ground.fencing",
            "salesrl_trl.demo.services.demo_server",
            "salesrl_trl.judged.chain",
            "salesrl_trl.launch.preflight.services",
            "salesrl_trl.record.view.__main__",
            "salesrl_trl.launch.env",
            "salesrl_trl.launch.preflight",
            "salesrl_trl.launch.evaluate",
        ),
        "torch",
    ),
    # scripts/test_components.py needs neither, and is to answer within seconds
    "salesrl_trl.agents.episodes": "openai",
    "salesrl_trl.launch.preflight.runner": "vllm",
}


def test_modules_do_not_drag_in_what_they_do_not_need():
    code = "import sys\n" + "".join(
        f"import {module}\nif {heavy!r} in sys.modules: sys.exit('{module} imports {heavy}')\n"
        for module, heavy in LIGHT.items()
    )
    done = subprocess.run([COLD_PYTHON, "-c", code], stderr=subprocess.PIPE, text=True, check=False)
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
    trees = {
        path: tree for path, tree in house.modules().items() if path not in ("wiring/trl_access.py", "trainer.py")
    }
    untyped = {path: found for path, tree in trees.items() if (found := house.untyped_trainers(tree))}
    private = {path: found for path, tree in trees.items() if (found := house.private(house.members_of_trainer(tree)))}
    assert (untyped, private) == ({}, {})
