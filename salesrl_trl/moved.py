"""Import paths documented in release 0.1, and their current ones. Old paths warn, and the next release removes
them."""

import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import CodeType, ModuleType
from typing import cast

ROOT = __name__.rpartition(".")[0]
MOVED = {
    "data.demo": "demo.rows", "env": "launch.env", "evaluate": "launch.evaluate", "preflight": "launch.preflight",
    "recording": "record", "rejudge": "record.rejudge", "report": "record.report",
    "reward.judge.judge_interface": "judged.judge", "reward.judge": "judged", "reward.parsing": "judged.parsing",
    "reward.replay": "record.replay", "reward.service": "service", "reward.stage": "judged.scoring",
    "run.launch": "launch.process", "run": "launch", "train": "launch.train", "translate": "launch.translate",
    "view": "record.view",
}  # fmt: skip
"""Paths below the package, of modules and of whole packages. The first match counts."""


class _Moved(MetaPathFinder):
    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        old = next((old for old in MOVED if f"{name}.".startswith(f"{ROOT}.{old}.")), None)
        if old is None:
            return None
        spec = find_spec(f"{ROOT}.{MOVED[old]}{name.removeprefix(f'{ROOT}.{old}')}")
        if spec is None:
            return None
        places = spec.submodule_search_locations
        moved = ModuleSpec(name, _Now(spec), origin=spec.origin, is_package=places is not None)
        moved.submodule_search_locations = places
        return moved


class _Now(Loader):
    """Substitutes the current module for an old path, also for `python -m`."""

    def __init__(self, spec: ModuleSpec) -> None:
        self._spec = spec

    def exec_module(self, module: ModuleType) -> None:
        self._warn(module.__name__)
        sys.modules[module.__name__] = import_module(self._spec.name)

    def get_code(self, name: str) -> CodeType | None:
        self._warn(name)
        return cast("CodeType | None", self._spec.loader.get_code(self._spec.name))  # type: ignore[union-attr]

    def _warn(self, name: str) -> None:
        text = f"`{name}` is now `{self._spec.name}`; the next release removes the old path"
        warnings.warn(text, FutureWarning, stacklevel=2)


sys.meta_path.insert(0, _Moved())
