"""An adapter is merged for a push beside its base: what is pushed, and that nothing is written."""

import copy
import itertools
import logging
import math
import weakref

import pytest
import torch
from peft import LoraConfig, get_peft_model
from support.pushing import CPU, GPU, SERVER, digest_of, generation_of, llm_of, pushed
from transformers import Qwen2Config, Qwen2ForCausalLM

from salesrl_trl.generation import vllm
from salesrl_trl.generation.merging import dithered

LOGGER = "salesrl_trl.generation.vllm"
QUERY, VALUE = "model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.v_proj"
EMBEDDING, HEAD, NORM = "model.embed_tokens", "lm_head", "model.norm.weight"
RANK, ALPHA = 4, 6


def adapted(dtype=torch.bfloat16, tied=False, autocast=True, **lora):
    """A policy with a trained adapter: no weight of it is 0."""
    torch.manual_seed(0)
    shape = {"vocab_size": 16, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    shape |= {"num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": tied}
    policy = Qwen2ForCausalLM(Qwen2Config(**shape)).to(dtype)
    given = {"target_modules": ["q_proj", "v_proj"], **lora}
    model = get_peft_model(policy, LoraConfig(r=RANK, lora_alpha=ALPHA, **given), autocast_adapter_dtype=autocast)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += (torch.randn(parameter.shape) / 50).to(parameter.dtype)
    return model


CASES = {
    "lora": {},
    "adapters in 16 bits": {"autocast": False},
    "a base in float32": {"dtype": torch.float32},
    "rsLoRA": {"use_rslora": True},
    "DoRA": {"use_dora": True},
    "bias": {"lora_bias": True},
    "embedding": {"target_modules": ["embed_tokens", "q_proj"]},
    "tied": {"target_modules": ["embed_tokens", "lm_head"], "tied": True},
    "modules_to_save": {"modules_to_save": ["lm_head"]},
    "trainable tokens": {"trainable_token_indices": [1, 5]},
    "parameters": {"target_parameters": ["mlp.up_proj.weight"]},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("ignore:Model (has|with) `tie_word_embeddings=True`")
def test_what_is_pushed_is_the_sum_dithered_once_and_the_base_stays_to_the_bit(case):
    model = adapted(**CASES[case])
    before, base = digest_of(model.named_parameters()), model.get_base_model()
    got = pushed(model)
    merged = copy.deepcopy(model).float().merge_and_unload()  # by peft, in float32
    assert set(got) == {name for name, _ in Qwen2ForCausalLM(base.config).named_parameters()}  # as vLLM knows them
    for name, weight in merged.named_parameters():
        assert torch.equal(got[name], dithered(weight.detach(), base.dtype)), name
    assert digest_of(model.named_parameters()) == before
    assert digest_of(pushed(model).items()) == digest_of(got.items())  # nothing is left behind


def test_a_young_adapter_reaches_an_engine_in_16_bits():
    torch.manual_seed(0)
    base = torch.randn(64, 512).bfloat16().float()
    adapter = torch.randn(64, 1) @ torch.randn(1, 512) * 1e-4  # mostly below half a rounding step
    pushed, nearest = dithered(base + adapter, torch.bfloat16).float(), (base + adapter).bfloat16().float()
    share = [((weight - base) * adapter).sum() / (adapter * adapter).sum() for weight in (pushed, nearest)]
    assert abs(share[0] - 1) < 0.2 < abs(share[1] - 1)
    step = 2 ** (torch.floor(torch.log2((base + adapter).abs())) - 7)
    assert ((pushed - base - adapter).abs() < step).all()
    assert torch.equal(dithered(base, torch.bfloat16).float(), base)  # what has no bits to lose stays
    assert torch.equal(dithered(base + adapter, torch.bfloat16).float(), pushed)  # equal weights, equal pushes
    special = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, 1e-40, -3e38])
    assert torch.equal(dithered(special, torch.bfloat16).isfinite(), special.isfinite())


def test_a_base_in_float32_is_dithered_for_an_engine_in_bfloat16():
    model, got = adapted(torch.float32), {}
    generation = generation_of(model, GPU, lambda name, weight: got.update({name: weight}))
    generation._engine_dtype = torch.bfloat16
    generation.sync_weights()
    for name, weight in copy.deepcopy(model).merge_and_unload().named_parameters():
        has_adapter = name.endswith(("q_proj.weight", "v_proj.weight"))
        assert torch.equal(got[name], dithered(weight.detach(), torch.bfloat16) if has_adapter else weight), name


