"""What the components and parts of a trainer use of TRL's: values and bound callables. `trl_access` makes them."""

from asyncio import AbstractEventLoop
from collections.abc import Callable, Mapping, MutableSequence, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator
from transformers import GenerationConfig, PreTrainedTokenizerBase
from transformers.trainer_callback import CallbackHandler

from salesrl_trl.generation.sampler import Finished, Generate, Handle, Start
from salesrl_trl.rollout.in_flight import Rollout
from salesrl_trl.rollout.rollout_scoring import Output
from salesrl_trl.types import Example
from salesrl_trl.update.stopping import StepSnapshot

if TYPE_CHECKING:
    from salesrl_trl.generation.vllm import SalesVLLMGeneration  # imports vLLM


@dataclass(frozen=True, kw_only=True, slots=True)
class Hooks:
    """Values and bound callables of TRL's trainer, which `trl_access` makes. No component gets the trainer itself."""

    model: torch.nn.Module
    ref_model: torch.nn.Module | None
    step: Callable[[], int]
    last_step: Callable[[], int]
    accelerator: Accelerator
    is_deepspeed: bool
    updates: bool  # whether steps change the policy
    engine: "SalesVLLMGeneration | GenerationConfig"
    """The engine, or the settings with which the policy itself generates."""
    has_rollout_func: bool
    tools: str | None
    """`"tools"` or `"an environment"`: what completions may call while TRL generates them. `None` for neither."""
    tool_names: Sequence[str]
    tokenizer: PreTrainedTokenizerBase
    eos_token_ids: Sequence[int]
    chat_template: str | None
    reward_weights: Sequence[float]
    reward_names: Sequence[str]  # under which TRL logs the functions of these weights
    reward_answered: Sequence[bool]
    group: Callable[[], int]  # completions of a prompt at the moment: in training, or in an evaluation
    reward_arguments: Callable[[], Mapping[str, object]]
    """Returns what reward functions may ask for beside columns: `reward.scorer.TRL_ARGUMENTS`. A run has its own."""
    has_entropy_bonus: bool
    has_aux_loss: bool
    num_generations_eval: int
    generate: Generate
    ask: Start  # the same by vLLM, each completion reported when it is finished
    converse: Start  # the same for completions that may call tools
    functions: Sequence[Callable[..., Any]]  # those of `tools`, without an environment's
    tools_loop: Callable[[], AbstractEventLoop]  # on which tools run
    play: Callable[[Sequence[Example], Finished, bool], Handle]  # plays an episode with each row
    go_on: Callable[[], None]  # generates the next turns of those that are out
    reads_pictures: bool
    logps_of: Callable[[Mapping[str, torch.Tensor]], torch.Tensor]
    """Log-probs of a batch's completions under the current policy, shape (B, T)."""
    score: Callable[[Rollout], Output]
    advantages: Callable[[], MutableSequence[float]]
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
    restore: Callable[[StepSnapshot], None]
