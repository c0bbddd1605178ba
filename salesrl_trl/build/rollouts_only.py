"""The trainer of `mode: rollouts`: it generates and scores as in training, and updates nothing.

Owns what is left out of a step. Everything else is the trainer's own, so figures and heartbeats are those of training.
"""

import torch
from torch import nn

from salesrl_trl.names import Phase
from salesrl_trl.trainer import SalesGRPOTrainer


class RolloutTrainer(SalesGRPOTrainer):
    """Makes the rollouts of each step. There is no pass, so there are no gradients and no state of an optimizer."""

    def training_step(self, model: nn.Module, inputs: object, *_: object, **__: object) -> torch.Tensor:
        """Generates and scores the rollouts that are due."""
        with self._timeline.phase(Phase.BATCHING):  # less the phases inside it
            model.train()
            self._prepare_inputs(inputs)  # type: ignore[no-untyped-call]
            self._step += 1
        if self.accelerator.sync_gradients:
            self._timeline.begin(Phase.OPTIMIZER)
        return torch.zeros((), device=self.accelerator.device)
