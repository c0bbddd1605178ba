"""The formula for FLOPs against what PyTorch counts in a real pass, sums against loops, peaks against real names."""

import math
import re

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from salesrl_trl.telemetry.flops import ModelFlops, UnknownFlops, attention_pairs, model_flops
from salesrl_trl.telemetry.peaks import PEAK_BF16_FLOPS, mfu, peak_bf16_flops

LAYERS, HIDDEN, INNER, HEADS, KV_HEADS, VOCABULARY = 3, 64, 96, 4, 2, 160
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


def qwen2(**fields):
    return Qwen2ForCausalLM(Qwen2Config(**{**SIZES, **fields}))


def qwen3(**fields):
    return Qwen3ForCausalLM(Qwen3Config(**{**SIZES, "head_dim": 32, **fields}))  # 4 heads of 32 in a width of 64


def llama(**fields):
    return LlamaForCausalLM(LlamaConfig(**{**SIZES, **fields}))


def gpt2():
    sizes = {"n_layer": LAYERS, "n_embd": HIDDEN, "n_head": HEADS, "vocab_size": VOCABULARY}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, attn_implementation="eager"))


def lora(model, targets=ALL_LINEAR, rank=RANK, **fields):
    return get_peft_model(model, LoraConfig(r=rank, target_modules=list(targets), **fields))


def with_input_gradients(model):
    model.enable_input_require_grads()
    return model


def with_reference(model):
    """A second adapter beside the one that is trained, as TRL keeps the starting point of one."""
    model.add_adapter("ref", LoraConfig(r=2 * RANK, target_modules=list(ALL_LINEAR)))
    return model


def frozen_embedding(model):
    model.get_input_embeddings().requires_grad_(False)
    return model


def frozen_up_to(model, layer):
    frozen_embedding(model)
    model.model.layers[:layer].requires_grad_(False)
    return model


def only_matrices_of_attention(model):
    """No adapter, no norms: the first layer's projections read what nothing before them is trained for."""
    model.requires_grad_(False)
    for layer in model.model.layers:
        for name in ATTENTION:
            getattr(layer.self_attn, name).requires_grad_(True)
    return model


ROWS, LENGTH = 2, 24


def counted(model, logits_to_keep):
    """FLOPs that PyTorch counts in a forward and backward pass, without those of rotary position embeddings."""
    tokens = torch.randint(VOCABULARY, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))
    with FlopCounterMode(display=False) as counter:
        model(
            input_ids=tokens, logits_to_keep=logits_to_keep, use_cache=False
        ).logits.float().square().mean().backward()
    return counter.get_total_flops()


