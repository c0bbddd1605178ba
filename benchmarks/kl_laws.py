"""Laws to compare the packaged one with, and for tests that need a law whose steps are known by heart.

`--branch_kl.settings.law benchmarks.kl_laws.FactorLaw` brings the first one into a run.
"""

import math
from dataclasses import dataclass

from salesrl_trl.kl.law import KLTarget, State, Window

RISE_PATIENCE = 6
"""The first rise of a fresh policy's KL is over after this many windows without a new highest KL."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FactorLaw:
    """The packaged law before `AdaptiveLaw`: one factor above the band, one below it, parts of them inside.

    A coefficient stays while its KL is on its way back by its trend, in the first window, and below the band during
    the first rise of a fresh policy's KL.
    """

    raise_factor: float = 1.15
    lower_factor: float = 0.85
    recentre: float = 0.5
    """Share of a whole step at the inner side of an edge. It decreases to 0 at the centre."""
    trend_windows: float = 2.0
    """Windows by which the KL's trend is extended; 0 for none, and no first rise either."""

    def move(self, window: Window, state: State) -> tuple[float, State]:
        """The next coefficient, and the state: the KL of this window, and how far the first rise has come."""
        target, kl = window.target, window.kl
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
        kept = {"previous": kl, "rising": rising, "highest": highest, "since_highest": since_highest}
        return window.beta * factor, kept

    def factor(self, target: KLTarget, kl: float, previous: float | None) -> float:
        """The factor for a coefficient, apart from the first rise."""
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
class ZieglerLaw:
    """The adaptive KL controller of Ziegler et al. (2019), as in TRL's PPO, OpenRLHF and verl.

    Its target is the band's geometric centre.
    """

    gain: float = 0.5
    """Steps of a window by the horizon: `n_steps / horizon`."""

    def move(self, window: Window, state: State) -> tuple[float, State]:
        """The next coefficient; no state."""
        target = window.target
        assert target.low and target.high
        error = window.kl / math.sqrt(target.low * target.high) - 1
        return window.beta * (1 + self.gain * max(-0.2, min(0.2, error))), {}
