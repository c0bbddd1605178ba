"""The KL of all branches during training: penalty, windows, controller and saved state in one place.

Of an optimizer step: `penalty` and `add` for each micro-batch, `drain_sums` for this rank's sums, which
`Components.end_kl_step` adds up over ranks, and `end_step` takes the totals, moves the coefficients and logs each
move.
"""

import json
import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from accelerate.logging import get_logger

from salesrl_trl.kl.controller import KLControl, WindowSettings
from salesrl_trl.kl.law import KLLaw, KLTarget
from salesrl_trl.kl.penalty import BranchPenalty, MicroBatch, PenaltySettings
from salesrl_trl.names import KL_STATE_FILE, kl_of

logger = get_logger(__name__)  # its lines begin with the rank
_PLAIN_LOGGER = logging.getLogger(__name__)


class BranchedKL:
    """The KL of all branches. `targets` are in the order of branch ids. Without a `law` the coefficients stay."""

    def __init__(
        self, targets: Mapping[str, KLTarget], law: KLLaw | None, windows: WindowSettings, settings: PenaltySettings
    ) -> None:
        self.control = KLControl(targets, law, windows)
        self.settings = settings
        self._reported: set[str] = set()  # branches whose share was said to shrink
        self._sums: torch.Tensor | None = None  # (branches, len(SUMS)) of this rank since the last optimizer step

    def penalty(self, inputs: MicroBatch, scale: float = 1.0) -> BranchPenalty:
        """The penalty of one of TRL's micro-batches, with the current coefficients times `scale`."""
        return BranchPenalty(inputs, [scale * beta for beta in self.control.betas], self.settings, self.control.shares)

    def add(self, penalty: BranchPenalty) -> None:
        """Add what the penalty measured of its micro-batch. Its loss must have been computed."""
        sums = penalty.sums()
        self._sums = sums if self._sums is None else self._sums + sums

    def drain_sums(self) -> torch.Tensor:
        """This rank's sums since the last call, shape (branches, len(`penalty.SUMS`)), float64."""
        if self._sums is None:
            raise RuntimeError("the KL's sums were asked for before `add` was given a micro-batch")
        sums, self._sums = self._sums, None
        return sums

    def forget_sums(self) -> None:
        self._sums = None

    def end_step(self, totals: Sequence[Sequence[float]], step: int, *, is_logged: bool) -> None:
        """Move the coefficients by the measurement of one optimizer step. They hold from the next step on.
        `totals`: sums over all ranks, by branch id, then by `penalty.SUMS`. `step` is for the log."""
        before = [branch.notice for branch in self.control.branches]
        decisions = self.control.observe([(kl, weight) for kl, *_, weight in totals])
        if not is_logged:
            return
        for decision in decisions:
            _PLAIN_LOGGER.info(f"[BranchedKL@{step}] {decision}")
        for branch, notice, (kl, penalty, *_) in zip(self.control.branches, before, totals, strict=True):
            if branch.share < 1 and branch.branch not in self._reported:
                self._reported.add(branch.branch)
                _PLAIN_LOGGER.warning(
                    f"[BranchedKL@{step}] {branch.branch}: the coefficient is at its bound of {branch.beta:g}. "
                    f"Its rewards count less in the update from here on, by {branch.target.least_share:g} at least; "
                    f"{kl_of(branch.branch, '_update_share')} has the share"
                )
            if branch.notice and branch.notice != notice:
                _PLAIN_LOGGER.warning(f"[BranchedKL@{step}] {branch.branch}: {branch.notice}")
            if not math.isfinite(kl + penalty):
                _PLAIN_LOGGER.warning(
                    f"[BranchedKL@{step}] {branch.branch}: the KL is {kl}, its penalty {penalty}: log-probs of the "
                    "policy or the reference are broken, or overflow without a clamp"
                )

    def save(self, checkpoint: Path) -> None:
        text = json.dumps(self.control.state_dict(), indent=2)
        (checkpoint / KL_STATE_FILE).write_text(text + "\n", encoding="utf-8")

    def load(self, checkpoint: Path) -> None:
        """Go on from a checkpoint. Without a state of the KL in it, start as configured, with a warning."""
        path = checkpoint / KL_STATE_FILE
        if not path.is_file():
            logger.warning(f"{checkpoint} holds no {KL_STATE_FILE}: the KL coefficients start as configured")
            return
        self.control.load_state_dict(json.loads(path.read_text(encoding="utf-8")))
        betas = ", ".join(f"{branch.branch} beta {branch.beta:.4g}" for branch in self.control.branches)
        logger.info(f"[BranchedKL] going on with {betas}")
