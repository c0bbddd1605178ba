"""Coefficients against a count of the whole model and against hand formulas, sums against loops, peaks by names."""

import copy
import functools
import math
import re

import pytest
import torch
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM, T5Config, T5ForConditionalGeneration

from salesrl_trl.telemetry.flops import ModelFlops, UnknownFlops, attention_pairs, model_flops
from salesrl_trl.telemetry.perf import PEAK_BF16, mfu, peak_bf16_flops

LAYERS, HIDDEN, INNER, HEADS, KV_HEADS, VOCABULARY = 2, 64, 96, 4, 2, 160
DEEP = 4
"""Layers of a model of which not all are run. Counts take twice as long then."""
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
ATTENTION = ALL_LINEAR[:4]
RANK = 8


def small(kind, **fields):
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**SIZES, **fields}))


qwen2, llama = (functools.partial(small, kind) for kind in ("qwen2", "llama"))
qwen3 = functools.partial(small, "qwen3", head_dim=32)  # 4 heads of 32 in a width of 64
one_layer = functools.partial(qwen3, num_hidden_layers=1)
mixtral = functools.partial(small, "mixtral", num_local_experts=4, num_experts_per_tok=2)


def gpt2():
    sizes = {"n_layer": LAYERS, "n_embd": HIDDEN, "n_head": HEADS, "vocab_size": VOCABULARY}
    config = AutoConfig.for_model("gpt2", **sizes, bos_token_id=0, eos_token_id=0, attn_implementation="eager")
    return AutoModelForCausalLM.from_config(config)


def lora(model, targets=ALL_LINEAR, rank=RANK, **fields):
    return get_peft_model(model, LoraConfig(r=rank, target_modules=list(targets), **fields))


def with_input_gradients(model):
    model.enable_input_require_grads()
    return model


def frozen_embedding(model):
    model.get_input_embeddings().requires_grad_(False)
    return model


def frozen_up_to(model, layer):
    frozen_embedding(model)
    model.model.layers[:layer].requires_grad_(False)
    return model


def deepseek():
    """Latent attention, one dense layer before the mixtures, a shared expert."""
    sizes = {"moe_intermediate_size": 32, "n_routed_experts": 8, "n_group": 2, "topk_group": 1, "kv_lora_rank": 16,
             "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16,
             "num_hidden_layers": DEEP, "first_k_dense_replace": 1, "num_experts_per_tok": 2,
             "num_key_value_heads": HEADS}  # fmt: skip
    return small("deepseek_v3", **sizes)


MODELS = {
    "dense with one head for keys and a tied, frozen head": lambda: frozen_embedding(
        llama(num_key_value_heads=1, tie_word_embeddings=True)
    ),
    "dense with frozen lower layers": lambda: frozen_up_to(llama(num_hidden_layers=DEEP), 2),
    "gpt2": gpt2,
    "mixture with latent attention": deepseek,
    "mixture, lora on attention": lambda: lora(mixtral(), ATTENTION),
    "lora on queries and values": lambda: lora(llama(num_hidden_layers=DEEP), ("q_proj", "v_proj")),
    "lora with input gradients": lambda: with_input_gradients(lora(qwen3())),
    "lora with a trained copy of the embedding and on the head": lambda: lora(
        qwen2(), (*ALL_LINEAR, "lm_head"), modules_to_save=["embed_tokens"]
    ),
    "dora": lambda: lora(llama(), use_dora=True),
}
LENGTH = 24


def counted(model, length, completion):
    """FLOPs that PyTorch counts in a pass of the whole model on a CPU, but for those that no token needs."""
    for module in model.modules():
        if hasattr(module, "config"):
            module.config._experts_implementation = "eager"

    def once(rows):
        ids = torch.arange(rows * length).reshape(rows, length) % VOCABULARY
        with FlopCounterMode(display=False) as counter:
            model(input_ids=ids, logits_to_keep=completion, use_cache=False).logits.square().mean().backward()
        return counter.get_total_flops()

    return once(2) - once(1)


@pytest.mark.parametrize("build", MODELS.values(), ids=MODELS)
def test_flops_are_those_of_a_pass_through_the_whole_model(build):
    model, completion = build(), 7
    flops = model_flops(model)
    # The counter takes the products of attention in full. Rotary embeddings, 1 in 10,000, count once in a batch.
    total = flops.total([LENGTH, completion, LENGTH**2])
    assert total == pytest.approx(counted(model, LENGTH, completion), rel=2e-4)


def test_coefficients_are_those_by_hand_and_what_is_computed_twice_counts_once():
    # 2 FLOPs for a weight forward, and as many for each gradient, of the weight and of its input. Rotary embeddings:
    # one product of head_dim / 2 numbers more, which makes a head's width in FLOPs.
    weights = DEEP * (2 * HIDDEN * 16 * (HEADS + KV_HEADS) + 3 * HIDDEN * INNER)
    flops = model_flops(llama(num_hidden_layers=DEEP))
    assert (flops.per_token, flops.per_head_token) == (6 * weights + 16, 6 * HIDDEN * VOCABULARY)
    assert flops.per_pair == 12 * DEEP * HEADS * 16
    checkpointed = llama(num_hidden_layers=DEEP).train()
    checkpointed.gradient_checkpointing_enable()
    assert model_flops(checkpointed) == flops
    frozen = model_flops(llama(num_hidden_layers=DEEP).requires_grad_(False))
    assert (frozen.per_token, frozen.per_pair) == (2 * weights + 16, 4 * DEEP * HEADS * 16)


