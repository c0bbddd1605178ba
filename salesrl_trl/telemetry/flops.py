"""The FLOPs of a training pass of a causal language model.

Owns the formula and the sums over a batch that it needs. Measures no time, reads no device and logs nothing.

These are model FLOPs as in PaLM (Chowdhery et al. 2022, appendix B): the matrix products that forward and backward
pass need. A multiply and an add are two FLOPs. Not counted are:

- work that is done a second time (gradient checkpointing, flash attention's backward pass), so that it lowers the
  utilisation;
- softmax, norms, activations and dropout;
- the optimizer, generation and the reference's pass.

The figure is exact for dense models and plain LoRA. For all others `UnknownFlops` says why there is no figure: a wrong
one would look like a right one.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.pytorch_utils import Conv1D

LINEARS = (nn.Linear, Conv1D)
"""bitsandbytes' linears are `nn.Linear` too; GPT-2 has `Conv1D`."""
QKV = frozenset({"q_proj", "k_proj", "v_proj", "qkv_proj", "query_key_value", "c_attn", "Wqkv", "W_pack", "qkv"})
"""Names of the projections to queries, keys and values. They alone read a decoder layer's input."""
DOWN = frozenset({"down_proj", "c_proj", "fc2", "fc_out", "dense_4h_to_h", "w2"})
"""Names of the last linear of a layer's MLP. It reads the output of the others."""
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "num_routed_experts", "moe_num_experts")
"""Fields of a config that are above 1 for a mixture of experts. Its shapes do not give the cost of a token."""
OTHER_ATTENTION = ("kv_lora_rank", "v_head_dim", "global_head_dim", "num_kv_shared_layers", "attention_chunk_size")
"""Fields of a config that are set for heads of several widths, or for keys that layers share."""
PRODUCTS = 2
"""FLOPs of a matrix product per token and weight: one multiply, one add."""
ATTENTION_PRODUCTS = 4
"""FLOPs per query, key and channel of the heads: scores and weighted values, each a multiply and an add."""
BACKWARD = 2
"""Products of attention's backward pass per product of its forward pass: a gradient for each of the two factors."""
ALL_BEFORE, INPUT_NORM, PROJECTIONS, REST_OF_ATTENTION, MLP, MLP_OUTPUT, NOTHING = -2, -1, 0, 1, 2, 3, 4
"""Parts of a decoder layer in the order of the forward pass. Training begins with one of them."""


class UnknownFlops(ValueError):
    """The formula does not hold for this model. The message says why, for a log line."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFlops:
    """FLOPs of the policy's forward and backward pass, as the coefficients of a batch's sums.

        FLOPs = per_token * tokens + per_head_token * completion tokens + sum over windows of per_pair * pairs

    Example: one layer with 4 heads of 16, trained in full, has `windows=(None,)` and `per_pair=(12 * 64,)`. Of these,
    4 * 64 belong to the forward pass.

    Args:
        per_token (`int`):
            FLOPs per token of all linears but the output head.
        per_head_token (`int`):
            FLOPs per completion token of the output head, which sees no other tokens.
        windows (`tuple[int | None, ...]`):
            Widths of the layers' attention, in tokens; `None` for the whole sequence.
        per_pair (`tuple[int, ...]`):
            By window, FLOPs per pair of a query and a key that it sees, over all layers with this window.
    """

    per_token: int
    per_head_token: int
    windows: tuple[int | None, ...]
    per_pair: tuple[int, ...]

    def sums(
        self, lengths: torch.Tensor, completion_lengths: torch.Tensor, has_prompt: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The sums over a batch that `total` needs. Sums of several batches or ranks may be added. Waits for no
        device.

        Args:
            lengths (`torch.Tensor`):
                Shape (B,), integers: tokens of each sequence, prompt and completion, without padding.
            completion_lengths (`torch.Tensor`):
                Shape (B,), integers: tokens of each completion.
            has_prompt (`torch.Tensor`, *optional*):
                Shape (B,), bool: False for a completion whose prompt went through the model with another one.

        Returns:
            `torch.Tensor` of shape (2 + len(windows),), float64, on the device of `lengths`: tokens, completion
            tokens, pairs by window. Exact up to 2**53.
        """
        left_out = lengths - completion_lengths
        left_out = torch.zeros_like(left_out) if has_prompt is None else torch.where(has_prompt, 0, left_out)
        pairs = [
            (attention_pairs(lengths, window) - attention_pairs(left_out, window)).sum() for window in self.windows
        ]
        tokens = (lengths - left_out).to(torch.int64).sum()
        return torch.stack([tokens, completion_lengths.to(torch.int64).sum(), *pairs]).to(torch.float64)

    def total(self, sums: Sequence[float]) -> float:
        """FLOPs of forward and backward.

        Args:
            sums (`Sequence[float]`):
                From `sums`. Another length raises a `ValueError`.
        """
        coefficients = (self.per_token, self.per_head_token, *self.per_pair)
        return float(sum(each * count for each, count in zip(coefficients, sums, strict=True)))


