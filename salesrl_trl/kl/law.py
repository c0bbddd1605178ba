"""The target of a branch's KL, and the law that moves the branch's coefficient.

Owns the band (`KLTarget`), the interface of a law (`KLLaw`) and the packaged law (`ControlLaw`). A law of your own is
one class with the method `move`; docs/KL.md has an example.

Pure: no torch, clock, file or collective, and no state of its own. The same arguments give the same coefficient, on
every rank and after a resume.
"""

import contextlib
import inspect
import json
import math
from dataclasses import dataclass
from typing import Any, Protocol

from salesrl_trl.errors import ConfigError

OPEN_BAND_WIDTH = 10.0
"""A band from 0 has no lower edge. Its centre is computed as if it began at `high` / 10."""
FAR = 20.0
"""Largest distance from a band's centre, in half-widths. A KL of 0 has no logarithm."""
RISE_PATIENCE = 6
"""The first rise of a fresh policy's KL is over after this many windows without a new highest KL. A rising KL, however
slow and noisy, sets a new highest value every few windows. A KL that stands still does so ever more seldom."""
DEFAULT_RANGE = 100.0
"""Without bounds of its own, a coefficient stays within a hundredth and a hundred times its first value."""

State = dict[str, Any]
"""JSON values by name, as a checkpoint holds them. A law has one of each branch, `{}` before the first window."""


def is_number(value: object) -> bool:
    """Whether a value is a finite number. `True` is none."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


@dataclass(frozen=True, kw_only=True, slots=True)
class KLTarget:
    """The target of a branch's KL: `KLTarget(beta=0.1, low=0.02, high=0.06)`.

    Raises:
        `ConfigError`: for a target that can't work.
    """

    beta: float
    """Coefficient of the first step."""
    low: float | None = None
    """Lower edge of the band, in nats per token. Without a band the coefficient stays unchanged."""
    high: float | None = None
    """Upper edge of the band, in nats per token."""
    beta_min: float | None = None
    """Least coefficient; a hundredth of `beta` when not given."""
    beta_max: float | None = None
    """Largest coefficient; a hundred times `beta` when not given."""

    def __post_init__(self) -> None:
        for name in ("beta", "low", "high", "beta_min", "beta_max"):
            value = getattr(self, name)
            if value is None and name != "beta":
                continue
            if not is_number(value) or value < 0:
                text = " YAML reads 1e-3 as a text: write 1.0e-3." if isinstance(value, str) else ""
                raise ConfigError(f"a KL target's `{name}` is {value!r}. Expected a number of 0 or more.{text}")
        if (self.low is None) != (self.high is None):
            raise ConfigError(f"a KL band is {self.low} to {self.high}. Expected both `low` and `high`, or neither.")
        if self.low is not None and self.high is not None and self.low >= self.high:
            raise ConfigError(f"a KL band is {self.low} to {self.high}. Expected `low` to be less than `high`.")
        least, most = self.bounds
        if least > most:
            raise ConfigError(
                f"`beta_min` is {least:g} and `beta_max` {most:g}. Expected `beta_min` to be at most `beta_max`."
            )
        if not least <= self.beta <= most:
            raise ConfigError(
                f"`beta` is {self.beta:g}. Expected it between `beta_min` {least:g} and `beta_max` {most:g}."
            )
        if not self.has_band and (self.beta_min, self.beta_max) != (None, None):
            raise ConfigError(
                "`beta_min` or `beta_max` is given without `low` and `high`. A coefficient without a band never "
                "moves. Add the band, or leave out the bounds."
            )
        if self.has_band and self.beta == 0:
            raise ConfigError(
                "a KL band is given with a `beta` of 0, which no factor can raise. Expected a `beta` of more than 0."
            )

    @property
    def has_band(self) -> bool:
        """Whether the target has a band."""
        return self.high is not None

    @property
    def bounds(self) -> tuple[float, float]:
        """Least and largest coefficient."""
        least = self.beta / DEFAULT_RANGE if self.beta_min is None else self.beta_min
        return least, self.beta * DEFAULT_RANGE if self.beta_max is None else self.beta_max

    def contains(self, kl: float) -> bool:
        """Whether a KL lies in the band."""
        if self.low is None or self.high is None:
            return False
        return kl <= self.high and (kl >= self.low or self.low == 0)

    def distance(self, kl: float) -> float:
        """Signed distance from the band's geometric centre in half-widths: -1 and 1 at its edges, within +-`FAR`."""
        assert self.low is not None and self.high is not None
        low = self.low or self.high / OPEN_BAND_WIDTH
        if kl <= 0:
            return -FAR
        half_width = math.log(self.high / low) / 2
        return max(-FAR, min(FAR, math.log(kl / math.sqrt(low * self.high)) / half_width))


