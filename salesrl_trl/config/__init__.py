"""The settings of a recipe: fields, units and checks.

Owns validation and nothing else. Other classes receive plain arguments, never these objects. Fields of TRL and
transformers stay in `GRPOConfig` and `ModelConfig`.

Each concern has a module. The modules share `checks` and do not import each other. Other rooms import from here.
"""

from salesrl_trl.config.data import DataConfig
from salesrl_trl.config.judge import JudgeProviderConfig
from salesrl_trl.config.policy import WarmStartConfig
from salesrl_trl.config.reward import RewardConfig
from salesrl_trl.config.telemetry import ALL_STEPS, TelemetryConfig
from salesrl_trl.config.training import DEFAULT_BRANCHES, SalesGRPOConfig

__all__ = [
    "ALL_STEPS",
    "DEFAULT_BRANCHES",
    "DataConfig",
    "JudgeProviderConfig",
    "RewardConfig",
    "SalesGRPOConfig",
    "TelemetryConfig",
    "WarmStartConfig",
]
