"""Model FLOPs of a causal language model's forward and backward pass, for `instruments`: as in PaLM (Chowdhery et al.
2022, appendix B), computed from weight shapes. Recomputation (gradient checkpointing) lowers the utilisation."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from peft import PeftMixedModel, PeftModel
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

OTHER_COSTS = (
    "attention_chunk_size", "num_kv_shared_layers", "num_experts", "num_local_experts", "n_routed_experts",
    "kv_lora_rank", "is_encoder_decoder",
)  # fmt: skip
"""Config fields that make the cost of tokens or layers non-uniform."""


class UnknownFlops(ValueError):
    """The cost of this model's tokens can't be determined. The message states the reason, for a log line."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFlops:
    """FLOPs of the policy's forward and backward pass, as coefficients of a batch's sums.

        FLOPs = per_token * tokens + per_head_token * completion tokens + per_pair * pairs

    Example: one layer with 4 heads of size 16 has `per_pair=12 * 64`, of which the forward pass accounts for 4 * 64.
    """

    per_token: float  # FLOPs per token of all matrix products except attention and the output head
    per_head_token: float  # FLOPs per completion token of the output head, which processes no other tokens
    per_pair: float  # FLOPs per query-key pair, over all layers

    def sums(
        self, lengths: torch.Tensor, completion_lengths: torch.Tensor, has_prompt: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The sums over a batch that `total` needs: tokens, completion tokens and pairs; shape (3,), float64. Can be
        added across batches and ranks. Does not synchronise with the device.

        - `lengths`: shape (B,), integers: tokens of each sequence, prompt and completion, without padding.
        - `completion_lengths`: shape (B,), integers.
        - `has_prompt`: shape (B,), bool: False if another completion's forward pass already processed the prompt.
        """
        left_out = lengths - completion_lengths
        left_out = torch.zeros_like(left_out) if has_prompt is None else torch.where(has_prompt, 0, left_out)
        tokens, pairs = lengths - left_out, attention_pairs(lengths) - attention_pairs(left_out)
        return torch.stack([each.to(torch.int64).sum() for each in (tokens, completion_lengths, pairs)]).double()

    def total(self, sums: Sequence[float]) -> float:
        """FLOPs of forward and backward passes, from `sums`."""
        tokens, completion_tokens, pairs = sums
        return self.per_token * tokens + self.per_head_token * completion_tokens + self.per_pair * pairs


def attention_pairs(lengths: torch.Tensor) -> torch.Tensor:
    """Query-key pairs of causal attention per sequence: s * (s + 1) / 2, int64."""
    lengths = lengths.to(torch.int64)
    return lengths * (lengths + 1) // 2


def model_flops(model: nn.Module) -> ModelFlops:
    """The coefficients of an unwrapped transformers causal language model, with or without a PEFT adapter.

    A weight costs 2 FLOPs per token in the forward pass, 2 for its input's gradient, and 2 more if trainable. Raises
    `UnknownFlops` for models whose tokens differ in cost.
    """
    base = model.get_base_model() if isinstance(model, PeftModel | PeftMixedModel) else model
    if not isinstance(base, PreTrainedModel):
        raise UnknownFlops("the model is not a transformers model")
    config, head = base.config, base.get_output_embeddings()
    if config.get_text_config() is not config:
        raise UnknownFlops("it is multimodal: its config contains a text config")
    if others := [field for field in OTHER_COSTS if getattr(config, field, None)]:
        raise UnknownFlops(f"its tokens or layers differ in cost ({', '.join(others)})")
    # without `layer_types` (Mistral, Phi-3), `sliding_window` applies to every layer
    has_window = getattr(config, "use_sliding_window", True) and getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or ["sliding_attention" if has_window else "full_attention"]
    if others := sorted({*kinds} - {"full_attention"}):
        raise UnknownFlops(f"it has layers of type {', '.join(others)}")
    if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
        raise UnknownFlops("its adapter adds tokens to the prompt")
    if getattr(base, "is_quantized", False) and not getattr(base, "is_loaded_in_4bit", False):
        raise UnknownFlops("its weights are packed")
    adapters, active = {*getattr(model, "peft_config", ())}, getattr(model, "active_adapter", ())
    idle = {"original_module", *(adapters - {*([active] if isinstance(active, str) else active)})}
    layers = [part for name, part in base.named_modules() if idle.isdisjoint(name.split("."))]
    costs = {layer: _cost(layer) for layer in layers if isinstance(layer, nn.Linear | Conv1D)}
    of_head = sum(costs.pop(module, 0) for module in head.modules())
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    pairs = 12 * config.num_hidden_layers * config.num_attention_heads * width
    return ModelFlops(per_token=sum(costs.values()), per_head_token=of_head, per_pair=pairs)


def _cost(layer: nn.Linear | Conv1D) -> int:
    inputs, outputs = (layer.nx, layer.nf) if isinstance(layer, Conv1D) else (layer.in_features, layer.out_features)
    return inputs * outputs * (6 if layer.weight.requires_grad else 4)  # by its shape, as ZeRO-3 partitions weights