class KLLaw(Protocol):
    """Moves the coefficient of a branch once per window.

    One object serves all branches. It keeps nothing of a branch itself: checkpoints hold only what `move` returns.
    """

    def move(self, target: KLTarget, beta: float, kl: float, state: State) -> tuple[float, State]:
        """Compute the next coefficient.

        Args:
            target (`KLTarget`):
                The branch's target. It has a band.
            beta (`float`):
                Coefficient of the window.
            kl (`float`):
                KL of the window in nats per token: the mean over tokens on all ranks. Always finite.
            state (`State`):
                State that the branch's last call returned. Checkpoints hold it.

        Returns:
            The coefficient from the next step on, and the state for the next call. The controller keeps the
            coefficient within the target's bounds.
        """
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class ControlLaw:
    """The packaged law: multiplies a coefficient by a factor.

    d is the distance of the window's KL from the band's centre in half-widths (-1 and 1 at the edges), and d' that of
    the window before:

        above the band          beta *= raise_factor
        below the band          beta *= lower_factor
        inside, d > 0           beta *= raise_factor ** (recentre * d)
        inside, d < 0           beta *= lower_factor ** (recentre * -d)

    Outside the band the coefficient stays unchanged:

    - where d + trend_windows * (d - d') lies in the band or beyond it: the KL returns by itself;
    - in the first window: no trend is known yet;
    - below the band during the first rise of a fresh policy's KL. The rise ends when the KL reaches the band, or after
      `RISE_PATIENCE` windows without a new highest KL.

    `recentre = 0` and `trend_windows = 0` leave the factors alone. With them the KL waits at an edge of the band until
    noise pushes it outside, and a coefficient falls to its bound while the KL of a fresh policy rises from 0.

    Raises:
        `ConfigError`: for a law that can't work.
    """

    raise_factor: float = 1.15
    """More than 1."""
    lower_factor: float = 0.85
    """Between 0 and 1."""
    recentre: float = 0.5
    """Share of a whole step that corrects a coefficient at the inner side of an edge, in [0, 1]."""
    trend_windows: float = 2.0
    """Windows by which the KL's trend is extended, 0 or more."""

    def __post_init__(self) -> None:
        for name in ("raise_factor", "lower_factor", "recentre", "trend_windows"):
            if not is_number(getattr(self, name)):
                raise ConfigError(f"`kl_{name}` is {getattr(self, name)!r}. Expected a number.")
        checks = (
            (self.raise_factor > 1, "kl_raise_factor", self.raise_factor, "more than 1"),
            (0 < self.lower_factor < 1, "kl_lower_factor", self.lower_factor, "between 0 and 1"),
            (0 <= self.recentre <= 1, "kl_recentre", self.recentre, "0 to 1"),
            (self.trend_windows >= 0, "kl_trend_windows", self.trend_windows, "0 or more"),
        )
        for works, name, value, expected in checks:
            if not works:
                raise ConfigError(f"`{name}` is {value}. Expected {expected}.")

    def move(self, target: KLTarget, beta: float, kl: float, state: State) -> tuple[float, State]:
        """The next coefficient, and the state: the KL of this window, and how far the first rise has come."""
        factor = self.factor(target, kl, state.get("previous"))
        rising, highest = state.get("rising", True), state.get("highest", 0.0)
        since_highest = state.get("since_highest", 0)
        if self.trend_windows and rising:
            since_highest = 0 if kl > highest else since_highest + 1
            highest = max(highest, kl)
            below = not target.contains(kl) and target.distance(kl) < 0
            rising = below and since_highest < RISE_PATIENCE
            if rising:
                factor = max(factor, 1.0)
        return beta * factor, {"previous": kl, "rising": rising, "highest": highest, "since_highest": since_highest}

    def factor(self, target: KLTarget, kl: float, previous: float | None) -> float:
        """The factor for a coefficient, apart from the first rise.

        Args:
            target (`KLTarget`):
                A target with a band.
            kl (`float`):
                The window's KL, in nats per token.
            previous (`float`, *optional*):
                The KL of the window before.
        """
        distance = target.distance(kl)
        if target.contains(kl):
            return self._power(self.recentre * max(-1.0, min(1.0, distance)))
        side = math.copysign(1.0, distance)
        if not self.trend_windows:
            return self._power(side)
        if previous is None:
            return 1.0
        ahead = distance + self.trend_windows * (distance - target.distance(previous))
        return 1.0 if side * ahead <= 1 else self._power(side)

    def _power(self, exponent: float) -> float:
        return math.pow(self.raise_factor, exponent) if exponent > 0 else math.pow(self.lower_factor, -exponent)


def name_of(law: object) -> str:
    """Dotted path of a law's class."""
    return f"{type(law).__module__}.{type(law).__qualname__}"


def check_law(law: KLLaw) -> None:
    """Refuse an object that is no law, before a model is loaded for it. Calls `move` once, which changes nothing.

    Raises:
        `ConfigError`: `move` is missing, or takes or returns something else.
    """
    arguments = (KLTarget(beta=0.1, low=0.02, high=0.06), 0.1, 0.1, State())
    try:
        inspect.signature(law.move).bind(*arguments)
    except (AttributeError, TypeError) as error:
        raise ConfigError(
            f"the KL law {name_of(law)} can't be used: {error}. Expected an object with the method "
            "`move(target, beta, kl, state)`; `salesrl_trl.kl.law.KLLaw` describes it."
        ) from error
    moved(law, *arguments)


def moved(law: KLLaw, target: KLTarget, beta: float, kl: float, state: State) -> tuple[float, State]:
    """`law.move`, with a checked result. The state comes as a checkpoint would give it back.

    Raises:
        `ConfigError`: the result is not a finite number and a mapping of JSON values.
    """
    result: object = law.move(target, beta, kl, dict(state))
    if isinstance(result, tuple) and len(result) == 2 and is_number(result[0]) and isinstance(result[1], dict):
        with contextlib.suppress(TypeError, ValueError):  # not JSON: refused below
            return float(result[0]), json.loads(json.dumps(result[1]))
    raise ConfigError(
        f"the KL law {name_of(law)} returned {result!r} at a KL of {kl:g} and a coefficient of {beta:g}. Expected a "
        "finite coefficient and a state: a dict of JSON values, `{}` for none."
    )
