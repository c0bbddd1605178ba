"""The end of a run that was asked to stop.

Owns the way of a request, and the step after which all ranks stop together. `run_control` owns the error with which
the run ends. `stop_notice` carries the request to other processes.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch

from salesrl_trl.reward.desk import RewardDesk
from salesrl_trl.update.ranks import on_any_rank
from salesrl_trl.update.run_control import RunControl
from salesrl_trl.update.stop_notice import watched

STOPPED = "stopped"
"""Reason code of completions that were given up because the run was asked to stop."""


class Stopping:
    """Stops a run early, with a checkpoint.

    Args:
        run_control (`RunControl`):
            Ends the run.
        desk (`RewardDesk`):
            Its rewards are not waited for.
        device (`torch.device`):
            Of collectives.
        step (`Callable[[], int]`):
            Optimizer steps done.
    """

    def __init__(
        self, run_control: RunControl, desk: RewardDesk, device: torch.device, step: Callable[[], int]
    ) -> None:
        self._run_control = run_control
        self._desk = desk
        self._device = device
        self._step = step

    def request(self, reason: str) -> None:
        """End training after the optimizer step under way, on all ranks. From a signal handler too.

        Nothing is waited for: completions that are not scored by now are missing, so that the step may be skipped.
        The request reaches the other ranks at once. They wait for no reward either.

        Args:
            reason (`str`):
                What asked for it, for example `"SIGTERM"`.
        """
        self._run_control.requested = reason
        self._desk.cut_off(STOPPED)

    def watched(self) -> AbstractContextManager[None]:
        """While active, a request on one process reaches all others."""
        return watched(
            lambda: self._run_control.requested, lambda reason: self.request(f"{reason} of another process")
        )

    def agree(self) -> None:
        """Stop after the step that has just ended, if any rank was asked to; a collective."""
        if on_any_rank(self._run_control.requested is not None, self._device):
            self._run_control.stop(self._step())

    def raise_if_asked(self) -> None:
        """`agree`, and raise `RunStopped` on all ranks if any rank was asked to stop; a collective."""
        self.agree()
        if self._run_control.error is not None:
            raise self._run_control.error
