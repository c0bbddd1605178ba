"""The law that moves a branch's KL coefficient, and its state.

Pure: no torch, clock, I/O or collective. Owns neither the measurement (`penalty.py`) nor its sum over ranks (the
trainer's): the same figures in give the same decisions out, on every rank and after a resume.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from salesrl_trl.errors import ConfigError

OPEN_BAND_WIDTH = 10.0
"""A band from 0 has no lower edge. Its middle is sought as if it began at `high` / 10."""
FAR = 20.0
"""Largest distance from a band's centre, in half-widths: a KL of 0 has no logarithm."""
RISE_PATIENCE = 6
"""Windows without a new highest KL after which a fresh policy's first rise is over. A rise sets a new one every few
windows, however slow and noisy it is; a KL that stands still does so ever more seldom."""
DEFAULT_RANGE = 100.0
"""Without bounds of its own a coefficient stays within a hundredth and a hundred times its first value."""


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


@dataclass(frozen=True, kw_only=True, slots=True)
class KLTarget:
    """Where a branch's KL is to be: `KLTarget(beta=0.1, low=0.02, high=0.06)`.

    Raises:
        `ConfigError`: for a target that can't work.
    """

    beta: float
    """Coefficient of the first step."""
    low: float | None = None
    """Lower edge of the band, in nats per token. Without a band the coefficient stays as it is."""
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
            if not _number(value) or value < 0:
                text = " YAML reads 1e-3 as a text: write 1.0e-3." if isinstance(value, str) else ""
                raise ConfigError(f"a KL target's `{name}` is {value!r}. Expected a number of 0 or more.{text}")
        if (self.low is None) != (self.high is None):
            raise ConfigError(f"a KL band is {self.low} to {self.high}. Expected both `low` and `high`, or neither.")
        if self.low is not None and self.high is not None and self.low >= self.high:
            raise ConfigError(f"a KL band is {self.low} to {self.high}. Expected `low` to be less than `high`.")
        least, most = self.bounds
        if least > most:
            raise ConfigError(f"`beta_min` is {least:g} and `beta_max` {most:g}. Expected the first to be the lesser.")
        if not least <= self.beta <= most:
            raise ConfigError(f"`beta` is {self.beta:g}. Expected it between `beta_min` {least:g} and {most:g}.")
        if not self.has_band and (self.beta_min, self.beta_max) != (None, None):
            raise ConfigError("bounds of a coefficient are given without `low` and `high`. Without a band it stays.")
        if self.has_band and self.beta == 0:
            raise ConfigError("a KL band is given with a `beta` of 0, which no factor can raise. Expected more.")

    @property
    def has_band(self) -> bool:
        """Whether there is a band to be in."""
        return self.high is not None

    @property
    def bounds(self) -> tuple[float, float]:
        """Least and largest coefficient."""
        least = self.beta / DEFAULT_RANGE if self.beta_min is None else self.beta_min
        return least, self.beta * DEFAULT_RANGE if self.beta_max is None else self.beta_max

    def contains(self, kl: float) -> bool:
        """Whether the band does."""
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


