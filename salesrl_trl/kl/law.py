"""The target of a branch's KL (`KLTarget`), and the law that moves its coefficient (`KLLaw`, `AdaptiveLaw`). Pure, and
without a state of its own: the same arguments give the same coefficient, on every rank and after a resume."""

import contextlib
import inspect
import json
import math
from dataclasses import dataclass
from typing import Any, Protocol

from salesrl_trl.errors import ConfigError

OPEN_BAND_WIDTH = 10.0
"""A band from 0 has no lower edge. Its centre is computed as if its lower edge were `high` / 10."""
FAR = 20.0
"""Largest distance from a band's centre, in half-widths. It stands for the logarithm of a KL of 0, which has none."""
EXTREME = 100.0  # A KL further than this factor from its band reaches the law as one at this factor
PROPORTIONAL, INTEGRAL = 1.5, 0.3
"""Parts of the packaged law's step. Their quotient, 5 windows, is near the time that a KL takes to answer."""
SMOOTHING = 0.4  # share of the old value in a smoothed log KL, if the window has the usual tokens
USUAL = 0.1  # share of a window's tokens in the usual number of tokens
ANSWER = 0.6
"""By how much the logarithm of a KL falls when that of its coefficient rises by 1; for the first move. Measured: 0.4
to 0.9."""
FALLS = 2  # the first rise of a KL has ended when so many windows in a row lie below its highest value
FIRST_STEP = 10.0
STALL_WINDOWS, STALL_STEP, NEARER = 15, math.log(3), 0.05
"""A KL stalls if it came no nearer to its band by the logarithm `NEARER` in `STALL_WINDOWS`, while its coefficient
moved by the logarithm `STALL_STEP`."""
NOTICE = "notice"  # key in a law's state of a text for the log: one sentence without the branch, or nothing
OUT_OF_REACH = (
    "the KL came no nearer to [{low:g}, {high:g}] in {windows} windows, while the coefficient went from {then:.3g} "
    "to {now:.3g}. What is left comes from the optimizer's noise, or from other branches with the same weights. {do}"
)
TOO_HIGH = "Lower `learning_rate`, raise `high`, or give the branch a `least_share`"
TOO_LOW = "Lower `low`, or the coefficients of the other branches"
DEFAULT_RANGE = 100.0
"""Without bounds of its own, a coefficient stays within a hundredth and a hundred times its first value."""
LEAST_BETA = 1e-9
"""A `beta_min` of 0 means this: no factor can raise 0, and beside advantages of about 1 a lower one is below float32's
rounding."""

State = dict[str, Any]
"""JSON values by name, as a checkpoint holds them. Each branch has one: `{}` before the first window."""


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


@dataclass(frozen=True, kw_only=True, slots=True)
class KLTarget:
    """The target of a branch's KL: `KLTarget(beta=0.1, low=0.02, high=0.06)`. `ConfigError` if it can't work."""

    beta: float  # coefficient of the first step
    low: float | None = None
    """Lower edge of the band, in nats per token. Without a band the coefficient stays unchanged."""
    high: float | None = None  # upper edge of the band, in nats per token
    beta_min: float | None = None  # least coefficient; a hundredth of `beta` when not given. 0 is `LEAST_BETA`.
    beta_max: float | None = None  # largest coefficient; a hundred times `beta` when not given
    least_share: float = 1.0
    """The last resort, in (0, 1]. If a law asks for more than `beta_max`, the coefficient is `beta_max`, and the
    branch's rewards count less in the update: by `beta_max` divided by what the law asks for, but never by less than
    this share. 1 switches it off."""

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
        if not is_number(self.least_share) or not 0 < self.least_share <= 1:
            raise ConfigError(f"a KL target's `least_share` is {self.least_share!r}. Expected more than 0, up to 1.")
        if not self.has_band and (self.beta_min, self.beta_max, self.least_share) != (None, None, 1.0):
            raise ConfigError(
                "`beta_min`, `beta_max` or `least_share` is given without `low` and `high`. A coefficient without "
                "a band never moves. Add the band, or leave out the bounds."
            )
        if self.has_band and self.beta == 0:
            raise ConfigError(
                "a KL band is given with a `beta` of 0, which no factor can raise. Expected a `beta` of more than 0."
            )

    @property
    def has_band(self) -> bool:
        return self.high is not None

    @property
    def reach(self) -> tuple[float, float]:
        """Least and largest coefficient that a law can ask for: `bounds`, the upper one divided by `least_share`."""
        least, most = self.bounds
        return least, most / self.least_share

    @property
    def bounds(self) -> tuple[float, float]:
        least = (self.beta / DEFAULT_RANGE if self.beta_min is None else self.beta_min) or min(LEAST_BETA, self.beta)
        return least, self.beta * DEFAULT_RANGE if self.beta_max is None else self.beta_max

    def contains(self, kl: float) -> bool:
        if self.low is None or self.high is None:
            return False
        return kl <= self.high and (kl >= self.low or self.low == 0)

    @property
    def edges(self) -> tuple[float, float]:
        """The edges of the band, both above 0: `OPEN_BAND_WIDTH` stands for a band from 0."""
        assert self.low is not None and self.high is not None
        return self.low or self.high / OPEN_BAND_WIDTH, self.high

    def distance(self, kl: float) -> float:
        """Signed distance from the band's geometric centre in half-widths: -1 and 1 at its edges, within +-`FAR`."""
        low, high = self.edges
        if kl <= 0:
            return -FAR
        half_width = math.log(high / low) / 2
        return max(-FAR, min(FAR, math.log(kl / math.sqrt(low * high)) / half_width))


