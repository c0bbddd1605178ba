"""The memory of a training process on one card at four moments of a step, by parts, in GiB.

It is good to about 10 %, against an H200 (docs/EXPERIMENTS.md); the preflight's stage `step` measures. The formulas
are those of a decoder as transformers 5 has it, of TRL 1.16's tiled log-probs and of vLLM 0.31, without DeepSpeed and
FSDP.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from transformers import PreTrainedModel
from trl import ModelConfig

from salesrl_trl.config import SalesGRPOConfig
from salesrl_trl.launch.checks.model import empty_model, positions_of, put_adapter
from salesrl_trl.shared_prompts.shared_passes import MOST_TOKENS
from salesrl_trl.telemetry.device import GIB

CONTEXT_GIB = 0.75  # CUDA's context and kernels: 0.74 GiB on an H200 in every row of `benchmarks.memory`
CHANNELS_GIB = 0.5  # NCCL's channels, with several processes
FRAGMENTS = 0.04  # share of PyTorch's allocations that its allocator cannot use again when sizes change
TILE_TOKENS, TILE_VOCABULARY = 4096, 32_768  # `TOKEN_CHUNK_SIZE` and `_CHUNKED_LOGPROB_CHUNK_SIZE` of TRL
PROFILED_TOKENS = 4096  # `max_num_batched_tokens`, with which TRL's vLLM measures its working memory
MOMENTS = {"adamw": 2, "adafactor": 0, "sgd": 0, "adagrad": 1, "rmsprop": 1, "lion": 1, "ademamix": 3}
"""Numbers that an optimizer keeps for a weight, by the begin of its name in transformers. Others count as AdamW."""
SCORING = "passes without gradients"  # the moment of an evaluation, or of the log-probs of the reference
STOCHASTIC_OPTIM = "adamw_torch_8bit"  # torchao's optimizer, which can round stochastically
NUMBER_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "half": 2, "float": 4}
_READ_ONE = re.compile(r"([qkv]|gate|up)_proj$")  # of one block those of attention, and of an MLP, have one input


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """A decoder's figures. Widths and counts are numbers of parameters or of values per token, not bytes."""

    parameters: int
    linear: int  # parameters of the linear layers without the output head
    embedding: int
    is_tied: bool  # the output head is the token embedding
    layers: int
    hidden: int
    intermediate: int  # width of a block's MLP
    query: int  # width of a token's queries, over all heads
    key_value: int  # width of a token's keys, over all heads of keys. Its values are as wide
    vocabulary: int
    positions: int | None  # tokens that the model is made for, if its configuration says
    number_bytes: int  # of a number in the checkpoint
    adapters: int = 0  # parameters of LoRA's adapters
    adapter_inputs: float = 0.0  # widths of the inputs that the adapters of one layer read, each once


def parameter_count(name_or_path: str, revision: str | None, trust_remote_code: bool) -> int:
    return sum(weight.numel() for weight in empty_model(name_or_path, revision, trust_remote_code).parameters())


