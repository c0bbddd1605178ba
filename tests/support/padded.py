"""Padded batches as TRL makes them, and TRL's own passes over them."""

import contextlib
import inspect
import types

import torch
from accelerate import PartialState
from trl import GRPOTrainer
from trl.trainer.utils import add_fused_lm_head

from salesrl_trl.shared_prompts.shared_passes import PassSettings, SharedPrompts

VOCABULARY = 97
WIDTH = 10
"""Columns of the completions."""
PROMPTS = (7, 7, 7, 12, 12, 1)
"""Tokens of each row's prompt. Equal ones are the same prompt."""
COMPLETIONS = (10, 3, 6, 1, 0, 4)
"""Tokens of each row's completion."""


def padded_batch(prompts=PROMPTS, completions=COMPLETIONS, seed=0):
    """Ids and mask, both (B, 12 + WIDTH): prompts padded on the left, completions on the right."""
    draw = torch.Generator().manual_seed(seed)
    first = max(prompts)
    ids = torch.randint(3, VOCABULARY, (len(prompts), first + WIDTH), generator=draw)
    text_of = {length: torch.randint(3, VOCABULARY, (length,), generator=draw) for length in prompts}
    mask = torch.zeros_like(ids)
    for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        ids[row, first - prompt : first] = text_of[prompt]
        mask[row, first - prompt : first + completion] = 1
    return ids * mask, mask


def trls_own(model, *args, **kwargs):
    """TRL's method, without a trainer."""
    method = inspect.unwrap(GRPOTrainer._get_per_token_logps_and_entropies)
    accelerator = types.SimpleNamespace(autocast=contextlib.nullcontext)
    return method(types.SimpleNamespace(accelerator=accelerator), model, *args, **kwargs)


def shared(model, highest=int, **given):
    """This package's way through the model. Adds TRL's head to it."""
    PartialState()  # of the loggers
    settings = PassSettings(is_on=True, autocast=contextlib.nullcontext, highest=highest, **given)
    base = model.get_base_model() if hasattr(model, "peft_config") else model
    add_fused_lm_head(base, temperature=0.9, outputs=("log_probs", "entropy"))
    return SharedPrompts(model, settings)


def apart(ours, theirs):
    """The norm of the difference over the norm."""
    return ((ours - theirs).norm() / theirs.norm()).item()


def gradient(model, logps, entropies, aux_loss=None, zero=True):
    """The gradient of a loss that weighs each token otherwise, flattened; added to what is there without `zero`."""
    if zero:
        model.zero_grad()
    weights = torch.randn(logps.shape, generator=torch.Generator().manual_seed(1)).to(logps.device)
    loss = (logps * weights).sum() + 0.3 * (entropies * weights.flip(1)).sum()
    (loss if aux_loss is None else loss + 0.5 * aux_loss).backward()
    grads = [each.grad for each in model.parameters() if each.grad is not None]
    return torch.cat([(each.full_tensor() if hasattr(each, "full_tensor") else each).flatten() for each in grads])
