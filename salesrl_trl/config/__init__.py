"""The settings of training: fields, units and checks. Other packages import the class from here.

Owns validation alone: other classes get plain arguments. Fields of TRL and transformers stay in `GRPOConfig` and
`ModelConfig`. The class is imported when it is first named: it brings torch, which takes seconds.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from salesrl_trl.config.training import SalesGRPOConfig

__all__ = ["SalesGRPOConfig"]


def __getattr__(name: str) -> object:
    if name != "SalesGRPOConfig":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from salesrl_trl.config.training import SalesGRPOConfig

    return SalesGRPOConfig