def rotary(model):
    """One product of (head_dim / 2, 1) and (1, LENGTH), forward only: not in the formula, far below 1 in 1000."""
    return 2 * (getattr(model.config, "head_dim", None) or HIDDEN // HEADS) // 2 * LENGTH


SQUARE = ROWS * LENGTH * LENGTH  # the counter takes the products of attention in full, the masked half with the rest
EXACT = 1e-9
MODELS = {
    "dense": (qwen2, EXACT),
    "dense of heads wider than the model": (qwen3, EXACT),
    "dense with one head for keys": (lambda: llama(num_key_value_heads=1), EXACT),
    "dense with a tied head": (lambda: qwen2(tie_word_embeddings=True), EXACT),
    "dense with a frozen embedding": (lambda: frozen_embedding(qwen3()), EXACT),
    "dense with a tied, frozen head": (lambda: frozen_embedding(llama(tie_word_embeddings=True)), EXACT),
    "dense with frozen lower layers": (lambda: frozen_up_to(llama(), 2), EXACT),
    "all frozen but the final norm and the head": (lambda: frozen_up_to(llama(), LAYERS), EXACT),
    "matrices of attention only": (lambda: only_matrices_of_attention(llama()), EXACT),
    "lora on all linears": (lambda: lora(qwen3()), EXACT),
    "lora on attention": (lambda: lora(qwen2(), ATTENTION), EXACT),
    # Of the six products of the first layer's attention one is not needed: its keys have nothing to train.
    "lora on queries and values": (lambda: lora(llama(), ("q_proj", "v_proj")), 0.02),
    "lora on the mlp": (lambda: lora(qwen3(), ALL_LINEAR[4:]), EXACT),
    "lora on upper layers": (lambda: lora(llama(), layers_to_transform=[2]), EXACT),
    "lora with input gradients": (lambda: with_input_gradients(lora(qwen3())), EXACT),
    "lora with a second adapter": (lambda: with_reference(lora(qwen3())), EXACT),
    "lora with a trained copy of the head": (lambda: lora(qwen2(), modules_to_save=["lm_head"]), EXACT),
    "lora with a trained copy of the embedding": (lambda: lora(qwen2(), modules_to_save=["embed_tokens"]), EXACT),
    "lora on the head": (lambda: lora(qwen2(), (*ALL_LINEAR, "lm_head")), EXACT),
}


@pytest.mark.parametrize("keep", [LENGTH, 7], ids=["every logit", "logits of a completion"])
@pytest.mark.parametrize(("build", "tolerance"), MODELS.values(), ids=MODELS)
def test_flops_are_those_that_pytorch_counts(build, tolerance, keep):
    model = build()
    flops = model_flops(model)
    assert flops.windows == (None,)
    ratio = flops.total([ROWS * LENGTH, ROWS * keep, SQUARE]) / (counted(model, keep) - rotary(model))
    print(f"ratio {ratio:.6f}")  # pytest -s -v shows them
    assert ratio == pytest.approx(1, abs=tolerance)


def test_flops_of_gpt2_with_its_own_kind_of_linear_are_those_that_pytorch_counts():
    model = gpt2()
    total = model_flops(model).total([ROWS * LENGTH, ROWS * LENGTH, SQUARE])
    assert total == pytest.approx(counted(model, 0), rel=EXACT)


def test_gradients_of_the_input_cost_the_first_layers_projections_and_their_adapters_once_more():
    plain, hooked = model_flops(lora(qwen3())), model_flops(with_input_gradients(lora(qwen3())))
    # Queries 64 -> 128, keys and values 64 -> 64 each, and three times 64 -> 8: 2 FLOPs each
    assert hooked.per_token - plain.per_token == 2 * (64 * 128 + 2 * 64 * 64 + 3 * 64 * 8)
    assert (hooked.per_head_token, hooked.per_pair) == (plain.per_head_token, plain.per_pair)


def test_a_removed_hook_costs_nothing_again():
    model = with_input_gradients(lora(qwen3()))
    hooked = model_flops(model)
    model.disable_input_require_grads()
    assert model_flops(model).per_token < hooked.per_token


def test_coefficients_of_a_dense_model_are_six_per_weight_and_twelve_per_channel():
    flops = model_flops(llama())
    # By layer: queries and output 64 x 64, keys and values 64 x 32, three of 64 x 96; 3 layers, 6 FLOPs
    assert flops.per_token == 6 * 3 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 96)
    assert flops.per_head_token == 6 * 64 * 160
    assert flops.per_pair == (12 * 3 * 4 * 16,)


def test_a_second_adapter_is_not_counted_while_it_rests():
    assert model_flops(with_reference(lora(qwen3()))) == model_flops(lora(qwen3()))


def test_of_two_adapters_copies_of_the_head_the_one_that_runs_is_counted():
    model = lora(qwen2(), modules_to_save=["lm_head"])
    alone = model_flops(model)
    model.add_adapter("ref", LoraConfig(r=RANK, target_modules=list(ALL_LINEAR), modules_to_save=["lm_head"]))
    assert model_flops(model) == alone
    assert alone.per_head_token == 6 * 64 * 160  # trained, so forward and two gradients


def test_the_adapter_that_runs_is_the_one_that_is_counted():
    model = with_reference(lora(qwen3()))
    model.set_adapter("ref")
    assert model_flops(model) == model_flops(lora(qwen3(), rank=2 * RANK))


def test_a_disabled_adapter_costs_nothing():
    model = lora(llama(), modules_to_save=["lm_head"])
    frozen = llama().requires_grad_(False)
    with model.disable_adapter():
        assert model_flops(model) == model_flops(frozen)


