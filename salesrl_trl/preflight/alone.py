"""The stage `rag` or `judge` alone: no torch, no TRL trainer, no tokenizer.

All settings of training but those of a step's load are accepted and not checked: the whole preflight does that.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

from salesrl_trl.build.checks.reward import check_stand_ins
from salesrl_trl.build.services_plan import ServicesConfig, ServicesPlan, StepSettings
from salesrl_trl.build.settings import SettingsParser, names_of_settings
from salesrl_trl.config import DataConfig, RewardConfig
from salesrl_trl.preflight.services import JudgeStage, RagStage
from salesrl_trl.preflight.stage import PreflightStage, StageReport, report_of

if TYPE_CHECKING:
    from salesrl_trl.build.plan import Plan

STAGES: dict[str, PreflightStage] = {stage.name: stage for stage in (RagStage(), JudgeStage())}


def read_alone(argv: Sequence[str], default_recipe: Path) -> ServicesConfig:
    """The settings of the two stages. A misspelt setting of any stage raises `ConfigError`."""
    parser = SettingsParser((DataConfig, RewardConfig, StepSettings), unread=names_of_settings())
    return ServicesConfig(*parser.read(argv, default_recipe))


def examine_alone(name: str, argv: Sequence[str], default_recipe: Path) -> Iterator[StageReport]:
    """Run one of `STAGES` and yield its report. Raises `SalesRLError` if a setting does not work."""
    config = read_alone(argv, default_recipe)
    check_stand_ins(config.reward, config.training.branches, next(iter(config.data.own_sources), None))
    plan = ServicesPlan(config)
    with plan.opened:
        yield report_of(STAGES[name], cast("Plan", plan))
