"""The number format of the weights in training, by the memory that is free."""

from types import SimpleNamespace

import pytest

from salesrl_trl.build.memory.estimate import Estimate, Moment
from salesrl_trl.errors import ConfigError
from salesrl_trl.preflight import memory


def weigh_on(card_gib, *, exact_gib, rounded_gib):
    """An estimate by figures alone: for float32 weights, and for stochastic rounding."""

    def weigh(dtype, optim):
        gib = {"float32": exact_gib, "bfloat16": rounded_gib}[dtype]
        return Estimate(card_gib=card_gib, moments=(Moment(name="x", parts={"weights": gib}),), sequences=None)

    return weigh


ROOMY = weigh_on(80.0, exact_gib=40.0, rounded_gib=20.0)
LARGE = weigh_on(140.0, exact_gib=197.0, rounded_gib=112.0)
ROUNDING = "bf16_stochastic_round=True"


@pytest.fixture
def settle(monkeypatch):
    """The number format, whether the optimizer was set to round, and the line for the banner."""

    def choose(weigh=ROOMY, has_torchao=False, dtype="bfloat16", lora=False, optim="adamw_torch_fused", **given):
        settings = {"bf16": True, "fp16": False, "optim_args": None, "deepspeed_plugin": None, **given}
        training = SimpleNamespace(**settings, optim=SimpleNamespace(value=optim))
        training.is_sharded = training.deepspeed_plugin is not None
        config = SimpleNamespace(model=SimpleNamespace(dtype=dtype, use_peft=lora), training=training)
        plan = SimpleNamespace(config=config, dtype=None)
        monkeypatch.setattr(memory, "is_torchao_available", lambda: has_torchao)
        note = memory.settle_precision(plan, weigh)
        return plan.dtype, training.optim_args == ROUNDING and given.get("optim_args") is None, note

    return choose


@pytest.mark.parametrize(
    ("given", "dtype", "rounds"),
    [
        ({}, "float32", False),
        ({"dtype": "auto"}, "float32", False),
        ({"dtype": "float16"}, "float32", False),
        ({"weigh": None}, "float32", False),
        ({"dtype": "float32", "weigh": LARGE}, "float32", False),  # asked for: tried
        ({"deepspeed_plugin": "ZeRO", "weigh": LARGE}, "bfloat16", False),
        ({"deepspeed_plugin": "ZeRO", "bf16": False}, "float32", False),  # a CPU
        ({"lora": True, "weigh": LARGE}, "bfloat16", False),
        ({"weigh": LARGE, "has_torchao": True}, "bfloat16", True),
        ({"has_torchao": True}, "float32", False),  # the exact one first
        ({"weigh": LARGE, "optim": "adafactor"}, "float32", False),  # what it takes is not known
        ({"weigh": LARGE, "optim": "adamw_torch_8bit", "optim_args": ROUNDING}, "bfloat16", False),
        ({"optim": "adamw_torch_8bit", "optim_args": "block_size=256"}, "float32", False),
    ],
)
def test_trained_weights_are_in_16_bits_only_where_no_update_is_lost(settle, given, dtype, rounds):
    *chosen, note = settle(**given)
    assert chosen == [dtype, rounds]
    assert (note is None) == (dtype == given.get("dtype", "bfloat16") and not rounds)  # said where it is not as set


@pytest.mark.parametrize(
    ("given", "remedy"),
    [
        ({"weigh": LARGE}, r"LoRA .*DeepSpeed .*`pip install torchao`.*`dtype: float32`.*check_gpu_memory"),
        ({"weigh": LARGE, "dtype": "float16", "has_torchao": True}, "`dtype: bfloat16`, for which torchao"),
        ({"weigh": weigh_on(140.0, exact_gib=197.0, rounded_gib=150.0)}, r"full.yaml\); or `dtype: float32`"),
    ],
)
def test_where_nothing_fits_it_says_what_was_got_and_what_helps(settle, given, remedy):
    with pytest.raises(ConfigError, match=rf"in float32 takes about 197 GiB, .* and the card has 140.*{remedy}"):
        settle(**given)
