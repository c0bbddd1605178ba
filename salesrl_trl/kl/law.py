"""A branch's KL target (`KLTarget`), and the controller that adjusts its coefficient (`KLLaw`, `AdaptiveLaw`). Pure
and stateless: equal arguments yield equal coefficients, on every rank and after a resume."""

import contextlib
import inspect
import json
import math
from dataclasses import dataclass
from typing import Any, Protocol

from salesrl_trl.errors import ConfigError

OPEN_BAND_WIDTH = 10.0  # a band from 0 lacks a lower edge; its centre is computed as if it were `high` / 10
FAR = 20.0  # maximum distance from a band's centre, in half-widths; also that of a KL of 0 or less
EXTREME = 100.0  # a KL beyond this factor from its band is clipped to it
PROPORTIONAL, INTEGRAL = 1.5, 0.3
"""Gains of the built-in controller. Their quotient, 5 windows, is close to the response time of a KL."""
SMOOTHING = 0.4  # weight of the old value in the smoothed log KL, for a window with the usual tokens
USUAL = 0.1  # weight of a window in the running average of tokens
ANSWER = 0.45  # decrease of log KL per unit of log coefficient, for the first adjustment; small policies: 0.4 to 0.9
FALLS = 2  # windows in a row below the maximum that end the KL's initial rise
FIRST_STEP = 10.0
STALL_WINDOWS, STALL_STEP, NEARER = 15, math.log(3), 0.05
"""A KL stalls if its log distance to the band shrank by less than `NEARER` in `STALL_WINDOWS`, although the log
coefficient moved by `STALL_STEP`."""
NOTICE = "notice"  # key in a controller's state for a log message: one sentence without the branch, or empty
OUT_OF_REACH = (
    "the KL got no closer to [{low:g}, {high:g}] in {windows} windows, while the coefficient went from {then:.3g} "
    "to {now:.3g}. The rest is due to the optimizer's noise, or to other branches that share the weights. {do}"
)
TOO_HIGH = "Lower `learning_rate`, raise `high`, or give the branch a `least_share`"
TOO_LOW = "Lower `low`, or the coefficients of the other branches"
DEFAULT_RANGE = 100.0  # by default, a coefficient stays between a hundredth and a hundred times its initial value
LEAST_BETA = 1e-9
"""Replaces a `beta_min` of 0, because no factor can raise 0. Next to advantages of about 1, smaller coefficients
vanish in float32 rounding."""

State = dict[str, Any]
"""JSON values by name, as stored in checkpoints. Each branch has one; `{}` before the first window."""


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


@dataclass(frozen=True, kw_only=True, slots=True)
class KLTarget:
    """A branch's KL target: `KLTarget(beta=0.1, low=0.02, high=0.06)`. Raises `ConfigError` if it is invalid."""

    beta: float  # coefficient of the first step
    low: float | None = None  # lower edge of the band, in nats per token; without a band the coefficient is fixed
    high: float | None = None  # upper edge of the band, in nats per token
    beta_min: float | None = None  # minimum coefficient; by default a hundredth of `beta`. 0 means `LEAST_BETA`.
    beta_max: float | None = None  # maximum coefficient; by default a hundred times `beta`
    least_share: float = 1.0
    """The last resort, in (0, 1]. If the controller requests more than `beta_max`, the coefficient is `beta_max`, and
    the branch's rewards are scaled down by `beta_max` divided by the requested coefficient, but at most to this share.
    1 disables it."""

    def __post_init__(self) -> None:
        for name in ("beta", "low", "high", "beta_min", "beta_max"):
            value = getattr(self, name)
            if value is None and name != "beta":
                continue
            if not is_number(value) or value < 0:
                text = " YAML parses 1e-3 as a string: write 1.0e-3." if isinstance(value, str) else ""
                raise ConfigError(f"a KL target's `{name}` is {value!r}. Expected a number of 0 or more.{text}")
        if (self.low is None) != (self.high is None):
            raise ConfigError(f"a KL band is {self.low} to {self.high}. Expected both `low` and `high`, or neither.")
        if self.low is not None and self.high is not None and self.low >= self.high:
            raise ConfigError(f"a KL band is {self.low} to {self.high}. Expected `low` to be less than `high`.")
        least, most = self.bounds
        if least > most:
            text = f"`beta_min` is {least:g} and `beta_max` {most:g}. Expected `beta_min` to be at most `beta_max`."
            raise ConfigError(text)
        if not least <= self.beta <= most:
            text = f"`beta` is {self.beta:g}. Expected it between `beta_min` {least:g} and `beta_max` {most:g}."
            raise ConfigError(text)
        if not is_number(self.least_share) or not 0 < self.least_share <= 1:
            raise ConfigError(f"a KL target's `least_share` is {self.least_share!r}. Expected more than 0, up to 1.")
        if not self.has_band and (self.beta_min, self.beta_max, self.least_share) != (None, None, 1.0):
            raise ConfigError(
                "`beta_min`, `beta_max` or `least_share` is given without `low` and `high`. A coefficient without "
                "a band never changes. Add the band, or remove the bounds."
            )
        if self.has_band and self.beta == 0:
            raise ConfigError("a KL band requires a `beta` above 0, because no factor can raise a coefficient of 0.")

    @property
    def has_band(self) -> bool:
        return self.high is not None

    @property
    def reach(self) -> tuple[float, float]:
        """Minimum and maximum coefficient that can be requested: `bounds`, the upper one divided by `least_share`."""
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
        """The edges of the band, both above 0; `OPEN_BAND_WIDTH` defines the lower one of a band from 0."""
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
    """A branch's window as passed to the controller: a finite measurement over at least one token."""

    target: KLTarget  # the branch's target, which has a band
    beta: float  # the window's coefficient as requested, within the target's `reach`
    kl: float  # in nats per token: k1, the mean over the window's tokens on all ranks; noise can make it negative
    tokens: float  # number of those tokens, above 0


