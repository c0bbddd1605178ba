"""The FLOPs of a training pass of a causal language model, as PyTorch counts them, for `instruments`.

Model FLOPs as in PaLM (Chowdhery et al. 2022, appendix B): the matrix products that forward and backward pass need.
Work that is done a second time (gradient checkpointing) lowers the utilisation. The count runs on a copy without
memory (torch's `meta` device), built from the configuration: weights may be sharded or quantised.
"""

import copy
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import PreTrainedModel

TOKENS = 8  # length of the shortest counted sequence. Others are twice and three times as long.
OTHER_ATTENTION = ("attention_chunk_size", "global_head_dim", "num_kv_shared_layers")
"""Fields of a config with which layers have attention of unlike costs, or share keys."""


class UnknownFlops(ValueError):
    """The cost of this model's tokens can't be known. The message says why, for a log line."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFlops:
    """FLOPs of the policy's forward and backward pass, as the coefficients of a batch's sums.

        FLOPs = per_token * tokens + per_head_token * completion tokens + per_pair * pairs

    Example: one layer with 4 heads of 16, trained in full, has `per_pair=12 * 64`, of which 4 * 64 are the forward's.
    """

    per_token: float  # FLOPs per token of all products but those of attention and of the output head
    per_head_token: float  # FLOPs per completion token of the output head, which sees no other tokens
    per_pair: float  # FLOPs per pair of a query and a key that it sees, over all layers

    def sums(
        self, lengths: torch.Tensor, completion_lengths: torch.Tensor, has_prompt: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The sums over a batch that `total` needs: tokens, completion tokens and pairs; shape (3,), float64. Sums of
        several batches or ranks may be added. Waits for no device.

        - `lengths`: shape (B,), integers: tokens of each sequence, prompt and completion, without padding.
        - `completion_lengths`: shape (B,), integers.
        - `has_prompt`: shape (B,), bool: False for a completion whose prompt went through the model with another one.
        """
        left_out = lengths - completion_lengths
        left_out = torch.zeros_like(left_out) if has_prompt is None else torch.where(has_prompt, 0, left_out)
        tokens, pairs = lengths - left_out, attention_pairs(lengths) - attention_pairs(left_out)
        return torch.stack([each.to(torch.int64).sum() for each in (tokens, completion_lengths, pairs)]).double()

    def total(self, sums: Sequence[float]) -> float:
        """FLOPs of forward and backward, from `sums`."""
        tokens, completion_tokens, pairs = sums
        return self.per_token * tokens + self.per_head_token * completion_tokens + self.per_pair * pairs


def attention_pairs(lengths: torch.Tensor) -> torch.Tensor:
    """Pairs of a query and a key that it sees in causal attention, by sequence: s * (s + 1) / 2, int64."""
    lengths = lengths.to(torch.int64)
    return lengths * (lengths + 1) // 2


def model_flops(model: nn.Module) -> ModelFlops:
    """The coefficients of a causal language model of transformers, with or without an adapter of PEFT, unwrapped.

    The FLOPs of a sequence of s tokens, of which c are completion, are `a s + h c + p s**2 + k`. Four counts give a, h
    and p. The counter takes attention in full, so that p belongs to a pair. k is left out, which no token needs: the
    norms of DoRA's weights, for example.

    Counts run over few layers, because each layer's products are dispatched one by one: a layer costs what the one
    before it costs, if both have the same weights and train the same of them. The first of such a row is apart: what
    comes before it may need no gradient.

    Raises `UnknownFlops` for models whose tokens differ in cost in other ways. A model that can't run on `meta` raises
    errors of its own.
    """
    base = _base(model)
    depth = base.config.num_hidden_layers
    bare = _without_memory(model, base)
    lists = (module for module in bare.modules() if isinstance(module, nn.ModuleList))
    layers = next((modules for modules in lists if len(modules) == depth), None)
    if layers is None:
        raise UnknownFlops(f"no list of {depth} decoder layers was found in it")
    rows = [list(row) for _, row in itertools.groupby(layers, key=_weights)]
    shortest = _counts(bare, layers, [row[:2] for row in rows])
    total = shortest
    for index, row in enumerate(rows):
        if len(row) > 2:
            others = [other[: 1 if place == index else 2] for place, other in enumerate(rows)]
            total = total + (len(row) - 2) * (shortest - _counts(bare, layers, others))
    once, twice, thrice, longer_completion = total.tolist()
    per_pair = (thrice - 2 * twice + once) / (2 * TOKENS**2)
    per_token = (twice - once) / TOKENS - 3 * TOKENS * per_pair
    return ModelFlops(per_token=per_token, per_head_token=longer_completion - once, per_pair=per_pair)