def shape_of(model: PreTrainedModel, lora: ModelConfig) -> ModelShape | None:
    """The figures of an empty model, with the adapters that PEFT puts on it. `None` for one that is no decoder of
    attention and MLP blocks, by its configuration. Raises `ConfigError` if the adapters have no place."""
    text = model.config.get_text_config()
    needed = ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size")
    if not all(isinstance(getattr(text, name, None), int) for name in needed):
        return None

    def number(name: str, otherwise: int) -> int:
        value = getattr(text, name, None)
        return value if isinstance(value, int) else otherwise

    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    layers = [module for module in model.modules() if isinstance(module, torch.nn.Linear) and module is not head]
    heads = text.num_attention_heads
    width = number("head_dim", text.hidden_size // heads)
    shape = ModelShape(
        parameters=sum(weight.numel() for weight in model.parameters()),
        linear=sum(layer.weight.numel() for layer in layers),
        embedding=embedding.weight.numel(),
        is_tied=head is not None and head.weight is embedding.weight,
        layers=text.num_hidden_layers,
        hidden=text.hidden_size,
        intermediate=number("intermediate_size", 4 * text.hidden_size),
        query=heads * width,
        key_value=number("num_key_value_heads", heads) * width,
        vocabulary=text.vocab_size,
        positions=positions_of(model.config),
        number_bytes=(model.config.dtype or torch.float32).itemsize,
    )
    if not lora.use_peft:
        return shape
    from peft.tuners.lora import LoraLayer

    adapted = put_adapter(model, lora)
    widths = {
        _READ_ONE.sub("", name): int(module.in_features or 0)
        for name, module in adapted.named_modules()
        if isinstance(module, LoraLayer)
    }
    trained = sum(weight.numel() for weight in adapted.parameters() if weight.requires_grad)
    return replace(shape, adapters=trained, adapter_inputs=sum(widths.values()) / shape.layers)


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What a process trains with: the settings of its run, and what is given in place of some."""

    training: SalesGRPOConfig
    model: ModelConfig
    shape: ModelShape
    prompt_tokens: int  # of the longest prompt, to which TRL pads a generation batch
    dtype: str | None  # number format of the weights in training; `None` or `"auto"` for the checkpoint's
    optim: str

    @property
    def lora(self) -> bool:
        return bool(self.model.use_peft)

    @property
    def autocast(self) -> bool:
        """The forward pass computes in 16 bits."""
        return bool(self.training.bf16 or self.training.fp16)

    @cached_property
    def weight_bytes(self) -> int:
        """Of a number of the loaded weights."""
        return NUMBER_BYTES.get(self.dtype or "auto", self.shape.number_bytes)

    @property
    def compute_bytes(self) -> int:
        """Of a number in a matrix product."""
        return 2 if self.autocast or self.weight_bytes == 2 else 4

    @cached_property
    def has_reference(self) -> bool:
        """There is a KL. With LoRA, the policy without its adapters is the reference: no second model."""
        return bool(self.training.kl_targets())

    @property
    def trained(self) -> int:
        """Parameters that are trained: all, or the adapters."""
        return self.shape.adapters if self.lora else self.shape.parameters

    @property
    def completion_tokens(self) -> int:
        return self.training.max_completion_length or 1

    @property
    def length(self) -> int:
        return self.prompt_tokens + self.completion_tokens

    @property
    def rollouts(self) -> int:
        """Completions that a process generates at once."""
        return int(self.training.per_device_train_batch_size * self.training.steps_per_generation)

    @property
    def tokens(self) -> int:
        """Tokens of a pass with gradients, all completions of full length. Passes of groups that share their prompt
        are as large, but for models so small that nobody counts."""
        return int(max(self.training.per_device_train_batch_size * self.length, self.training.pass_tokens or 0))

    @property
    def has_engine(self) -> bool:
        """vLLM runs in this process."""
        return bool(self.training.use_vllm) and self.training.vllm_mode == "colocate"

    @property
    def engine_length(self) -> int:
        """Tokens of the longest prompt and completion that vLLM accepts."""
        length = self.training.parsed_engine_kwargs().get("max_model_len")
        given = self.training.vllm_max_model_length or self.shape.positions or self.length  # vLLM's own default
        return length if isinstance(length, int) else given


@dataclass(frozen=True, kw_only=True, slots=True)
class Moment:
    """The memory at one moment of a step."""

    name: str
    parts: Mapping[str, float]  # GiB by part; parts of 0 are left out

    @property
    def total_gib(self) -> float:
        return sum(self.parts.values())

    @property
    def tensors_gib(self) -> float:
        """What PyTorch has allocated: the total without context and fragments."""
        return sum(gib for part, gib in self.parts.items() if part not in ("CUDA context", "fragmentation"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """The memory of a process on one card."""

    card_gib: float
    moments: tuple[Moment, ...]
    sequences: float | None  # completions of full length for which vLLM's KV cache has room at once, if vLLM is here

    @property
    def peak(self) -> Moment:
        return max(self.moments, key=lambda moment: moment.total_gib)

    @property
    def needed_gib(self) -> float:
        return self.peak.total_gib

    @property
    def starts_engine(self) -> bool:
        """Whether vLLM's share holds its weights and one completion of full length. Without it vLLM does not start."""
        return self.sequences is None or self.sequences >= 1

    @property
    def fits(self) -> bool:
        return self.needed_gib <= self.card_gib and self.starts_engine


def estimate(setup: Setup, card_gib: float) -> Estimate:
    """The memory of a process that trains so on a card of this size."""
    shape, training = setup.shape, setup.training
    held, saved = _held(setup), _saved_activations(setup)
    number = 4 if setup.lora else setup.weight_bytes
    gradients = setup.trained * number * (2 if training.world_size > 1 else 1)  # DDP has them a second time
    before = gradients * (training.gradient_accumulation_steps > 1)  # those of the micro-batches before
    embedding = shape.embedding * setup.weight_bytes * (not setup.lora)  # its gradient; twice where it is the head too
    copies = 2.0 * shape.linear * (setup.autocast and setup.weight_bytes == 4)  # autocast's, kept until the pass ends
    predicted = training.per_device_train_batch_size * setup.completion_tokens
    # Beside a tile of logits: gradients of the hidden states and of a trained head, in float32 and their own format.
    head = predicted * shape.hidden * (4 + setup.weight_bytes)
    head += 0 if setup.lora else shape.embedding * (4 + 2 * (setup.weight_bytes == 2))
    end_of_forward = {
        "gradients": before,
        "activations": saved,
        "16-bit copies of weights": copies * (not (setup.lora and training.gradient_checkpointing)),
        "log-probs of the loss": _logits(setup, predicted) + head,
    }
    backward_of_a_layer = {
        "gradients": before + embedding * shape.is_tied,
        "activations": saved + _working_activations(setup),
        "16-bit copies of weights": copies / shape.layers if training.gradient_checkpointing else copies,
    }
    end_of_update = {
        "gradients": gradients,
        "optimizer's working memory": max(_optimizer_work(setup), embedding * (1 + shape.is_tied)),
    }
    awake = _generation(setup, card_gib)
    asleep = {} if not setup.has_engine or training.vllm_enable_sleep_mode else {**awake, "vLLM working memory": 0.0}
    in_training = {**held, **asleep}
    fullest = max(end_of_forward, backward_of_a_layer, key=lambda parts: sum(parts.values()))
    moments = (
        _moment("forward and backward", {**in_training, **fullest}, setup),
        _moment("optimizer step", {**in_training, **end_of_update}, setup),
        _moment("generation", {**held, **awake}, setup),
        _moment(SCORING, {**in_training, **_without_gradients(setup, copies)}, setup),
    )
    sequences = None
    if setup.has_engine:
        each = setup.engine_length * _token_cache(shape, _engine_bytes(setup)) / training.vllm_tensor_parallel_size
        sequences = awake["vLLM KV cache"] / each
    return Estimate(card_gib=card_gib, moments=moments, sequences=sequences)


def moment_bytes(optim: str, weight_bytes: int) -> float:
    """Bytes that an optimizer, by its name in transformers, keeps for a weight of so many bytes. Moments are float32;
    those of PyTorch's AdamW have the weight's format; those of 8 and 4 bits have a scale for each 256 numbers."""
    moments = MOMENTS.get(optim.removeprefix("paged_").split("_")[0], 2)
    if few := re.search(r"([48])bit", optim):
        return moments * int(few[1]) / 8 + 2 * 4 / 256
    return moments * (weight_bytes if optim.startswith("adamw_torch") else 4.0)


def _moment(name: str, parts: Mapping[str, float], setup: Setup) -> Moment:
    inside = {part: size / GIB for part, size in parts.items() if size}
    context = CONTEXT_GIB + CHANNELS_GIB * (setup.training.world_size > 1)
    fragments = FRAGMENTS * sum(gib for part, gib in inside.items() if not part.startswith("vLLM"))
    return Moment(name=name, parts={**inside, "CUDA context": context, "fragmentation": fragments})


# Bytes of what a process holds for long


def _held(setup: Setup) -> dict[str, float]:
    """bitsandbytes quantizes the linear layers: 1 byte, or 4 bits and a 32-bit scale for each 64 numbers. Adapters are
    float32."""
    shape = setup.shape
    weights: float = shape.parameters * setup.weight_bytes + 4 * shape.adapters
    if setup.model.load_in_4bit or setup.model.load_in_8bit:
        weights += shape.linear * ((1.0 if setup.model.load_in_8bit else 0.5 + 4 / 64) - setup.weight_bytes)
    return {
        "weights": weights,
        "optimizer states": moment_bytes(setup.optim, 4 if setup.lora else setup.weight_bytes) * setup.trained,
        "reference model": weights * (setup.has_reference and not setup.lora),
    }


def _optimizer_work(setup: Setup) -> float:
    """torchao works on one weight at a time, in float32, with both moments and the gradient; the fused AdamW needs
    none, `adamw_torch` a float32 copy of the weights."""
    if setup.optim in ("adamw_torch_8bit", "adamw_torch_4bit"):
        return 16.0 * min(setup.trained, setup.shape.embedding)
    return 4.0 * setup.trained * (setup.optim == "adamw_torch")


def _generation(setup: Setup, card_gib: float) -> dict[str, float]:
    """vLLM takes its share of the card: weights; the working memory of its largest batch, which are hidden states, the
    MLP's two widths, and logits of every sequence, thrice in float32; the KV cache gets the rest. Without vLLM: the KV
    cache of `generate`, and its float32 logits."""
    shape, training, options = setup.shape, setup.training, setup.training.parsed_engine_kwargs()
    if setup.has_engine:
        number, processes = _engine_bytes(setup), training.vllm_tensor_parallel_size
        share = options.get("gpu_memory_utilization")
        share = share if isinstance(share, float | int) else training.vllm_gpu_memory_utilization
        weights = shape.parameters * number / processes
        block = PROFILED_TOKENS * (4 * shape.hidden + 3 * shape.intermediate) * number
        rows = min(setup.rollouts * processes, PROFILED_TOKENS)
        working = (block + rows * shape.vocabulary * 12) / processes
        cache = max(0.0, share * card_gib * GIB - weights - working)
        return {"vLLM weights": weights, "vLLM KV cache": cache, "vLLM working memory": working}
    if training.use_vllm or training.sampler is not None:
        return {}
    cache = setup.rollouts * setup.length * _token_cache(shape, setup.compute_bytes)
    return {"KV cache": cache, "logits of generation": 2.0 * 4 * setup.rollouts * shape.vocabulary}


def _token_cache(shape: ModelShape, number_bytes: int) -> float:
    """Keys and values of one token, in all layers."""
    return 2.0 * shape.layers * shape.key_value * number_bytes


def _engine_bytes(setup: Setup) -> int:
    """Of a number of vLLM's weights and cache."""
    dtype = str(setup.training.parsed_engine_kwargs().get("dtype"))
    return NUMBER_BYTES.get(dtype, 2 if setup.autocast else 4)


# Bytes of activations. Of a token: c a number in a product, r in the residual stream (the weights' format).


def _without_gradients(setup: Setup, copies: float) -> dict[str, float]:
    """The larger of an evaluation and, where prompts are shared, of the reference's log-probs. One block's forward
    pass: three widths of the MLP, two of the residual stream, the norm's output."""
    training, shape = setup.training, setup.shape
    evaluates = training.held_out_eval or training.eval_strategy != "no"
    evaluated = int(training.per_device_eval_batch_size) * evaluates
    scored = min(max(MOST_TOKENS, setup.tokens), setup.rollouts * setup.length)
    scored *= setup.has_reference and training.shared_prompts != "off"
    block = 3 * setup.compute_bytes * shape.intermediate
    block += (2 * setup.weight_bytes + setup.compute_bytes) * shape.hidden
    evaluation = (evaluated * setup.length, evaluated * setup.completion_tokens)
    tokens, predicted = max(evaluation, (scored, scored))
    return {
        "activations": tokens * block,
        "16-bit copies of weights": copies * (not setup.lora),
        "log-probs of the loss": _logits(setup, predicted),
    }


def _layer_activations(setup: Setup) -> float:
    """What autograd keeps of one block's forward pass: two norms' float32 input; queries, repeated keys and values,
    the output of attention, with a mask; gate, its activation and up of the MLP; inputs of adapters; and where all
    weights train, the inputs of the norms and of the linear layers, which autocast casts for each layer anew."""
    shape, computed, stream, hidden = setup.shape, setup.compute_bytes, setup.weight_bytes, setup.shape.hidden
    kept: float = 8 * hidden + 4 * computed * shape.query + computed * setup.length
    kept += (3 if setup.lora else 4) * computed * shape.intermediate
    if setup.lora:
        kept += computed * shape.adapter_inputs
    else:
        kept += 2 * stream * hidden + (2 if stream == computed else 5) * computed * hidden
    return setup.tokens * kept


def _saved_activations(setup: Setup) -> float:
    """What is kept from the forward pass to the backward pass: of each block, the last norm and its hidden states.
    With gradient checkpointing a block keeps its input alone."""
    shape, input_of_block = setup.shape, setup.tokens * setup.weight_bytes * setup.shape.hidden
    block = input_of_block if setup.training.gradient_checkpointing else _layer_activations(setup)
    last = setup.tokens * shape.hidden * (4 + setup.weight_bytes * (1 if setup.lora else 2))
    return shape.layers * block + last


def _working_activations(setup: Setup) -> float:
    """More than the saved ones, while one block's backward pass runs: with gradient checkpointing its activations;
    gradients of the MLP's widths, of the residual stream, and of one weight."""
    shape = setup.shape
    again = _layer_activations(setup) if setup.training.gradient_checkpointing else 0.0
    widths = (3 if setup.lora else 2) * setup.compute_bytes * shape.intermediate
    number = 0 if setup.lora else 2 + setup.weight_bytes * (setup.weight_bytes != setup.compute_bytes)
    largest = shape.hidden * shape.intermediate
    return again + setup.tokens * (widths + 2 * setup.weight_bytes * shape.hidden) + number * largest


def _logits(setup: Setup, tokens: int) -> float:
    """One tile of logits: the log-probs and entropies of so many completion tokens (`ChunkedLogProbFunction`)."""
    return min(tokens, TILE_TOKENS) * TILE_VOCABULARY * float(setup.compute_bytes)
