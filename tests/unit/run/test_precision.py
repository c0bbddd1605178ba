"""Which number format the weights are trained in, by what there is room for."""

import pytest

from salesrl_trl.errors import ConfigError
from salesrl_trl.run.precision import Room, choose_precision

ROOMY = Room(parameters=500_000_000, memory_gib=80.0, vllm_share=0.35, has_reference=True)
# 7.6e9 parameters: 141.6 GiB with a reference of 4 bytes each and 6 GiB kept; 62.6 GiB in bf16 by 6 + 2 bytes
LARGE = Room(parameters=7_600_000_000, memory_gib=140.0, vllm_share=0.35, has_reference=True)


def choose(**given):
    settings = {
        "dtype": "bfloat16", "autocast": True, "keeps_masters": False, "adapters_only": False,
        "optim": "adamw_torch_fused", "optim_args": None, "room": ROOMY, "has_torchao": False,
    }  # fmt: skip
    return choose_precision(**{**settings, **given})


@pytest.mark.parametrize(
    ("given", "dtype", "rounds"),
    [
        ({}, "float32", False),
        ({"dtype": "auto"}, "float32", False),
        ({"dtype": "float16"}, "float32", False),
        ({"room": None}, "float32", False),
        ({"dtype": "float32", "room": LARGE}, "float32", False),  # asked for: tried
        ({"keeps_masters": True, "room": LARGE}, "bfloat16", False),
        ({"keeps_masters": True, "autocast": False, "room": None}, "float32", False),  # a CPU
        ({"adapters_only": True, "room": LARGE}, "bfloat16", False),
        ({"room": LARGE, "has_torchao": True}, "bfloat16", True),
        ({"has_torchao": True}, "float32", False),  # the exact one first
        ({"room": LARGE, "optim": "adafactor"}, "float32", False),  # what it takes is not known
        ({"room": LARGE, "optim": "adamw_torch_8bit", "optim_args": "bf16_stochastic_round=True"}, "bfloat16", False),
        ({"optim": "adamw_torch_8bit", "optim_args": "block_size=256"}, "float32", False),
    ],
)
def test_trained_weights_are_in_16_bits_only_where_no_update_is_lost(given, dtype, rounds):
    chosen = choose(**given)
    assert (chosen.dtype, chosen.stochastic_rounding) == (dtype, rounds)
    as_asked = dtype == given.get("dtype", "bfloat16") and not rounds
    assert (chosen.note is None) == as_asked  # what is not as the settings say is said


def test_the_estimate_is_the_formula():
    # 1e9 parameters x 20 bytes = 18.63 GiB, and 6: fits into 24.63 GiB and not into less
    edge = 1e9 * 20 / 2**30 + 6
    for memory, fits in ((edge + 0.01, True), (edge - 0.01, False)):
        room = Room(parameters=10**9, memory_gib=memory / 0.5, vllm_share=0.5, has_reference=True)
        assert choose(room=room, has_torchao=True).stochastic_rounding != fits
    # without a reference 4 bytes (3.73 GiB) less, which DDP's buckets take again
    for replicated in (False, True):
        room = Room(
            parameters=10**9, memory_gib=edge - 3, vllm_share=0.0, has_reference=False, is_replicated=replicated
        )
        assert choose(room=room, has_torchao=True).stochastic_rounding == replicated


@pytest.mark.parametrize(
    ("given", "remedy"),
    [
        ({"room": LARGE}, "pip install torchao"),
        ({"room": LARGE, "dtype": "float16", "has_torchao": True}, "`dtype: bfloat16`, for which torchao"),
        ({"room": LARGE}, "LoRA .*DeepSpeed .*vllm_gpu_memory_utilization"),
    ],
)
def test_where_nothing_fits_it_says_what_was_found_and_what_helps(given, remedy):
    with pytest.raises(ConfigError, match=r"7\.6 B weights in float32 takes about 148 GiB, and 91 GiB") as raised:
        choose(**given)
    with pytest.raises(ConfigError, match=remedy):
        choose(**given)
    assert "`dtype: float32`" in str(raised.value)


def test_a_card_too_small_for_either_is_not_offered_torchao():
    small = Room(parameters=7_600_000_000, memory_gib=24.0, vllm_share=0.35, has_reference=True)
    with pytest.raises(ConfigError) as raised:
        choose(room=small, has_torchao=True)
    assert "torchao" not in str(raised.value)
