"""The KL of all branches during training: measurement windows, coefficients that a controller (`KLLaw`) adjusts at the
end of each window, the penalty, and the saved state. Decisions are deterministic: equal on every rank and after a
resume."""

import json
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from accelerate.logging import get_logger

from salesrl_trl.errors import ConfigError
from salesrl_trl.kl.law import NOTICE, KLLaw, KLTarget, State, Window, moved, name_of
from salesrl_trl.kl.penalty import BranchPenalty, MicroBatch, PenaltySettings
from salesrl_trl.names import KL_STATE_FILE

logger = get_logger(__name__)  # prefixes lines with the rank
_PLAIN_LOGGER = logging.getLogger(__name__)

READABLE = 0.4
"""A window is conclusive if the standard error of its log KL is at most this share of the band's half-width, or of the
distance from the band's centre if larger."""
MOST_WINDOWS = 6  # a window ends after this multiple of its steps, conclusive or not
FEWEST_PAIRS = 4  # pairs of neighbouring steps needed to estimate a branch's noise
KNOWN_NOISE = 0.7  # weight of the old estimate when the dispersion is updated at the end of a window
WORTH_A_LINE = 1.1  # while the KL is in its band, smaller factors of the coefficient aren't logged
GAUSSIAN = 2.0  # dispersion of Gaussian log-ratios, as the mean of exp(-log-ratio) is 1; the least that is assumed


@dataclass(frozen=True, kw_only=True, slots=True)
class WindowSettings:
    """The optimizer steps of a window. Raises `ConfigError` for invalid numbers."""

    update_steps: int = 5
    """The minimum length. If the KL estimate is too noisy, the window is extended, up to `MOST_WINDOWS` times."""
    cooldown_steps: int = 0  # optimizer steps ignored after an adjustment, for policies that react slowly

    def __post_init__(self) -> None:
        for name, value, least in (
            ("branch_kl.settings.update_steps", self.update_steps, 1),
            ("law_settings.cooldown_steps", self.cooldown_steps, 0),
        ):
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ConfigError(f"`{name}` is {value!r}. Expected a whole number of {least} or more.")


@dataclass(kw_only=True, slots=True)
class _WindowCounts:
    kl_sum: float = 0.0
    tokens: float = 0.0
    steps: int = 0
    last: list[float] | None = None  # KL and tokens of the previous step in the same window
    squares: float = 0.0
    pairs: int = 0
    """Pairs of neighbouring steps; `squares` sums their squared KL differences, normalised to single tokens."""
    dispersion: float = GAUSSIAN  # variance of a token's log-ratio, divided by the KL
    seen: int = 0  # pairs in earlier windows
    cooldown: int = 0
    measured_steps: int = 0
    steps_in_band: int = 0


