"""The memory of a training process at four moments of a step, by parts, in GiB.

It is good to about 10 %, against an H200 (docs/EXPERIMENTS.md); the preflight's stage `step` measures. The
formulas are those of a decoder as transformers 5 has it, of TRL 1.16's tiled log-probs, DeepSpeed 0.19 and vLLM 0.31.
"""

import re
from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from typing import Any

from trl import ModelConfig

from salesrl_trl.config import SalesGRPOConfig
from salesrl_trl.launch.memory_shape import ModelShape
from salesrl_trl.shared_prompts.shared_passes import MOST_TOKENS
from salesrl_trl.telemetry.device import GIB

CONTEXT_GIB = 0.75  # CUDA's context and kernels: 0.74 GiB on an H200 in every row of `benchmarks.memory`
CHANNELS_GIB = 0.5  # NCCL's channels, with several processes
FRAGMENTS = 0.04  # share of PyTorch's allocations that its allocator cannot use again when sizes change
TILE_TOKENS, TILE_VOCABULARY = 4096, 32_768  # `TOKEN_CHUNK_SIZE` and `_CHUNKED_LOGPROB_CHUNK_SIZE` of TRL
PROFILED_TOKENS = 4096  # `max_num_batched_tokens`, with which TRL's vLLM measures its working memory
BUCKET, LIVE = 500_000_000, 1_000_000_000  # DeepSpeed's `reduce_bucket_size`, `stage3_max_live_parameters`
MOMENTS = {"adamw": 2, "adafactor": 0, "sgd": 0, "adagrad": 1, "rmsprop": 1, "lion": 1, "ademamix": 3}
"""Numbers that an optimizer keeps for a weight, by the begin of its name in transformers. Others count as AdamW."""
TRAINING, STEP, GENERATION = "forward and backward", "optimizer step", "generation"
SCORING = "passes without gradients"  # the moments. The last one is an evaluation, or the log-probs of the reference.
STOCHASTIC_OPTIM = "adamw_torch_8bit"  # torchao's optimizer, which can round stochastically
LEAST_GIB = 0.05  # a change that saves no more is no advice


NUMBER_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "half": 2, "float": 4}


