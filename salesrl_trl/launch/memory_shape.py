"""The figures of a model that decide the memory of its training, counted without its weights."""

import functools
import re
from dataclasses import dataclass, replace

import torch
from transformers import PreTrainedModel
from trl import ModelConfig

from salesrl_trl.errors import ConfigError
from salesrl_trl.launch.checks.model import empty_model, positions_of, put_adapter

_READ_ONE = re.compile(r"([qkv]|gate|up)_proj$")  # of one block those of attention, and of an MLP, have one input


class UnknownShape(ConfigError):
    """A model is no decoder of attention and MLP blocks, by its configuration."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """A decoder's figures. Widths and counts are numbers of parameters or of values per token, not bytes."""

    parameters: int
    linear: int  # parameters of the linear layers without the output head
    embedding: int
    is_tied: bool  # the output head is the token embedding
    layers: int
    hidden: int
    intermediate: int  # width of a block's MLP. Of a mixture: of all experts that a token visits, shared ones included
    heads: int
    query: int  # width of a token's queries, over all heads
    key_value: int  # width of a token's keys, over all heads of keys. Its values are as wide
    vocabulary: int
    positions: int | None  # tokens that the model is made for, if its configuration says
    number_bytes: int  # of a number in the checkpoint
    adapters: int = 0  # parameters of LoRA's adapters
    adapter_inputs: float = 0.0  # widths of the inputs that the adapters of one layer read, each once


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
    needed = ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size")
    if missing := [name for name in needed if not isinstance(getattr(text, name, None), int)]:
        raise UnknownShape(f"the configuration of {model.config.model_type} has no number for {', '.join(missing)}")

    def number(name: str, otherwise: int = 0) -> int:
        value = getattr(text, name, None) or otherwise
        return max(value) if isinstance(value, list) else value  # Gemma 3n has one for each block

    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    layers = [module for module in model.modules() if isinstance(module, torch.nn.Linear) and module is not head]
    heads, mlp = text.num_attention_heads, number("intermediate_size", 4 * text.hidden_size)
    width, expert = number("head_dim", text.hidden_size // heads), number("moe_intermediate_size", mlp)
    shared = number("shared_expert_intermediate_size", number("n_shared_experts") * expert)
    visited = number("num_experts_per_tok")
    return ModelShape(
        parameters=sum(weight.numel() for weight in model.parameters()),
        linear=sum(layer.weight.numel() for layer in layers),
        embedding=embedding.weight.numel(),
        is_tied=head is not None and head.weight is embedding.weight,
        layers=text.num_hidden_layers,
        hidden=text.hidden_size,
        intermediate=visited * expert + shared if visited else mlp,
        heads=heads,
        query=heads * width,
        key_value=number("num_key_value_heads", heads) * width,
        vocabulary=text.vocab_size,
        positions=positions_of(model.config),
        number_bytes=(model.config.dtype or torch.float32).itemsize,
    )


def with_adapters(shape: ModelShape, model: PreTrainedModel, lora: ModelConfig) -> ModelShape:
    """The figures with the adapters that PEFT puts on the empty model, which it changes."""
    from peft.tuners.lora import LoraLayer

    adapted = put_adapter(model, lora)
    widths = {
        _READ_ONE.sub("", name): int(module.in_features or 0)
        for name, module in adapted.named_modules()
        if isinstance(module, LoraLayer)
    }
    parameters = sum(weight.numel() for weight in adapted.parameters() if weight.requires_grad)
    layers = model.config.get_text_config().num_hidden_layers
    return replace(shape, adapters=parameters, adapter_inputs=sum(widths.values()) / layers)