@dataclass(frozen=True, kw_only=True, slots=True)
class ControlLaw:
    """How a coefficient follows its branch's KL.

    Once per window, with d the distance of the window's KL from the band's centre in half-widths (-1 and 1 at the
    edges) and d' the window before:

        above the band          beta *= raise_factor
        below the band          beta *= lower_factor
        inside, d > 0           beta *= raise_factor ** (recentre * d)
        inside, d < 0           beta *= lower_factor ** (recentre * -d)

    and neither above nor below where d + trend_windows * (d - d') lies in the band or beyond it: the KL is on its way
    back by itself. Nor in a first window, which has no course yet; nor below the band in a fresh policy's first rise,
    which ends in the band or after `RISE_PATIENCE` windows without a new highest KL.

    `recentre = 0` and `trend_windows = 0` leave the bare law. It waits at a band's edge until noise pushes the KL over
    it, and drives a coefficient towards its bound while the KL of a fresh policy rises from 0.

    Raises:
        `ConfigError`: for a law that can't work.
    """

    update_steps: int = 5
    """Optimizer steps in a window."""
    cooldown_steps: int = 0
    """Optimizer steps after a change that belong to no window, for a policy that answers late."""
    raise_factor: float = 1.15
    """More than 1."""
    lower_factor: float = 0.85
    """Between 0 and 1."""
    recentre: float = 0.5
    """Share of a whole step with which a coefficient is corrected at a band's inner edge, in [0, 1]."""
    trend_windows: float = 2.0
    """Windows by which the KL's course is extended, 0 or more."""

    def __post_init__(self) -> None:
        for name in ("update_steps", "cooldown_steps"):
            if not isinstance(getattr(self, name), int):
                raise ConfigError(f"`kl_{name}` is {getattr(self, name)!r}. Expected a whole number.")
        for name in ("raise_factor", "lower_factor", "recentre", "trend_windows"):
            if not _number(getattr(self, name)):
                raise ConfigError(f"`kl_{name}` is {getattr(self, name)!r}. Expected a number.")
        checks = (
            (self.update_steps >= 1, "kl_update_steps", self.update_steps, "at least 1"),
            (self.cooldown_steps >= 0, "kl_cooldown_steps", self.cooldown_steps, "0 or more"),
            (self.raise_factor > 1, "kl_raise_factor", self.raise_factor, "more than 1"),
            (0 < self.lower_factor < 1, "kl_lower_factor", self.lower_factor, "between 0 and 1"),
            (0 <= self.recentre <= 1, "kl_recentre", self.recentre, "0 to 1"),
            (self.trend_windows >= 0, "kl_trend_windows", self.trend_windows, "0 or more"),
        )
        for works, name, value, expected in checks:
            if not works:
                raise ConfigError(f"`{name}` is {value}. Expected {expected}.")

    def factor(self, target: KLTarget, kl: float, previous: float | None) -> float:
        """By how much to multiply a coefficient.

        Args:
            target (`KLTarget`):
                One with a band.
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """A coefficient that moved."""

    branch: str
    """Whose."""
    kl: float
    """The window's, in nats per token."""
    target: KLTarget
    """With the band."""
    before: float
    """Coefficient until now."""
    after: float
    """Coefficient from the next step on."""

    def __str__(self) -> str:
        place = "in" if self.target.contains(self.kl) else "outside"
        return (
            f"{self.branch}: KL {self.kl:.4f} {place} [{self.target.low:g}, {self.target.high:g}], "
            f"beta {self.before:.4g} -> {self.after:.4g}"
        )


