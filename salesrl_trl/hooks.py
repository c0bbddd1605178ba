"""TRL's trainer, as far as the rooms use it.

Owns the list of values and bound callables. Neither this package's trainer nor TRL's is handed to any room.
"""

from collections.abc import Callable, Mapping, MutableSequence, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers.trainer_callback import CallbackHandler

from salesrl_trl.generation.sampler import Ask, Generate
from salesrl_trl.rollout.pipeline import Rollout
from salesrl_trl.rollout.scoring import Output


@dataclass(frozen=True, kw_only=True, slots=True)
class Hooks:
    """The parts of TRL's trainer."""

    model: torch.nn.Module
    """The policy, with its adapter if there is one."""
    unwrapped: Callable[[], torch.nn.Module]
    """The policy without the wrappers of distributed training."""
    ref_model: torch.nn.Module | None
    """TRL's own copy of the reference policy."""
    step: Callable[[], int]
    """Optimizer steps done."""
    accelerator: Any
    """accelerate's `Accelerator`, which publishes no types."""
    is_deepspeed: bool
    """Whether DeepSpeed owns the optimizer."""
    engine: Any
    """What generates: TRL's `VLLMGeneration`, or transformers' `GenerationConfig`."""
    has_rollout_func: bool
    """Whether a `rollout_func` generates."""
    tokenizer: Any
    """The policy's tokenizer. transformers publishes no types."""
    pad_to_multiple_of: int | None
    """TRL's setting: by which columns of tensors are padded."""
    eos_token_ids: Sequence[int]
    """Tokens that end a completion."""
    reward_weight: float
    """TRL's weight of the reward."""
    has_entropy_bonus: bool
    """Whether the loss has an entropy bonus."""
    has_aux_loss: bool
    """Whether the loss has the auxiliary loss of a mixture's router."""
    num_generations_eval: int
    """Completions of a held-out row."""
    generate: Generate
    """TRL's `_generate`."""
    ask: Ask
    """The same of a server, without waiting."""
    logps_of: Callable[[Mapping[str, torch.Tensor]], torch.Tensor]
    """Log-probs of a batch's completions under the policy as it is, shape (B, T)."""
    score: Callable[[Rollout], Output]
    """TRL's `_generate_and_score_completions`."""
    advantages: Callable[[], MutableSequence[float]]
    """That column of TRL's table of completions."""
    set_aside: Callable[[], AbstractContextManager[None]]
    """While active: evaluation mode, one completion a prompt; TRL's figures and tables stay as they are."""
    drop_gradients: Callable[[], None]
    """Sets all gradients to `None`."""
    save: Callable[[Path], None]
    """Writes the policy into a folder."""
    log: Callable[[Mapping[str, float | None]], None]
    """Adds an entry to the log, without what TRL gathers for a step."""
    callbacks: CallbackHandler
    """TRL's callbacks."""
    eval_dataset: Any
    """Held-out rows."""
    position: Callable[[], tuple[int, bool]]
    """Micro-steps done, and whether a generation batch is at hand to go on with."""
