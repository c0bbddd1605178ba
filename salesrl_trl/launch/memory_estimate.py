"""Estimates the GPU memory of a training process at four moments of a step, by parts, in GiB, to within about 10 % on
an H200, 13 % with activations kept (benchmarks/log). The formulas follow transformers 5 decoders, TRL 1.16's tiled
log-probs and vLLM 0.31, without DeepSpeed and FSDP."""

import math
import operator
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from transformers import PreTrainedModel
from trl import ModelConfig

from salesrl_trl.config import SalesGRPOConfig
from salesrl_trl.launch.checks.model import empty_model, positions_of, put_adapter
from salesrl_trl.rollout.model_passes import unasked_tokens
from salesrl_trl.shared_prompts.shared_passes import MOST_TOKENS
from salesrl_trl.telemetry.device import GIB

CONTEXT_GIB = 0.75  # CUDA's context and kernels: 0.74 GiB on an H200 in every row of `benchmarks.memory`
CHANNELS_GIB = 0.5  # NCCL's channels, with several processes
FRAGMENTS = 0.04  # share of PyTorch's allocations lost to fragmentation when sizes change
TILE_TOKENS, TILE_VOCABULARY = 4096, 32_768  # `TOKEN_CHUNK_SIZE` and `_CHUNKED_LOGPROB_CHUNK_SIZE` of TRL
PROFILED_TOKENS = 4096  # `max_num_batched_tokens`, with which vLLM profiles its memory in TRL
MOMENTS = {"adamw": 2, "adafactor": 0, "sgd": 0, "adagrad": 1, "rmsprop": 1, "lion": 1, "ademamix": 3}
"""Optimizer states per weight, by the prefix of the name in transformers. Others count as AdamW."""
STOCHASTIC_OPTIM = "adamw_torch_8bit"  # torchao's optimizer, which can round stochastically
NUMBER_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "half": 2, "float": 4}


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """A decoder's dimensions. Widths and counts are numbers of parameters or of values per token, not bytes."""

    parameters: int
    linear: int  # parameters of the linear layers, excluding the output head
    embedding: int
    layers: int
    hidden: int
    intermediate: int  # width of a block's MLP
    heads: int
    query: int  # width of a token's queries, over all heads
    key_value: int  # width of a token's keys, over all key heads; the same for its values
    vocabulary: int
    positions: int | None  # maximum length, if the configuration has one
    number_bytes: int  # of a number in the checkpoint
    adapters: int  # parameters of LoRA's adapters


def parameter_count(name_or_path: str, revision: str | None, trust_remote_code: bool) -> int:
    return sum(weight.numel() for weight in empty_model(name_or_path, revision, trust_remote_code).parameters())


def shape_of(model: PreTrainedModel, lora: ModelConfig) -> ModelShape | None:
    """The dimensions of an empty model with PEFT's adapters. `None` unless its configuration is that of a decoder with
    attention and MLP blocks. Raises `ConfigError` if no layer fits the adapters."""
    text = model.config.get_text_config()
    needed = ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size")
    if not all(isinstance(getattr(text, name, None), int) for name in needed):
        return None
    head, heads = model.get_output_embeddings(), text.num_attention_heads
    layers = [module for module in model.modules() if isinstance(module, torch.nn.Linear) and module is not head]
    width = getattr(text, "head_dim", None) or text.hidden_size // heads
    parameters = sum(weight.numel() for weight in model.parameters())
    adapted = put_adapter(model, lora).parameters() if lora.use_peft else ()
    return ModelShape(
        parameters=parameters, linear=sum(layer.weight.numel() for layer in layers),
        embedding=model.get_input_embeddings().weight.numel(), layers=text.num_hidden_layers, hidden=text.hidden_size,
        intermediate=getattr(text, "intermediate_size", None) or 4 * text.hidden_size,
        heads=heads, query=heads * width,
        key_value=(getattr(text, "num_key_value_heads", None) or heads) * width,
        vocabulary=text.vocab_size, positions=positions_of(model.config),
        number_bytes=(model.config.dtype or torch.float32).itemsize,
        adapters=sum(weight.numel() for weight in adapted if weight.requires_grad),
    )  # fmt: skip


