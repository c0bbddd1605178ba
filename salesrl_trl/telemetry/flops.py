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
from transformers import PreTrainedConfig, PreTrainedModel

TOKENS = 8  # length of the shortest counted sequence. Others are twice and three times as long.
OTHER_ATTENTION = ("attention_chunk_size", "global_head_dim", "num_kv_shared_layers")
"""Fields of a config with which layers have attention of unlike costs, or share keys."""


class UnknownFlops(ValueError):
    """The cost of this model's tokens can't be known. The message says why, for a log line."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFlops:
    """FLOPs of the policy's forward and backward pass, as the coefficients of a batch's sums.

        FLOPs = per_token * tokens + per_head_token * completion tokens + sum over windows of per_pair * pairs

    Example: one layer with 4 heads of 16, trained in full, has `windows=(None,)` and `per_pair=(12 * 64,)`. Of these,
    4 * 64 belong to the forward pass.
    """

    per_token: float  # FLOPs per token of all products but those of attention and of the output head
    per_head_token: float  # FLOPs per completion token of the output head, which sees no other tokens
    windows: tuple[int | None, ...]  # widths of the layers' attention, in tokens; `None` for the whole sequence
    per_pair: tuple[float, ...]
    """By window, FLOPs per pair of a query and a key that it sees, over all layers with this window."""

    def sums(
        self, lengths: torch.Tensor, completion_lengths: torch.Tensor, has_prompt: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The sums over a batch that `total` needs. Sums of several batches or ranks may be added. Waits for no
        device.

        - `lengths`: shape (B,), integers: tokens of each sequence, prompt and completion, without padding.
        - `completion_lengths`: shape (B,), integers.
        - `has_prompt`: shape (B,), bool: False for a completion whose prompt went through the model with another one.

        Returns shape (2 + len(windows),), float64: tokens, completion tokens, pairs by window. Exact up to 2**53.
        """
        left_out = lengths - completion_lengths
        left_out = torch.zeros_like(left_out) if has_prompt is None else torch.where(has_prompt, 0, left_out)
        pairs = [
            (attention_pairs(lengths, window) - attention_pairs(left_out, window)).sum() for window in self.windows
        ]
        tokens = (lengths - left_out).to(torch.int64).sum()
        return torch.stack([tokens, completion_lengths.to(torch.int64).sum(), *pairs]).to(torch.float64)

    def total(self, sums: Sequence[float]) -> float:
        """FLOPs of forward and backward, from `sums`. Raises `ValueError` for sums of another length."""
        coefficients = (self.per_token, self.per_head_token, *self.per_pair)
        return float(sum(flops * count for flops, count in zip(coefficients, sums, strict=True)))


def attention_pairs(lengths: torch.Tensor, window: int | None) -> torch.Tensor:
    """Pairs of a query and a key that it sees, of causal attention, by sequence, int64. Waits for no device.

    Of s positions, the query at position i sees i keys, with its own, but only the last w of them. With m = min(s, w):

        pairs = 1 + 2 + ... + m + (s - m) * w = m * (m + 1) / 2 + (s - m) * w
    """
    lengths = lengths.to(torch.int64)
    near = lengths if window is None else lengths.clamp(max=window)
    pairs = near * (near + 1) // 2
    return pairs if window is None else pairs + (lengths - near) * window


def model_flops(model: nn.Module) -> ModelFlops:
    """The coefficients of a causal language model of transformers, with or without an adapter of PEFT, unwrapped.

    The FLOPs of a sequence of s tokens, of which c are completion, are `a s + h c + p s**2 + k`. Four counts give a, h
    and p. The counter takes attention in full, so that p belongs to a pair. Windows share p by their number of layers.
    k is left out: what no token needs, such as the norms of DoRA's weights, once in a pass.

    Counts run over few layers, because each layer's products are dispatched one by one: a layer costs what the one
    before it costs, if both have the same weights and train the same of them. The first of such a row is apart: what
    comes before it may need no gradient.

    Raises `UnknownFlops` for models whose tokens differ in cost in other ways. A model that can't run on `meta` raises
    errors of its own.
    """
    base, windows = _base(model), _windows(_config(model))
    bare = _without_memory(model, base)
    lists = (module for module in bare.modules() if isinstance(module, nn.ModuleList))
    layers = next((modules for modules in lists if len(modules) == len(windows)), None)
    if layers is None:
        raise UnknownFlops(f"no list of {len(windows)} decoder layers was found in it")
    rows = [list(row) for _, row in itertools.groupby(layers, key=_weights)]
    shortest = _counts(bare, layers, [row[:2] for row in rows])
    total = shortest
    for index, row in enumerate(rows):
        if len(row) > 2:
            others = [other[: 1 if place == index else 2] for place, other in enumerate(rows)]
            total = total + (len(row) - 2) * (shortest - _counts(bare, layers, others))
    once, twice, thrice, longer_completion = total.tolist()
    per_pair = (thrice - 2 * twice + once) / (2 * TOKENS**2)
    kinds = sorted(set(windows), key=lambda window: window or 0)
    shares = [windows.count(window) / len(windows) for window in kinds]
    return ModelFlops(
        per_token=(twice - once) / TOKENS - 3 * TOKENS * per_pair,
        per_head_token=longer_completion - once,
        windows=tuple(kinds),
        per_pair=tuple(per_pair * share for share in shares),
    )


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
    return base


def _config(base: PreTrainedModel) -> PreTrainedConfig:
    config = base.config
    if config.is_encoder_decoder:
        raise UnknownFlops("it is an encoder-decoder")
    if config.get_text_config() is not config:
        raise UnknownFlops("it takes more than text: its config has a text config inside")
    for field in OTHER_ATTENTION:
        if getattr(config, field, None):
            raise UnknownFlops(f"its attention is not alike in all layers ({field} is set)")
    return config


def _windows(config: PreTrainedConfig) -> list[int | None]:
    """By layer, the number of tokens that a token sees; `None` for all. In configs without `layer_types` (Mistral,
    Phi-3), `sliding_window` applies to every layer."""
    width = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    alike = "full_attention" if width is None else "sliding_attention"
    kinds = getattr(config, "layer_types", None) or [alike] * config.num_hidden_layers
    unknown = sorted(set(kinds) - {"full_attention", "sliding_attention"})
    if unknown:
        raise UnknownFlops(f"it has layers of type {', '.join(unknown)}")
    if "sliding_attention" in kinds and not width:
        raise UnknownFlops("it has layers with a sliding window but the config does not say how wide (sliding_window)")
    return [width if kind == "sliding_attention" else None for kind in kinds]


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