class BranchController:
    """One branch's coefficient. Without a `law` it is fixed, and only the share of steps in the band is tracked."""

    def __init__(self, branch: str, target: KLTarget, law: KLLaw | None, windows: WindowSettings) -> None:
        self.branch = branch
        self.target = target
        self.asked = target.beta  # coefficient requested by the `law`, within the target's `reach`
        self._law = law if target.has_band else None
        self._law_state: State = {}
        self._windows = windows
        self._at = _WindowCounts()

    @property
    def beta(self) -> float:
        return min(self.asked, self.target.bounds[1])

    @property
    def share(self) -> float:
        """The weight of the branch's rewards: 1, or less if the requested coefficient exceeds the maximum. The
        quotient of coefficient and share is the requested coefficient."""
        return self.beta / self.asked if self.asked > self.beta else 1.0

    @property
    def share_in_band(self) -> float:
        """The share of measured steps with a KL inside the band. NaN without a band or measurements."""
        if not self.target.has_band or not self._at.measured_steps:
            return math.nan
        return self._at.steps_in_band / self._at.measured_steps

    @property
    def notice(self) -> str:
        """The controller's notice about the last window, for the log; may be empty."""
        return str(self._law_state.get(NOTICE, ""))

    def observe(self, kl_sum: float, tokens: float) -> str:
        """Process one optimizer step's measurement over all ranks: the sum of the KL over the branch's `tokens`, in
        nats. Returns a log line about the adjustment, effective from the next step; empty if not `WORTH_A_LINE`.
        Steps without tokens or with a non-finite sum are ignored; a window without tokens has no effect."""
        measured = tokens > 0 and math.isfinite(kl_sum)
        if measured:
            self._at.measured_steps += 1
            self._at.steps_in_band += self.target.contains(kl_sum / tokens)
        if self._law is None:
            return ""
        if self._at.cooldown > 0:
            self._at.cooldown -= 1
            return ""
        if measured:
            self._add(kl_sum / tokens, tokens)
        self._at.steps += 1
        least = self._windows.update_steps
        if self._at.steps < least or (self._at.steps < least * MOST_WINDOWS and not self._is_readable):
            return ""
        return self._close_window(self._law)

    def _add(self, kl: float, tokens: float) -> None:
        self._at.kl_sum += kl * tokens
        self._at.tokens += tokens
        if self._at.last is not None:  # only neighbours, so that drift doesn't count as noise
            before, count = self._at.last
            self._at.squares += (kl - before) ** 2 / (1 / tokens + 1 / count)
            self._at.pairs += 1
        self._at.last = [kl, tokens]

    @property
    def _is_readable(self) -> bool:
        """Whether the window's KL is precise enough for its distance from the band's centre to be meaningful."""
        if not self._at.tokens or self._at.seen + self._at.pairs < FEWEST_PAIRS:
            return True
        low, high = self.target.edges
        kl = self._at.kl_sum / self._at.tokens
        far = math.log(high / low) / 2 * max(1.0, abs(self.target.distance(kl)))
        return math.sqrt(self._dispersion_seen() / (max(kl, low) * self._at.tokens)) <= READABLE * far

    def _dispersion_seen(self) -> float:
        if not self._at.pairs:
            return self._at.dispersion
        kl = max(self._at.kl_sum / self._at.tokens, self.target.edges[0])  # near 0, the quotient has no bound
        now = max(GAUSSIAN, self._at.squares / self._at.pairs / kl)  # averaged in logarithms, so outliers soon fade
        return float(self._at.dispersion**KNOWN_NOISE * now ** (1 - KNOWN_NOISE))

    def _close_window(self, law: KLLaw) -> str:
        kl_sum, tokens, self._at.dispersion = self._at.kl_sum, self._at.tokens, self._dispersion_seen()
        self._at.kl_sum, self._at.tokens, self._at.steps = 0.0, 0.0, 0
        self._at.seen += self._at.pairs
        self._at.squares, self._at.pairs, self._at.last = 0.0, 0, None
        if not tokens:
            return ""
        kl, before = kl_sum / tokens, self.asked
        least, most = self.target.reach
        window = Window(target=self.target, beta=before, kl=kl, tokens=tokens)
        after, self._law_state = moved(law, window, self._law_state)
        self.asked = max(least, min(most, after))
        if self.asked == before:
            return ""
        self._at.cooldown = self._windows.cooldown_steps
        if self.target.contains(kl) and max(self.asked, before) < WORTH_A_LINE * min(self.asked, before):
            return ""
        place = f"{'in' if self.target.contains(kl) else 'outside'} [{self.target.low:g}, {self.target.high:g}]"
        return f"{self.branch}: KL {kl:.4f} {place}, beta {before:.4g} -> {self.asked:.4g}"

    def state_dict(self) -> State:
        law = None if self._law is None else name_of(self._law)
        return {"beta": self.asked, **asdict(self._at), "law": law, "law_state": self._law_state}

    def load_state_dict(self, state: State) -> None:
        """Resume from `state_dict`. A coefficient outside the current reach is clipped; without a `law` the configured
        one is kept. A `law` of a different class starts with an empty state."""
        self._at = _WindowCounts(**{key: state[key] for key in _WindowCounts.__slots__ if state.get(key) is not None})
        if self._law is not None:
            least, most = self.target.reach
            self.asked = max(least, min(most, state["beta"]))
            self._law_state = state["law_state"] if state.get("law") == name_of(self._law) else {}