def attention_pairs(lengths: torch.Tensor, window: int | None) -> torch.Tensor:
    """Pairs of a query and a key that it sees, of causal attention. Waits for no device.

    Of s positions, the query at position i sees i keys, with its own, but only the last w of them. With m = min(s, w):

        pairs = 1 + 2 + ... + m + (s - m) * w = m * (m + 1) / 2 + (s - m) * w

    Args:
        lengths (`torch.Tensor`):
            Shape (B,), integers, in tokens.
        window (`int`, *optional*):
            w, in tokens.

    Returns:
        `torch.Tensor` of shape (B,), int64.
    """
    lengths = lengths.to(torch.int64)
    near = lengths if window is None else lengths.clamp(max=window)
    pairs = near * (near + 1) // 2
    return pairs if window is None else pairs + (lengths - near) * window


def model_flops(model: nn.Module) -> ModelFlops:
    """The coefficients of a model, from the shapes of its linears and from which weights are trained.

    A linear with n inputs and m outputs costs, per token:

    - 2nm forward;
    - 2nm for the gradient of its weight, if the weight is trained;
    - 2nm for the gradient of its input, if something before it is trained.

    With a frozen embedding, nothing before the first layer's projections is trained. But `enable_input_require_grads`
    asks for that gradient all the same, as TRL does for PEFT with gradient checkpointing. Attention costs 4 per pair,
    head and channel forward, and twice that backward.

    In the first layer with a trained weight, two gradients count that are not needed: attention's gradient to the keys
    if only queries are trained (and the like), and the input's gradient of an MLP that stands beside attention. In all
    other cases the figure is PyTorch's own count.

    Reads `in_features` and `out_features`, not the weights: weights are empty under ZeRO-3 and packed when quantised.
    Adapters count as they are at the time of the call. Active adapters run. An adapter that is merged, disabled or
    kept aside (a second one named "ref") does not.

    Args:
        model (`nn.Module`):
            A causal language model of transformers, with or without LoRA, unwrapped from DDP and DeepSpeed.

    Returns:
        `ModelFlops`.

    Raises:
        `UnknownFlops`: for a mixture of experts, layers other than full or sliding-window attention, latent attention,
            encoder-decoders, images or sound, adapters other than plain LoRA on linears, and a matrix that belongs to
            no linear or embedding.
    """
    config = _config(model)
    idle = _idle(model)
    _refuse_other_matrices(model, idle)
    layers, head = _decoder_layers(model, config), _head(model)

    reached = _embedding_needs_gradient(model, idle)
    per_token, pairs = 0, dict.fromkeys(sorted(set(_windows(config)), key=lambda window: window or 0), 0)
    for layer, window in zip(layers, _windows(config), strict=True):
        cost, earliest = _layer(layer, idle, reached)
        reached = earliest < NOTHING
        per_token += cost
        backward = BACKWARD if earliest <= PROJECTIONS else 0
        pairs[window] += ATTENTION_PRODUCTS * (1 + backward) * config.num_attention_heads * _head_dim(config)

    elsewhere = idle | set(layers.modules()) | set(head.modules())
    others = [module for module in model.modules() if module not in elsewhere]
    reached = reached or any(_trained(module) for module in others)
    per_token += sum(_cost(module, needs_input=reached) for module in others)
    return ModelFlops(
        per_token=per_token,
        per_head_token=sum(_cost(module, needs_input=reached) for module in head.modules() if module not in idle),
        windows=tuple(pairs),
        per_pair=tuple(pairs.values()),
    )


