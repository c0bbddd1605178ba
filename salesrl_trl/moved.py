"""Import paths of the last release that documents named, by what they are called now.

Owns the table. An old path imports the module of today, the very same object, and warns once. It goes with the next
release. Standard library only.
"""

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
    "build": "launch",
    "config.data": "launch.data_config",
    "config.judge": "launch.judge_config",
    "config.reward": "launch.reward_config",
    "config.telemetry": "launch.telemetry_config",
    "data.columns": "launch.data.form",
    "data.demo": "demo.rows",
    "data.form": "launch.data.form",
    "data.formats": "launch.data.formats",
    "data.lengths": "launch.data.prompts",
    "data.sources": "launch.data.sources",
    "data.templates": "launch.data.prompts",
    "env": "launch.env",
    "evaluate": "launch.evaluate",
    "evaluation": "launch.evaluation",
    "evaluation.row_statistics": "ground.row_statistics",
    "launch.data.files": "data.files",
    "parts.bbq": "launch.evaluation.bbq",
    "parts.closing_report": "record.recorder",
    "parts.held_out": "launch.evaluation.held_out",
    "parts.judge_meter": "judged.meter_part",
    "parts.quick_eval": "launch.evaluation.quick",
    "parts.recorder": "record.recorder",
    "parts.spending": "judged.spending",
    "preflight": "launch.preflight",
    "recording": "record",
    "recording.completion_record": "telemetry.completion_record",
    "rejudge": "record.rejudge",
    "report": "record.report",
    "reward.cache": "judged.cache",
    "reward.chain": "judged.chain",
    "reward.episodes": "agents.episodes",
    "reward.judge": "judged",
    "reward.judge_reward": "judged.judge_reward",
    "reward.parsing": "judged.parsing",
    "reward.rag_answers": "judged.rag_client",
    "reward.rag_client": "judged.rag_client",
    "reward.replay": "record.replay",
    "reward.scoring": "judged.scoring",
    "reward.service": "service",
    "reward.service.budget": "judged.budget",
    "reward.stage": "judged.scoring",
    "rollout.chat_turns": "agents.chat_turns",
    "rollout.greedy": "launch.evaluation.quick",
    "rollout.policy_endpoint": "agents.policy_endpoint",
    "rollout.search": "agents.tools",
    "rollout.tools": "agents.tools",
    "run": "launch",
    "run.launch": "launch.process",
    "run.tools": "ground.command_line",
    "telemetry.trackers": "parts.trackers",
    "train": "launch.train",
    "translate": "launch.translate",
    "view": "record.view",
    "wiring.model_card": "parts.model_card",
}
"""Below the package, of modules and of packages with all that is in them."""


class _Moved(MetaPathFinder):
    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        old = name.removeprefix(f"{ROOT}.")
        parts = old.split(".")
        ends = range(len(parts), 0, -1)
        found = next((count for count in ends if ".".join(parts[:count]) in MOVED), None) if old != name else None
        if found is None:
            return None
        now = ".".join((ROOT, MOVED[".".join(parts[:found])], *parts[found:]))
        if (spec := find_spec(now)) is None:
            return None
        moved = ModuleSpec(
            name, _Now(spec), origin=spec.origin, is_package=spec.submodule_search_locations is not None
        )
        moved.submodule_search_locations = spec.submodule_search_locations
        return moved


class _Now(Loader):
    """Puts today's module in the place of an old path, and runs it by `python -m`."""

    def __init__(self, spec: ModuleSpec) -> None:
        self._spec = spec

    def exec_module(self, module: ModuleType) -> None:
        self._warn(module.__name__)
        sys.modules[module.__name__] = import_module(self._spec.name)

    def get_code(self, name: str) -> CodeType | None:
        self._warn(name)
        return cast("CodeType | None", self._spec.loader.get_code(self._spec.name))  # type: ignore[union-attr]

    def _warn(self, name: str) -> None:
        text = f"`{name}` is `{self._spec.name}` now; the old path goes with the next release"
        warnings.warn(text, FutureWarning, stacklevel=2)


sys.meta_path.insert(0, _Moved())