def test_weights_that_zero_3_took_away_count_in_full():
    model = lora(qwen3(), modules_to_save=["lm_head"])
    before = model_flops(model)
    for parameter in model.parameters():
        parameter.ds_shape = parameter.shape
        parameter.data = torch.empty(0)
    assert sum(parameter.numel() for parameter in model.parameters()) == 0
    assert model_flops(model) == before


def test_causal_pairs_are_counted_by_hand():
    # 1; 1 + 2 + 3 = 6; 5 * 6 / 2 = 15; none of an empty sequence
    assert attention_pairs(torch.tensor([1, 3, 5, 0]), None).tolist() == [1, 6, 15, 0]


def test_pairs_of_a_window_are_counted_by_hand():
    # Width 3: 1; 1 + 2 + 3; 1 + 2 + 3 + 3 + 3 = 12; none
    assert attention_pairs(torch.tensor([1, 3, 5, 0]), 3).tolist() == [1, 6, 12, 0]


def test_pairs_are_those_that_a_mask_lets_through():
    for window in (None, 1, 4, 9):
        for length in (1, 4, 5, 12):
            query, key = torch.arange(length)[:, None], torch.arange(length)[None, :]
            seen = (key <= query) & (key > query - (window or length))  # transformers.masking_utils
            assert attention_pairs(torch.tensor([length]), window).item() == seen.sum().item()


def test_pairs_of_long_sequences_are_exact():
    # 2**20 * (2**20 + 1) / 2, beyond what float32 and int32 hold
    assert attention_pairs(torch.tensor([2**20], dtype=torch.int32), None).item() == 2**39 + 2**19


MIXED = ModelFlops(per_token=7, per_head_token=5, windows=(None, 4), per_pair=(3, 2))


def test_sums_of_ragged_sequences_are_those_of_a_loop():
    lengths, completions = [9, 1, 4, 6], [3, 1, 0, 6]
    full = sum(1 for length in lengths for query in range(length) for key in range(query + 1))
    near = sum(1 for length in lengths for query in range(length) for key in range(query + 1) if query - key < 4)
    sums = MIXED.sums(torch.tensor(lengths), torch.tensor(completions))
    assert sums.dtype == torch.float64
    assert sums.tolist() == [20, 10, full, near]
    # 7 * 20 + 5 * 10 + 3 * (45 + 1 + 10 + 21) + 2 * (30 + 1 + 10 + 18)
    assert MIXED.total(sums.tolist()) == 140 + 50 + 3 * 77 + 2 * 59


def test_sums_of_batches_add_up():
    lengths, completions = torch.tensor([9, 1, 4, 6]), torch.tensor([3, 1, 0, 6])
    halves = MIXED.sums(lengths[:2], completions[:2]) + MIXED.sums(lengths[2:], completions[2:])
    assert halves.tolist() == MIXED.sums(lengths, completions).tolist()


def test_a_prompt_that_went_with_another_completion_is_not_counted_again():
    """A group of three: one whole sequence, and two completions that see the prompt and themselves."""
    flops = ModelFlops(per_token=1, per_head_token=1, windows=(None,), per_pair=(1,))
    tokens, head_tokens, pairs = flops.sums(
        torch.tensor([9, 8, 7]), torch.tensor([4, 3, 2]), torch.tensor([True, False, False])
    ).tolist()
    assert (tokens, head_tokens) == (5 + 4 + 3 + 2, 4 + 3 + 2)
    assert pairs == sum(range(1, 10)) + (6 + 7 + 8) + (6 + 7)


def test_sums_wait_for_no_device():
    lengths = torch.empty(4, dtype=torch.int64, device="meta")  # has no values: to read one raises
    sums = MIXED.sums(lengths, lengths)
    assert (sums.device.type, sums.shape) == ("meta", (4,))


def test_sums_of_another_length_are_refused():
    with pytest.raises(ValueError, match="zip"):
        MIXED.total([1.0, 1.0, 1.0])


