"""Settings that are a mapping of entries: what `branch_kl` has for all branches, and `record`."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any, cast

from salesrl_trl.config.checks import check, load_object
from salesrl_trl.config.ranges import Count, NumberOrNone, Positive, Range, check_names, check_value
from salesrl_trl.errors import ConfigError
from salesrl_trl.kl.controller import WindowSettings
from salesrl_trl.kl.estimators import ESTIMATORS, LARGEST_CLAMP
from salesrl_trl.kl.law import AdaptiveLaw, KLLaw, check_law

KL_SETTINGS = "settings"
"""An entry of `branch_kl` that is no branch."""
FIXED = "fixed"
"""A law by which the coefficients stay."""
COOLDOWN = "cooldown_steps"
"""An entry of `law_settings` that is no argument of the law: it holds for every law."""

_CLAMP = Range(0, LARGEST_CLAMP, "the ratio times the estimate grows as e^(2 * clamp), which overflows above 44")


@dataclass(frozen=True, kw_only=True)
class KLSettings:
    """`branch_kl.settings`, checked."""

    estimator: Annotated[str, ESTIMATORS] = "k3"
    """`k1`, `k2` or `k3`, as in http://joschu.net/blog/kl-approx.html. TRL has k3. With `use_bias_correction_kl`, k1
    and k3 have the KL's gradient on average, and k2 has another one. Without it k2 has the KL's gradient, and k1 has
    none."""
    clamp: Annotated[float, _CLAMP] = 10.0
    """Log-ratio in nats, up to 40: beyond, the penalty is linear. 0 is TRL's own formula, which overflows at 88."""
    update_steps: Count = 5
    """Optimizer steps in a window: a branch's KL is measured over a window before its coefficient moves."""
    law: str | None = None
    """Dotted path of a class that moves the coefficients instead of the packaged law, for example
    `"my_package.laws.MyLaw"`. `kl.law.KLLaw` describes such a class. `fixed` moves nothing: each branch's KL is still
    compared with its band in the logs."""
    law_settings: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the law. The packaged one has `max_step`: the largest factor by which a coefficient is
    raised or lowered at the end of a window, 2 by default. `cooldown_steps` holds for every law: optimizer steps after
    a change that no window includes, 0 by default."""

    def __post_init__(self) -> None:
        check_value(f"law_settings.{COOLDOWN}", self.law_settings.get(COOLDOWN, 0), NumberOrNone)

    @property
    def windows(self) -> WindowSettings:
        """The windows in which a branch's KL is measured."""
        return WindowSettings(update_steps=self.update_steps, cooldown_steps=self.law_settings.get(COOLDOWN, 0))

    def law_of(self, law_object: KLLaw | None = None) -> KLLaw | None:
        """The law that moves the coefficients; `None` if they stay. `law_object` takes the place of the settings' law.
        Raises `ConfigError` for a law that can't work, and for settings that the law does not have."""
        law, arguments = law_object, {name: value for name, value in self.law_settings.items() if name != COOLDOWN}
        if law_object is not None or self.law == FIXED:
            what = f"the KL's law is `{FIXED}`" if law_object is None else "a KL law is given as an object"
            check(
                (law_object is None or self.law is None) and not arguments,
                f"{what}, and by `law` or `law_settings` of `branch_kl.settings` too. Expected one.",
            )
        else:
            make: Callable[..., KLLaw] = AdaptiveLaw
            if self.law is not None:
                make = cast(Callable[..., KLLaw], load_object(self.law, "branch_kl.settings.law"))
            else:
                check_names("branch_kl.settings.law_settings", arguments, ("max_step", COOLDOWN))
            try:
                law = make(**arguments)
            except TypeError as error:
                raise ConfigError(
                    f"the KL's law {self.law} can't be made with `law_settings: {arguments}`: {error}. Expected a "
                    "class, and its keyword arguments."
                ) from error
        if law is not None:
            check_law(law)
        return law


@dataclass(frozen=True, kw_only=True)
class RecordSettings:
    """`record`, checked."""

    gib: Positive = 4.0
    filter: str | None = None

    @property
    def clean(self) -> Callable[[str], str] | None:
        """The function of `filter`. Raises `ConfigError` if it is none from text to text."""
        if self.filter is None:
            return None
        clean = cast("Callable[[str], str]", load_object(self.filter, "record.filter"))
        try:
            is_text = isinstance(clean("a text"), str)
        except Exception as error:  # whatever a function of a user's own raises
            raise ConfigError(f"`record.filter` is {self.filter!r}, which fails: {type(error).__name__}.") from error
        check(is_text, f"`record.filter` is {self.filter!r}. Expected a function that returns a text.")
        return clean
