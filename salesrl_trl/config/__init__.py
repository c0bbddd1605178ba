"""The settings of training: fields, units and checks. The class, which brings torch, is imported when it is named."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from salesrl_trl.config.training import SalesGRPOConfig

__all__ = ["SalesGRPOConfig"]


def __getattr__(name: str) -> object:
    if name != "SalesGRPOConfig":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from salesrl_trl.config.training import SalesGRPOConfig

    return SalesGRPOConfig
