"""Layers that keep their activations under gradient checkpointing."""

from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import Qwen2Config, Qwen2ForCausalLM

from salesrl_trl.parts.kept_activations import KeptActivations

LAYERS, TOKENS = 4, 24
SMALL = Qwen2Config(vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=LAYERS,
                    num_attention_heads=2, num_key_value_heads=1)  # fmt: skip
IDS = torch.arange(TOKENS).reshape(2, TOKENS // 2)


@pytest.fixture
def model():
    torch.manual_seed(0)
    made = get_peft_model(Qwen2ForCausalLM(SMALL), LoraConfig(target_modules="all-linear", init_lora_weights=False))
    made.gradient_checkpointing_enable({"use_reentrant": False})
    made.enable_input_require_grads()
    return made.train()


def connect(model, most, **given):
    args = SimpleNamespace(**{"kept_activation_tokens": most, "is_sharded": False, "torch_compile": False} | given)
    part = KeptActivations()
    part.connect(SimpleNamespace(args=args, trl=SimpleNamespace(model=lambda: model)))


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


@pytest.mark.parametrize(("most", "kept"), [(1, 0), (TOKENS // LAYERS, 1), (TOKENS - 1, 3), (TOKENS, 4), (999, 4)])
def test_the_last_layers_keep_what_fits_and_gradients_are_the_same(model, most, kept):
    expected, all_twice, least = passed(model)
    assert all_twice == [2] * LAYERS
    connect(model, most)
    found, runs, size = passed(model)
    assert all(map(torch.equal, expected, found))
    assert runs == [2] * (LAYERS - kept) + [1] * kept
    model.gradient_checkpointing_disable()
    _, once, whole = passed(model)
    assert once == [1] * LAYERS
    assert size == pytest.approx(least + (whole - least) * kept / LAYERS, rel=0.05)


def test_nothing_changes_in_passes_without_gradients_and_the_flags_are_as_before_also_after_an_error(model):
    connect(model, TOKENS)
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


@pytest.mark.parametrize(
    ("given", "reason"), [({"is_sharded": True}, "gathers its sharded weights"), ({"torch_compile": True}, "compile")]
)
def test_it_is_off_with_a_reason_where_layers_cannot_choose(model, given, reason, caplog):
    caplog.set_level("INFO")
    connect(model, TOKENS, **given)
    assert passed(model)[1] == [2] * LAYERS
    assert "off: `kept_activation_tokens`, because" in caplog.text and reason in caplog.text