class Sharding(StrEnum):
    """The states of training that processes share, each holding a part."""

    NONE = "none"
    ZERO1 = "ZeRO-1"
    ZERO2 = "ZeRO-2"
    ZERO3 = "ZeRO-3"
    FSDP = "FSDP"

    @property
    def is_zero(self) -> bool:
        return self.value.startswith("ZeRO")

    @property
    def level(self) -> int:
        """What is split: 1 the optimizer's states, 2 gradients too, 3 weights too."""
        return {"none": 0, "ZeRO-1": 1, "ZeRO-2": 2}.get(self.value, 3)


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What a process trains with: the settings of its run, and what is given in place of some."""

    training: SalesGRPOConfig
    model: ModelConfig
    shape: ModelShape
    prompt_tokens: int  # of the longest prompt, to which TRL pads a generation batch
    dtype: str | None  # number format of the weights in training; `None` or `"auto"` for the checkpoint's
    optim: str
    sharding: Sharding
    processes: int

    @property
    def lora(self) -> bool:
        return bool(self.model.use_peft)

    @property
    def autocast(self) -> bool:
        """The forward pass computes in 16 bits."""
        return bool(self.training.bf16 or self.training.fp16)

    @cached_property
    def weight_bytes(self) -> int:
        """Of a number of the loaded weights. DeepSpeed has 16-bit ones, FSDP float32."""
        if self.sharding.is_zero and self.autocast:
            return 2
        return 4 if self.sharding is Sharding.FSDP else NUMBER_BYTES.get(self.dtype or "auto", self.shape.number_bytes)

    @property
    def compute_bytes(self) -> int:
        """Of a number in a matrix product."""
        return 2 if self.autocast or self.weight_bytes == 2 else 4

    @cached_property
    def has_reference(self) -> bool:
        """There is a KL. With LoRA, the policy without its adapters is the reference: no second model."""
        return bool(self.training.kl_targets())

    @property
    def completion_tokens(self) -> int:
        return self.training.max_completion_length or 1

    @property
    def length(self) -> int:
        return self.prompt_tokens + self.completion_tokens

    @property
    def micro_batch(self) -> int:
        return int(self.training.per_device_train_batch_size)

    @property
    def rollouts(self) -> int:
        """Completions that a process generates at once."""
        return self.micro_batch * int(self.training.steps_per_generation)

    @property
    def tokens(self) -> int:
        """Tokens of a pass with gradients, all completions of full length. Passes of groups that share their prompt
        are as large, but for models so small that nobody counts."""
        return max(self.micro_batch * self.length, int(self.training.pass_tokens or 0))

    @property
    def passes_without_gradients(self) -> list[tuple[int, int]]:
        """Tokens of a pass, and of them those that it predicts: of an evaluation, and for the reference's log-probs
        where prompts are shared. Without that these passes are as small as those with gradients."""
        evaluates = self.training.held_out_eval or self.training.eval_strategy != "no"
        evaluated = int(self.training.per_device_eval_batch_size) * evaluates
        scored = min(max(MOST_TOKENS, self.tokens), self.rollouts * self.length)
        scored *= self.has_reference and self.training.shared_prompts != "off"
        return [(evaluated * self.length, evaluated * self.completion_tokens), (scored, scored)]

    def offloads(self, states: str) -> bool:
        """Whether DeepSpeed keeps these states (`"optimizer"`, `"param"`) outside of the card."""
        config = getattr(self.training.deepspeed_plugin, "deepspeed_config", {}).get("zero_optimization", {})
        return (config.get(f"offload_{states}") or {}).get("device") not in ("none", None)

    @property
    def has_engine(self) -> bool:
        """vLLM runs in this process."""
        return bool(self.training.use_vllm) and self.training.vllm_mode == "colocate"


def setup_of(
    training: SalesGRPOConfig, model: ModelConfig, shape: ModelShape, prompt_tokens: int, *, dtype: str | None,
    optim: str | None = None, sharding: Sharding | None = None, processes: int | None = None,
) -> Setup:  # fmt: skip
    """The setup of a run. `optim`, `sharding`, `processes`: in place of the run's own."""
    if sharding is None and training.deepspeed_plugin is not None:
        zero = (Sharding.NONE, Sharding.ZERO1, Sharding.ZERO2, Sharding.ZERO3)
        sharding = zero[training.deepspeed_plugin.zero_stage]
    return Setup(
        training=training, model=model, shape=shape, prompt_tokens=prompt_tokens, dtype=dtype,
        optim=optim or training.optim.value,
        sharding=sharding or (Sharding.FSDP if training.is_sharded else Sharding.NONE),
        processes=processes or training.world_size,
    )  # fmt: skip


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
    held, gradients, saved = _held(setup), _gradients(setup), _saved_activations(setup)
    before = gradients * (training.gradient_accumulation_steps > 1)  # those of the micro-batches before
    embedding = shape.embedding * setup.weight_bytes * (not setup.lora)  # its gradient; twice where it is the head too
    copies = 2.0 * shape.linear * (setup.autocast and setup.weight_bytes == 4)  # autocast's, kept until the pass ends
    at_once = copies * (setup.sharding.level < 3)
    predicted = setup.micro_batch * setup.completion_tokens
    # Beside a tile of logits: gradients of the hidden states and of a trained head, in float32 and their own format.
    head = predicted * shape.hidden * (4 + setup.weight_bytes)
    head += 0 if setup.lora else shape.embedding * (4 + 2 * (setup.weight_bytes == 2))
    end_of_forward = {
        "gradients": before,
        "activations": saved,
        "16-bit copies of weights": at_once * (not (setup.lora and training.gradient_checkpointing)),
        "log-probs of the loss": _logits(setup, predicted) + head,
    }
    backward_of_a_layer = {
        "gradients": before + embedding * shape.is_tied,
        "activations": saved + _working_activations(setup),
        "16-bit copies of weights": copies / shape.layers if training.gradient_checkpointing else at_once,
    }
    end_of_update = {
        "gradients": gradients,
        "optimizer's working memory": max(_optimizer_work(setup), embedding * (1 + shape.is_tied)),
    }
    # One block's forward pass: three widths of the MLP, two of the residual stream, the norm's output.
    block = 3 * setup.compute_bytes * shape.intermediate
    block += (2 * setup.weight_bytes + setup.compute_bytes) * shape.hidden
    without_gradients = [
        {
            "activations": tokens * block,
            "16-bit copies of weights": at_once * (not setup.lora),
            "log-probs of the loss": _logits(setup, predicted),
        }
        for tokens, predicted in setup.passes_without_gradients
    ]
    awake = _generation(setup, card_gib)
    asleep = {} if not setup.has_engine or training.vllm_enable_sleep_mode else {**awake, "vLLM working memory": 0.0}
    # Buckets in which gradients travel, and weights that a process gathers: at most DeepSpeed's default sizes.
    bucket = min(BUCKET, _trained(setup)) * (setup.sharding is not Sharding.NONE)
    gathered = min(LIVE, shape.parameters) * (setup.sharding.level == 3)
    in_training = {**held, "communication buffers": setup.compute_bytes * (bucket + gathered), **asleep}
    fullest = _larger(end_of_forward, backward_of_a_layer)
    moments = (
        _moment(TRAINING, {**in_training, **fullest}, setup),
        _moment(STEP, {**in_training, **end_of_update}, setup),
        _moment(GENERATION, {**held, **awake}, setup),
        _moment(SCORING, {**in_training, **_larger(*without_gradients)}, setup),
    )
    sequences = awake["vLLM KV cache"] / _sequence_cache(setup) if setup.has_engine else None
    return Estimate(card_gib=card_gib, moments=moments, sequences=sequences)