@dataclass(kw_only=True)
class Setup:
    """The training setup of a process: the settings of its run, and values that replace some of them."""

    training: SalesGRPOConfig
    model: ModelConfig
    shape: ModelShape
    card_gib: float
    prompt_tokens: int  # length of the longest prompt, to which TRL pads a generation batch
    dtype: str | None  # number format of the trained weights; `None` or `"auto"` for the checkpoint's
    optim: str
    keeps: bool = True  # `kept_activations_gib`

    def __post_init__(self) -> None:
        training, shape = self.training, self.shape
        self.lora = bool(self.model.use_peft)
        autocast = bool(training.bf16 or training.fp16)  # the forward pass computes in 16 bits
        self.weight_bytes = NUMBER_BYTES.get(self.dtype or "auto", shape.number_bytes)
        self.compute_bytes = 2 if autocast or self.weight_bytes == 2 else 4  # of a number in a matrix product
        engine = str(training.parsed_engine_kwargs().get("dtype"))
        self.engine_bytes = NUMBER_BYTES.get(engine, 2 if autocast else 4)  # of a number of vLLM's weights and cache
        # with LoRA, the policy without its adapters is the reference: no second model
        self.has_reference = bool(training.kl_targets())
        self.trained = shape.adapters if self.lora else shape.parameters
        self.completion_tokens = training.max_completion_length or 1
        self.length = self.prompt_tokens + self.completion_tokens
        self.rollouts = int(training.per_device_train_batch_size * training.steps_per_generation)
        self.tokens = self._pass_tokens()
        self.has_engine = bool(training.use_vllm) and training.vllm_mode == "colocate"
        recomputes_all = training.torch_compile or self.model.attn_implementation == "eager" or not self.keeps
        self.kept_gib = 0.0 if recomputes_all else training.kept_activations_gib

    def _pass_tokens(self) -> int:
        """Tokens of a forward and backward pass. With shared prompts it has as many whole micro-batches as fit its
        limit, each with one copy of every prompt. Without gradient checkpointing PyTorch keeps what the comparison
        with TRL's padded pass took at first."""
        training, batch = self.training, int(self.training.per_device_train_batch_size)
        padded, most = batch * self.length, training.pass_tokens
        if training.shared_prompts == "off" or not training.gradient_checkpointing:
            return max(padded, most or 0)
        copies = math.ceil(batch / training.num_generations)
        tokens: int = batch * self.completion_tokens + copies * self.prompt_tokens
        most = most or unasked_tokens(self.shape.parameters, padded, is_light=self.compute_bytes == 2)
        return tokens * max(1, min(most // tokens, int(training.gradient_accumulation_steps)))

    def weighed(self, dtype: str | None, optim: str) -> "Estimate":
        """The estimate with another number format and optimizer, by its name in transformers. Without kept activations
        if it does not fit with them: saving time is no reason to round weights or to reject a run."""
        whole = estimate(replace(self, dtype=dtype, optim=optim))
        return whole if whole.fits else estimate(replace(self, dtype=dtype, optim=optim, keeps=False))


@dataclass(frozen=True, kw_only=True, slots=True)
class Moment:
    """The memory at one moment of a step."""

    name: str
    parts: Mapping[str, float]  # GiB by part, without empty parts

    @property
    def total_gib(self) -> float:
        return sum(self.parts.values())


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """The memory of a process on one GPU."""

    card_gib: float
    moments: tuple[Moment, ...]
    sequences: float | None  # completions of full length that fit into the KV cache of a colocated vLLM
    kept_gib: float = 0.0  # `kept_activations_gib`, unless it is ineffective or would not fit

    @property
    def peak(self) -> Moment:
        return max(self.moments, key=operator.attrgetter("total_gib"))

    @property
    def needed_gib(self) -> float:
        return self.peak.total_gib

    @property
    def starts_engine(self) -> bool:
        """Whether vLLM's share fits its weights and one completion of full length. Otherwise vLLM does not start."""
        return self.sequences is None or self.sequences >= 1

    @property
    def fits(self) -> bool:
        return self.needed_gib <= self.card_gib and self.starts_engine


def estimate(setup: Setup) -> Estimate:
    """The memory of a process with this setup."""
    shape, training = setup.shape, setup.training
    gradients = setup.trained * (4 if setup.lora else setup.weight_bytes)
    gradients *= 2 if training.world_size > 1 else 1  # DDP keeps a second copy
    before = gradients if training.gradient_accumulation_steps > 1 else 0  # from earlier micro-batches
    embedding = 0 if setup.lora else shape.embedding
    # autocast caches them for the forward pass
    copies = 2.0 * shape.linear if setup.compute_bytes < setup.weight_bytes else 0.0
    recomputes = training.gradient_checkpointing and not setup.kept_gib  # all layers
    saved, working = _activations(setup)
    predicted = training.per_device_train_batch_size * setup.completion_tokens
    # Besides a tile of logits: gradients of the hidden states and of a trained head, in float32 and their own format
    head = predicted * shape.hidden * (4 + setup.weight_bytes) + embedding * (6 if setup.weight_bytes == 2 else 4)
    end_of_forward = {
        "gradients": before,
        "activations": saved,
        "16-bit copies of weights": 0.0 if setup.lora and recomputes else copies,
        "log-probs of the loss": _logits(setup, predicted) + head,
    }
    backward_of_a_layer = {
        "gradients": before + embedding * setup.weight_bytes,
        "activations": saved + working,
        "16-bit copies of weights": copies / shape.layers if recomputes else copies,
    }
    # torchao updates one weight at a time, in float32; fused AdamW needs no memory, plain AdamW a copy of the weights
    work = 16.0 * min(setup.trained, shape.embedding) if re.search("torch_[48]bit", setup.optim) else 0.0
    work += 4.0 * setup.trained if setup.optim == "adamw_torch" else 0.0
    held, awake = _held(setup), _generation(setup)
    asleep = {} if not setup.has_engine or training.vllm_enable_sleep_mode else {**awake, "vLLM working memory": 0.0}
    in_training = {**held, **asleep}
    is_backward = sum(backward_of_a_layer.values()) > sum(end_of_forward.values())
    fullest = backward_of_a_layer if is_backward else end_of_forward
    moments = (
        _moment("forward and backward", {**in_training, **fullest}, setup),
        _moment("optimizer step", {**in_training, "gradients": gradients, "optimizer's working memory": work}, setup),
        _moment("generation", {**held, **awake}, setup),
        _moment("passes without gradients", {**in_training, **_without_gradients(setup, copies)}, setup),
    )
    sequences = None
    if setup.has_engine:
        length = training.parsed_engine_kwargs().get("max_model_len")
        given = training.vllm_max_model_length or shape.positions or setup.length  # vLLM's own default
        cache = _token_cache(shape, setup.engine_bytes) / training.vllm_tensor_parallel_size
        sequences = awake["vLLM KV cache"] / (cache * (length if isinstance(length, int) else given))
    return Estimate(card_gib=setup.card_gib, moments=moments, sequences=sequences, kept_gib=setup.kept_gib)


def moment_bytes(optim: str, weight_bytes: int) -> float:
    """Bytes of optimizer state per weight, by the optimizer's name in transformers. Moments are float32, except that
    PyTorch's AdamW uses the weight's format, and 8-bit and 4-bit moments have a scale per 256 numbers."""
    moments = MOMENTS.get(optim.removeprefix("paged_").split("_")[0], 2)
    if few := re.search(r"([48])bit", optim):
        return moments * int(few[1]) / 8 + 2 * 4 / 256
    return moments * (weight_bytes if optim.startswith("adamw_torch") else 4.0)


def _moment(name: str, parts: Mapping[str, float], setup: Setup) -> Moment:
    inside = {part: size / GIB for part, size in parts.items() if size}
    context = CONTEXT_GIB + (CHANNELS_GIB if setup.training.world_size > 1 else 0)
    fragments = FRAGMENTS * sum(gib for part, gib in inside.items() if not part.startswith("vLLM"))
    return Moment(name=name, parts={**inside, "CUDA context": context, "fragmentation": fragments})


# Bytes of the parts


def _held(setup: Setup) -> dict[str, float]:
    """bitsandbytes quantizes the linear layers: 1 byte, or 4 bits and a 32-bit scale per 64 numbers. Adapters are
    float32."""
    shape = setup.shape
    weights: float = shape.parameters * setup.weight_bytes + 4 * shape.adapters
    if setup.model.load_in_4bit or setup.model.load_in_8bit:
        weights += shape.linear * ((1.0 if setup.model.load_in_8bit else 0.5 + 4 / 64) - setup.weight_bytes)
    return {
        "weights": weights,
        "optimizer states": moment_bytes(setup.optim, 4 if setup.lora else setup.weight_bytes) * setup.trained,
        "reference model": weights if setup.has_reference and not setup.lora else 0.0,
    }


def _generation(setup: Setup) -> dict[str, float]:
    """vLLM's share of the GPU holds its weights, the working memory of its largest batch (hidden states, the MLP's two
    widths, and three float32 copies of every sequence's logits), and the KV cache in the rest. Without vLLM: the KV
    cache of `generate` and its float32 logits."""
    shape, training = setup.shape, setup.training
    if setup.has_engine:
        number, processes = setup.engine_bytes, training.vllm_tensor_parallel_size
        share = training.parsed_engine_kwargs().get("gpu_memory_utilization")
        share = share if isinstance(share, float | int) else training.vllm_gpu_memory_utilization
        weights = shape.parameters * number / processes
        block = PROFILED_TOKENS * (4 * shape.hidden + 3 * shape.intermediate) * number
        rows = min(setup.rollouts * processes, PROFILED_TOKENS)
        working = (block + rows * shape.vocabulary * 12) / processes
        cache = max(0.0, share * setup.card_gib * GIB - weights - working)
        return {"vLLM weights": weights, "vLLM KV cache": cache, "vLLM working memory": working}
    if training.use_vllm or training.sampler is not None:
        return {}
    cache = setup.rollouts * setup.length * _token_cache(shape, setup.compute_bytes)
    return {"KV cache": cache, "logits of generation": 2.0 * 4 * setup.rollouts * shape.vocabulary}


def _token_cache(shape: ModelShape, number_bytes: int) -> float:
    """Keys and values of one token in all layers."""
    return 2.0 * shape.layers * shape.key_value * number_bytes


def _without_gradients(setup: Setup, copies: float) -> dict[str, float]:
    """The larger of an evaluation and, with shared prompts, the reference's log-probs. A block's forward pass holds
    three MLP widths, two widths of the residual stream, and the norm's output."""
    training, shape = setup.training, setup.shape
    evaluates = training.held_out_eval or training.eval_strategy != "no"
    tokens = int(training.per_device_eval_batch_size) * setup.length if evaluates else 0
    if setup.has_reference and training.shared_prompts != "off":
        tokens = max(tokens, min(max(MOST_TOKENS, setup.tokens), setup.rollouts * setup.length))
    width = 3 * setup.compute_bytes * shape.intermediate
    width += (2 * setup.weight_bytes + setup.compute_bytes) * shape.hidden
    return {
        "activations": tokens * width,
        "16-bit copies of weights": 0.0 if setup.lora else copies,
        "log-probs of the loss": _logits(setup, tokens),
    }


def _activations(setup: Setup) -> tuple[float, float]:
    """What autograd saves for the backward pass, and the additional memory of one block's backward pass.

    A block saves the float32 inputs of two norms; queries, repeated keys and values, the attention output and a mask;
    the MLP's gate, its activation and up projection; inputs of the norms and of the linear layers. With gradient
    checkpointing a block saves only its input and recomputes the rest. `kept_activations_gib` exempts the last
    blocks, whose activations are freed before others are recomputed. Eager attention saves its scores.
    """
    shape, computed, stream, hidden = setup.shape, setup.compute_bytes, setup.weight_bytes, setup.shape.hidden
    block: float = 8 * hidden + 4 * computed * shape.query + computed * setup.length
    block += (3 if setup.lora else 4) * computed * shape.intermediate
    block += (3 * computed if setup.lora else 2 * (stream + computed)) * hidden
    gradients = 3 * computed * shape.intermediate
    if setup.model.attn_implementation == "eager":  # the scores of every pair of tokens, and their gradients
        scores = shape.heads * setup.length
        block += (4 + computed) * scores
        gradients = max(gradients, (4 + 4 * (computed == 2) + computed) * scores)
    working: float = gradients + 2 * stream * hidden
    last = hidden * (4 + 2 * stream)
    kept = setup.tokens * shape.layers * (block - stream * hidden)
    if setup.training.gradient_checkpointing:
        kept = min(kept, setup.kept_gib * GIB)
    inputs = setup.tokens * (shape.layers * stream * hidden + last)
    return inputs + kept, setup.tokens * working + max(0.0, setup.tokens * block - kept)


def _logits(setup: Setup, tokens: int) -> float:
    """One tile of logits, for the log-probs and entropies of completion tokens (`ChunkedLogProbFunction`)."""
    return min(tokens, TILE_TOKENS) * TILE_VOCABULARY * float(setup.compute_bytes)
