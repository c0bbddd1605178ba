"""What a training pass of a causal language model costs in FLOPs, and what share of the chip's peak that is.

Owns the formula, the sums over a batch that it needs, and the peaks of known chips. It measures no time, reads no
device and logs nothing: whoever has the clock calls `mfu`.

Model FLOPs as in PaLM (Chowdhery et al. 2022, appendix B): the matrix products that forward and backward pass cannot
do without, a multiply and an add being two. What is done a second time (gradient checkpointing, flash attention's
backward pass) is not counted, so it lowers the share; nor are softmax, norms, activations, dropout, the optimizer,
generation and the reference's pass. An exact figure for dense models and plain LoRA; for all else `UnknownFlops` says
why there is none, for a wrong figure would look like a right one.
"""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.pytorch_utils import Conv1D

LINEARS = (nn.Linear, Conv1D)
"""Those of bitsandbytes are `nn.Linear` too; GPT-2 has `Conv1D`."""
QKV = frozenset({"q_proj", "k_proj", "v_proj", "qkv_proj", "query_key_value", "c_attn", "Wqkv", "W_pack", "qkv"})
"""What the projections to queries, keys and values are called: they alone read a decoder layer's input."""
DOWN = frozenset({"down_proj", "c_proj", "fc2", "fc_out", "dense_4h_to_h", "w2"})
"""What the last linear of a layer's MLP is called: it reads what the others give."""
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "num_routed_experts", "moe_num_experts")
"""Fields of a config that, above 1, say mixture of experts: what a token costs is then not in the shapes."""
OTHER_ATTENTION = ("kv_lora_rank", "v_head_dim", "global_head_dim", "num_kv_shared_layers", "attention_chunk_size")
"""Fields of a config that, if set, say heads of several widths or keys that are not a layer's own."""
PRODUCTS = 2
"""FLOPs of a matrix product per token and weight: one multiply, one add."""
ATTENTION_PRODUCTS = 4
"""FLOPs per query, key and channel of the heads: scores and weighted values, each a multiply and an add."""
BACKWARD = 2
"""Products of attention's backward pass per product of its forward pass: a gradient for each of the two factors."""
ALL_BEFORE, INPUT_NORM, PROJECTIONS, REST_OF_ATTENTION, MLP, MLP_OUTPUT, NOTHING = -2, -1, 0, 1, 2, 3, 4
"""Parts of a decoder layer in the order of the forward pass, to say with which of them training begins."""


class UnknownFlops(ValueError):
    """The formula does not hold for this model; the message says why, in words fit for a log line."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFlops:
    """Cost of the policy's forward and backward pass, as the coefficients of a batch's sums.

        FLOPs = per_token * tokens + per_head_token * completion tokens + sum over windows of per_pair * pairs

    Example: one layer, 4 heads of 16, trained in full: `windows=(None,)`, `per_pair=(12 * 64,)`, of which 4 * 64 are
    forward.

    Args:
        per_token (`int`):
            FLOPs per token of all linears but the output head.
        per_head_token (`int`):
            FLOPs per completion token of the output head, which sees no others.
        windows (`tuple[int | None, ...]`):
            The widths of attention that the layers have, in tokens; `None` for the whole sequence.
        per_pair (`tuple[int, ...]`):
            By window, FLOPs per pair of a query and a key that it sees, of all layers that have that window.
    """

    per_token: int
    per_head_token: int
    windows: tuple[int | None, ...]
    per_pair: tuple[int, ...]

    def sums(self, lengths: torch.Tensor, completion_lengths: torch.Tensor) -> torch.Tensor:
        """What `total` needs of a batch. Sums of several batches or ranks may be added. Waits for no device.

        Args:
            lengths (`torch.Tensor`):
                Shape (B,), integers: tokens of each sequence, prompt and completion, padding not among them.
            completion_lengths (`torch.Tensor`):
                Shape (B,), integers: tokens of each completion.

        Returns:
            `torch.Tensor` of shape (2 + len(windows),), float64, on the device of `lengths`: tokens, completion
            tokens, pairs by window. Exact up to 2**53.
        """
        pairs = [attention_pairs(lengths, window).sum() for window in self.windows]
        tokens = lengths.to(torch.int64).sum()
        return torch.stack([tokens, completion_lengths.to(torch.int64).sum(), *pairs]).to(torch.float64)

    def total(self, sums: Sequence[float]) -> float:
        """FLOPs of forward and backward.

        Args:
            sums (`Sequence[float]`):
                As `sums` gives them. Its own length is the only one that fits (`ValueError`).
        """
        coefficients = (self.per_token, self.per_head_token, *self.per_pair)
        return float(sum(each * count for each, count in zip(coefficients, sums, strict=True)))


def attention_pairs(lengths: torch.Tensor, window: int | None) -> torch.Tensor:
    """Pairs of a query and a key that it sees, of causal attention. Waits for no device.

    A query at position i of s sees i keys, its own among them, or the last w: with m = min(s, w),

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
    """The coefficients of a model, from the shapes of its linears and what of it is trained.

    A linear of n inputs and m outputs costs 2nm per token forward, 2nm more for its weight's gradient if that is
    trained and 2nm more for its input's gradient if something before it is trained. Nothing is before the first
    layer's projections if the embedding is frozen, unless `enable_input_require_grads` asks for a gradient all the
    same, as TRL does for PEFT with gradient checkpointing. Attention costs 4 per pair, head and channel forward and
    twice that backward.

    In the first layer that has something to train, two things count that need not be done: attention's gradient to
    keys if only queries are trained (and the like), and the input's gradient of an MLP that stands beside attention
    instead of behind it. In all other cases the figure is PyTorch's own count.

    Takes `in_features` and `out_features`, not the weights, which are empty under ZeRO-3 and packed when quantised.
    Adapters count as they are at the time of the call: the active ones run, and one that is being merged, disabled or
    kept aside (a second one named "ref") does not.

    Args:
        model (`nn.Module`):
            A causal language model of transformers, with or without LoRA, unwrapped from DDP and DeepSpeed.

    Returns:
        `ModelFlops`.

    Raises:
        `UnknownFlops`: for mixture of experts, layers that are not full or sliding-window attention, latent
        attention, encoder-decoders, images or sound, adapters other than plain LoRA on linears, and whatever holds a
        matrix that no linear or embedding holds.
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
        raise UnknownFlops("it takes more than text: the config has a text config of its own inside")
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
    """By layer, how many tokens back it sees; `None` for all.

    Configs without `layer_types` (Mistral, Phi-3) mean every layer by `sliding_window`.
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
    """Modules that are there but do not run: adapters that are not active, and originals that a copy stands in for."""
    from peft.tuners.lora import LoraLayer
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils import ModulesToSaveWrapper

    if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
        raise UnknownFlops("its adapter adds tokens to the prompt")
    tops: list[nn.Module] = []
    for module in model.modules():
        if isinstance(module, ModulesToSaveWrapper):
            # Disabled or not: a copy that is disabled is frozen, and costs what the original does.
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
            if len(getattr(parameter, "ds_shape", parameter.shape)) > 1:  # ds_shape: what ZeRO-3 took away
                raise UnknownFlops(f"{name} ({type(module).__name__}) holds a matrix and is no linear or embedding")


