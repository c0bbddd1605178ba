"""The target of a branch's KL, and the law that moves the branch's coefficient.

Owns the band (`KLTarget`), the interface of a law (`KLLaw`) and the packaged law (`AdaptiveLaw`). A law of your own is
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
EXTREME = 100.0
"""A law sees no KL further than this factor from its band."""
PROPORTIONAL, INTEGRAL = 1.5, 0.3
"""Parts of the packaged law's step. Their quotient, 5 windows, is near the time that a KL needs to come back."""
SMOOTHING = 0.4
"""Share of the old value in a smoothed log KL, if the window has the usual tokens."""
USUAL = 0.1
"""Share of a window's tokens in the usual number of tokens."""
TREND_MEMORY, FIRST_TREND = 0.85, 0.3
"""Memory by window of the trend of log KL, and the trend that is assumed at first."""
RISE_WINDOWS, AHEAD = 25, 2.0
"""A first rise reaches its band within `RISE_WINDOWS` by its trend. It is predicted over `AHEAD` windows."""
MEMORY, LAG_MEMORY, PRIOR = 0.95, 0.7, 0.3
"""Of the fit: memory by window of its sums, and of the coefficient that a KL answers to; weight of a floor of 0."""
LEAST_SPAN = 0.3
"""A floor is believed if 1 / beta varied by this much in the fit's memory (variance by squared mean)."""
RISING = 0.25
"""Growth of a smoothed log KL in a window that makes the fit begin anew."""
HOLD_WINDOWS = 10
"""Windows above the band, with a coefficient held or at its bound, before the band is said to be out of reach."""
NOTICE = "notice"
"""Name in a law's state of a text for the log: one sentence without the branch, or nothing."""
OUT_OF_REACH = (
    "the coefficient alone can't bring the KL into [{low:g}, {high:g}]: it is at its bound, or the KL hardly "
    "answers, so that what is left comes from the optimizer's noise. Lower `learning_rate`, or raise `high`"
)
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Window:
    """What a law is told of a branch's window: only measurements, which always are finite, of at least one token."""

    target: KLTarget
    """The branch's target. It has a band."""
    beta: float
    """Coefficient of the window."""
    kl: float
    """KL in nats per token: the mean over the window's tokens on all ranks. Noise and k1 can make it negative."""
    tokens: float
    """Number of those tokens, more than 0."""


class KLLaw(Protocol):
    """Moves the coefficient of a branch once per window.

    One object serves all branches. It keeps nothing of a branch itself: checkpoints hold only what `move` returns.
    """

    def move(self, window: Window, state: State) -> tuple[float, State]:
        """Compute the next coefficient.

        Args:
            window (`Window`):
                The window that ended.
            state (`State`):
                State that the branch's last call returned. Checkpoints hold it.

        Returns:
            The coefficient from the next step on, and the state for the next call. The controller keeps the
            coefficient within the target's bounds. A text under `NOTICE` in the state is logged once as a warning.
        """
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class AdaptiveLaw:
    """The packaged law: PI control of log KL by log beta, in velocity form.

    Here e is the logarithm of KL / centre of the band, smoothed, and e' that of the window before:

        log beta += PROPORTIONAL * (e - e') + INTEGRAL * e

    The adaptive controller of Ziegler et al. (2019), which TRL's PPO had, is its integral part with a clip. The
    proportional part of Stooke et al. (2020) brakes a KL that is on its way back.

    - A step is at most a factor of `max_step`. Velocity form has no sum that could wind up at a bound.
    - A window counts by its tokens beside the usual number of tokens. One with few tokens moves little.
    - In the first window the coefficient stays: there is no trend yet.
    - While a fresh policy's KL rises to its band, the coefficient is not lowered. The rise is over when its trend
      would not bring it there within `RISE_WINDOWS`. If the rise is going to pass the band, the coefficient is raised
      at once.
    - The KL that no coefficient removes is estimated: least squares with forgetting (the sums of the recursive form)
      fit KL = floor + drive / beta to the windows since the KL last rose. If the floor lies above the band, the
      coefficient is not raised any more. `NOTICE` says so after `HOLD_WINDOWS` of it, or at the upper bound, if the
      KL does not fall.

    Raises:
        `ConfigError`: for a law that can't work.
    """

    max_step: float = 1.5
    """Largest factor of a coefficient in one window, more than 1."""

    def __post_init__(self) -> None:
        if not is_number(self.max_step) or self.max_step <= 1:
            raise ConfigError(f"`kl_max_step` is {self.max_step!r}. Expected a number of more than 1.")

    def move(self, window: Window, state: State) -> tuple[float, State]:
        """The next coefficient, and the state: smoothed log KL and trend, the first rise, and the sums of the fit."""
        target = window.target
        assert target.low is not None and target.high is not None
        low = target.low or target.high / OPEN_BAND_WIDTH
        centre = math.log(low * target.high) / 2
        usual = state.get("tokens", window.tokens)
        weight = window.tokens / usual
        share = 1 - SMOOTHING**weight
        log_kl = math.log(min(max(window.kl, low if target.low == 0 else low / EXTREME), target.high * EXTREME))
        before = state.get("log_kl", log_kl)
        smooth = before + share * (log_kl - before)
        trend = TREND_MEMORY * state.get("trend", FIRST_TREND) + (1 - TREND_MEMORY) * (smooth - before)
        seen = None if smooth - before > RISING else state.get("fit")  # a KL that rises does not answer yet
        fit = _fitted(seen, 1 / window.beta, window.kl, weight)
        step = 0.0
        rising = state.get("rising", True) and smooth < math.log(low)
        rising = rising and trend * RISE_WINDOWS > math.log(low) - smooth
        if rising:
            ahead = window.kl + AHEAD * (window.kl - state.get("kl", 0.0))
            step = INTEGRAL * (math.log(ahead) - centre) if ahead > target.high else 0.0
        elif state:
            step = PROPORTIONAL * (smooth - before) + INTEGRAL * share / (1 - SMOOTHING) * (smooth - centre)
        held, notice = state.get("held", 0) if window.kl > target.high else 0, ""
        if _span(fit) > LEAST_SPAN and min(_floor(fit), window.kl) > target.high:
            held, step = held + 1, min(step, 0.0)
        elif window.kl > target.high and window.beta >= target.bounds[1]:
            held += 1
        if held >= HOLD_WINDOWS and smooth + trend * RISE_WINDOWS > math.log(target.high):
            notice = OUT_OF_REACH.format(low=target.low, high=target.high)
        most = math.log(self.max_step)
        after = window.beta * math.exp(max(-most, min(most, step)))
        return after, {
            "log_kl": smooth, "trend": trend, "rising": rising, "kl": window.kl, "fit": fit, "held": held,
            NOTICE: notice, "tokens": usual + USUAL * (window.tokens - usual),
        }  # fmt: skip


