"""LoRA layers that compute what PEFT's do, in fewer kernels."""

import copy
import pickle
from types import SimpleNamespace

import pytest
import torch
from accelerate import PartialState
from peft import LoraConfig, get_peft_model
from peft.tuners.lora.layer import Linear
from torch.nn.modules.module import register_module_forward_hook
from torch.utils.checkpoint import checkpoint
from transformers import Qwen2Config, Qwen2ForCausalLM
from trl.trainer.utils import disable_dropout_in_model

from salesrl_trl.parts.lora import FusedLinear, LoraLayers, fuse, spare_casts

WIDTHS = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 256, "num_attention_heads": 4,
          "num_key_value_heads": 1, "num_hidden_layers": 2}  # fmt: skip
IDS = torch.arange(24).reshape(2, 12)
Q_PROJ = "base_model.model.model.layers.0.self_attn.q_proj"  # has a bias


def adapted(dtype=torch.float32, **settings):
    torch.manual_seed(0)
    base = Qwen2ForCausalLM(Qwen2Config(**WIDTHS)).to(dtype)
    for name, each in base.named_parameters():
        if name.endswith("bias"):  # of q, k and v, zeros at first
            torch.nn.init.normal_(each, std=0.1)
    chosen = {"target_modules": "all-linear", "init_lora_weights": False, "lora_alpha": 12}
    return get_peft_model(base, LoraConfig(**chosen | settings)).train()


def fused(model):
    for each in model.modules():
        if hasattr(each, "lora_A"):
            assert fuse(each) is None
    return model


def computed(model, autocast=False):
    """Loss and all gradients, in float64."""
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = model(input_ids=IDS, labels=IDS).loss
    loss.backward()
    gradients = [each.grad.double() for each in model.parameters() if each.grad is not None]
    return [loss.detach().double(), *gradients]


def calls(model, monkeypatch):
    """How many layers PEFT computes in a pass."""
    seen, forward = [], Linear.forward
    monkeypatch.setattr(
        Linear, "forward", lambda self, *given, **named: seen.append(1) or forward(self, *given, **named)
    )
    computed(model)
    monkeypatch.undo()
    return len(seen)


