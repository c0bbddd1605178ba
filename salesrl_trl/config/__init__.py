"""Training settings: fields, units and checks. The class, which needs torch, is imported lazily."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from salesrl_trl.config.training import SalesGRPOConfig

__all__ = ["SalesGRPOConfig"]


def __getattr__(name: str) -> object:
    if name != "SalesGRPOConfig":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from salesrl_trl.config.training import SalesGRPOConfig

    return SalesGRPOConfig
