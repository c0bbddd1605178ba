"""Layers that keep their activations under gradient checkpointing."""

from types import SimpleNamespace

import pytest
import torch
from accelerate import PartialState
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModel,
    Gemma2Config,
    Lfm2Config,
    Lfm2ForCausalLM,
    MambaConfig,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from salesrl_trl.parts.kept_activations import KeptActivations, bytes_per_token
from salesrl_trl.telemetry.device import GIB

LAYERS, TOKENS = 4, 24
WIDTHS = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 256, "num_attention_heads": 4,
          "num_key_value_heads": 1}  # fmt: skip
IDS = torch.arange(TOKENS).reshape(2, TOKENS // 2)


def trained(model):
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.enable_input_require_grads()
    return model.train()


@pytest.fixture
def model():
    torch.manual_seed(0)
    base = Qwen2ForCausalLM(Qwen2Config(**WIDTHS, num_hidden_layers=LAYERS))
    return trained(get_peft_model(base, LoraConfig(target_modules="all-linear", init_lora_weights=False)))


def connect(model, layer_tokens, **given):
    """A run with room for the activations of so many tokens in one layer. Returns the part and the passes."""
    each = bytes_per_token(model.get_decoder().layers[-1], 4) or 1
    settings = {
        "gradient_checkpointing": True,
        "is_sharded": False,
        "torch_compile": False,
        "bf16": False,
        "fp16": False,
    }
    args = SimpleNamespace(**settings | {"kept_activations_gib": layer_tokens * each / GIB} | given)
    PartialState(cpu=True)  # for the log
    part, passes = KeptActivations(), SimpleNamespace(fitting=0)
    part.connect(SimpleNamespace(args=args, passes=passes, trl=SimpleNamespace(model=lambda: model)))
    part.on_train_begin()
    return part, passes


def passed(model):
    """A pass's loss and gradients, how often each layer ran, and the bytes that autograd kept."""
    runs, kept = [0] * LAYERS, {}
    hooks = [
        layer.mlp.register_forward_pre_hook(lambda *_, place=place: runs.__setitem__(place, runs[place] + 1))
        for place, layer in enumerate(model.get_decoder().layers)
    ]
    weights = {each.data_ptr() for each in model.parameters()}

    def keep(tensor):
        if tensor.data_ptr() not in weights:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    model.zero_grad()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model(input_ids=IDS, labels=IDS, use_cache=False).loss
    loss.backward()
    for hook in hooks:
        hook.remove()
    grads = [each.grad.clone() for each in model.parameters() if each.grad is not None]
    return [loss.detach(), *grads], runs, sum(kept.values())


@pytest.mark.parametrize(
    ("layer_tokens", "kept"), [(1, 1), (2 * TOKENS, 2), (LAYERS * TOKENS - 1, 3), (LAYERS * TOKENS, 4), (9999, 4)]
)
def test_the_last_layers_keep_what_fits_and_gradients_are_the_same(model, layer_tokens, kept):
    expected, all_twice, least = passed(model)
    assert all_twice == [2] * LAYERS
    assert connect(model, layer_tokens)[1].fitting == layer_tokens // LAYERS
    found, runs, size = passed(model)
    assert all(map(torch.equal, expected, found))
    assert runs == [2] * (LAYERS - kept) + [1] * kept
    model.gradient_checkpointing_disable()
    _, once, whole = passed(model)
    assert once == [1] * LAYERS
    assert size == pytest.approx(least + (whole - least) * kept / LAYERS, rel=0.05)
    each = bytes_per_token(model.get_decoder().layers[-1], 4)
    assert each * TOKENS == pytest.approx((whole - least) / LAYERS, rel=0.1)


def test_nothing_changes_in_passes_without_gradients_and_the_flags_are_as_before_also_after_an_error(model):
    connect(model, 9999)
    layers = model.get_decoder().layers
    seen = []
    layers[0].mlp.register_forward_pre_hook(lambda *_: seen.append(layers[0].gradient_checkpointing))
    with torch.no_grad():
        model(input_ids=IDS)
    model.eval()(input_ids=IDS)
    assert seen == [True, True]
    hook = layers[1].mlp.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model.train()(input_ids=IDS, use_cache=False)
    hook.remove()
    assert seen[2] is False
    assert all(layer.gradient_checkpointing for layer in layers)


@pytest.mark.parametrize("end", [KeptActivations.on_train_end, KeptActivations.end_run], ids=["ended", "failed"])
def test_a_run_over_has_no_effect_on_the_next_trainer_of_the_same_model(model, end):
    end(connect(model, 9999)[0])
    assert passed(model)[1] == [2] * LAYERS
    connect(model, TOKENS)
    assert passed(model)[1] == [2] * (LAYERS - 1) + [1]


@pytest.mark.parametrize(("norms", "config"), [(2, Qwen2Config), (4, Gemma2Config)])
def test_each_norm_keeps_its_float32_input(norms, config):
    layer = AutoModel.from_config(config(**WIDTHS, num_hidden_layers=1, head_dim=16)).layers[0]
    # inputs and outputs of q, k, v and o, and of the MLP's three, 4 bytes each
    linear = 4 * (64 + 64 + 2 * (64 + 16) + 64 + 64 + 3 * (64 + 256))
    assert bytes_per_token(layer, 4) == linear + norms * 4 * 64


def test_what_a_state_space_model_keeps_is_not_known():
    layer = AutoModel.from_config(MambaConfig(hidden_size=64, num_hidden_layers=1, vocab_size=64)).layers[0]
    assert bytes_per_token(layer, 4) is None


def hybrid():
    return trained(
        Lfm2ForCausalLM(
            Lfm2Config(**WIDTHS, num_hidden_layers=LAYERS, layer_types=["conv", *["full_attention"] * (LAYERS - 1)])
        )
    )


def mixture():
    return trained(MixtralForCausalLM(MixtralConfig(**WIDTHS, num_hidden_layers=LAYERS, num_local_experts=2)))


@pytest.mark.parametrize(
    ("build", "given", "reason"),
    [
        (None, {"is_sharded": True}, "on all ranks together"),
        (None, {"torch_compile": True}, "compile the model again"),
        (None, {"gradient_checkpointing": False}, "is false"),
        (mixture, {}, "can't be estimated"),
        (hybrid, {}, "can't be estimated"),
    ],
)
def test_it_is_off_with_a_reason_where_layers_cannot_choose_or_be_estimated(model, build, given, reason, caplog):
    caplog.set_level("INFO")
    model = model if build is None else build()
    assert connect(model, 9999, **given)[1].fitting == 0
    assert all(layer.gradient_checkpointing for layer in model.get_decoder().layers)
    assert not model.get_decoder()._forward_pre_hooks
    assert "off: `kept_activations_gib`, because" in caplog.text
    assert reason in caplog.text
