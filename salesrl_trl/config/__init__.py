"""The settings of a recipe: fields, units and checks. Other packages import the classes from here.

Owns validation alone: other classes get plain arguments. Fields of TRL and transformers stay in `GRPOConfig` and
`ModelConfig`. A class is imported when it is first named: `SalesGRPOConfig` brings torch, which takes seconds.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from salesrl_trl.config.telemetry import ALL_STEPS, TelemetryConfig
    from salesrl_trl.config.training import SalesGRPOConfig

_MODULES = {
    "ALL_STEPS": "telemetry",
    "SalesGRPOConfig": "training",
    "TelemetryConfig": "telemetry",
}

__all__ = ["ALL_STEPS", "SalesGRPOConfig", "TelemetryConfig"]


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