def _larger(*moments: dict[str, float]) -> dict[str, float]:
    return max(moments, key=lambda parts: sum(parts.values()))


def advice(setup: Setup, card_gib: float) -> list[str]:
    """Settings that take less memory, the cheapest first, each with what it alone leaves to be needed."""
    now, lora, batch = estimate(setup, card_gib), copy(setup.model), setup.micro_batch
    lora.use_peft = True
    one_by_one = {
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": batch * setup.training.gradient_accumulation_steps,
        "steps_per_generation": setup.rollouts,
    }
    changes: list[tuple[str, dict[str, object], dict[str, Any]]] = [  # a text, settings of training, and of the setup
        ("`per_device_eval_batch_size: 1`", {"per_device_eval_batch_size": 1}, {}),
        ("`gradient_checkpointing: true`", {"gradient_checkpointing": True}, {}),
        (", ".join(f"`{name}: {value}`" for name, value in one_by_one.items()), one_by_one, {}),
        ("`vllm_enable_sleep_mode: true`", {"vllm_enable_sleep_mode": True}, {}),
    ]
    for share in (0.3, 0.45, 0.6):
        text = f"`vllm_gpu_memory_utilization: {share}`"
        changes.append((text, {"vllm_gpu_memory_utilization": share}, {}))
    if not setup.lora and setup.sharding is Sharding.NONE:
        text = f"`optim: {STOCHASTIC_OPTIM}` with `optim_args: bf16_stochastic_round=True` (torchao)"
        changes.append((text, {}, {"dtype": "bfloat16", "optim": STOCHASTIC_OPTIM}))
        changes.append(("`use_peft: true`, with a higher `learning_rate`", {}, {"model": lora, "dtype": "bfloat16"}))
    if setup.sharding.level < 3:
        sharded = {"sharding": Sharding.ZERO3, "processes": max(setup.processes, 2)}
        changes.append((f"DeepSpeed ZeRO-3 on {sharded['processes']} cards (`accelerate_configs/`)", {}, sharded))
    lines = []
    for text, settings, others in changes:
        training = copy(setup.training)
        training.__dict__.update(settings)
        after = estimate(replace(setup, training=training, **others), card_gib)
        if after.needed_gib < now.needed_gib - LEAST_GIB or after.starts_engine > now.starts_engine:
            lines.append(f"{text}: {after.needed_gib:.1f} GiB")
    return [*lines, "more cards or a larger one, or a smaller model"]


def moment_bytes(optim: str, weight_bytes: int) -> float:
    """Bytes that an optimizer, by its name in transformers, keeps for a weight of so many bytes. Moments are float32;
    those of PyTorch's AdamW have the weight's format; those of 8 and 4 bits have a scale for each 256 numbers."""
    moments = MOMENTS.get(optim.removeprefix("paged_").split("_")[0], 2)
    if few := re.search(r"([48])bit", optim):
        return moments * int(few[1]) / 8 + 2 * 4 / 256
    return moments * (weight_bytes if optim.startswith("adamw_torch") else 4.0)


def _moment(name: str, parts: Mapping[str, float], setup: Setup) -> Moment:
    inside = {part: size / GIB for part, size in parts.items() if size}
    context = CONTEXT_GIB + CHANNELS_GIB * (setup.processes > 1)
    fragments = FRAGMENTS * sum(gib for part, gib in inside.items() if not part.startswith("vLLM"))
    return Moment(name=name, parts={**inside, "CUDA context": context, "fragmentation": fragments})


# Bytes of what a process holds for long


