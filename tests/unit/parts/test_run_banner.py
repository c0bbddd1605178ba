"""The warning about mixtures of experts."""

from types import SimpleNamespace

import pytest
import torch
from transformers import (
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from salesrl_trl.parts.run_banner import experts_warning
from salesrl_trl.update.correction import CorrectionSettings

SMALL = {"vocab_size": 32, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2,
         "num_key_value_heads": 1, "intermediate_size": 8, "head_dim": 4}  # fmt: skip
MIXTRAL = MixtralForCausalLM, MixtralConfig(**SMALL, num_local_experts=4)
QWEN = Qwen3MoeForCausalLM, Qwen3MoeConfig(**SMALL, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8)
DENSE = Qwen2ForCausalLM, Qwen2Config(**SMALL)


def warned(kind, dtype=torch.bfloat16, weights="bounded", mode="sequence_mask", **given):
    build, config = kind
    with torch.device("meta"):
        model = build(config).to(dtype)
    usual = {"use_vllm": True, "bf16": False, "fp16": False, "vllm_importance_sampling_correction": True,
             "correction": CorrectionSettings(mode=mode, weights=weights)}  # fmt: skip
    return experts_warning(model, SimpleNamespace(**usual | given))


@pytest.mark.parametrize(
    ("kind", "given", "remedy"),
    [
        (MIXTRAL, {}, "Use `vllm_importance_sampling_mode: token_truncate`"),
        (QWEN, {"dtype": torch.float32, "bf16": True}, "Use `vllm_importance_sampling_mode: token_truncate`"),
        (QWEN, {"mode": "token_truncate"}, "The correction limits"),
        (QWEN, {"weights": "bypass"}, "The loss clips the ratio"),
        (QWEN, {"vllm_importance_sampling_correction": False}, "Set `vllm_importance_sampling_correction: true`"),
        (QWEN, {"dtype": torch.float32}, None),  # float32 on both sides: the same experts
        (QWEN, {"use_vllm": False}, None),
        (DENSE, {}, None),
    ],
)
def test_a_mixture_in_16_bits_is_told_that_its_experts_differ_and_what_limits_it(kind, given, remedy):
    warning = warned(kind, **given)
    assert (warning is None) == (remedy is None)
    assert remedy is None or remedy in warning
