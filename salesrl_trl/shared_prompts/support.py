"""Which models and settings can't share prompts, and why. The comparison of `shared_passes` finds what no reason
foresees."""

from collections.abc import Callable, Iterator, Sequence

import torch
from accelerate.utils import extract_model_from_parallel
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from salesrl_trl.shared_prompts.shared_attention import SDPA

FLASH = "flash"
"""Part of the names of attentions that compute as `flash` does."""
CHANGING_ROPE = ("dynamic", "longrope")
"""Parts of the names of rotary embeddings whose frequencies follow the longest sequence of a batch."""
KINDS = {"full_attention", "sliding_attention"}
"""Kinds of layers that can share prompts. Sliding ones can as long as no sequence is longer than their window."""


def why_not_shared(model: nn.Module) -> str | None:
    """The first reason why this model can't share prompts, unwrapped from DDP and DeepSpeed; `None` if there is
    none."""
    return next(_reasons(model), None)


def attention_of(model: nn.Module) -> str:
    return str(_base(model).config._attn_implementation)


def window_of(model: nn.Module) -> int | None:
    config = _base(model).config
    kinds = getattr(config, "layer_types", None)
    has_window = getattr(config, "use_sliding_window", True) and (kinds is None or "sliding_attention" in kinds)
    return getattr(config, "sliding_window", None) if has_window else None


def rope_limit_of(model: nn.Module) -> int | None:
    """Columns from which the rotary embedding depends on the longest sequence of a batch; `None` if it never does."""
    config = _base(model).config
    rope = getattr(config, "rope_parameters", None) or {}
    of_layers = [rope] if "rope_type" in rope else [entry for entry in rope.values() if isinstance(entry, dict)]
    changing = [layer for layer in of_layers if any(kind in layer.get("rope_type", "") for kind in CHANGING_ROPE)]
    limits = [layer.get("original_max_position_embeddings") or config.max_position_embeddings for layer in changing]
    return min(limits, default=None)


def has_dropout(model: nn.Module) -> bool:
    layers = any(isinstance(module, nn.Dropout) and module.p > 0 for module in model.modules())
    return layers or bool(getattr(_base(model).config, "attention_dropout", 0.0))


def draws_beyond_dropout(model: nn.Module, calm: torch.Tensor, make_pass: Callable[[], torch.Tensor]) -> bool:
    """Whether a pass in training draws random numbers other than dropout: noise on embeddings, a router's jitter,
    layers that are left out. Where attention has dropout, this can't be found out. The model comes in evaluation mode,
    and is left in it, with the random generators where they were. `calm`: the result of `make_pass` in that mode."""
    if getattr(_base(model).config, "attention_dropout", 0.0):
        return False
    gpus = [device for device in {parameter.device for parameter in model.parameters()} if device.type == "cuda"]
    with torch.random.fork_rng(gpus):
        before = _random_states(gpus)
        model.train()
        for module in model.modules():
            if isinstance(module, (nn.modules.dropout._DropoutNd, GradientCheckpointingLayer)):
                module.training = False
        drawn = make_pass()
        model.eval()
        has_drawn = any(not torch.equal(*states) for states in zip(before, _random_states(gpus), strict=True))
    return has_drawn and not torch.equal(calm, drawn)


def _random_states(gpus: Sequence[torch.device]) -> list[torch.Tensor]:
    return [torch.get_rng_state(), *map(torch.cuda.get_rng_state, gpus)]


def _base(model: nn.Module) -> PreTrainedModel:
    model = extract_model_from_parallel(model)  # DDP and DeepSpeed wrap the policy
    get = getattr(model, "get_base_model", None)
    base: PreTrainedModel = model if get is None else get()
    return base


def _reasons(model: nn.Module) -> Iterator[str]:
    adapter = getattr(model, "active_peft_config", None)
    if getattr(adapter, "is_prompt_learning", False):
        yield "the model's adapter adds tokens to the prompt"
    if getattr(adapter, "alora_invocation_tokens", None) or getattr(adapter, "peft_type", None) == "LILY":
        yield "the model's adapter follows the tokens of a whole sequence"
    if hasattr(model, "_orig_mod"):
        yield "the model is compiled"
    if len({parameter.device for parameter in model.parameters()}) > 1:
        yield "the model is split over devices"
    base = _base(model)
    config = base.config
    if config.get_text_config() is not config:
        yield "the model takes more than text"
    if config.is_encoder_decoder:
        yield "the model is an encoder-decoder"
    kinds = set(getattr(config, "layer_types", None) or ())
    if kinds - KINDS:
        yield f"the model has layers of type {', '.join(sorted(kinds - KINDS))}"
    if getattr(base, "_is_stateful", False):
        yield "the model has recurrent layers"
    if getattr(config, "attention_chunk_size", None):
        yield "the model's attention is cut into chunks"
    if not getattr(config, "is_causal", True):
        yield "the model's attention is not causal"
    if not getattr(base, "_supports_attention_backend", False):
        yield "the model's attention does not go through transformers' interface"
    name = attention_of(model)
    if name != SDPA and FLASH not in name:
        yield f"the model's attention is `{name}`. Expected `{SDPA}` or flash attention: set `attn_implementation`"
    if name != SDPA and getattr(config, "attn_logit_softcapping", None):
        yield "the model's attention scores are capped"