class KLControl:
    """The coefficients of all branches, with `targets` in branch id order. Without a `law` they are fixed."""

    def __init__(self, targets: Mapping[str, KLTarget], law: KLLaw | None, windows: WindowSettings) -> None:
        self.branches = [BranchController(branch, target, law, windows) for branch, target in targets.items()]

    @property
    def betas(self) -> list[float]:
        return [branch.beta for branch in self.branches]

    @property
    def shares(self) -> list[float]:
        return [branch.share for branch in self.branches]

    def observe(self, measured: Sequence[tuple[float, float]]) -> list[str]:
        """Process one optimizer step: by branch id, the sum of the KL in nats and the tokens, over all ranks. Returns
        a log line per adjustment."""
        return [*filter(None, (branch.observe(*sums) for branch, sums in zip(self.branches, measured, strict=True)))]

    def state_dict(self) -> dict[str, State]:
        return {branch.branch: branch.state_dict() for branch in self.branches}

    def load_state_dict(self, state: Mapping[str, State]) -> None:
        for branch in self.branches:
            if branch.branch in state:
                branch.load_state_dict(state[branch.branch])


class BranchedKL:
    """The KL of all branches, with `targets` in branch id order. Without a `law` the coefficients are fixed."""

    def __init__(
        self, targets: Mapping[str, KLTarget], law: KLLaw | None, windows: WindowSettings, settings: PenaltySettings
    ) -> None:
        self.control = KLControl(targets, law, windows)
        self.settings = settings
        self._sums: dict[str, torch.Tensor] = {}  # by TRL's mode: (branches, len(SUMS)), this rank's, not drained yet

    def penalty(self, inputs: MicroBatch, scale: float = 1.0) -> BranchPenalty:
        """The penalty of one TRL micro-batch, using the current coefficients times `scale`."""
        return BranchPenalty(inputs, [scale * beta for beta in self.control.betas], self.settings, self.control.shares)

    def add(self, penalty: BranchPenalty, mode: str) -> None:
        """Add the penalty's measurements of its micro-batch, whose loss must have been computed. `mode`: `"train"`, or
        `"eval"` for an evaluation, which leaves a step's sums alone."""
        sums = penalty.sums()
        self._sums[mode] = self._sums[mode] + sums if mode in self._sums else sums

    def drain_sums(self, mode: str) -> torch.Tensor:
        """This rank's sums since the mode's last call, shape (branches, len(`penalty.SUMS`)), float64."""
        if mode not in self._sums:
            raise RuntimeError("`drain_sums` was called before `add`")
        return self._sums.pop(mode)

    def forget_sums(self) -> None:
        self._sums.clear()

    def end_step(self, totals: Sequence[Sequence[float]], step: int, *, is_logged: bool) -> None:
        """Adjust the coefficients according to one optimizer step's measurement, effective from the next step.
        `totals`: sums over all ranks, by branch id, then by `penalty.SUMS`. `step` is for the log."""
        before = [branch.notice for branch in self.control.branches]
        moves = self.control.observe([(kl, weight) for kl, *_, weight in totals])
        if not is_logged:
            return
        for move in moves:
            _PLAIN_LOGGER.info(f"[BranchedKL@{step}] {move}")
        for branch, notice, (kl, penalty, *_) in zip(self.control.branches, before, totals, strict=True):
            if branch.notice and branch.notice != notice:
                _PLAIN_LOGGER.warning(f"[BranchedKL@{step}] {branch.branch}: {branch.notice}")
            if not math.isfinite(kl + penalty):
                _PLAIN_LOGGER.warning(
                    f"[BranchedKL@{step}] {branch.branch}: the KL is {kl}, its penalty {penalty}: log-probs of the "
                    "policy or the reference are invalid, or overflow without a clamp"
                )

    def save(self, checkpoint: Path) -> None:
        text = json.dumps(self.control.state_dict(), indent=2)
        (checkpoint / KL_STATE_FILE).write_text(text + "\n", encoding="utf-8")

    def load(self, checkpoint: Path) -> None:
        """Resume from a checkpoint. If it lacks a KL state, start as configured, with a warning."""
        path = checkpoint / KL_STATE_FILE
        if not path.is_file():
            logger.warning(f"{checkpoint} lacks {KL_STATE_FILE}: the KL coefficients start as configured")
            return
        self.control.load_state_dict(json.loads(path.read_text(encoding="utf-8")))
        betas = ", ".join(f"{branch.branch} beta {branch.beta:.4g}" for branch in self.control.branches)
        logger.info(f"[BranchedKL] resuming with {betas}")