@pytest.mark.parametrize("way", [GPU, CPU, SERVER])
def test_the_base_is_the_same_after_many_pushes_of_an_adapter_that_moves(way):
    model = adapted(target_modules="all-linear")
    frozen = [(name, weight) for name, weight in model.named_parameters() if not weight.requires_grad]
    before, generation = digest_of(frozen), generation_of(model, way)
    for _ in range(20):
        generation.sync_weights()
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data += torch.randn(parameter.shape) * 1e-5
    assert digest_of(frozen) == before
    assert digest_of(pushed(model, way).items()) == digest_of(pushed(model).items())  # by each way the same


def test_of_merged_weights_one_layer_is_in_memory_at_a_time():
    alive, most = weakref.WeakSet(), []
    model = adapted(target_modules=".*(embed_tokens|_proj)")  # also a call's first weight
    own = {each.data_ptr() for each in model.parameters()}

    def take(name, weight):
        if weight.data_ptr() not in own:
            alive.add(weight)
        most.append(len(alive))

    generation_of(model, take=take).sync_weights()
    assert max(most) == 1
    assert len(most) == 2 * 12 + 3  # both layers' weights and biases, the embedding, the last norm and the head


@pytest.mark.parametrize(
    ("number", "version", "most"),
    [(0, None, 32), (1, 2, 32), (32, 2, 32), (33, None, 32), (640, None, 32), (33, 1, 1)],
)
def test_a_push_calls_vllms_model_seldom_but_never_with_all_weights(number, version, most):
    weights, calls = [(str(place), torch.full((1,), place)) for place in range(number)], []
    generation = generation_of(torch.nn.Module(), fsdp_version=version)
    generation.llm = llm_of(lambda weights: calls.append(list(weights)))
    generation._iter_named_params = lambda: iter(weights)
    generation.sync_weights()
    assert list(itertools.chain(*calls)) == weights
    assert [len(each) for each in calls] == [most] * (number // most) + [number % most] * (number % most > 0)


def test_a_push_that_fails_leaves_the_policy_as_it_was():
    model = adapted()
    before, ids = digest_of(model.named_parameters()), torch.arange(8)[None]
    logits = model(ids).logits

    def fail(name, weight):
        if name.startswith("model.layers.1"):
            raise ConnectionError

    with pytest.raises(ConnectionError):
        generation_of(model, take=fail).sync_weights()
    assert digest_of(model.named_parameters()) == before
    assert torch.equal(model(ids).logits, logits)
    assert not any(getattr(each, "merged", False) for each in model.modules())
    model.merge_adapter()  # peft's own again
    assert digest_of(model.named_parameters()) != before


@pytest.mark.parametrize(
    ("base", "version", "reason"),
    [
        ({}, 1, "FSDP1 stores"),
        ({"is_quantized": True}, None, "bitsandbytes 4-bit"),
        ({"is_quantized": True, "is_loaded_in_4bit": True}, None, None),
        ({}, 2, None),
    ],
    ids=["FSDP1", "8 bits", "4 bits", "FSDP2"],
)
def test_a_push_that_must_write_the_base_says_so_once(base, version, reason, caplog):
    model = adapted()
    vars(model.get_base_model()).update(base)
    with caplog.at_level(logging.WARNING, LOGGER):
        generation = generation_of(model, fsdp_version=version)
    assert generation._merges_beside is (reason is None)
    told = [each.getMessage() for each in caplog.records if each.name == LOGGER]
    assert len(told) == (reason is not None)
    assert all(reason in each for each in told)


def test_a_push_of_shards_visits_the_models_modules_once(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "full_tensor", lambda self: self, raising=False)  # as if gathered
    model, asked = adapted(), []
    expected = digest_of(pushed(model).items())
    got = []
    generation = generation_of(model, CPU, lambda *weight: got.append(weight), fsdp_version=2)
    monkeypatch.setattr(vllm, "is_peft_model", lambda model: not asked.append(model))
    generation.sync_weights()
    assert digest_of(got) == expected
    assert len(asked) == 1
