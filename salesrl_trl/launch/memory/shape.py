"""What decides the memory of a training process: the figures of its model, and the settings of its run.

Owns the counting, on a model that is built without its weights. `estimate` has the formulas of bytes.
"""

import functools
import math
import re
from dataclasses import dataclass
from enum import StrEnum

import torch
from transformers import PreTrainedModel
from trl import ModelConfig

from salesrl_trl.config import SalesGRPOConfig
from salesrl_trl.config.rollouts import why_in_trls_order
from salesrl_trl.errors import ConfigError
from salesrl_trl.launch.checks.model import empty_model, positions_of, put_adapter
from salesrl_trl.shared_prompts.ahead import unasked_tokens
from salesrl_trl.shared_prompts.shared_passes import MOST_TOKENS
from salesrl_trl.shared_prompts.support import why_not_shared, window_of

NUMBER_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "half": 2, "float": 4}


class UnknownShape(ConfigError):
    """A model is no decoder of attention and MLP blocks, by its configuration."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Adapters:
    """LoRA's adapters of a model."""

    parameters: int
    inputs: float  # sum of the widths of the adapted layers' inputs, over the modules of one layer
    distinct: float  # the same, where layers that read one input count it once


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
    needed = ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size")
    if missing := [name for name in needed if not isinstance(getattr(text, name, None), int)]:
        raise UnknownShape(f"the configuration of {model.config.model_type} has no number for {', '.join(missing)}")

    def number(name: str, otherwise: int = 0) -> int:
        value = getattr(text, name, None) or otherwise
        return max(value) if isinstance(value, list) else value  # Gemma 3n has one for each block

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
    width = number("head_dim", text.hidden_size // heads)
    visited, mlp = number("num_experts_per_tok"), number("intermediate_size", 4 * text.hidden_size)
    expert = number("moe_intermediate_size", mlp)
    shared = number("shared_expert_intermediate_size", number("n_shared_experts") * expert)
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
        key_value=number("num_key_value_heads", heads) * width,
        norms_heads=any(name.endswith("q_norm") for name, _ in model.named_modules()),
        vocabulary=text.vocab_size,
        positions=positions_of(model.config),
        number_bytes=dtype.itemsize,
        shares_prompts=why_not_shared(model) is None,
        window=window_of(model),
    )


_READ_ONE = re.compile(r"([qkv]|gate|up)_proj$")  # of one block those of attention, and of an MLP, have one input


def adapters_of(model: PreTrainedModel, lora: ModelConfig) -> Adapters:
    """The adapters that PEFT puts on an empty model, which it changes."""
    from peft.tuners.lora import LoraLayer

    adapted = put_adapter(model, lora)
    layers = model.config.get_text_config().num_hidden_layers
    widths = {
        name: int(each.in_features or 0) for name, each in adapted.named_modules() if isinstance(each, LoraLayer)
    }
    return Adapters(
        parameters=sum(weight.numel() for weight in adapted.parameters() if weight.requires_grad),
        inputs=sum(widths.values()) / layers,
        distinct=sum({_READ_ONE.sub("", name): width for name, width in widths.items()}.values()) / layers,
    )


# Settings


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Engine:
    """vLLM in the process of training."""

    share: float  # `vllm_gpu_memory_utilization`
    sleeps: bool
    number_bytes: int
    processes: int
    length: int  # tokens of the longest prompt and completion. vLLM starts if its cache has room for them


@dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    """What a process trains with."""

    micro_batch: int
    micro_batches: int
    rollouts: int  # completions that a process generates at once
    evaluated: int = 0  # completions of an evaluation's batch; 0 without evaluations
    prompt_tokens: int
    completion_tokens: int
    checkpointing: bool
    weight_bytes: int  # of a number of the loaded weights
    quantized_bits: int | None = None  # of a number of the frozen linear layers
    autocast: bool  # the forward pass computes in 16 bits
    optim: str
    lora: bool
    lora_dropout: bool
    has_reference: bool  # there is a KL. With LoRA, the policy without its adapters is the reference: no second model
    sharding: Sharding = Sharding.NONE
    processes: int = 1
    offloads_optimizer: bool = False
    offloads_weights: bool = False
    eager_attention: bool = False  # which keeps every attention weight
    engine: Engine | None = None
    generates: bool = False  # transformers generates in this process
    group: int | None = None  # completions of a prompt that goes through the model once; `None` for TRL's own passes
    pass_tokens: int | None = None  # the number of `shared_prompts`
    parameters: int = 0  # weights of the model

    @property
    def tokens(self) -> int:
        """Tokens of a pass with gradients, all completions of full length."""
        padded = self.micro_batch * (self.prompt_tokens + self.completion_tokens)
        if self.group is None:
            return padded
        fewest = self.shared_tokens(self.micro_batch)
        if self.sharding is not Sharding.NONE:
            return fewest
        is_light = self.checkpointing and self.compute_bytes == 2
        most = self.pass_tokens
        if most is None:
            most = unasked_tokens(self.parameters, padded, is_light=is_light)
        return max(fewest, min(self.shared_tokens(self.micro_batch * self.micro_batches), most))

    def shared_tokens(self, completions: int) -> int:
        """Tokens of whole groups with so many completions in all, each prompt once."""
        return math.ceil(completions / (self.group or 1)) * self.prompt_tokens + completions * self.completion_tokens

    @property
    def predicted_tokens(self) -> int:
        """Completion tokens of a pass with gradients."""
        if self.group is None:
            return self.micro_batch * self.completion_tokens
        return min(self.tokens, self.micro_batch * self.micro_batches * self.completion_tokens)

    @property
    def scored_tokens(self) -> int:
        """Tokens of a pass for the reference's log-probs, where prompts are shared; 0 if there is none."""
        if self.group is None or not self.has_reference:
            return 0
        most = MOST_TOKENS if self.pass_tokens is None else self.pass_tokens
        return max(self.shared_tokens(self.group), min(most, self.shared_tokens(self.rollouts)))

    @property
    def compute_bytes(self) -> int:
        """Bytes of a number in a matrix product."""
        return 2 if self.autocast or self.weight_bytes == 2 else 4


