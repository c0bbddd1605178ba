"""What the components use of TRL's trainer.

Owns this list: values and bound callables, which `trl_access` makes. No component gets this package's trainer, or
TRL's.
"""

from collections.abc import Callable, Mapping, MutableSequence, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate import Accelerator
from transformers import GenerationConfig, PreTrainedTokenizerBase
from transformers.trainer_callback import CallbackHandler

from salesrl_trl.generation.sampler import Ask, Generate
from salesrl_trl.generation.vllm import SalesVLLMGeneration
from salesrl_trl.rollout.pipeline import Rollout
from salesrl_trl.rollout.scoring import Output
from salesrl_trl.update.step_snapshot import StepSnapshot


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
    last_step: Callable[[], int]
    """The optimizer step with which the run ends."""
    accelerator: Accelerator
    is_deepspeed: bool
    """Whether DeepSpeed owns the optimizer."""
    engine: SalesVLLMGeneration | GenerationConfig
    """The engine, or the settings with which the policy itself generates."""
    has_rollout_func: bool
    tools: str | None
    """`"tools"` or `"an environment"`: what completions may call while TRL generates them. `None` for neither."""
    tokenizer: PreTrainedTokenizerBase
    pad_to_multiple_of: int | None
    """TRL's setting: padded tensors have a multiple of this many columns."""
    eos_token_ids: Sequence[int]
    """Tokens that end a completion."""
    reward_weights: Sequence[float]
    """TRL's weight of each reward function."""
    reward_answered: Sequence[bool]
    """Of each reward function: whether the package calls it."""
    group: Callable[[], int]
    """Completions of a prompt at the moment: in training, or in an evaluation."""
    reward_arguments: Callable[[], Mapping[str, object]]
    """Returns what reward functions may ask for beside columns: `reward.scorer.TRL_ARGUMENTS`. A run has its own."""
    has_entropy_bonus: bool
    has_aux_loss: bool
    """Whether the loss has the auxiliary loss of a mixture's router."""
    num_generations_eval: int
    """Completions of a held-out row."""
    generate: Generate
    """TRL's `_generate`."""
    ask: Ask
    """The same for a server, without waiting."""
    logps_of: Callable[[Mapping[str, torch.Tensor]], torch.Tensor]
    """Log-probs of a batch's completions under the current policy, shape (B, T)."""
    score: Callable[[Rollout], Output]
    """TRL's `_generate_and_score_completions`."""
    advantages: Callable[[], MutableSequence[float]]
    """The column `advantages` of TRL's table of completions."""
    set_aside: Callable[[], AbstractContextManager[None]]
    """While active: evaluation mode, one completion a prompt; TRL's figures and tables stay as they are."""
    drop_gradients: Callable[[], None]
    save: Callable[[Path], None]
    log: Callable[[Mapping[str, float | None]], None]
    """Adds an entry to the log, without the figures that TRL gathers for a step."""
    callbacks: CallbackHandler
    eval_dataset: object
    position: Callable[[], tuple[int, bool]]
    """Returns the micro-steps done, and whether a generation batch is there to go on with."""
    capture: Callable[[], StepSnapshot]
    """Returns the state at the end of an optimizer step."""
    restore: Callable[[StepSnapshot], None]
    """Sets the trainer back to it."""
