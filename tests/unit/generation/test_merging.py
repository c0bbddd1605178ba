"""An adapter is merged for a push beside its base: what is pushed, and that nothing is written."""

import logging
import weakref

import pytest
import torch
from peft import LoraConfig, get_peft_model
from support.pushing import CPU, GPU, SERVER, digest_of, generation_of, pushed
from transformers import Qwen2Config, Qwen2ForCausalLM

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


def delta_of(layer, scaling=ALPHA / RANK):
    """B A alpha / r in float32."""
    return layer.lora_B["default"].weight.float() @ layer.lora_A["default"].weight.float() * scaling


def plain(model, name):
    layer = model.get_submodule(f"base_model.model.{name}")
    return layer.base_layer.weight.float() + delta_of(layer)


def by_magnitude(model, name):  # m (W + delta) / |W + delta|, row by row
    layer = model.get_submodule(f"base_model.model.{name}")
    sum_ = layer.base_layer.weight.float() + delta_of(layer)
    magnitude = layer.lora_magnitude_vector["default"].weight
    return (magnitude / torch.linalg.norm(sum_, dim=1))[:, None] * sum_


def of_an_embedding(model, name):  # its A and B are the other way round
    layer = model.get_submodule(f"base_model.model.{name}")
    a, b = layer.lora_embedding_A["default"], layer.lora_embedding_B["default"]
    return layer.base_layer.weight.float() + (b @ a).T * (ALPHA / RANK)


def twice(model, name):  # one weight is the embedding's and the head's: vLLM has one too, and gets both deltas
    head = model.get_submodule(f"base_model.model.{HEAD}")
    return of_an_embedding(model, name) + delta_of(head)


def with_trained_rows(model, name):
    layer = model.get_submodule(f"base_model.model.{name}").token_adapter
    rows = layer.base_layer.weight.detach().float()
    rows[[1, 5]] = layer.trainable_tokens_delta["default"]
    return rows


def trained(model, name):
    return model.get_submodule(f"base_model.model.{name}").modules_to_save["default"].weight


CASES = {
    "lora": ({}, QUERY, plain),
    "adapters in 16 bits": ({"autocast": False}, QUERY, plain),
    "a base in float32": ({"dtype": torch.float32}, QUERY, plain),
    "DoRA": ({"use_dora": True}, QUERY, by_magnitude),
    "embedding": ({"target_modules": ["embed_tokens", "q_proj"]}, EMBEDDING, of_an_embedding),
    "tied": ({"target_modules": ["embed_tokens", "lm_head"], "tied": True}, EMBEDDING, twice),
    "modules_to_save": ({"modules_to_save": ["lm_head"]}, HEAD, trained),
    "trainable tokens": ({"trainable_token_indices": [1, 5]}, EMBEDDING, with_trained_rows),
    "parameters": ({"target_parameters": ["mlp.up_proj.weight"]}, "model.layers.1.mlp.up_proj", plain),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("ignore:Model (has|with) `tie_word_embeddings=True`")
def test_what_is_pushed_is_the_sum_rounded_once_and_the_base_stays_to_the_bit(case):
    given, name, merged = CASES[case]
    model = adapted(**given)
    before, base = digest_of(model.named_parameters()), model.get_base_model()
    got = pushed(model)
    expected = merged(model, name).to(base.dtype)
    if case == "DoRA":  # a division and products in another order: bits of float32, rounded to 8 bits
        assert ((got[f"{name}.weight"] - expected).abs() <= expected.abs() / 2**7).all()
    else:
        assert torch.equal(got[f"{name}.weight"], expected)
    assert torch.equal(got[NORM], base.model.norm.weight)
    assert digest_of(model.named_parameters()) == before
    assert digest_of(pushed(model).items()) == digest_of(got.items())  # nothing is left behind
    # the names are those of the model without an adapter, as vLLM knows them
    assert set(got) == {name for name, _ in Qwen2ForCausalLM(base.config).named_parameters()}


def test_a_trained_bias_is_pushed_too():
    model = adapted(lora_bias=True)
    layer = model.get_submodule(f"base_model.model.{QUERY}")
    bias = layer.base_layer.bias.float() + layer.lora_B["default"].bias * (ALPHA / RANK)
    assert torch.equal(pushed(model)[f"{QUERY}.bias"], bias.to(torch.bfloat16))


@pytest.mark.parametrize("way", [GPU, CPU, SERVER])
def test_the_base_is_the_same_after_a_hundred_pushes_of_an_adapter_that_moves(way):
    model = adapted(target_modules="all-linear")
    frozen = [(name, weight) for name, weight in model.named_parameters() if not weight.requires_grad]
    before, generation = digest_of(frozen), generation_of(model, way)
    for _ in range(100):
        generation.sync_weights()
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data += torch.randn(parameter.shape) * 1e-5
    assert digest_of(frozen) == before
    assert digest_of(pushed(model, way).items()) == digest_of(pushed(model).items())  # by each way the same


def test_of_merged_weights_one_layer_is_in_memory_at_a_time():
    alive, most = weakref.WeakSet(), []
    model = adapted(target_modules="all-linear")
    own = {each.data_ptr() for each in model.parameters()}

    def take(name, weight):
        if weight.data_ptr() not in own:
            alive.add(weight)
        most.append(len(alive))

    generation_of(model, take=take).sync_weights()
    assert max(most) == 1
    assert len(most) == 2 * 12 + 3  # both layers' weights and biases, the embedding, the last norm and the head


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
        ({}, 1, "FSDP1 keeps"),
        ({"is_quantized": True}, None, "bitsandbytes' 4 bits"),
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
