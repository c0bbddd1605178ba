"""The number format of the weights in training, by the memory that is free."""

import pytest

from salesrl_trl.build.memory.estimate import Estimate, Moment
from salesrl_trl.build.precision import choose_precision
from salesrl_trl.errors import ConfigError


def weigh_on(card_gib, *, exact_gib, rounded_gib):
    """An estimate by figures alone: for float32 weights, and for stochastic rounding."""

    def weigh(dtype, optim):
        gib = {"float32": exact_gib, "bfloat16": rounded_gib}[dtype]
        return Estimate(card_gib=card_gib, moments=(Moment(name="x", parts={"weights": gib}),), sequences=None)

    return weigh


ROOMY = weigh_on(80.0, exact_gib=40.0, rounded_gib=20.0)
LARGE = weigh_on(140.0, exact_gib=197.0, rounded_gib=112.0)


def choose(**given):
    settings = {
        "dtype": "bfloat16", "autocast": True, "keeps_masters": False, "adapters_only": False,
        "optim": "adamw_torch_fused", "optim_args": None, "weigh": ROOMY, "has_torchao": False,
    }  # fmt: skip
    return choose_precision(**{**settings, **given})


@pytest.mark.parametrize(
    ("given", "dtype", "rounds"),
    [
        ({}, "float32", False),
        ({"dtype": "auto"}, "float32", False),
        ({"dtype": "float16"}, "float32", False),
        ({"weigh": None}, "float32", False),
        ({"dtype": "float32", "weigh": LARGE}, "float32", False),  # asked for: tried
        ({"keeps_masters": True, "weigh": LARGE}, "bfloat16", False),
        ({"keeps_masters": True, "autocast": False, "weigh": None}, "float32", False),  # a CPU
        ({"adapters_only": True, "weigh": LARGE}, "bfloat16", False),
        ({"weigh": LARGE, "has_torchao": True}, "bfloat16", True),
        ({"has_torchao": True}, "float32", False),  # the exact one first
        ({"weigh": LARGE, "optim": "adafactor"}, "float32", False),  # what it takes is not known
        ({"weigh": LARGE, "optim": "adamw_torch_8bit", "optim_args": "bf16_stochastic_round=True"}, "bfloat16", False),
        ({"optim": "adamw_torch_8bit", "optim_args": "block_size=256"}, "float32", False),
    ],
)
def test_trained_weights_are_in_16_bits_only_where_no_update_is_lost(given, dtype, rounds):
    chosen = choose(**given)
    assert (chosen.dtype, chosen.stochastic_rounding) == (dtype, rounds)
    as_asked = dtype == given.get("dtype", "bfloat16") and not rounds
    assert (chosen.note is None) == as_asked  # what is not as the settings say is said


@pytest.mark.parametrize(
    ("given", "remedy"),
    [
        ({"weigh": LARGE}, "pip install torchao"),
        ({"weigh": LARGE, "dtype": "float16", "has_torchao": True}, "`dtype: bfloat16`, for which torchao"),
        ({"weigh": LARGE}, "LoRA .*DeepSpeed .*check_gpu_memory"),
    ],
)
def test_where_nothing_fits_it_says_what_was_found_and_what_helps(given, remedy):
    with pytest.raises(ConfigError, match=r"in float32 takes about 197 GiB, .* and the card has 140") as raised:
        choose(**given)
    with pytest.raises(ConfigError, match=remedy):
        choose(**given)
    assert "`dtype: float32`" in str(raised.value)


def test_a_card_too_small_for_either_is_not_offered_torchao():
    small = weigh_on(24.0, exact_gib=150.0, rounded_gib=66.0)
    with pytest.raises(ConfigError) as raised:
        choose(weigh=small, has_torchao=True)
    assert "torchao" not in str(raised.value)