def setup_of(
    training: SalesGRPOConfig, model: ModelConfig, shape: ModelShape, prompt_tokens: int, *, dtype: str | None,
    optim: str | None = None, sharding: Sharding | None = None, processes: int | None = None,
) -> Setup:  # fmt: skip
    """The setup of a run. TRL pads a generation batch to its longest prompt, of `prompt_tokens`, and completion.

    `dtype`: number format of the weights in training; `None` or `"auto"` for the checkpoint's. DeepSpeed has 16-bit
    weights, FSDP float32 ones. `optim`, `sharding`, `processes`: in place of the run's own.
    """
    autocast, completion_tokens = training.bf16 or training.fp16, training.max_completion_length or 1
    deepspeed = training.deepspeed_plugin
    if sharding is None and deepspeed is not None:
        sharding = (Sharding.NONE, Sharding.ZERO1, Sharding.ZERO2, Sharding.ZERO3)[deepspeed.zero_stage]
    elif sharding is None:
        sharding = Sharding.FSDP if training.is_sharded else Sharding.NONE
    zero = getattr(deepspeed, "deepspeed_config", {}).get("zero_optimization", {})
    offloaded = {
        name for name, entry in zero.items() if isinstance(entry, dict) and entry.get("device") not in ("none", None)
    }
    number = NUMBER_BYTES.get(dtype or "auto", shape.number_bytes)
    number = 2 if sharding.is_zero and autocast else 4 if sharding is Sharding.FSDP else number
    is_shared = (
        training.shared_prompts != "off"
        and shape.shares_prompts
        and (shape.window is None or prompt_tokens + completion_tokens <= shape.window)
        and model.attn_implementation != "eager"
        and not training.torch_compile
        and why_in_trls_order(training, False, False) is None
    )
    engine = None
    if training.use_vllm and training.vllm_mode == "colocate":
        options = training.parsed_engine_kwargs()
        share, length = options.get("gpu_memory_utilization"), options.get("max_model_len")
        longest = training.vllm_max_model_length or shape.positions  # vLLM's own default
        engine = Engine(
            share=share if isinstance(share, float | int) else training.vllm_gpu_memory_utilization,
            sleeps=training.vllm_enable_sleep_mode,
            number_bytes=NUMBER_BYTES.get(str(options.get("dtype")), 2 if autocast else 4),
            processes=training.vllm_tensor_parallel_size,
            length=length if isinstance(length, int) else longest or prompt_tokens + completion_tokens,
        )
    return Setup(
        micro_batch=training.per_device_train_batch_size,
        micro_batches=training.gradient_accumulation_steps,
        rollouts=training.per_device_train_batch_size * training.steps_per_generation,
        evaluated=training.per_device_eval_batch_size * (training.held_out_eval or training.eval_strategy != "no"),
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        checkpointing=training.gradient_checkpointing,
        weight_bytes=number,
        quantized_bits=4 if model.load_in_4bit else 8 if model.load_in_8bit else None,
        autocast=autocast,
        optim=training.optim.value if optim is None else optim,
        lora=model.use_peft,
        lora_dropout=model.use_peft and model.lora_dropout > 0 and not training.disable_dropout,
        has_reference=bool(training.kl_targets()),
        sharding=sharding,
        processes=training.world_size if processes is None else processes,
        offloads_optimizer="offload_optimizer" in offloaded,
        offloads_weights="offload_param" in offloaded,
        eager_attention=model.attn_implementation == "eager",
        engine=engine,
        generates=not training.use_vllm and training.sampler is None,
        group=training.num_generations if is_shared else None,
        pass_tokens=training.pass_tokens,
        parameters=shape.parameters,
    )