@dataclass(frozen=True, kw_only=True, slots=True)
class Window:
    """What a law gets of a branch's window: a measurement that is always finite, of at least one token."""

    target: KLTarget  # the branch's target. It has a band.
    beta: float  # coefficient of the window, as the law asked for it, within the target's `reach`
    kl: float
    """KL in nats per token: k1, the mean over the window's tokens on all ranks. Its noise can make it negative."""
    tokens: float  # number of those tokens, more than 0


class KLLaw(Protocol):
    """Moves the coefficient of a branch once per window.

    One object serves all branches. It keeps nothing of a branch itself: checkpoints hold only what `move` returns.
    """

    def move(self, window: Window, state: State) -> tuple[float, State]:
        """Compute the next coefficient, after the window that ended. `state`: what the branch's last call returned.
        Checkpoints hold it.

        Returns:
            The coefficient from the next step on, and the state for the next call. The controller keeps the
            coefficient within the target's `reach`. A text under `NOTICE` in the state is logged once as a warning.
        """


@dataclass(frozen=True, kw_only=True, slots=True)
class AdaptiveLaw:
    """The packaged law: PI control of log KL by log beta, in velocity form, after a first move that is computed.

    Here e is the logarithm of KL / centre of the band, smoothed, and e' that of the window before:

        log beta += PROPORTIONAL * (e - e') + INTEGRAL * e

    The adaptive controller of Ziegler et al. (2019), which TRL's PPO had, is its integral part with a clip. The
    proportional part of Stooke et al. (2020) brakes a KL that is on its way back.

    - A step is at most a factor of `max_step`. Velocity form has no sum that could wind up at a bound.
    - A window counts by its tokens beside the usual number of tokens. One with few tokens moves little.
    - In the first window the coefficient stays.
    - As long as a fresh policy's KL rises, the coefficient stays; `FALLS` windows in a row below its highest end the
      rise. From the third window on, if one more window of this growth would lift the KL above the band, the first
      move is made: the factor that brings it to the centre if the KL answers by `ANSWER`.
    - `NOTICE` says when the coefficient does not act: the KL came no nearer to its band for `STALL_WINDOWS`, while the
      coefficient moved threefold or reached its bound. The law goes on all the same.

    Raises `ConfigError` for a law that can't work.
    """

    max_step: float = 2.0
    """Largest factor of a coefficient in one window, more than 1. The first move may have `FIRST_STEP`."""

    def __post_init__(self) -> None:
        if not is_number(self.max_step) or self.max_step <= 1:
            raise ConfigError(f"`max_step` of `law_settings` is {self.max_step!r}. Expected a number above 1.")

    def move(self, window: Window, state: State) -> tuple[float, State]:
        """The next coefficient, and the state: smoothed log KL, usual tokens, the first rise, and the stall."""
        target, (low, high) = window.target, window.target.edges
        centre = math.log(low * high) / 2
        usual = state.get("tokens", window.tokens)
        share = 1 - SMOOTHING ** (window.tokens / usual)
        log_kl = math.log(min(max(window.kl, low if target.low == 0 else low / EXTREME), high * EXTREME))
        before = state.get("log_kl", log_kl)
        smooth = before + share * (log_kl - before)
        windows, growth = state.get("windows", 0) + 1, window.kl - state.get("kl", 0.0)
        highest = max(window.kl, state.get("highest", 0.0))
        falls = 0 if window.kl >= highest else state.get("falls", 0) + 1
        fresh = state.get("fresh", window.kl < low) and falls < FALLS
        step, most = 0.0, math.log(self.max_step)
        if fresh and windows > 2 and falls == 0 and window.kl + growth > high:
            step, most = (math.log(window.kl + growth) - centre) / ANSWER, math.log(max(FIRST_STEP, self.max_step))
            smooth, fresh = log_kl, False
        elif windows > 1 and not fresh:
            step = PROPORTIONAL * (smooth - before) + INTEGRAL * share / (1 - SMOOTHING) * (smooth - centre)
        after = window.beta * math.exp(max(-most, min(most, step)))
        return after, {
            "log_kl": smooth, "tokens": usual + USUAL * (window.tokens - usual), "windows": windows, "kl": window.kl,
            "highest": highest, "falls": falls, "fresh": fresh, **_stall(window, smooth, fresh, state),
        }  # fmt: skip