@pytest.mark.parametrize("checkpoints", [True, False])
def test_loss_and_gradients_are_pefts(checkpoints, monkeypatch):
    model = adapted().double()
    if checkpoints:  # the first layer's input needs a gradient, and the backward pass computes layers again
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
    expected = computed(model)
    assert calls(model, monkeypatch) > 0
    fused(model)
    assert calls(model, monkeypatch) == 0
    found = computed(model)
    assert len(expected) == len(found) == 1 + 2 * 2 * 7
    for a, b in zip(expected, found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_a_layer_whose_dropout_is_disabled_is_fused(monkeypatch):
    model = adapted(lora_dropout=0.1)
    disable_dropout_in_model(model)
    assert calls(fused(model), monkeypatch) == 0


def test_outputs_may_change_in_place_and_autocast_may_be_on_in_a_backward_pass(monkeypatch):
    def gradients(model):
        layer = model.get_submodule(Q_PROJ)
        with torch.autocast("cpu", torch.bfloat16):
            with torch.autocast("cpu", enabled=False):
                inputs = torch.linspace(-1, 1, 640, requires_grad=True).reshape(2, 5, 64)
                output = checkpoint(layer, inputs, use_reentrant=False).mul_(3)  # permits one read of saved tensors
            output.square().sum().backward()
        return [layer.lora_A["default"].weight.grad, layer.lora_B["default"].weight.grad]

    for expected, found in zip(gradients(adapted()), gradients(fused(adapted())), strict=True):
        assert (expected - found).norm() < 0.01 * expected.norm()  # PEFT's products are in bfloat16 here


def test_rounding_is_no_worse_than_pefts_under_autocast():
    def of_layer(model, autocast=False):
        layer = model.get_submodule(Q_PROJ)
        inputs = torch.randn(2000, 64, generator=torch.manual_seed(0)).bfloat16().to(layer.weight).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            output = layer(inputs)
        weights = [layer.lora_A["default"].weight, layer.lora_B["default"].weight]
        return [output, *torch.autograd.grad(output.float().square().sum(), [inputs, *weights])]

    def errors(model):
        pairs = zip(of_layer(copy.deepcopy(model).double()), of_layer(model, autocast=True), strict=True)
        return [((a - b).norm() / a.norm()).item() for a, b in pairs]

    model = adapted(torch.bfloat16)
    for each in model.parameters():
        if each.requires_grad:  # in float32, but at first of numbers that bfloat16 represents
            torch.nn.init.uniform_(each, -0.1, 0.1)
    pefts, ours = errors(model), errors(fused(model))
    assert 0 < ours[0] < 0.95 * pefts[0]
    assert all(a < 1.1 * b < 0.01 for a, b in zip(ours, pefts, strict=True))
    assert {each.dtype for each in model.parameters() if each.requires_grad} == {torch.float32}


def second_adapter(*active, targets=r".*q_proj", **settings):
    def change(model):
        torch.manual_seed(1)
        model.add_adapter("second", LoraConfig(target_modules=targets, init_lora_weights=False, **settings))
        model.base_model.set_adapter([*active, "second"])
        for name, each in model.named_parameters():
            each.data *= 2 if "magnitude" in name else 1  # DoRA's first ones change nothing

    return change


def double_adapters(model):
    for each in model.parameters():
        each.data = each.data.double() if each.requires_grad else each.data


def base_of_another_class(model):
    for name, each in model.named_modules():
        if name.endswith("base_layer"):
            each.__class__ = type("Rounded", (torch.nn.Linear,), {"forward": lambda self, x: x @ self.weight.t()})


def hook(inside):
    def change(model):
        for name, each in model.named_modules():
            if name.endswith(inside):
                each.register_forward_hook(lambda *found: found[-1] * 2)

    return change


def scale_by_a_tensor(model):
    for each in model.modules():
        if hasattr(each, "lora_A"):
            each.scaling["default"] = torch.tensor([3.0])  # PEFT's `prepare_model_for_compiled_hotswap` has tensors


class OnlyLinear(torch.Tensor):
    """A weight like quantised ones, which no other operation accepts."""

    @classmethod
    def __torch_function__(cls, function, types, given=(), named=None):
        assert function not in (torch.Tensor.matmul, torch.Tensor.addmm_)
        return super().__torch_function__(function, types, given, named)


def quantise(model):
    for name, each in model.named_modules():
        if name.endswith("base_layer"):
            each.weight = torch.nn.Parameter(each.weight.detach().as_subclass(OnlyLinear), requires_grad=False)


def train_the_base(model):
    for name, each in model.named_parameters():
        each.requires_grad_("base_layer" in name or each.requires_grad)


@pytest.mark.parametrize(
    "change",
    [lambda model: model.disable_adapter_layers(), lambda model: model.merge_adapter(),
     second_adapter("default", targets="all-linear"), second_adapter(use_dora=True), second_adapter(lora_bias=True),
     second_adapter(lora_dropout=0.5), hook("lora_A.default"), hook("lora_dropout.default"), hook("base_layer"),
     scale_by_a_tensor, quantise, train_the_base, base_of_another_class, double_adapters],
    ids=["disabled", "merged", "two adapters", "DoRA", "bias", "dropout", "hooks", "hooks of dropout",
         "hooks of the base", "scale", "weights", "trained base", "another class", "dtypes"],
)  # fmt: skip
def test_what_changes_after_fusing_is_left_to_peft(change):
    def logits(model):
        torch.manual_seed(0)
        return model(input_ids=IDS).logits

    model, expected = fused(adapted()), adapted()
    with torch.no_grad():
        assert not torch.equal(logits(model), logits(expected))  # other roundings
        for each in (model, expected):
            change(each)
        assert torch.equal(logits(model), logits(expected))


@pytest.mark.parametrize(
    ("settings", "run", "reason"),
    [
        ({"lora_dropout": 0.05}, {}, "`lora_dropout` is not 0"),
        ({"use_dora": True}, {}, "DoRA"),
        ({"lora_bias": True, "target_modules": ["q_proj"]}, {}, "a bias"),
        ({"bias": "lora_only", "target_modules": ["q_proj"]}, {}, "trained too"),
        ({"target_modules": ["embed_tokens"]}, {}, "`Embedding`, not its `Linear`"),
        ({}, {"bf16": True}, "adapters are computed in torch.bfloat16, their base layers are not"),
        ({}, {"torch_compile": True}, "`torch_compile`"),
        ({}, {"is_deepspeed": True}, "DeepSpeed"),
    ],
)
def test_what_is_not_fused_is_logged_once_with_its_reason(settings, run, reason, caplog):
    PartialState(cpu=True)
    caplog.set_level("INFO")
    model = adapted(**settings)
    given = {"device": torch.device("cpu"), "model": lambda: model} | dict.fromkeys(
        ("torch_compile", "bf16", "fp16", "is_deepspeed"), False
    )
    values = SimpleNamespace(**given | run)
    LoraLayers().connect(SimpleNamespace(args=values, trl=values))
    (line,) = [each for each in caplog.messages if "off: " in each]
    assert "LoRA layers" in line and reason in line
    assert not any(isinstance(each, FusedLinear) for each in model.modules())


def test_named_adapters_and_global_hooks_are_left_to_peft(monkeypatch):
    model, expected = fused(adapted()).eval(), adapted().eval()
    named = {"input_ids": IDS, "adapter_names": ["__base__", "default"]}
    assert torch.equal(model(**named).logits, expected(**named).logits)
    with register_module_forward_hook(lambda *_: None):
        assert calls(model, monkeypatch) > 0


def test_a_fused_model_is_copied_pickled_and_moved_as_before():
    model = fused(adapted())
    with torch.no_grad():
        expected = model(input_ids=IDS).logits
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert torch.equal(other(input_ids=IDS).logits, expected)
        torch.testing.assert_close(copy.deepcopy(model).merge_and_unload()(input_ids=IDS).logits, expected)
        assert model.to("meta")(input_ids=IDS.to("meta")).logits.shape == expected.shape


@pytest.mark.parametrize("autocast", [True, False])
def test_a_layer_with_dropout_spares_casts_under_autocast_and_computes_the_same(autocast):
    model, seen = adapted(torch.bfloat16, lora_dropout=0.1), set()
    for name, layer in model.named_modules():
        if name.endswith("lora_A.default"):
            layer.register_forward_pre_hook(lambda _, inputs: seen.add(inputs[0].dtype))
    model.eval()  # without draws
    before = computed(model, autocast)
    assert seen == {torch.float32}
    seen.clear()
    spare_casts(model, "cpu")
    after = computed(model, autocast)
    assert seen == {torch.bfloat16 if autocast else torch.float32}
    assert all(map(torch.equal, before, after))