def _counts(model: nn.Module, layers: nn.ModuleList, rows: Sequence[Sequence[nn.Module]]) -> torch.Tensor:
    """FLOPs of a forward and backward pass through these layers alone, shape (4,), float64: of a sequence with one
    completion token, of one twice and one thrice as long, and of the first one with two completion tokens."""
    del layers[:]
    layers.extend(itertools.chain.from_iterable(rows))
    counts = []
    for length, completion in ((TOKENS, 1), (2 * TOKENS, 1), (3 * TOKENS, 1), (TOKENS, 2)):
        ids = torch.zeros(1, length, dtype=torch.long, device="meta")
        with torch.enable_grad(), FlopCounterMode(display=False) as counter:
            logits = model(
                input_ids=ids, attention_mask=torch.ones_like(ids), logits_to_keep=completion, use_cache=False
            ).logits
            if logits.requires_grad:
                logits.sum().backward()
        counts.append(counter.get_total_flops())
    return torch.tensor(counts, dtype=torch.float64)


def _base(model: nn.Module) -> PreTrainedModel:
    from peft import PeftModel

    base = model.get_base_model() if isinstance(model, PeftModel) else model
    if not isinstance(base, PreTrainedModel):
        raise UnknownFlops("the model has no transformers config")
    config = base.config
    if config.is_encoder_decoder:
        raise UnknownFlops("it is an encoder-decoder")
    if config.get_text_config() is not config:
        raise UnknownFlops("it takes more than text: its config has a text config inside")
    for field in OTHER_ATTENTION:
        if getattr(config, field, None):
            raise UnknownFlops(f"its attention is not alike in all layers ({field} is set)")
    # without `layer_types` (Mistral, Phi-3), `sliding_window` applies to every layer
    has_window = getattr(config, "use_sliding_window", True) and getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or ["sliding_attention" if has_window else "full_attention"]
    if others := sorted({*kinds} - {"full_attention"}):
        raise UnknownFlops(f"it has layers of type {', '.join(others)}")
    return base


def _without_memory(model: nn.Module, base: PreTrainedModel) -> nn.Module:
    """A copy on `meta`, with the active adapter, which trains what the model trains. Attention and experts are plain
    products there, as many for each token, and nothing is computed a second time."""
    config = copy.deepcopy(base.config)
    config._attn_implementation, config._experts_implementation = "eager", "batched_mm"
    with torch.device("meta"):
        plain = type(base)(config)
        if any(vars(module).get("_require_grads_hooks") for module in model.modules()):
            plain.enable_input_require_grads()
        bare = _with_adapter(plain, model)
    trained = {name: parameter.requires_grad for name, parameter in model.named_parameters(remove_duplicate=False)}
    for name, parameter in bare.named_parameters():
        if name not in trained:
            raise UnknownFlops(f"its weights are not those of its configuration, which has {name}")
        parameter.requires_grad_(trained[name])
    return bare


def _with_adapter(bare: nn.Module, model: nn.Module) -> nn.Module:
    from peft import LoraConfig, PeftModel, get_peft_model

    if not isinstance(model, PeftModel):
        return bare
    settings = copy.deepcopy(model.peft_config[model.active_adapter])
    if settings.is_prompt_learning:
        raise UnknownFlops("its adapter adds tokens to the prompt")
    if isinstance(settings, LoraConfig):
        settings.init_lora_weights = False  # some ways to begin read the weights
    adapted: nn.Module = get_peft_model(bare, settings, adapter_name=model.active_adapter)
    return adapted


def _weights(layer: nn.Module) -> list[tuple[str, torch.Size, bool]]:
    """What a layer's products depend on."""
    return [(name, weight.shape, weight.requires_grad) for name, weight in layer.named_parameters()]
