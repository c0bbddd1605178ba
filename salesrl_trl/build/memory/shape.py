"""The figures of a model that decide its memory. Owns the count, on a model that is built without its weights."""

import functools
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel
from trl import ModelConfig

from salesrl_trl.build.checks.model import empty_model, positions_of, put_adapter
from salesrl_trl.errors import ConfigError
from salesrl_trl.shared_prompts.support import why_not_shared, window_of


class UnknownShape(ConfigError):
    """A model is no decoder of attention and MLP blocks, by its configuration."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Adapters:
    """LoRA's adapters of a model."""

    parameters: int
    inputs: float  # sum of the widths of the adapted layers' inputs, over the modules of one layer


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """A decoder's figures. Widths and counts are numbers of parameters or of values per token, not bytes."""

    parameters: int
    linear: int  # parameters of the linear layers, without the output head and without experts that are one weight
    largest: int  # parameters of the largest weight of a block
    embedding: int
    is_tied: bool  # the output head is the token embedding
    layers: int
    hidden: int
    intermediate: int  # width of a block's MLP. Of a mixture: of all experts that a token visits, shared ones included
    routed: int  # experts that a token is sent to; 0 without a mixture
    routed_width: int  # the part of `intermediate` that they have, if they are one weight; else 0
    heads: int
    query: int  # width of a token's queries, over all heads
    key_value: int  # width of a token's keys, over all heads of keys. Its values are as wide
    norms_heads: bool  # queries and keys are normalised (Qwen3)
    vocabulary: int
    positions: int | None  # tokens that the model is made for, if its configuration says
    number_bytes: int  # of a number in the checkpoint
    adapters: Adapters | None = None
    shares_prompts: bool = True  # a group's prompt can go through it once
    window: int | None = None  # its sliding window in tokens, if it has one


def parameter_count(name_or_path: str, revision: str | None, trust_remote_code: bool) -> int:
    """The number of a model's parameters."""
    return sum(weight.numel() for weight in empty_model(name_or_path, revision, trust_remote_code).parameters())


@functools.lru_cache(maxsize=8)
def model_shape(name_or_path: str, revision: str | None, trust_remote_code: bool) -> ModelShape:
    """A model's figures, without adapters. Raises `UnknownShape`."""
    return shape_of(empty_model(name_or_path, revision, trust_remote_code))


def shape_of(model: PreTrainedModel) -> ModelShape:
    """The figures of a model, without adapters. Raises `UnknownShape`."""
    text = model.config.get_text_config()
    asked = ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size")
    if missing := [name for name in asked if not isinstance(getattr(text, name, None), int)]:
        raise UnknownShape(f"the configuration of {model.config.model_type} has no number for {', '.join(missing)}")
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    linear = [
        module.weight.numel()
        for module in model.modules()
        if isinstance(module, torch.nn.Linear) and module is not head  # the head's product is never cast as a whole
    ]
    experts = [
        weight.numel() for name, weight in model.named_parameters() if weight.dim() == 3 and ".experts." in name
    ]
    heads = text.num_attention_heads
    width = getattr(text, "head_dim", None) or text.hidden_size // heads
    visited = getattr(text, "num_experts_per_tok", None) or 0
    mlp = getattr(text, "intermediate_size", None) or 4 * text.hidden_size
    mlp = max(mlp) if isinstance(mlp, list) else mlp  # Gemma 3n has one for each block
    expert = getattr(text, "moe_intermediate_size", None) or mlp
    number = getattr(text, "n_shared_experts", None) or 0
    shared = getattr(text, "shared_expert_intermediate_size", None) or number * expert
    dtype = model.config.dtype or torch.float32
    return ModelShape(
        parameters=sum(weight.numel() for weight in model.parameters()),
        linear=sum(linear),
        largest=max([*linear, *experts], default=0),
        embedding=embedding.weight.numel(),
        is_tied=head is not None and head.weight is embedding.weight,
        layers=text.num_hidden_layers,
        hidden=text.hidden_size,
        intermediate=visited * expert + shared if visited else mlp,
        routed=visited,
        routed_width=visited * expert if experts else 0,
        heads=heads,
        query=heads * width,
        key_value=(getattr(text, "num_key_value_heads", None) or heads) * width,
        norms_heads=any(name.endswith("q_norm") for name, _ in model.named_modules()),
        vocabulary=text.vocab_size,
        positions=positions_of(model.config),
        number_bytes=torch.empty((), dtype=dtype).element_size(),
        shares_prompts=why_not_shared(model) is None,
        window=window_of(model),
    )


def adapters_of(model: PreTrainedModel, lora: ModelConfig) -> Adapters:
    """The adapters that PEFT puts on an empty model, which it changes."""
    from peft.tuners.lora import LoraLayer

    adapted = put_adapter(model, lora)
    layers = model.config.get_text_config().num_hidden_layers
    modules = [module for module in adapted.modules() if isinstance(module, LoraLayer)]
    return Adapters(
        parameters=sum(weight.numel() for weight in adapted.parameters() if weight.requires_grad),
        inputs=sum(int(module.in_features or 0) for module in modules) / layers,
    )