class BranchController:
    """One branch's coefficient.

    Args:
        branch (`str`):
            Its name.
        target (`KLTarget`):
            Where its KL is to be.
        law (`ControlLaw`, *optional*):
            How to get there. Without one the coefficient stays, and only the share of steps in the band is kept.
    """

    def __init__(self, branch: str, target: KLTarget, law: ControlLaw | None) -> None:
        self.branch = branch
        self.target = target
        self.beta = target.beta
        self._law = law if target.has_band else None
        self._kl_sum = 0.0
        self._tokens = 0.0
        self._steps = 0
        self._cooldown = 0
        self._previous: float | None = None
        self._rising = True
        self._highest = 0.0
        self._since_highest = 0
        self._measured_steps = 0
        self._steps_in_band = 0

    @property
    def share_in_band(self) -> float:
        """Share of the steps with a measurement whose KL lay in the band; NaN before the first and without a band."""
        if not self.target.has_band or not self._measured_steps:
            return math.nan
        return self._steps_in_band / self._measured_steps

    def observe(self, kl_sum: float, tokens: float) -> Decision | None:
        """One optimizer step's measurement, over all ranks. The change it leads to holds from the next step on.

        Args:
            kl_sum (`float`):
                Sum of the KL over the branch's tokens, in nats. One that is not finite is no measurement.
            tokens (`float`):
                Their number. A step without tokens is no measurement, a window without tokens changes nothing.
        """
        measured = tokens > 0 and math.isfinite(kl_sum)
        if measured:
            self._measured_steps += 1
            self._steps_in_band += self.target.contains(kl_sum / tokens)
        if self._law is None:
            return None
        if self._cooldown > 0:
            self._cooldown -= 1
            return None
        if measured:
            self._kl_sum += kl_sum
            self._tokens += tokens
        self._steps += 1
        if self._steps < self._law.update_steps:
            return None
        return self._close_window(self._law)

    def _close_window(self, law: ControlLaw) -> Decision | None:
        kl_sum, tokens = self._kl_sum, self._tokens
        self._kl_sum, self._tokens, self._steps = 0.0, 0.0, 0
        if not tokens:
            return None
        kl, before = kl_sum / tokens, self.beta
        least, most = self.target.bounds
        factor = law.factor(self.target, kl, self._previous)
        if law.trend_windows and self._first_rise(kl):
            factor = max(factor, 1.0)
        self.beta = max(least, min(most, before * factor))
        self._previous = kl
        if self.beta == before:
            return None
        self._cooldown = law.cooldown_steps
        return Decision(branch=self.branch, kl=kl, target=self.target, before=before, after=self.beta)

    def _first_rise(self, kl: float) -> bool:
        """Whether the KL of a policy that started at its reference is still on its way up to the band."""
        if not self._rising:
            return False
        self._since_highest = 0 if kl > self._highest else self._since_highest + 1
        self._highest = max(self._highest, kl)
        below = not self.target.contains(kl) and self.target.distance(kl) < 0
        self._rising = below and self._since_highest < RISE_PATIENCE
        return self._rising

    _STATE = ("_kl_sum", "_tokens", "_steps", "_cooldown", "_previous", "_rising", "_highest", "_since_highest",
              "_measured_steps", "_steps_in_band")  # fmt: skip

    def state_dict(self) -> dict[str, Any]:
        """Everything that later decisions depend on, as JSON values."""
        return {"beta": self.beta, **{name.removeprefix("_"): getattr(self, name) for name in self._STATE}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict`. A coefficient outside bounds that were narrowed since is moved to the nearer one;
        one without control stays the configured one."""
        for name in self._STATE:
            setattr(self, name, state[name.removeprefix("_")])
        if self._law is not None:
            least, most = self.target.bounds
            self.beta = max(least, min(most, state["beta"]))


class KLControl:
    """The coefficients of all branches.

    Args:
        targets (`Mapping[str, KLTarget]`):
            By branch, in the order of branch ids.
        law (`ControlLaw`, *optional*):
            One for all; without it coefficients stay.
    """

    def __init__(self, targets: Mapping[str, KLTarget], law: ControlLaw | None) -> None:
        self.branches = [BranchController(branch, target, law) for branch, target in targets.items()]
        """By branch id."""

    @property
    def betas(self) -> list[float]:
        """Coefficients by branch id."""
        return [branch.beta for branch in self.branches]

    def observe(self, measured: Sequence[tuple[float, float]]) -> list[Decision]:
        """One optimizer step's sums of the KL and numbers of tokens by branch id, over all ranks."""
        decisions = [
            branch.observe(kl_sum, tokens) for branch, (kl_sum, tokens) in zip(self.branches, measured, strict=True)
        ]
        return [decision for decision in decisions if decision is not None]

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """By branch."""
        return {branch.branch: branch.state_dict() for branch in self.branches}

    def load_state_dict(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Go on from `state_dict`. A branch that was not there then starts afresh."""
        for branch in self.branches:
            if branch.branch in state:
                branch.load_state_dict(state[branch.branch])