def _config(model: nn.Module) -> PreTrainedConfig:
    config: PreTrainedConfig | None = getattr(model, "config", None)
    if not isinstance(config, PreTrainedConfig):
        raise UnknownFlops("the model has no transformers config")
    if config.is_encoder_decoder:
        raise UnknownFlops("it is an encoder-decoder")
    if config.get_text_config() is not config:
        raise UnknownFlops("it takes more than text: its config has a text config inside")
    for field in EXPERT_COUNTS:
        if getattr(config, field, None) not in (None, 0, 1):
            raise UnknownFlops(f"it is a mixture of experts ({field} = {getattr(config, field)})")
    for field in OTHER_ATTENTION:
        if getattr(config, field, None):
            raise UnknownFlops(f"its attention is not plain multi-head attention ({field} is set)")
    if not isinstance(getattr(config, "num_attention_heads", None), int):
        raise UnknownFlops("the config does not say one number of attention heads (num_attention_heads)")
    return config


def _head_dim(config: PreTrainedConfig) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _windows(config: PreTrainedConfig) -> list[int | None]:
    """By layer, the number of tokens that a token sees; `None` for all.

    In configs without `layer_types` (Mistral, Phi-3), `sliding_window` applies to every layer.
    """
    width = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    alike = "full_attention" if width is None else "sliding_attention"
    kinds = getattr(config, "layer_types", None) or [alike] * config.num_hidden_layers
    unknown = sorted(set(kinds) - {"full_attention", "sliding_attention"})
    if unknown:
        raise UnknownFlops(f"it has layers of type {', '.join(unknown)}")
    if "sliding_attention" in kinds and not width:
        raise UnknownFlops("it has layers with a sliding window but the config does not say how wide (sliding_window)")
    return [width if kind == "sliding_attention" else None for kind in kinds]


def _decoder_layers(model: nn.Module, config: PreTrainedConfig) -> nn.ModuleList:
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == config.num_hidden_layers:
            return module
    raise UnknownFlops(f"no list of {config.num_hidden_layers} decoder layers was found in it")


def _head(model: nn.Module) -> nn.Module:
    find = getattr(model, "get_output_embeddings", None)
    head = find() if callable(find) else None
    if not isinstance(head, nn.Module):
        raise UnknownFlops("it has no output head")
    return head


def _idle(model: nn.Module) -> set[nn.Module]:
    """Modules that do not run: adapters that are not active, and originals that have been replaced by a copy."""
    from peft.tuners.lora import LoraLayer
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils import ModulesToSaveWrapper

    if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
        raise UnknownFlops("its adapter adds tokens to the prompt")
    tops: list[nn.Module] = []
    for module in model.modules():
        if isinstance(module, ModulesToSaveWrapper):
            # A disabled copy is frozen and costs as much as the original.
            runs = next(iter(module.active_adapters), "")
            tops += [copy for adapter, copy in module.modules_to_save.items() if adapter != runs]
            tops += [module.original_module] if runs in module.modules_to_save else []
        elif isinstance(module, LoraLayer):
            active = set() if module.disable_adapters or module.merged else set(module.active_adapters)
            if not isinstance(module.get_base_layer(), (*LINEARS, nn.Embedding)):
                raise UnknownFlops(f"its adapter sits on a {type(module.get_base_layer()).__name__}, not on a linear")
            if active & set(module.lora_variant):
                raise UnknownFlops("its adapter is a variant of LoRA with products of its own, such as DoRA")
            for adapters in (module.lora_A, module.lora_B):
                tops += [adapter for name, adapter in adapters.items() if name not in active]
        elif isinstance(module, BaseTunerLayer):
            raise UnknownFlops(f"its adapter is not LoRA but {type(module).__name__}")
    return {module for top in tops for module in top.modules()}


