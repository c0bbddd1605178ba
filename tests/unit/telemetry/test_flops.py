"""Coefficients against a count of the whole model, sums against loops, peaks by names."""

import functools
import math

import pytest
import torch
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from salesrl_trl.telemetry.flops import ModelFlops, UnknownFlops, attention_pairs, model_flops
from salesrl_trl.telemetry.perf import mfu, peak_bf16_flops

LAYERS, HIDDEN, INNER, HEADS, KV_HEADS, VOCABULARY = 2, 64, 96, 4, 2, 160
SIZES = {
    "num_hidden_layers": LAYERS,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "vocab_size": VOCABULARY,
    "attn_implementation": "eager",
}
ALL_LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def small(kind, **fields):
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**SIZES, **fields}))


qwen2, llama = (functools.partial(small, kind) for kind in ("qwen2", "llama"))
qwen3 = functools.partial(small, "qwen3", head_dim=32)  # 4 heads of 32 in a width of 64


def gpt2():
    sizes = {"n_layer": LAYERS, "n_embd": HIDDEN, "n_head": HEADS, "vocab_size": VOCABULARY}
    config = AutoConfig.for_model("gpt2", **sizes, bos_token_id=0, eos_token_id=0, attn_implementation="eager")
    return AutoModelForCausalLM.from_config(config)


def lora(model, targets=ALL_LINEAR):
    """With gradients of the first layer's input too, as with gradient checkpointing."""
    model.enable_input_require_grads()
    return get_peft_model(model, LoraConfig(r=8, target_modules=list(targets)))


MODELS = {
    "dense with heads wider than the model": qwen3,
    "dense with one head for keys and a tied head": lambda: llama(num_key_value_heads=1, tie_word_embeddings=True),
    "gpt2": gpt2,
    "lora": lambda: lora(qwen3()),
    "lora on the head": lambda: lora(qwen2(), (*ALL_LINEAR, "lm_head")),
}
LENGTH = 24


def counted(model, length, completion):
    """FLOPs that PyTorch counts in a pass of the whole model on a CPU, but for those that no token needs."""

    def once(rows):
        ids = torch.arange(rows * length).reshape(rows, length) % VOCABULARY
        with FlopCounterMode(display=False) as counter:
            model(input_ids=ids, logits_to_keep=completion, use_cache=False).logits.square().mean().backward()
        return counter.get_total_flops()

    return once(2) - once(1)


@pytest.mark.parametrize("build", MODELS.values(), ids=MODELS)
def test_flops_are_those_of_a_pass_through_the_whole_model(build):
    model, completion = build(), 7
    # The counter takes the products of attention in full. Rotary embeddings, 1 in 10,000, count once in a batch.
    total = model_flops(model).total([LENGTH, completion, LENGTH**2])
    assert total == pytest.approx(counted(model, LENGTH, completion), rel=1e-3)


def test_weights_that_zero_3_took_away_count_in_full():
    model = lora(qwen3())
    flops = model_flops(model)
    for parameter in model.parameters():
        parameter.data = torch.empty(0)
    assert model_flops(model) == flops


def test_pairs_of_long_sequences_are_exact():
    # 2**20 * (2**20 + 1) / 2, beyond what float32 and int32 hold
    assert attention_pairs(torch.tensor([2**20], dtype=torch.int32)).item() == 2**39 + 2**19


FLOPS = ModelFlops(per_token=7, per_head_token=5, per_pair=3)


def test_sums_of_ragged_sequences_are_those_of_a_loop():
    lengths, completions = [9, 1, 4, 6], [3, 1, 0, 6]
    pairs = sum(1 for length in lengths for query in range(length) for key in range(query + 1))
    sums = FLOPS.sums(torch.tensor(lengths), torch.tensor(completions))
    assert sums.dtype == torch.float64
    assert sums.tolist() == [20, 10, pairs]
    assert FLOPS.total(sums.tolist()) == 7 * 20 + 5 * 10 + 3 * (45 + 1 + 10 + 21)


def test_a_prompt_that_went_with_another_completion_is_not_counted_again():
    """A group of three: one whole sequence, and two completions that see the prompt and themselves."""
    tokens, head_tokens, pairs = FLOPS.sums(
        torch.tensor([9, 8, 7]), torch.tensor([4, 3, 2]), torch.tensor([True, False, False])
    ).tolist()
    assert (tokens, head_tokens) == (5 + 4 + 3 + 2, 4 + 3 + 2)
    assert pairs == sum(range(1, 10)) + (6 + 7 + 8) + (6 + 7)


def with_field(name, value):
    model = llama()
    setattr(model.config, name, value)
    return model


def packed():
    model = llama()
    model.is_quantized = True  # as GPTQ
    return model


UNKNOWN = {
    "linear attention": (lambda: with_field("layer_types", ["linear_attention"]), "linear_attention"),
    "a window without layer types": (lambda: small("mistral", sliding_window=5), "sliding_attention"),
    "no config": (lambda: torch.nn.Linear(2, 2), "not a transformers model"),
    "packed weights": (packed, "packed"),
    "mixture of experts": (lambda: with_field("num_local_experts", 4), "num_local_experts"),
    "adapter that adds to the prompt": (
        lambda: get_peft_model(llama(), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)),
        "adds tokens to the prompt",
    ),
}


@pytest.mark.parametrize(("build", "reason"), UNKNOWN.values(), ids=UNKNOWN)
def test_where_a_token_s_cost_is_not_known_it_says_why(build, reason):
    with pytest.raises(UnknownFlops, match=reason):
        model_flops(build())


PEAKS = {
    "H100 80GB HBM3": 989.4,
    "H100 PCIe": 756,
    "H100 NVL": 835.5,
    "A100-SXM4-80GB": 312,
    "A10": 125,
    "A10G": 70,
    "L40": 181,
    "L40S": 362,
    "RTX 6000 Ada Generation": 364.25,
    "GeForce RTX 4090": 165.2,
    "AMD Instinct MI300X OAM": 1307.4,
}
"""TFLOP/s by the name that a driver says after "NVIDIA ". Drivers before 470 left that out."""


@pytest.mark.parametrize(("name", "peak"), PEAKS.items(), ids=PEAKS)
def test_a_chip_has_its_own_peak_by_the_name_that_it_says(name, peak):
    assert peak_bf16_flops(name) == pytest.approx(peak * 1e12)
    assert peak_bf16_flops(f"NVIDIA {name}") == pytest.approx(peak * 1e12)


@pytest.mark.parametrize(
    "name",
    [
        "Tesla V100-SXM2-32GB", "Tesla T4", "cpu", "", "AMD Radeon Graphics", "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 4090 D", "NVIDIA GeForce RTX 3090 Ti", "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA A100-SXM-64GB", "NVIDIA A10-24Q",
    ],
)  # fmt: skip
def test_a_chip_or_a_slice_that_is_not_in_the_table_has_no_peak(name):
    assert peak_bf16_flops(name) is None


@pytest.mark.parametrize(
    ("flops", "seconds", "peak"),
    [
        (1e12, 1.0, None),
        (math.nan, 1.0, 1e14),
        (1e12, 0.0, 1e14),
        (1e12, -1.0, 1e14),
        (1e12, 1.0, 0.0),
        (1.01e14, 1.0, 1e14),
    ],
    ids=["unknown chip", "unknown model", "no time", "negative time", "no peak", "above the peak"],
)
def test_a_share_that_is_unknown_or_cannot_be_is_no_number(flops, seconds, peak):
    assert math.isnan(mfu(flops, seconds, peak))