def _embedding_needs_gradient(model: nn.Module, idle: set[nn.Module]) -> bool:
    """Whether the first layer's input needs a gradient.

    The hooks of `PreTrainedModel.enable_input_require_grads` are held by the model that it was called on, inside PEFT.
    """
    return any(
        bool(vars(module).get("_require_grads_hooks")) or (isinstance(module, nn.Embedding) and _trained(module))
        for module in model.modules()
        if module not in idle
    )


def _layer(layer: nn.Module, idle: set[nn.Module], reached: bool) -> tuple[int, int]:
    """FLOPs per token of a decoder layer's linears, and with which of its parts training begins.

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
        # LoRA's second factor reads what the first, trained, one gives.
        second = "lora_B" in name.split(".") and _trained(module)
        cost += _cost(module, needs_input=earliest < part or second)
    return cost, earliest


def _parts(layer: nn.Module) -> Iterator[tuple[int, str, nn.Module]]:
    """Part, name and module of all that is in a decoder layer."""
    linears = [name.split(".") for name, module in layer.named_modules() if isinstance(module, LINEARS)]
    attention = {path[0] for path in linears if QKV & set(path)}
    if not attention:
        raise UnknownFlops("its layers have no linears to queries, keys and values by any name that is known here")
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
    """FLOPs per token of a linear, forward and backward; 0 of all else. Its children are not looked at."""
    if isinstance(module, nn.Linear):
        size = module.in_features * module.out_features
    elif isinstance(module, Conv1D):
        size = module.nx * module.nf
    else:
        return 0
    return PRODUCTS * size * (1 + module.weight.requires_grad + needs_input)


def _trained(module: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters(recurse=False))


class Peak(NamedTuple):
    """A chip's peak in dense bf16 matrix products with sums in fp32."""

    name: str
    """Pattern of the whole of `torch.cuda.get_device_name()`, less a leading "NVIDIA "."""
    flops: float
    """FLOP/s. Where the source only says the figure with 2:4 sparsity, half of it."""
    source: str


