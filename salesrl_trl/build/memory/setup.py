"""The settings of a run that decide the memory of a process. Owns the reading of them, and no formula of bytes."""

import math
from dataclasses import dataclass
from enum import StrEnum

from trl import ModelConfig

from salesrl_trl.build.memory.shape import ModelShape
from salesrl_trl.config import SalesGRPOConfig
from salesrl_trl.config.rollouts import why_in_trls_order
from salesrl_trl.shared_prompts.ahead import unasked_tokens
from salesrl_trl.shared_prompts.shared_passes import MOST_TOKENS


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
    length: int
    """`max_model_len`: tokens of the longest prompt and completion. vLLM starts if its cache has room for them."""


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
        if self.sharding is not Sharding.NONE:
            return self.shared_tokens(self.micro_batch)
        is_light = self.checkpointing and self.compute_bytes == 2
        unasked = unasked_tokens(self.parameters, padded, is_light=is_light)
        most = unasked if self.pass_tokens is None else self.pass_tokens
        whole = self.shared_tokens(self.micro_batch * self.micro_batches)
        return max(self.shared_tokens(self.micro_batch), min(whole, most))

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


NUMBER_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "half": 2, "float": 4}


def setup_of(
    training: SalesGRPOConfig,
    model: ModelConfig,
    shape: ModelShape,
    prompt_tokens: int,
    *,
    dtype: str | None,
    optim: str | None = None,
    sharding: Sharding | None = None,
    processes: int | None = None,
) -> Setup:
    """The setup of a run.

    - `prompt_tokens`: of the longest prompt. TRL pads a generation batch to its longest prompt and completion.
    - `dtype`: number format of the weights in training; `None` or `"auto"` for the checkpoint's. DeepSpeed has 16-bit
      weights, FSDP float32 ones.
    - `optim` (its name in transformers), `sharding`, `processes`: in place of the run's own.
    """
    autocast, completion_tokens = training.bf16 or training.fp16, training.max_completion_length or 1
    sharding = _sharding(training) if sharding is None else sharding
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
        offloads_optimizer=_offloads(training, "offload_optimizer"),
        offloads_weights=_offloads(training, "offload_param"),
        eager_attention=model.attn_implementation == "eager",
        engine=_engine(training, shape, prompt_tokens),
        generates=not training.use_vllm and training.sampler is None,
        group=training.num_generations if is_shared else None,
        pass_tokens=training.pass_tokens,
        parameters=shape.parameters,
    )


def _sharding(training: SalesGRPOConfig) -> Sharding:
    if training.deepspeed_plugin is not None:
        return (Sharding.NONE, Sharding.ZERO1, Sharding.ZERO2, Sharding.ZERO3)[training.deepspeed_plugin.zero_stage]
    return Sharding.FSDP if training.is_sharded else Sharding.NONE


def _offloads(training: SalesGRPOConfig, name: str) -> bool:
    zero = getattr(training.deepspeed_plugin, "deepspeed_config", {}).get("zero_optimization", {})
    return zero.get(name, {}).get("device", "none") not in ("none", None)


def _engine(training: SalesGRPOConfig, shape: ModelShape, prompt_tokens: int) -> Engine | None:
    if not training.use_vllm or training.vllm_mode != "colocate":
        return None
    options = training.parsed_engine_kwargs()
    share, length = options.get("gpu_memory_utilization"), options.get("max_model_len")
    longest = training.vllm_max_model_length or shape.positions  # vLLM's own default
    longest = longest or prompt_tokens + (training.max_completion_length or 1)
    return Engine(
        share=share if isinstance(share, float | int) else training.vllm_gpu_memory_utilization,
        sleeps=training.vllm_enable_sleep_mode,
        number_bytes=NUMBER_BYTES.get(str(options.get("dtype")), 2 if training.bf16 or training.fp16 else 4),
        processes=training.vllm_tensor_parallel_size,
        length=length if isinstance(length, int) else longest,
    )
