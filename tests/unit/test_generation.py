"""The engine options and the number format; the engine itself is in tests/integration."""

import pytest
import torch
import trl.generation.vllm_generation as upstream_vllm
import trl.trainer.grpo_trainer as upstream_trainer
from transformers import Qwen2Config, Qwen2ForCausalLM

from salesrl_trl.generation import (
    SalesVLLMGeneration,
    engine_kwargs,
    has_tied_head,
    vllm_dtype,
    vllm_engine_options,
)


def test_extra_engine_arguments_win():
    options = engine_kwargs(
        enforce_eager=True,
        load_format="dummy",
        dtype="float32",
        seed=7,
        extra={"seed": 8, "max_num_batched_tokens": 1},
    )
    assert options == {
        "enforce_eager": True,
        "load_format": "dummy",
        "dtype": "float32",
        "seed": 8,
        "max_num_batched_tokens": 1,
    }


@pytest.mark.parametrize(
    ("requested", "bf16", "fp16", "model", "expected"),
    [
        ("float16", True, False, torch.float32, "float16"),
        ("auto", True, False, torch.float32, "bfloat16"),
        ("auto", False, True, torch.float32, "float16"),
        ("auto", False, False, torch.float32, "float32"),
        ("auto", False, False, torch.bfloat16, "bfloat16"),
        ("auto", False, False, None, "auto"),
    ],
)
def test_vllm_samples_in_the_format_that_training_runs_in(requested, bf16, fp16, model, expected):
    assert vllm_dtype(requested, bf16=bf16, fp16=fp16, model_dtype=model) == expected


def test_trl_is_left_as_it_was_even_when_the_trainer_fails_to_build():
    stock = upstream_trainer.VLLMGeneration
    with pytest.raises(RuntimeError), vllm_engine_options({"seed": 1}):
        assert upstream_trainer.VLLMGeneration.func is SalesVLLMGeneration
        raise RuntimeError
    assert upstream_trainer.VLLMGeneration is stock


def test_the_engine_is_built_with_trls_arguments_and_ours_on_top(monkeypatch):
    seen = {}

    def engine(**kwargs):
        seen.update(kwargs)
        raise InterruptedError  # all that follows needs a model

    monkeypatch.setattr(upstream_vllm, "LLM", engine)
    generation = SalesVLLMGeneration.__new__(SalesVLLMGeneration)
    generation.engine_options = {"enforce_eager": True, "seed": 5}
    for name, value in {
        "mode": "colocate",
        "tensor_parallel_size": 1,
        "gpu_memory_utilization": 0.5,
        "max_model_length": 64,
        "max_num_seqs": 4,
        "enable_sleep_mode": False,
        "model_impl": "auto",
        "trust_remote_code": False,
    }.items():
        setattr(generation, name, value)

    class Model(torch.nn.Module):
        name_or_path = "some/model"

    class Accelerator:
        num_processes = 1
        process_index = local_process_index = 0

    generation.model, generation.accelerator = Model(), Accelerator()
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "0")
    with pytest.raises(InterruptedError):
        generation._init_vllm()
    assert upstream_vllm.LLM is engine
    assert (seen["model"], seen["max_num_seqs"], seen["logprobs_mode"]) == ("some/model", 4, "processed_logprobs")
    assert (seen["enforce_eager"], seen["seed"]) == (True, 5)


@pytest.mark.parametrize("tied", [True, False])
def test_a_tied_output_head_is_recognised(tied):
    config = Qwen2Config(
        vocab_size=8,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        tie_word_embeddings=tied,
    )
    assert has_tied_head(Qwen2ForCausalLM(config)) is tied
