"""salesrl_trl: GRPO on TRL for policies scored by slow, real services and judges.

This module's names are the public API. They are imported lazily: `SalesGRPOTrainer` imports torch, which takes
seconds; the package alone imports nothing heavy.
"""

from importlib import import_module
from typing import TYPE_CHECKING

import_module(f"{__name__}.moved")

__version__ = "0.2.0"

if TYPE_CHECKING:
    from salesrl_trl.agents.episodes import per_episode as per_episode
    from salesrl_trl.agents.mcp_tools import mcp_tools as mcp_tools
    from salesrl_trl.agents.tools import tool as tool
    from salesrl_trl.config.quick_evaluations import Figure as Figure
    from salesrl_trl.config.quick_evaluations import QuickEvalSettings as QuickEvalSettings
    from salesrl_trl.config.training import SalesGRPOConfig as SalesGRPOConfig
    from salesrl_trl.errors import ConfigError as ConfigError
    from salesrl_trl.errors import DataError as DataError
    from salesrl_trl.errors import DivergedError as DivergedError
    from salesrl_trl.errors import JudgeAlarm as JudgeAlarm
    from salesrl_trl.errors import RunStopped as RunStopped
    from salesrl_trl.errors import SalesRLError as SalesRLError
    from salesrl_trl.errors import ServiceError as ServiceError
    from salesrl_trl.errors import TooFewRewardsError as TooFewRewardsError
    from salesrl_trl.errors import WeightSyncError as WeightSyncError
    from salesrl_trl.generation.sampler import Sampler as Sampler
    from salesrl_trl.judged.budget import Budget as Budget
    from salesrl_trl.judged.budget import Limit as Limit
    from salesrl_trl.judged.budget import Price as Price
    from salesrl_trl.judged.chain import SalesReward as SalesReward
    from salesrl_trl.judged.judge import Judge as Judge
    from salesrl_trl.judged.judge_reward import JudgeReward as JudgeReward
    from salesrl_trl.judged.rag_client import RagBackend as RagBackend
    from salesrl_trl.judged.scoring import Added as Added
    from salesrl_trl.judged.scoring import Case as Case
    from salesrl_trl.judged.scoring import Missing as Missing
    from salesrl_trl.judged.scoring import RewardStage as RewardStage
    from salesrl_trl.kl.law import KLLaw as KLLaw
    from salesrl_trl.launch.assembly import judge_reward as judge_reward
    from salesrl_trl.launch.assembly import open_reward as open_reward
    from salesrl_trl.launch.data.form import Form as Form
    from salesrl_trl.launch.data.formats import DatasetFormat as DatasetFormat
    from salesrl_trl.launch.data.sources import build_dataset as build_dataset
    from salesrl_trl.launch.data.sources import load_rows as load_rows
    from salesrl_trl.launch.reward_config import RewardConfig as RewardConfig
    from salesrl_trl.reward.functions import RewardFunction as RewardFunction
    from salesrl_trl.reward.functions import per_batch as per_batch
    from salesrl_trl.reward.functions import per_completion as per_completion
    from salesrl_trl.reward.functions import per_group as per_group
    from salesrl_trl.reward.functions import soft_overlong_punishment as soft_overlong_punishment
    from salesrl_trl.rollout.buffer import ByArrival as ByArrival
    from salesrl_trl.service.transport import Transport as Transport
    from salesrl_trl.timing import TimingContext as TimingContext
    from salesrl_trl.trainer import SalesGRPOTrainer as SalesGRPOTrainer
    from salesrl_trl.types import Action as Action
    from salesrl_trl.types import Answer as Answer
    from salesrl_trl.types import Criterion as Criterion
    from salesrl_trl.types import InvalidAction as InvalidAction
    from salesrl_trl.types import Outcome as Outcome
    from salesrl_trl.types import Reward as Reward
    from salesrl_trl.types import SalesRow as SalesRow
    from salesrl_trl.types import Verdict as Verdict
    from salesrl_trl.wiring.part import Part as Part

_NAMES = [
    # the trainer and its settings
    ("trainer", "SalesGRPOTrainer"),
    ("config.training", "SalesGRPOConfig"),
    ("launch.reward_config", "RewardConfig"),
    ("config.quick_evaluations", "QuickEvalSettings"),
    # your own reward functions: docs/how-to/own-rewards.md
    ("reward.functions", "per_completion", "per_group", "per_batch"),
    ("agents.episodes", "per_episode"),
    ("reward.functions", "RewardFunction"),
    ("reward.functions", "soft_overlong_punishment"),
    ("types", "Reward"),
    ("service.transport", "Transport"),
    ("agents.tools", "tool"),
    ("agents.mcp_tools", "mcp_tools"),
    ("judged.budget", "Budget", "Limit", "Price"),
    # from rows to the built-in reward
    ("launch.data.sources", "load_rows", "build_dataset"),
    ("launch.data.form", "Form"),
    ("launch.assembly", "open_reward"),
    ("judged.chain", "SalesReward"),
    ("launch.assembly", "judge_reward"),
    ("judged.judge_reward", "JudgeReward"),
    # your own components: docs/background/architecture.md, "Seams"
    ("launch.data.formats", "DatasetFormat"),
    ("config.quick_evaluations", "Figure"),
    ("judged.judge", "Judge"),
    ("rollout.buffer", "ByArrival"),
    ("kl.law", "KLLaw"),
    ("wiring.part", "Part"),
    ("judged.rag_client", "RagBackend"),
    ("judged.scoring", "RewardStage"),
    ("generation.sampler", "Sampler"),
    # the values exchanged between them
    ("types", "SalesRow", "Action", "InvalidAction", "Answer", "Criterion", "Verdict", "Outcome"),
    ("judged.scoring", "Case", "Added", "Missing"),
    ("timing", "TimingContext"),
    # errors
    ("errors", "SalesRLError", "ConfigError", "DataError", "ServiceError", "TooFewRewardsError"),
    ("errors", "DivergedError", "JudgeAlarm", "WeightSyncError", "RunStopped"),
]
"""A submodule and names from it, in the order of the API page. Add new names here and above."""
_MODULES = {name: module for module, *names in _NAMES for name in names}

__all__ = ["__version__", *_MODULES]

if not TYPE_CHECKING:  # for type checkers, names not listed above are errors

    def __getattr__(name: str) -> object:
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