def test_windows_are_those_of_the_layers():
    fields = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}  # the first layer sees all
    flops = model_flops(qwen2(**fields))
    assert flops.windows == (None, 5)
    assert flops.per_pair == (12 * 4 * 16, 2 * 12 * 4 * 16)


@pytest.mark.parametrize(("window", "windows"), [(5, (5,)), (None, (None,))])
def test_a_config_without_layer_types_means_every_layer(window, windows):
    flops = model_flops(MistralForCausalLM(MistralConfig(**SIZES, sliding_window=window)))
    assert (flops.windows, flops.per_pair) == (windows, (3 * 12 * 4 * 16,))


def test_a_window_that_is_switched_off_is_none():
    model = MistralForCausalLM(MistralConfig(**SIZES, sliding_window=5))
    model.config.use_sliding_window = False  # Qwen's configs then say no width either; others may leave it
    assert model_flops(model).windows == (None,)
    assert model_flops(qwen2(use_sliding_window=False, sliding_window=5)).windows == (None,)


def mixtral():
    return MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2))


def t5():
    return T5ForConditionalGeneration(T5Config(d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, vocab_size=32))


def with_layer_type(kind):
    model = qwen2()
    model.config.layer_types = ["full_attention", kind, "full_attention"]
    return model


def with_field(name, value):
    model = llama()
    setattr(model.config, name, value)
    return model


def with_other_matrix():
    model = llama()
    model.model.layers[1].mlp = torch.nn.Bilinear(2, 3, 4)
    return model


class Packed(torch.nn.Module):
    """As GPTQ has it: weights that are buffers, in a class of its own."""

    def __init__(self):
        super().__init__()
        self.register_buffer("qweight", torch.zeros(8, 8, dtype=torch.int32))


def packed(model, names):
    for module in list(model.modules()):
        for name in names & dict(module.named_children()).keys():
            setattr(module, name, Packed())
    return model


def with_other_matrix_under_zero_3():
    model = with_other_matrix()
    for parameter in model.parameters():
        parameter.ds_shape = parameter.shape
        parameter.data = torch.empty(0)
    return model


def with_other_names():
    model = llama()
    for layer in model.model.layers:
        for name in ATTENTION[:3]:
            setattr(layer.self_attn, f"my_{name}", getattr(layer.self_attn, name))
            delattr(layer.self_attn, name)
    return model


UNKNOWN = {
    "experts": (mixtral, "mixture of experts"),
    "encoder-decoder": (t5, "encoder-decoder"),
    "linear attention": (lambda: with_layer_type("linear_attention"), "linear_attention"),
    "window of no width": (lambda: with_layer_type("sliding_attention"), "how wide"),
    "latent attention": (lambda: with_field("kv_lora_rank", 8), "kv_lora_rank"),
    "no config": (lambda: torch.nn.Linear(2, 2), "no transformers config"),
    "no layers": (lambda: with_field("num_hidden_layers", 5), "no list of 5 decoder layers"),
    "no head": (lambda: llama().model, "no output head"),
    "matrix in no linear": (with_other_matrix, "Bilinear"),
    "matrix in no linear under zero-3": (with_other_matrix_under_zero_3, "Bilinear"),
    "unknown projections": (with_other_names, "with a name in `QKV`"),
    "packed weights": (lambda: packed(llama(), {*ATTENTION}), "with a name in `QKV`"),
    "lora on packed weights": (lambda: packed(lora(llama()), {"base_layer"}), "sits on a Packed"),
    "dora": (lambda: lora(llama(), use_dora=True), "DoRA"),
    "lora on the embedding": (lambda: lora(llama(), (*ALL_LINEAR, "embed_tokens")), "holds a matrix"),
}


@pytest.mark.parametrize(("build", "reason"), UNKNOWN.values(), ids=UNKNOWN)
def test_where_the_formula_does_not_hold_it_says_why(build, reason):
    with pytest.raises(UnknownFlops, match=reason):
        model_flops(build())


def test_one_expert_is_a_dense_model():
    assert model_flops(with_field("num_local_experts", 1)) == model_flops(llama())