class KLLaw(Protocol):
    """A KL controller, which adjusts each branch's coefficient once per window.

    One object serves all branches. It must not store per-branch state: checkpoints hold only what `move` returns.
    """

    def move(self, window: Window, state: State) -> tuple[float, State]:
        """Compute the next coefficient after a window has ended. `state` is the one returned by the branch's previous
        call; checkpoints store it.

        Returns:
            The coefficient from the next step on, and the state for the next call. The coefficient is then clipped to
            the target's `reach`. A message under `NOTICE` in the state is logged once as a warning.
        """


@dataclass(frozen=True, kw_only=True, slots=True)
class AdaptiveLaw:
    """The built-in controller: PI control of log KL through log beta, in velocity form, after a computed first step.

    With e the smoothed logarithm of KL / centre of the band, and e' that of the previous window:

        log beta += PROPORTIONAL * (e - e') + INTEGRAL * e

    The adaptive controller of Ziegler et al. (2019), formerly used by TRL's PPO, is its integral term with a clip. The
    proportional term of Stooke et al. (2020) damps a KL that is returning to the band.

    - A window changes the coefficient by at most a factor of `max_step`. The velocity form prevents integral windup.
    - A window is weighted by its tokens relative to the usual number of tokens.
    - The coefficient is unchanged after the first window.
    - While a fresh policy's KL rises, the coefficient is unchanged; `FALLS` windows in a row below the maximum end the
      rise. From the third window on, if another window of this growth would lift the KL above the band, the first step
      is made: the factor that brings the KL to the centre, assuming a response of `ANSWER`.
    - `NOTICE` reports an ineffective coefficient: the KL got no closer to its band for `STALL_WINDOWS`, although the
      coefficient changed threefold or reached its bound. Control continues.

    Raises `ConfigError` for invalid settings.
    """

    max_step: float = 2.0  # maximum factor of a coefficient per window, above 1; the first may reach `FIRST_STEP`

    def __post_init__(self) -> None:
        if not is_number(self.max_step) or self.max_step <= 1:
            raise ConfigError(f"`max_step` of `law_settings` is {self.max_step!r}. Expected a number above 1.")

    def move(self, window: Window, state: State) -> tuple[float, State]:
        """The next coefficient, and the state: smoothed log KL, usual tokens, initial rise, and stall."""
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
    """The stall state: the number of windows in which the KL got no closer to its band, the coefficient at their
    start, and a notice if there are many."""
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
    notice = state[NOTICE]  # the same text during the whole stall, so that it is logged once
    if not notice and acted and stall["windows"] >= STALL_WINDOWS:
        notice = OUT_OF_REACH.format(
            low=target.low, high=target.high, windows=stall["windows"], then=stall["beta"], now=window.beta,
            do=TOO_HIGH if side > 0 else TOO_LOW,
        )  # fmt: skip
    return {"stall": stall, NOTICE: notice}


def name_of(law: object) -> str:
    return f"{type(law).__module__}.{type(law).__qualname__}"


def check_law(law: KLLaw) -> None:
    """Reject an invalid controller before a model is loaded. Calls `move` once, without side effects. Raises
    `ConfigError` if `move` does not exist, or its signature or result is wrong."""
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
    """Call `law.move` and validate its result. The state is returned as if restored from a checkpoint. Raises
    `ConfigError` unless the result is a finite number and a mapping of JSON values."""
    result: object = law.move(window, dict(state))
    if isinstance(result, tuple) and len(result) == 2 and is_number(result[0]) and isinstance(result[1], dict):
        with contextlib.suppress(TypeError, ValueError):  # not JSON: rejected below
            return float(result[0]), json.loads(json.dumps(result[1]))
    raise ConfigError(
        f"the KL law {name_of(law)} returned {result!r} at a KL of {window.kl:g} and a coefficient of "
        f"{window.beta:g}. Expected a finite coefficient and a state: a dict "
        "of JSON values, `{}` for none."
    )