def _stall(window: Window, smooth: float, fresh: bool, state: State) -> State:
    """The state of a stall: for how many windows the KL came no nearer to its band, since which coefficient, and a
    notice if that is long."""
    target, least, most = window.target, *window.target.reach
    assert target.low is not None and target.high is not None
    above, low = smooth - math.log(target.high), math.log(target.low) if target.low else -math.inf
    side = 1 if above > 0 else -1 if smooth < low and not fresh else 0
    far = abs(above) if side > 0 else low - smooth
    stall = state.get("stall", {"side": 0})
    if side == 0:
        return {"stall": {"side": 0}, NOTICE: ""}
    if side != stall["side"] or far < stall["far"] - NEARER:
        return {"stall": {"side": side, "far": far, "beta": window.beta, "windows": 0}, NOTICE: ""}
    stall = {**stall, "windows": stall["windows"] + 1}
    at_bound = window.beta >= most if side > 0 else window.beta <= least
    acted = side * math.log(window.beta / stall["beta"]) >= STALL_STEP or at_bound
    notice = state[NOTICE]  # one text for the whole stall, so that it is logged once
    if not notice and acted and stall["windows"] >= STALL_WINDOWS:
        notice = OUT_OF_REACH.format(
            low=target.low, high=target.high, windows=stall["windows"], then=stall["beta"], now=window.beta,
            do=TOO_HIGH if side > 0 else TOO_LOW,
        )  # fmt: skip
    return {"stall": stall, NOTICE: notice}


def name_of(law: object) -> str:
    return f"{type(law).__module__}.{type(law).__qualname__}"


def check_law(law: KLLaw) -> None:
    """Refuse an object that is no law, before a model is loaded for it. Calls `move` once, which changes nothing.
    Raises `ConfigError` if `move` is missing, or takes or returns something else."""
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
    """`law.move`, with a checked result. The state is returned as a checkpoint would give it back. Raises
    `ConfigError` unless the result is a finite number and a mapping of JSON values."""
    result: object = law.move(window, dict(state))
    if isinstance(result, tuple) and len(result) == 2 and is_number(result[0]) and isinstance(result[1], dict):
        with contextlib.suppress(TypeError, ValueError):  # not JSON: refused below
            return float(result[0]), json.loads(json.dumps(result[1]))
    raise ConfigError(
        f"the KL law {name_of(law)} returned {result!r} at a KL of {window.kl:g} and a coefficient of "
        f"{window.beta:g}. Expected a finite coefficient and a state: a dict "
        "of JSON values, `{}` for none."
    )