def _trained(setup: Setup) -> int:
    """Parameters that are trained: all, or the adapters. Those that PEFT has not counted are a hundredth."""
    shape = setup.shape
    return (shape.adapters or shape.parameters // 100) if setup.lora else shape.parameters


def _held(setup: Setup) -> dict[str, float]:
    """bitsandbytes quantizes the linear layers: 1 byte, or 4 bits and a 32-bit scale for each 64 numbers. Adapters are
    float32, under DeepSpeed 16 bits. DeepSpeed has float32 copies of the trained 16-bit weights."""
    shape, trained, in_16_bits = setup.shape, _trained(setup), setup.sharding.is_zero and setup.autocast
    weights: float = shape.parameters * setup.weight_bytes + trained * setup.lora * (2 if in_16_bits else 4)
    if setup.model.load_in_4bit or setup.model.load_in_8bit:
        weights += shape.linear * ((1.0 if setup.model.load_in_8bit else 0.5 + 4 / 64) - setup.weight_bytes)
    if setup.sharding.level == 3:
        weights *= (not setup.offloads("param")) / setup.processes
    number = 4 if setup.lora or setup.sharding.is_zero else setup.weight_bytes
    mine = trained * (not setup.offloads("optimizer")) / (setup.processes if setup.sharding.level else 1)
    return {
        "weights": weights,
        "master weights": 4 * mine * in_16_bits,
        "optimizer states": moment_bytes(setup.optim, number) * mine,
        "reference model": weights * (setup.has_reference and not setup.lora),
    }


def _gradients(setup: Setup) -> float:
    """One for each trained weight, in its number format. DDP has them a second time, in its buckets."""
    number = 2 if setup.sharding.is_zero and setup.autocast else 4 if setup.lora else setup.weight_bytes
    copies = 1 + (setup.processes > 1 and setup.sharding is Sharding.NONE)
    return _trained(setup) * number * copies / (setup.processes if setup.sharding.level >= 2 else 1)


def _optimizer_work(setup: Setup) -> float:
    """DeepSpeed has its part of the gradients in float32; torchao works on one weight at a time, in float32, with both
    moments and the gradient; the fused AdamW needs none, `adamw_torch` a float32 copy of the weights."""
    trained = _trained(setup)
    if setup.sharding.is_zero:
        return 4 * trained * (not setup.offloads("optimizer")) / setup.processes
    if setup.optim in ("adamw_torch_8bit", "adamw_torch_4bit"):
        return 16.0 * min(trained, setup.shape.embedding)
    return 4.0 * trained * (setup.optim == "adamw_torch")


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


def _sequence_cache(setup: Setup) -> float:
    """Keys and values of a completion of full length in vLLM. It starts if its cache has room for one."""
    processes = int(setup.training.vllm_tensor_parallel_size)
    return engine_length(setup) * _token_cache(setup.shape, _engine_bytes(setup)) / processes


def engine_length(setup: Setup) -> int:
    """Tokens of the longest prompt and completion that vLLM accepts."""
    length = setup.training.parsed_engine_kwargs().get("max_model_len")
    given = setup.training.vllm_max_model_length or setup.shape.positions or setup.length  # vLLM's own default
    return length if isinstance(length, int) else given


def _engine_bytes(setup: Setup) -> int:
    """Of a number of vLLM's weights and cache."""
    dtype = str(setup.training.parsed_engine_kwargs().get("dtype"))
    return NUMBER_BYTES.get(dtype, 2 if setup.autocast else 4)


# Bytes of activations. Of a token: c a number in a product, r in the residual stream (the weights' format).


def _layer_activations(setup: Setup) -> float:
    """What autograd keeps of one block's forward pass: two norms' float32 input; queries, repeated keys and values,
    the output of attention, with a mask; gate, its activation and up of the MLP; inputs of adapters; and where all
    weights train, the inputs of the norms and of the linear layers, which autocast casts for each layer anew."""
    shape, computed, stream, hidden = setup.shape, setup.compute_bytes, setup.weight_bytes, setup.shape.hidden
    kept: float = 8 * hidden + 4 * computed * shape.query + computed * setup.length
    kept += (3 if setup.lora else 4) * computed * shape.intermediate
    if setup.lora:
        kept += computed * (shape.adapter_inputs or 3 * hidden + shape.intermediate)
    else:
        kept += 2 * stream * hidden + (2 if stream == computed else 5) * computed * hidden
    if setup.model.attn_implementation == "eager":
        kept += (4 + computed) * shape.heads * setup.length
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
    gradients of the MLP's widths or of eager attention's weights, of the residual stream, and of one weight."""
    shape = setup.shape
    again = _layer_activations(setup) if setup.training.gradient_checkpointing else 0.0
    of_mlp = setup.compute_bytes * shape.intermediate
    widths = (3 if setup.lora else 2) * of_mlp
    if setup.model.attn_implementation == "eager":
        weights = (4 + 4 * (setup.compute_bytes == 2) + setup.compute_bytes) * shape.heads * setup.length
        widths = max(widths, weights - (3 if setup.lora else 4) * of_mlp)
    number = 0 if setup.lora else 2 + setup.weight_bytes * (setup.weight_bytes != setup.compute_bytes)
    largest = shape.hidden * shape.intermediate
    return again + setup.tokens * (widths + 2 * setup.weight_bytes * shape.hidden) + number * largest


def _logits(setup: Setup, tokens: int) -> float:
    """One tile of logits: the log-probs and entropies of so many completion tokens (`ChunkedLogProbFunction`)."""
    return min(tokens, TILE_TOKENS) * TILE_VOCABULARY * float(setup.compute_bytes)
