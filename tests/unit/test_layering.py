"""Imports go one way, down the list in docs/ARCHITECTURE.md, and the cheap modules stay cheap.

A parameter of type `Any` hides an import. So nothing outside of trainer.py may take a trainer for `Any`, or use its
private members.
"""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from support import house

import salesrl_trl

PACKAGE = Path(__file__).parents[2] / "salesrl_trl"
ORDER = (
    "types",
    "errors",
    "service_keys",
    "fencing",
    "process",
    "replaced",
    "overrides",
    "tidy_end",
    "timing",
    "surroundings",
    "names",
    "recording",
    "data",
    "generation",
    "shared_prompts",
    "demo",
    "telemetry",
    "kl",
    "reward",
    "evaluation",
    "report",
    "view",
    "update",
    "rollout",
    "config",
    "checkpoint",
    "hooks",
    "policy",
    "wiring",
    "bound",
    "trainer",
    "run",
    "train",
    "env",
    "preflight",
    "evaluate",
    "rejudge",
    "command",
)


def _room(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def _imported_rooms(path: Path) -> set[str]:
    rooms, door = set(), {"__version__": "types", **salesrl_trl._MODULES}
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module == "salesrl_trl":  # a room, or a name of a room
            names += [f"salesrl_trl.{door.get(alias.name, alias.name)}" for alias in node.names]
        rooms |= {name.split(".")[1] for name in names if name.startswith("salesrl_trl.")}
    return rooms


MODULES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def test_every_module_has_a_place_in_the_order():
    assert {_room(path) for path in MODULES} == set(ORDER)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_module_imports_only_from_above_itself(path):
    place = ORDER.index(_room(path))
    below = {room for room in _imported_rooms(path) if ORDER.index(room) > place}
    assert below == set()


@pytest.mark.parametrize(
    ("module", "heavy"),
    [
        ("salesrl_trl.names", "torch"),
        ("salesrl_trl.ground.fencing", "torch"),
        ("salesrl_trl.demo.services.server", "torch"),
        ("salesrl_trl.reward.chain", "torch"),
        ("salesrl_trl.preflight.services", "torch"),
        # benchmarks/policies.py has both this and vLLM on a GPU, which JAX, if bm25s brings it, takes for itself
        ("salesrl_trl.demo.services.judge", "bm25s"),
        ("salesrl_trl.view.__main__", "torch"),
        ("salesrl_trl.env", "torch"),
        ("salesrl_trl.preflight", "torch"),
        ("salesrl_trl.evaluate", "torch"),
    ],
)
def test_a_module_does_not_drag_in_what_it_does_not_need(module, heavy):
    code = f"import sys, {module}; sys.exit({heavy!r} in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


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
    trees = {path: tree for path, tree in house.modules().items() if path not in ("bound.py", "trainer.py")}
    untyped = {path: found for path, tree in trees.items() if (found := house.untyped_trainers(tree))}
    private = {path: found for path, tree in trees.items() if (found := house.private(house.members_of_trainer(tree)))}
    assert (untyped, private) == ({}, {})


def test_the_files_and_settings_of_each_usual_change_are_there():
    trees = house.modules()
    assert [file for change in house.CHANGES for file in change.files if file not in trees] == []
    assert {change.setting for change in house.CHANGES if change.setting} - house.settings(trees) == set()