def _fitted(fit: list[float] | None, beta_inverse: float, kl: float, weight: float) -> list[float]:
    """A fit with one more window: smoothed 1 / beta, then the sums of weight, x, y, xx, xy; x = 1 / beta, y = KL."""
    x, *sums = fit or [beta_inverse, 0.0, 0.0, 0.0, 0.0, 0.0]
    x += (1 - LAG_MEMORY) * (beta_inverse - x)
    new = (1.0, x, kl, x * x, x * kl)
    return [x, *(MEMORY * old + weight * value for old, value in zip(sums, new, strict=True))]


def _floor(fit: list[float]) -> float:
    """The KL that no coefficient removes, in nats per token: 0 to the mean KL, and 0 without evidence."""
    _, weight, x, kl, _, x_kl = fit
    if kl <= 0:
        return 0.0
    slope = (x_kl * weight / (x * kl) - 1 + PRIOR) / (_span(fit) + PRIOR)  # 1 without a floor, 0 if nothing answers
    return kl / weight * (1 - min(1.0, max(0.0, slope)))


def _span(fit: list[float]) -> float:
    """How far 1 / beta moved in the windows of the fit: its variance by its squared mean."""
    _, weight, x, _, xx, _ = fit
    return xx * weight / (x * x) - 1


def name_of(law: object) -> str:
    """Dotted path of a law's class."""
    return f"{type(law).__module__}.{type(law).__qualname__}"


def check_law(law: KLLaw) -> None:
    """Refuse an object that is no law, before a model is loaded for it. Calls `move` once, which changes nothing.

    Raises:
        `ConfigError`: `move` is missing, or takes or returns something else.
    """
    arguments = (Window(target=KLTarget(beta=0.1, low=0.02, high=0.06), beta=0.1, kl=0.1, tokens=1.0), State())
    try:
        inspect.signature(law.move).bind(*arguments)
    except (AttributeError, TypeError) as error:
        raise ConfigError(
            f"the KL law {name_of(law)} can't be used: {error}. Expected an object with the method "
            "`move(window, state)`; `salesrl_trl.kl.law.KLLaw` describes it."
        ) from error
    moved(law, *arguments)


def moved(law: KLLaw, window: Window, state: State) -> tuple[float, State]:
    """`law.move`, with a checked result. The state comes as a checkpoint would give it back.

    Raises:
        `ConfigError`: the result is not a finite number and a mapping of JSON values.
    """
    result: object = law.move(window, dict(state))
    if isinstance(result, tuple) and len(result) == 2 and is_number(result[0]) and isinstance(result[1], dict):
        with contextlib.suppress(TypeError, ValueError):  # not JSON: refused below
            return float(result[0]), json.loads(json.dumps(result[1]))
    raise ConfigError(
        f"the KL law {name_of(law)} returned {result!r} at a KL of {window.kl:g} and a coefficient of "
        f"{window.beta:g}. Expected a finite coefficient and a state: a dict "
        "of JSON values, `{}` for none."
    )
