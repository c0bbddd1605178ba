"""From settings to the passes through the model.

Owns this mapping, and the settings with which TRL's own passes are made.
"""

import functools

from accelerate import Accelerator
from accelerate.logging import get_logger
from torch import nn

from salesrl_trl.config.training import SalesGRPOConfig
from salesrl_trl.rollout.correction import CorrectionAtStep
from salesrl_trl.rollout.model_passes import Passes
from salesrl_trl.shared_prompts.flash import HALVES
from salesrl_trl.shared_prompts.shared_passes import PassSettings, SharedPrompts
from salesrl_trl.update.ledger import Ledger
from salesrl_trl.update.ranks import highest

logger = get_logger(__name__)


def passes_of(
    args: SalesGRPOConfig, accelerator: Accelerator, model: nn.Module, ledger: Ledger, in_trls_order: str | None
) -> Passes:
    """The passes of one trainer.

    Args:
        args (`SalesGRPOConfig`), accelerator (`Accelerator`), ledger (`Ledger`):
            Of the trainer.
        model (`nn.Module`):
            The policy, without the wrappers of distributed training.
        in_trls_order (`str`, *optional*):
            Why the order of a generation batch's completions has to be TRL's.
    """
    reasons = {
        "`torch_compile` compiles the model for TRL's batches": args.torch_compile,
        "sequences are split over processes": getattr(args, "parallelism_config", None) is not None,
        "`neftune_noise_alpha` adds noise to each sequence, as much as its length asks for": args.neftune_noise_alpha,
    }
    of_all = functools.partial(highest, device=accelerator.device)
    settings = PassSettings(
        is_on=args.shared_prompts != "off",
        reason=next((each for each, is_there in reasons.items() if is_there), None),
        autocast=accelerator.autocast,
        most_tokens=args.pass_tokens,
        highest=of_all if args.is_sharded else int,
        highest_of_all=of_all,
    )
    prompts = SharedPrompts(model, settings)
    if prompts.is_on and in_trls_order is not None:
        logger.info(f"TRL's shuffle may part the completions of a prompt, because {in_trls_order}")
    return Passes(
        prompts,
        most_tokens=1 if args.is_sharded else args.pass_tokens,
        weights=sum(parameter.numel() for parameter in model.parameters()),
        is_light=args.gradient_checkpointing and _is_half_on_gpu(args, model),
        correction=correction_at_step(args),
        ledger=ledger,
        in_order=prompts.is_on and in_trls_order is None,
    )


def _is_half_on_gpu(args: SalesGRPOConfig, model: nn.Module) -> bool:
    """Whether a pass computes in 16 bits, and on a GPU."""
    weight = next(model.parameters())
    return weight.is_cuda and (args.bf16 or args.fp16 or weight.dtype in HALVES)


def correction_at_step(args: SalesGRPOConfig) -> CorrectionAtStep | None:
    """The correction for the sampler's distribution from the pass that trains; `None` where TRL's own pass for old
    log-probs is needed: without vLLM's correction, or with several updates of a generation batch."""
    corrects = args.use_vllm and args.vllm_importance_sampling_correction
    if args.shared_prompts == "off" or not corrects or args.gradient_accumulation_steps % args.window:
        return None
    return CorrectionAtStep(*args.sampler_correction)
