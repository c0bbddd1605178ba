"""What a recipe may set: fields, their units and their checks.

Owns validation and nothing else. Behaviour classes receive plain arguments, never these objects. Fields that TRL or
transformers already has are theirs (`GRPOConfig`, `ModelConfig`).

Each concern has a module; they share `checks` and import nothing of each other. What others use is imported from here.
"""

from salesrl_trl.config.data import DataConfig
from salesrl_trl.config.policy import WarmStartConfig
from salesrl_trl.config.reward import JudgeProviderConfig, RewardConfig
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
