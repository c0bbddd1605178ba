"""The end of the last optimizer step: what a checkpoint holds beside weights and optimizer, as it was then.

`stopping` takes it after each step, and undoes a step that is cut off: weights and optimizer have not moved since.
"""

import copy
import random
from typing import Any

import numpy as np
import torch
from transformers import TrainerState

from salesrl_trl.kl.branched import BranchedKL


class StepSnapshot:
    """The state at the end of an optimizer step: transformers' counts, the learning rate, KL coefficients, and the
    `position`: micro-steps, and the slices of the generation batch under way, as TRL counts and keeps them."""

    def __init__(
        self, state: TrainerState, optimizer: torch.optim.Optimizer, scheduler: Any, kl: BranchedKL | None,
        position: tuple[int, list[Any] | None],
    ) -> None:  # fmt: skip
        self.step: int = state.global_step
        self._owners = (state, optimizer, scheduler, kl)
        self._position = position
        self._kl = None if kl is None else copy.deepcopy(kl.control.state_dict())
        self._counts = (state.global_step, state.epoch, state.num_input_tokens_seen)
        self._lines = len(state.log_history)
        self._rates = [group["lr"] for group in optimizer.param_groups]
        self._scheduler = copy.deepcopy(scheduler.state_dict())
        self._generators = (random.getstate(), np.random.get_state(), torch.get_rng_state())
        self._on_device = torch.cuda.get_rng_state() if torch.cuda.is_available() else None

    def restore(self) -> tuple[int, list[Any] | None]:
        """Set all of it back. Returns the position, which the trainer sets back itself."""
        state, optimizer, scheduler, kl = self._owners
        state.global_step, state.epoch, state.num_input_tokens_seen = self._counts
        del state.log_history[self._lines :]
        scheduler.load_state_dict(self._scheduler)
        for group, rate in zip(optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate
        if kl is not None and self._kl is not None:
            kl.control.load_state_dict(self._kl)
        python, numpy, torchs = self._generators
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(torchs)
        if self._on_device is not None:
            torch.cuda.set_rng_state(self._on_device)
        return self._position