def test_a_model_is_as_it_was_after_the_count():
    model = lora(mixtral(), ATTENTION)
    before = copy.deepcopy(model.config.to_dict()), {name: weight.requires_grad for name, weight in
                                                     model.named_parameters()}  # fmt: skip
    model_flops(model)
    after = model.config.to_dict(), {name: weight.requires_grad for name, weight in model.named_parameters()}
    assert before == after
    assert len(model.get_base_model().model.layers) == LAYERS
    assert all(weight.grad is None for weight in model.parameters())


@pytest.fixture(scope="module")
def flops_of_lora():
    return model_flops(lora(one_layer()))


def test_a_removed_hook_costs_nothing(flops_of_lora):
    model = with_input_gradients(lora(one_layer()))
    assert model_flops(model).per_token > flops_of_lora.per_token
    model.disable_input_require_grads()
    assert model_flops(model) == flops_of_lora


def test_of_two_adapters_the_one_that_runs_is_counted(flops_of_lora):
    model = lora(one_layer())
    model.add_adapter("ref", LoraConfig(r=2 * RANK, target_modules=list(ALL_LINEAR)))
    assert model_flops(model) == flops_of_lora
    model.set_adapter("ref")
    assert model_flops(model) == model_flops(lora(one_layer(), rank=2 * RANK))


def test_weights_that_zero_3_took_away_count_in_full(flops_of_lora, monkeypatch):
    model = lora(one_layer())
    for parameter in model.parameters():
        parameter.data = torch.empty(0)
    assert sum(parameter.numel() for parameter in model.parameters()) == 0
    monkeypatch.setattr("transformers.modeling_utils.is_deepspeed_zero3_enabled", lambda: True)
    assert model_flops(model) == flops_of_lora


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


def t5():
    return T5ForConditionalGeneration(T5Config(d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, vocab_size=32))


def with_field(name, value):
    model = llama()
    setattr(model.config, name, value)
    return model


def packed():
    """As GPTQ has it: weights that are buffers, under another name."""
    model = llama()
    for layer in model.model.layers:
        layer.self_attn.q_proj = torch.nn.Module()
        layer.self_attn.q_proj.register_buffer("qweight", torch.zeros(8, 8, dtype=torch.int32))
    return model


UNKNOWN = {
    "encoder-decoder": (t5, "encoder-decoder"),
    "layers with a window": (
        lambda: with_field("layer_types", ["full_attention", "sliding_attention"]),
        "sliding_attention",
    ),
    "a window without layer types": (lambda: small("mistral", sliding_window=5), "sliding_attention"),
    "keys that layers share": (lambda: with_field("num_kv_shared_layers", 2), "num_kv_shared_layers"),
    "no config": (lambda: torch.nn.Linear(2, 2), "no transformers config"),
    "other layers than its configuration says": (lambda: with_field("num_hidden_layers", 5), "not those of its conf"),
    "packed weights": (packed, "not those of its configuration, which has .*q_proj.weight"),
    "adapter that adds to the prompt": (
        lambda: get_peft_model(llama(), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)),
        "adds tokens to the prompt",
    ),
}


@pytest.mark.parametrize(("build", "reason"), UNKNOWN.values(), ids=UNKNOWN)
def test_where_a_token_s_cost_is_not_known_it_says_why(build, reason):
    with pytest.raises(UnknownFlops, match=reason):
        model_flops(build())


NAMES = """\
H100 80GB HBM3, H200, GH200 480GB, GH200 144G HBM3e, H800, H100 PCIe, H800 PCIe, H100 NVL, H200 NVL, H20, H20-3e, \
B100, B200, B300 SXM6 AC, GB200, GB300, A100-SXM4-40GB, A100-PCIE-40GB, A100 80GB PCIe, A800-SXM4-80GB, A30, A40, \
A10, A10G, L4, L40, L40S, RTX A6000, RTX 6000 Ada Generation, GeForce RTX 3090, GeForce RTX 4090, \
AMD Instinct MI300X, AMD Instinct MI300X OAM, AMD Instinct MI325X, AMD Instinct MI250X"""
"""As drivers say them, after "NVIDIA ". Drivers before 470 left that out."""


def test_a_chip_has_its_own_peak_by_the_name_that_it_says():
    tflops = {"H100 80GB HBM3": 989.4, "H100 PCIe": 756, "A100 80GB PCIe": 312, "A10": 125, "A10G": 70, "L40S": 362}
    for name, peak in tflops.items():
        assert peak_bf16_flops(name) == peak_bf16_flops(f"NVIDIA {name}") == pytest.approx(peak * 1e12)
    met = [[peak.name for peak in PEAK_BF16 if re.fullmatch(peak.name, name)] for name in NAMES.split(", ")]
    assert [len(entries) for entries in met] == [1] * len(met)
    assert {entry for entries in met for entry in entries} == {peak.name for peak in PEAK_BF16}


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
    [(1e12, 1.0, None), (math.nan, 1.0, 1e14), (1e12, 0.0, 1e14), (1e12, 1.0, 0.0), (1.01e14, 1.0, 1e14)],
    ids=["unknown chip", "unknown model", "no time", "no peak", "above the peak"],
)
def test_a_share_that_is_unknown_or_cannot_be_is_no_number(flops, seconds, peak):
    assert math.isnan(mfu(flops, seconds, peak))