HGX_BLACKWELL = "NVIDIA HGX data sheet, FP16/BF16 of 8 GPUs with sparsity"
PEAK_BF16_FLOPS = (
    Peak(r"GB300", 2500e12, "NVIDIA GB300 NVL72 data sheet: 360 PFLOPS of 72 GPUs with sparsity"),
    Peak(r"B300( SXM6 AC)?", 2250e12, f"{HGX_BLACKWELL}: B300 36 PFLOPS"),
    Peak(r"GB200", 2500e12, "NVIDIA GB200 NVL72 data sheet: 360 PFLOPS of 72 GPUs with sparsity"),
    Peak(r"B200", 2250e12, f"{HGX_BLACKWELL}: B200 36 PFLOPS"),
    Peak(r"B100", 1750e12, f"{HGX_BLACKWELL}: B100 28 PFLOPS"),
    Peak(
        r"GH200 (120GB|480GB|144G HBM3e)",
        989.4e12,
        "NVIDIA GH200 data sheet: 1,979 with sparsity, the chip of the H100 SXM",
    ),
    Peak(r"H200", 989.4e12, "NVIDIA H200 data sheet: SXM 1,979 with sparsity, the chip of the H100 SXM"),
    Peak(r"H200 NVL", 835.5e12, "NVIDIA H200 data sheet: NVL 1,671 with sparsity"),
    Peak(r"H100 \d+GB HBM3", 989.4e12, "NVIDIA H100 white paper, table of SXM5 and PCIe: 989.4 dense"),
    Peak(r"H100 PCIe", 756e12, "NVIDIA H100 white paper, table of SXM5 and PCIe: 756 dense"),
    Peak(r"H100 NVL", 835.5e12, "NVIDIA H100 data sheet: NVL 1,671 with sparsity"),
    Peak(
        r"H800", 989.4e12, "the chip of the H100 SXM, with less NVLink and fp64: 1,979 with sparsity in vendors' lists"
    ),
    Peak(
        r"H800 PCIe",
        756e12,
        "the chip of the H100 PCIe, with less NVLink and fp64: 1,513 with sparsity in vendors' lists",
    ),
    Peak(r"H20(-3e)?", 148e12, "vendors' lists, for want of a data sheet on NVIDIA's site: 148 dense"),
    # Not the A100-SXM-64GB, which is another chip.
    Peak(r"A100[- ](SXM4-[48]0GB|PCI[Ee]-[48]0GB|80GB PCIe)", 312e12, "NVIDIA A100 white paper: 312 dense"),
    Peak(r"A800[- ](SXM4-[48]0GB|80GB PCIe)", 312e12, "the chip of the A100, with less NVLink"),
    Peak(r"A30", 165e12, "NVIDIA A30 data sheet: 165 dense"),
    Peak(r"A40", 149.7e12, "NVIDIA A40 data sheet: 149.7 dense"),
    Peak(r"A10", 125e12, "NVIDIA A10 data sheet: 125 dense"),
    Peak(r"A10G", 70e12, "NVIDIA A10G data sheet (the chip of AWS G5): 70 dense"),
    Peak(r"L4", 121e12, "NVIDIA L4 data sheet: 242 with sparsity"),
    Peak(r"L40", 181e12, "NVIDIA L40 data sheet: 181.05 dense"),
    Peak(r"L40S", 362e12, "NVIDIA L40S data sheet: 362.05 dense"),
    Peak(r"RTX A6000", 154.8e12, "NVIDIA RTX A6000 in the GA102 white paper: 154.8 dense"),
    Peak(
        r"RTX 6000 Ada Generation",
        364.25e12,
        "NVIDIA RTX 6000 Ada data sheet: fp8 1,457 with sparsity, a quarter of it",
    ),
    Peak(r"GeForce RTX 3090", 71e12, "NVIDIA GA102 white paper: bf16 with fp32 sums 71 dense"),
    Peak(r"GeForce RTX 4090", 165.2e12, "NVIDIA Ada white paper: bf16 with fp32 sums 165.2 dense"),
    Peak(r"AMD Instinct MI300X( OAM| VF)?", 1307.4e12, "AMD Instinct MI300X data sheet: 1,307.4 dense"),
    Peak(r"AMD Instinct MI325X( OAM| VF)?", 1307.4e12, "AMD Instinct MI325X data sheet: 1,307.4 dense"),
    Peak(r"AMD Instinct MI250X", 191.5e12, "AMD Instinct MI250X data sheet: 383 of two dies; a die is a device"),
)
"""Peaks of chips that can be defended. A name fits whole or not at all: a slice of a GPU (MIG, vGPU), a laptop's or an
export version of the same number has another peak."""


def peak_bf16_flops(device_name: str) -> float | None:
    """Peak of a chip in FLOP/s with dense bf16, `None` where the table does not know it.

    Args:
        device_name (`str`):
            As `torch.cuda.get_device_name()` says it, such as "NVIDIA H100 80GB HBM3".
    """
    name = device_name.removeprefix("NVIDIA ")
    return next((peak.flops for peak in PEAK_BF16_FLOPS if re.fullmatch(peak.name, name)), None)


def mfu(flops: float, seconds: float, peak: float | None) -> float:
    """Model FLOPs utilisation: `flops / (seconds * peak)`, a share of 1.

    A share above 1 cannot be, so the peak, the time or the FLOPs are wrong, and NaN comes back. With a known peak, a
    positive time and FLOPs that are a number nothing else gives NaN, so a caller that has them can say so.

    Args:
        flops (`float`):
            Of `ModelFlops.total`, of one device or of all.
        seconds (`float`):
            That they took.
        peak (`float`, *optional*):
            Of `peak_bf16_flops`, of one device or of all, in FLOP/s; `None` if unknown.

    Returns:
        `float`: the share, NaN where it is unknown.
    """
    if peak is None or not peak > 0 or not seconds > 0:
        return math.nan
    share = flops / (seconds * peak)
    return share if share <= 1 else math.nan