CHIPS = {
    "NVIDIA H100 80GB HBM3": 989.4e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H100 NVL": 835.5e12,
    "NVIDIA H200": 989.4e12,
    "NVIDIA H200 NVL": 835.5e12,
    "NVIDIA GH200 480GB": 989.4e12,
    "NVIDIA GH200 144G HBM3e": 989.4e12,
    "NVIDIA H800": 989.4e12,
    "NVIDIA H800 PCIe": 756e12,
    "NVIDIA H20": 148e12,
    "NVIDIA H20-3e": 148e12,
    "NVIDIA B100": 1750e12,
    "NVIDIA B200": 2250e12,
    "NVIDIA GB200": 2500e12,
    "NVIDIA B300 SXM6 AC": 2250e12,
    "NVIDIA GB300": 2500e12,
    "NVIDIA A100-SXM4-40GB": 312e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA A100-PCIE-40GB": 312e12,
    "NVIDIA A100 80GB PCIe": 312e12,
    "A100-SXM4-40GB": 312e12,  # as drivers before 470 said it
    "NVIDIA A800-SXM4-80GB": 312e12,
    "NVIDIA A800 80GB PCIe": 312e12,
    "NVIDIA A30": 165e12,
    "NVIDIA A40": 149.7e12,
    "NVIDIA A10": 125e12,
    "NVIDIA A10G": 70e12,
    "NVIDIA L4": 121e12,
    "NVIDIA L40": 181e12,
    "NVIDIA L40S": 362e12,
    "NVIDIA RTX A6000": 154.8e12,
    "NVIDIA RTX 6000 Ada Generation": 364.25e12,
    "NVIDIA GeForce RTX 3090": 71e12,
    "NVIDIA GeForce RTX 4090": 165.2e12,
    "AMD Instinct MI300X": 1307.4e12,
    "AMD Instinct MI300X OAM": 1307.4e12,
    "AMD Instinct MI325X": 1307.4e12,
    "AMD Instinct MI250X": 191.5e12,
}


@pytest.mark.parametrize(("name", "peak"), CHIPS.items(), ids=CHIPS)
def test_a_chip_has_its_own_peak_by_the_name_that_it_says(name, peak):
    assert peak_bf16_flops(name) == peak


@pytest.mark.parametrize(
    "name",
    [
        "Tesla V100-SXM2-32GB",
        "Tesla T4",
        "cpu",
        "",
        "AMD Radeon Graphics",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA GeForce RTX 3090 Ti",
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        "NVIDIA A100-SXM-64GB",
        "NVIDIA A10-24Q",
    ],
)
def test_a_chip_or_a_slice_that_is_not_in_the_table_has_no_peak(name):
    assert peak_bf16_flops(name) is None


def test_every_entry_of_the_table_is_met_by_a_real_name():
    names = [name.removeprefix("NVIDIA ") for name in CHIPS]
    met = {peak.name: [name for name in names if re.fullmatch(peak.name, name)] for peak in PEAK_BF16_FLOPS}
    assert [pattern for pattern, those in met.items() if not those] == []
    assert sum(len(those) for those in met.values()) == len(names)  # no name meets two


def test_every_peak_is_of_a_size_that_a_chip_can_have_and_says_where_it_is_from():
    assert all(1e13 < peak.flops < 1e16 and peak.source for peak in PEAK_BF16_FLOPS)


def test_utilisation_is_flops_over_what_the_time_allowed():
    assert mfu(300e12, 2.0, 500e12) == 0.3  # 300 of 1000 TFLOPs
    assert mfu(1000e12, 2.0, 500e12) == 1.0


@pytest.mark.parametrize(
    ("flops", "seconds", "peak"),
    [(1e12, 1.0, None), (1e12, 0.0, 1e14), (1e12, -1.0, 1e14), (1e12, 1.0, 0.0), (1.01e14, 1.0, 1e14)],
    ids=["unknown chip", "no time", "negative time", "no peak", "above the peak"],
)
def test_a_share_that_is_unknown_or_cannot_be_is_no_number(flops, seconds, peak):
    assert math.isnan(mfu(flops, seconds, peak))