def _refuse_other_matrices(model: nn.Module, idle: set[nn.Module]) -> None:
    for name, module in model.named_modules():
        if module in idle or isinstance(module, (*LINEARS, nn.Embedding)):
            continue
        for parameter in module.parameters(recurse=False):
            if len(getattr(parameter, "ds_shape", parameter.shape)) > 1:  # ds_shape: before ZeRO-3 took it away
                raise UnknownFlops(f"{name} ({type(module).__name__}) holds a matrix and is no linear or embedding")


def _embedding_needs_gradient(model: nn.Module, idle: set[nn.Module]) -> bool:
    """Whether the first layer's input needs a gradient.

    `PreTrainedModel.enable_input_require_grads` keeps its hooks on the model that it was called on, inside PEFT.
    """
    return any(
        bool(vars(module).get("_require_grads_hooks")) or (isinstance(module, nn.Embedding) and _trained(module))
        for module in model.modules()
        if module not in idle
    )


def _layer(layer: nn.Module, idle: set[nn.Module], reached: bool) -> tuple[int, int]:
    """FLOPs per token of a decoder layer's linears, and the part of it with which training begins.

    Args:
        layer (`nn.Module`):
            One decoder layer.
        idle (`set[nn.Module]`):
            From `_idle`.
        reached (`bool`):
            Whether the layer's input needs a gradient.

    Returns:
        `tuple[int, int]`: FLOPs, and one of `ALL_BEFORE` to `NOTHING`.
    """
    parts = [(part, name, module) for part, name, module in _parts(layer) if module not in idle]
    trained = [part for part, _, module in parts if _trained(module)]
    earliest = ALL_BEFORE if reached else min(trained, default=NOTHING)
    cost = 0
    for part, name, module in parts:
        # LoRA's second factor reads the output of the first, which is trained.
        second = "lora_B" in name.split(".") and _trained(module)
        cost += _cost(module, needs_input=earliest < part or second)
    return cost, earliest


def _parts(layer: nn.Module) -> Iterator[tuple[int, str, nn.Module]]:
    """Part, name and module of everything in a decoder layer."""
    linears = [name.split(".") for name, module in layer.named_modules() if isinstance(module, LINEARS)]
    attention = {path[0] for path in linears if QKV & set(path)}
    if not attention:
        raise UnknownFlops("its layers have no linears to queries, keys and values with a name in `QKV`")
    for name, module in layer.named_modules():
        path, linear = name.split("."), isinstance(module, LINEARS)
        if QKV & set(path):
            yield PROJECTIONS, name, module
        elif path[0] in attention:
            yield (REST_OF_ATTENTION if linear else PROJECTIONS), name, module  # not linear: norms of queries and keys
        elif linear:
            yield (MLP_OUTPUT if DOWN & set(path) else MLP), name, module
        else:
            yield (REST_OF_ATTENTION if path[0].startswith("post") else INPUT_NORM), name, module


def _cost(module: nn.Module, needs_input: bool) -> int:
    """FLOPs per token of a linear, forward and backward; 0 for other modules. Does not look at children."""
    if isinstance(module, nn.Linear):
        size = module.in_features * module.out_features
    elif isinstance(module, Conv1D):
        size = module.nx * module.nf
    else:
        return 0
    return PRODUCTS * size * (1 + module.weight.requires_grad + needs_input)


def _trained(module: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters(recurse=False))
