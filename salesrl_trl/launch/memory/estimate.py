"""The memory of a training process at four moments of a step, by parts, in GiB, from `ModelShape` and `Setup`.

Sources, by their releases:

- transformers 5: `models/qwen2/modeling_qwen2.py`, which the decoders of Llama, Mistral and Qwen3 share.
- PyTorch: autograd keeps the inputs that a product needs for its gradient. `aten/src/ATen/autocast_mode.cpp` keeps the
  16-bit copy of a float32 weight until the outermost autocast ends, and casts an activation for each layer anew.
- TRL 1.16: `GRPOTrainer.__init__` loads a reference model. `_get_per_token_logps_and_entropies` never has the logits:
  `kernels/chunked_logprob.py` goes over the vocabulary in tiles, with gradients in float32.
- PEFT 0.21: an adapter is float32, and reads its input as it is (`update.weights.spare_casts`). DeepSpeed 0.19:
  `runtime/zero`, sizes of `zero/config.py`.
- torchao and bitsandbytes: their optimizers' states. vLLM 0.31: `gpu_worker.determine_available_memory`.

Against an H200: within 6 % of the driver's figure (docs/EXPERIMENTS.md).
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from salesrl_trl.errors import ConfigError
from salesrl_trl.launch.memory.shape import Adapters, ModelShape, Setup, Sharding
from salesrl_trl.launch.software import ask_driver
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
SEQUENCES = 8  # completions of full length at once, below which generation on vLLM would wait much


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


Weigh = Callable[[str, str], Estimate]  # from a number format of weights and an optimizer's name in transformers


def estimate(shape: ModelShape, setup: Setup, card_gib: float) -> Estimate:
    """The memory of a process that trains a model of this shape on a card of this size."""
    kept, gradients = _states(shape, setup), _gradients(shape, setup)
    before = gradients * (setup.micro_batches > 1)  # those of the micro-batches before
    embedding = shape.embedding * setup.weight_bytes * (not setup.lora)  # its gradient; twice where it is the head too
    copies = 2.0 * shape.linear * (setup.autocast and setup.weight_bytes == 4)
    at_once = copies * (setup.sharding.level < 3)
    held = at_once * (not setup.checkpointing)
    saved = saved_activations(shape, setup)
    # Beside a tile of logits: gradients of the hidden states and of a trained head, in float32 and their own format.
    head = setup.predicted_tokens * shape.hidden * (4 + setup.weight_bytes)
    head += 0 if setup.lora else shape.embedding * (4 + 2 * (setup.weight_bytes == 2))
    end_of_forward = {
        "gradients": before,
        "activations": saved,
        "16-bit copies of weights": max(at_once * (not setup.lora), held),
        "log-probs of the loss": _logits(setup, setup.predicted_tokens) + head,
    }
    backward_of_a_layer = {
        "gradients": before + embedding * shape.is_tied,
        "activations": saved + _working_activations(shape, setup),
        "16-bit copies of weights": held or copies / shape.layers,
    }
    end_of_update = {
        "gradients": gradients,
        "optimizer's working memory": max(_optimizer_work(shape, setup), embedding * (1 + shape.is_tied)),
    }
    # One block's forward pass: three widths of the MLP, two of the residual stream, the norm's output.
    block = 3 * setup.compute_bytes * shape.intermediate
    block += (2 * setup.weight_bytes + setup.compute_bytes) * shape.hidden
    evaluated = setup.evaluated * (setup.prompt_tokens + setup.completion_tokens)
    passes = [(evaluated, setup.evaluated * setup.completion_tokens), (setup.scored_tokens, setup.scored_tokens)]
    without_gradients = [
        {
            "activations": tokens * block,
            "16-bit copies of weights": at_once * (not setup.lora),
            "log-probs of the loss": _logits(setup, predicted),
        }
        for tokens, predicted in passes
    ]
    awake = _generation(shape, setup, card_gib)
    asleep = {} if setup.engine is None or setup.engine.sleeps else {**awake, "vLLM working memory": 0.0}
    # Buckets in which gradients travel, and weights that a process gathers: at most DeepSpeed's default sizes.
    bucket = min(BUCKET, _trained(shape, setup)) * (setup.sharding is not Sharding.NONE)
    gathered = min(LIVE, shape.parameters) * (setup.sharding.level == 3)
    in_training = {**kept, "communication buffers": setup.compute_bytes * (bucket + gathered), **asleep}
    moments = (
        _moment(TRAINING, {**in_training, **_larger(end_of_forward, backward_of_a_layer)}, setup),
        _moment(STEP, {**in_training, **end_of_update}, setup),
        _moment(GENERATION, {**kept, **awake}, setup),
        _moment(SCORING, {**in_training, **_larger(*without_gradients)}, setup),
    )
    sequences = None
    if setup.engine is not None:
        completion = setup.engine.length * _token_cache(shape, setup.engine.number_bytes) / setup.engine.processes
        sequences = awake["vLLM KV cache"] / completion
    return Estimate(card_gib=card_gib, moments=moments, sequences=sequences)


def advice(shape: ModelShape, setup: Setup, card_gib: float) -> list[str]:
    """Settings that take less memory, up to the first with which training fits: at each fullest moment the cheapest
    that saves some. More cards and a smaller model come last, if nothing else is enough."""
    steps, now = dict[str, str](), estimate(shape, setup, card_gib)
    while not now.fits:
        for name, text, other_shape, other in _changes(shape, setup, now):
            after = estimate(other_shape, other, card_gib)
            if after.needed_gib < now.needed_gib - LEAST_GIB or after.starts_engine > now.starts_engine:
                steps[name], shape, setup, now = text, other_shape, other, after
                break
        else:
            return [*steps.values(), "more cards or a larger one, or a smaller model"]
    return [*steps.values(), f"then about {now.needed_gib:.1f} GiB"]


def _changes(shape: ModelShape, setup: Setup, now: Estimate) -> Iterator[tuple[str, str, ModelShape, Setup]]:
    """The changes that are possible, the cheapest first: a name, the setting with its price, and what is then."""

    def change(text: str, **changed: Any) -> tuple[str, str, ModelShape, Setup]:
        return text.split(":")[0], text, shape, replace(setup, **changed)

    engine = setup.engine
    if setup.evaluated > 1:
        less = setup.evaluated // 2
        yield change(f"`per_device_eval_batch_size: {less}`", evaluated=less)
    if setup.group is not None and setup.pass_tokens != 1:
        yield change("`shared_prompts: 1`: micro-batches go through the model one by one", pass_tokens=1)
    if not setup.checkpointing:
        yield change("`gradient_checkpointing: true`: each block is computed twice", checkpointing=True)
    if setup.micro_batch % 2 == 0:
        batch, batches = setup.micro_batch // 2, setup.micro_batches * 2
        text = f"`per_device_train_batch_size: {batch}` with `gradient_accumulation_steps: {batches}`: the same update"
        yield change(text, micro_batch=batch, micro_batches=batches)
    if engine is not None:
        for share in (step / 20 for step in range(1, 20)):
            other = replace(engine, share=share)
            room = estimate(shape, replace(setup, engine=other), now.card_gib).sequences or 0.0
            if room >= min(SEQUENCES, setup.rollouts) and (share > engine.share) is not now.starts_engine:
                yield change(f"`vllm_gpu_memory_utilization: {share:.2f}`", engine=other)
                break
        if not engine.sleeps:
            text = "`vllm_enable_sleep_mode: true`: vLLM gets its weights and its cache anew at every step"
            yield change(text, engine=replace(engine, sleeps=True))
    if not setup.lora and setup.weight_bytes == 4 and setup.autocast and setup.sharding is Sharding.NONE:
        text = f"`optim: {STOCHASTIC_OPTIM}` with `optim_args: bf16_stochastic_round=True`: torchao rounds updates"
        yield change(text, weight_bytes=2, optim=STOCHASTIC_OPTIM)
    if not setup.lora:
        text = "`use_peft: true`: adapters are trained in place of all weights; `learning_rate` higher"
        *_, lora = change(text, lora=True, weight_bytes=setup.compute_bytes, optim="adamw_torch_fused")
        hidden, inner = float(shape.hidden), shape.intermediate
        usual = Adapters(parameters=shape.parameters // 100, inputs=6 * hidden + inner, distinct=3 * hidden + inner)
        yield "`use_peft", text, replace(shape, adapters=shape.adapters or usual), lora
    for zero in (Sharding.ZERO2, Sharding.ZERO3):
        if setup.sharding.level < zero.level:
            cards, number = max(setup.processes, 2), 2 if setup.autocast else setup.weight_bytes
            text = f"DeepSpeed {zero} on {cards} cards (`accelerate_configs/`)"
            yield change(text, sharding=zero, processes=cards, weight_bytes=number, optim="adamw_torch_fused")


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


def _larger(*moments: Mapping[str, float]) -> Mapping[str, float]:
    return max(moments, key=lambda parts: sum(parts.values()))


# What a process holds for long, in bytes


def _trained(shape: ModelShape, setup: Setup) -> int:
    """Parameters that are trained: the adapters, or all."""
    if not setup.lora:
        return shape.parameters
    assert shape.adapters is not None
    return shape.adapters.parameters


def _states(shape: ModelShape, setup: Setup) -> dict[str, float]:
    """What a process holds all the time.

    - bitsandbytes quantizes the linear layers: 1 byte, or 4 bits and a 32-bit scale for each 64 numbers.
    - Adapters are float32, under DeepSpeed 16 bits. With them the policy is its own reference.
    - DeepSpeed has float32 copies of the trained 16-bit weights.
    """
    trained, in_16_bits = _trained(shape, setup), setup.sharding.is_zero and setup.autocast
    weights: float = shape.parameters * setup.weight_bytes + trained * setup.lora * (2 if in_16_bits else 4)
    if setup.quantized_bits is not None:
        weights += shape.linear * ((1.0 if setup.quantized_bits == 8 else 0.5 + 4 / 64) - setup.weight_bytes)
    if setup.sharding.level == 3:
        weights *= (not setup.offloads_weights) / setup.processes
    number = 4 if setup.lora or setup.sharding.is_zero else setup.weight_bytes
    mine = trained * (not setup.offloads_optimizer) / (setup.processes if setup.sharding.level else 1)
    return {
        "weights": weights,
        "master weights": 4 * mine * in_16_bits,
        "optimizer states": moment_bytes(setup.optim, number) * mine,
        "reference model": weights * (setup.has_reference and not setup.lora),
    }


def _gradients(shape: ModelShape, setup: Setup) -> float:
    """One for each trained weight, in its number format. DDP has them a second time, in its buckets."""
    number = 2 if setup.sharding.is_zero and setup.autocast else 4 if setup.lora else setup.weight_bytes
    copies = 1 + (setup.processes > 1 and setup.sharding is Sharding.NONE)
    return _trained(shape, setup) * number * copies / (setup.processes if setup.sharding.level >= 2 else 1)


def _optimizer_work(shape: ModelShape, setup: Setup) -> float:
    """Memory of the optimizer's step itself.

    - The fused AdamW (transformers' default) needs none, `adamw_torch` a float32 copy of the weights (`foreach`).
    - DeepSpeed has its part of the gradients in float32 (`step` of `stage_1_and_2.py`).
    - torchao works on one weight at a time, in float32: both moments, the weight and its gradient.
    """
    trained = _trained(shape, setup)
    if setup.sharding.is_zero:
        return 4 * trained * (not setup.offloads_optimizer) / setup.processes
    if setup.optim in ("adamw_torch_8bit", "adamw_torch_4bit"):
        return 16.0 * min(trained, shape.embedding)
    return 4.0 * trained * (setup.optim == "adamw_torch")


def _generation(shape: ModelShape, setup: Setup, card_gib: float) -> dict[str, float]:
    """The memory for generation, by part. Without vLLM: the KV cache of `generate`, and its float32 logits.

    vLLM takes its share of the card, asleep none of it: weights; the working memory of its largest batch, which are
    hidden states, the MLP's two widths, and logits of every sequence, thrice in float32; the KV cache gets the rest.
    """
    if (engine := setup.engine) is not None:
        weights = shape.parameters * engine.number_bytes / engine.processes
        block = PROFILED_TOKENS * (4 * shape.hidden + 3 * shape.intermediate) * engine.number_bytes
        rows = min(setup.rollouts * engine.processes, PROFILED_TOKENS)
        working = (block + rows * shape.vocabulary * 12) / engine.processes
        cache = max(0.0, engine.share * card_gib * GIB - weights - working)
        return {"vLLM weights": weights, "vLLM KV cache": cache, "vLLM working memory": working}
    if not setup.generates:
        return {}
    length = setup.prompt_tokens + setup.completion_tokens
    cache = setup.rollouts * length * _token_cache(shape, setup.compute_bytes)
    return {"KV cache": cache, "logits of generation": 2.0 * 4 * setup.rollouts * shape.vocabulary}


def _token_cache(shape: ModelShape, number_bytes: int) -> float:
    """Keys and values of one token, in all layers."""
    return 2.0 * shape.layers * shape.key_value * number_bytes


# Activations, in bytes


def layer_activations(shape: ModelShape, setup: Setup) -> float:
    """What autograd keeps of one block's forward pass, for a pass with gradients.

    Bytes of a token, with c bytes in a product and r in the residual stream (the weights' format). Widths: h hidden,
    f of the MLP, q of the queries, S tokens of a row. Keys and values are repeated to q where a mask is given
    (`sdpa_attention.py`), and padding always gives one. Shared prompts have none in 16 bits.

    - norms, two: 4h for the float32 input of the square. All weights in training: r h for the product with the norm's
      weight, and the inputs of the linear layers, c h once or, as autocast casts for each layer anew, 5 c h together.
    - attention: 4 c q for queries, keys, values and output, 4 for each head, c S for the mask; eager: its weights.
    - MLP: 3 c f for gate, its activation and up; all weights in training: c f more, the input of down.
    - experts that are one weight: the same in that weight's format, because autocast does not cast for a grouped
      product (`integrations/moe.py`), and for each visited expert a copy of its output, and of its input if it is
      trained. Of a shared expert the output and its product with the gate.
    - adapters: their inputs, c wide, once for layers that read the same; under dropout, and where autocast changes
      their format, once for each adapter; a mask of 1 byte under dropout.
    """
    computed, stream = setup.compute_bytes, setup.weight_bytes
    hidden, query, heads = shape.hidden, shape.query, shape.heads
    length = setup.prompt_tokens + setup.completion_tokens
    inner = (3 if setup.lora else 4) * (computed * shape.intermediate + (stream - computed) * shape.routed_width)
    if shape.routed_width:
        inner += (1 if setup.lora else 2) * stream * hidden * shape.routed
        inner += 2 * computed * hidden * (shape.intermediate > shape.routed_width)
    norms = 2.0 * (4 * hidden + 4)
    if not setup.lora:
        norms += 2 * stream * hidden + (2 if stream == computed else 5) * computed * hidden
    attention = 4 * computed * query + 4 * heads + computed * length
    if setup.group is not None and computed == 2:
        attention = 2 * computed * (query + shape.key_value) + 4 * heads
    if setup.eager_attention:
        attention += (4 + computed) * heads * length
    if shape.norms_heads:
        attention += (4 if setup.lora else 4 + stream) * (query + shape.key_value)
    adapted = 0.0
    if setup.lora:
        assert shape.adapters is not None
        shares = stream == computed and not setup.lora_dropout
        inputs = shape.adapters.distinct if shares else shape.adapters.inputs
        adapted = (computed + setup.lora_dropout) * inputs
    return setup.tokens * (norms + attention + inner + adapted)


def saved_activations(shape: ModelShape, setup: Setup) -> float:
    """What is kept from the forward pass to the backward pass: of each block, the last norm and its hidden states.
    With gradient checkpointing a block keeps its input alone."""
    block = layer_activations(shape, setup)
    if setup.checkpointing:
        block = setup.tokens * setup.weight_bytes * shape.hidden
    last = setup.tokens * shape.hidden * (4 + setup.weight_bytes * (1 if setup.lora else 2))
    return shape.layers * block + last


def _working_activations(shape: ModelShape, setup: Setup) -> float:
    """More than the saved ones, while one block's backward pass runs.

    With gradient checkpointing its activations. In the MLP's product: three gradients of width f, less the input of
    down, which is done with; two gradients of the residual stream; one weight's gradient, in 16 bits and its format.
    In eager attention's softmax, when what the MLP kept is done with: the gradients of its result and of its input,
    both in float32, and of the weights in the products' format.
    """
    again = layer_activations(shape, setup) if setup.checkpointing else 0.0
    widths = (3 if setup.lora else 2) * setup.compute_bytes * shape.intermediate
    if setup.eager_attention:
        length = setup.prompt_tokens + setup.completion_tokens
        weights = (4 + 4 * (setup.compute_bytes == 2) + setup.compute_bytes) * shape.heads * length
        widths = max(widths, weights - (3 if setup.lora else 4) * setup.compute_bytes * shape.intermediate)
    number = 0 if setup.lora else 2 + setup.weight_bytes * (setup.weight_bytes != setup.compute_bytes)
    return again + setup.tokens * (widths + 2 * setup.weight_bytes * shape.hidden) + number * shape.largest


def _logits(setup: Setup, tokens: int) -> float:
    """One tile of logits: the log-probs and entropies of so many completion tokens (`ChunkedLogProbFunction`)."""
    return min(tokens, TILE_TOKENS) * TILE_VOCABULARY * float(setup.compute_bytes)


@dataclass(frozen=True, slots=True)
class Card:
    """A card to train on."""

    name: str
    gib: float
    uuid: str | None = None  # the driver's name of it; `None` if it is not in this machine


def named_card(text: str) -> Card:
    """A card by its size: `"75gib"`, or `"80gb"` with 80e9 bytes, the least of the cards with this name."""
    size = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(gb|gib)", text.strip().lower())
    if size is None:
        raise ConfigError(f"`card` is {text!r}. Expected a size, such as 24gb, 80gb or 131.5gib. Correct it.")
    return Card(text, float(size[1]) * (1e9 / GIB if size[2] == "gb" else 1.0))


def card_here(device: torch.device) -> Card | None:
    """The card of this process; `None` on a CPU."""
    if device.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(device)
    return Card(properties.name, properties.total_memory / GIB, f"GPU-{properties.uuid}")


def used_gib(card: Card) -> float | None:
    """Memory of the card in use now, by all processes. `None` if the driver does not say."""
    return next((float(mib) / 1024 for (mib,) in _ask_driver(card, "--query-gpu=memory.used")), None)


def users(card: Card) -> str:
    """The processes that use the card now: `"python (4711) 12.5 GiB"`. Empty if none is known, as in a container."""
    rows = _ask_driver(card, "--query-compute-apps=used_memory,pid,process_name")
    return ", ".join(f"{', '.join(name)} ({pid}) {float(mib) / 1024:.1f} GiB" for mib, pid, *name in rows)


def _ask_driver(card: Card, query: str) -> list[list[str]]:
    """The rows whose first field, the memory in MiB, the driver says."""
    if card.uuid is None:
        return []
    rows = ask_driver(f"--id={card.uuid}", query, "--format=csv,noheader,nounits")
    return [row for row in rows if row[0].replace(".", "").isdigit()]  # else "[N/A]"
