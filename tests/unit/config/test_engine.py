"""The engine's start, and device and precision: what a recipe asks for becomes what the machine can do."""

import importlib
import os
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import yaml
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
from transformers import Qwen2Config, Qwen2ForCausalLM
from trl import GRPOConfig
from warmup_model import settings_of

from salesrl_trl.config import SalesGRPOConfig
from salesrl_trl.config.rollouts import GRAPHS_ALONE, engine_options, why_not_partial
from salesrl_trl.config.trl_settings import COMPILERS, settle
from salesrl_trl.errors import ConfigError

ROOT = Path(__file__).parents[3]


def policy(tied=False, buffer=False):
    shape = {"vocab_size": 4, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    shape |= {"num_attention_heads": 1, "num_key_value_heads": 1, "tie_word_embeddings": tied}
    model = Qwen2ForCausalLM(Qwen2Config(**shape))
    if buffer:
        model.register_buffer("router_bias", torch.zeros(2))
    return model


@pytest.fixture
def config(tmp_path, monkeypatch):
    for name in COMPILERS:
        monkeypatch.setenv(name, "elsewhere")  # back to what it was after the test

    def build(**settings):
        return SalesGRPOConfig(output_dir=str(tmp_path / "run"), use_cpu=True, report_to="none", **settings)

    return build


@pytest.mark.parametrize(
    ("model", "given", "expected"),
    [
        (policy(), {}, "dummy"),
        (policy(buffer=True), {}, "auto"),  # TRL pushes parameters alone
        (policy(tied=True), {}, "dummy"),
        (policy(buffer=True), {"load_format": "dummy"}, "dummy"),
        (policy(), {"load_format": "runai_streamer"}, "runai_streamer"),
    ],
)
def test_the_engine_reads_no_weights_that_the_trainer_pushes_all_the_same(config, model, given, expected):
    assert engine_options(config(vllm_engine_kwargs=given), model)["load_format"] == expected


@pytest.mark.parametrize("is_on", [True, False])
def test_prefix_caching_and_chunked_prefill_arrive_in_the_engine(config, tiny, is_on):
    from vllm.engine.arg_utils import EngineArgs

    given = {"enable_prefix_caching": is_on, "enable_chunked_prefill": is_on, "max_num_batched_tokens": 4096}
    if is_on:
        given |= yaml.safe_load((ROOT / "recipes/fast_load.yaml").read_text())["vllm_engine_kwargs"]
    options = engine_options(config(vllm_engine_kwargs=given), policy())
    engine = EngineArgs(model=str(tiny), max_model_len=64, **options).create_engine_config()
    arrived = engine.cache_config.enable_prefix_caching, engine.scheduler_config.enable_chunked_prefill
    assert arrived == (is_on, is_on)


def test_options_of_the_colocated_engine_are_not_for_a_server(config):
    server = {"use_vllm": True, "vllm_mode": "server"}
    engine_options(config(**server, vllm_engine_kwargs={"enforce_eager": False}), policy())  # as in recipes/full.yaml
    with pytest.raises(ConfigError, match="sets load_format, seed of the colocated engine"):
        engine_options(config(**server, vllm_engine_kwargs={"load_format": "auto", "seed": 1}), policy())


@pytest.mark.parametrize(
    ("given", "eager_on_cpu", "eager", "graphs"),
    [(None, True, False, GRAPHS_ALONE), (True, True, True, None), (False, False, False, None)],
)
def test_the_engine_captures_graphs_on_a_gpu_and_compiles_only_when_it_is_asked_to(
    config, given, eager_on_cpu, eager, graphs
):
    args = config(vllm_engine_kwargs={"enforce_eager": given})
    asked = config(vllm_engine_kwargs={"enforce_eager": given, "compilation_config": {"mode": 3}})
    assert engine_options(args, policy())["enforce_eager"] is eager_on_cpu
    with patch.object(type(args), "device", SimpleNamespace(type="cuda")):
        options = engine_options(args, policy())
        assert engine_options(asked, policy())["compilation_config"] == {"mode": 3}
    assert options["enforce_eager"] is eager
    assert options.get("compilation_config") == graphs


def test_every_compiler_gets_a_folder_in_the_one_that_is_named(config, tmp_path):
    args = config(compile_cache_dir=str(tmp_path / "compiled"))
    assert {os.environ[name] for name in COMPILERS} == {str(args.compiled / folder) for folder in COMPILERS.values()}


def test_a_folder_that_cannot_be_made_is_told_before_anything_is_compiled(config, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="is not writable"):
        config(compile_cache_dir=str(tmp_path / "file"))


def test_a_shape_to_warm_up_sets_the_sequences_and_the_length_that_vllm_compiles_for(config):
    given = dict(zip(*[iter(settings_of("8x512"))] * 2, strict=True))
    args = config(**{name.removeprefix("--"): int(value) for name, value in given.items()})
    assert (args.per_device_train_batch_size * args.steps_per_generation, args.vllm_max_model_length) == (8, 512)
    with pytest.raises(ConfigError, match="8by512"):
        settings_of("8by512")


@pytest.mark.parametrize(
    ("given", "left", "reason"),
    [
        ({}, 4, None),
        ({"rollout_lookahead": 0}, 0, "`rollout_lookahead` is 0"),
        ({"rollout_lookahead": 0, "max_rollout_lookahead": 2}, 4, None),
        ({"partial_rollouts": 0.1}, 0, "the share amounts to less than one completion"),
        ({"vllm_mode": "server"}, 4, "a vLLM server"),
        ({"vllm_enable_sleep_mode": True}, 4, None),  # a CPU's engine does not sleep
    ],
)
def test_an_engine_has_slots_for_completions_that_are_left_and_what_keeps_it_from_leaving_any_is_said(
    config, given, left, reason
):
    partial = {"rollout_lookahead": 1, "partial_rollouts": 0.5, "use_vllm": True, **given}
    args = config(per_device_train_batch_size=4, gradient_accumulation_steps=2, num_generations=4, **partial)
    assert args.most_unfinished == left
    assert engine_options(args, policy()).get("max_num_seqs") == (8 + left if left else None)
    told = why_not_partial(args, talks=False, reads_pictures=False)
    assert told is None if reason is None else told.startswith(reason)


@pytest.fixture(autouse=True)
def _launched_alone(monkeypatch):
    accelerates = ("ACCELERATE_USE_CPU", "ACCELERATE_MIXED_PRECISION", "ACCELERATE_CONFIG_DS_FIELDS")
    for name in (*accelerates, "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


@pytest.fixture
def gpus(monkeypatch):
    def have(count, capability=(9, 0)):
        monkeypatch.setattr(torch.accelerator, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Tesla T4")

    return have


@pytest.mark.parametrize(
    ("count", "capability", "wish", "expected", "note"),
    [
        (0, None, (False, True, False), (True, True, False), ""),
        (0, None, (False, None, False), (True, False, False), "float32, as TRL's default bf16 is slow"),
        (0, None, (False, False, False), (True, False, False), ""),
        (1, (9, 0), (False, True, False), (False, True, False), ""),
        (1, (9, 0), (False, None, False), (False, True, False), ""),
        (1, (9, 0), (False, None, True), (False, False, True), ""),
        (1, (9, 0), (True, True, False), (True, True, False), ""),
        (1, (7, 5), (False, None, False), (False, False, False), "float32, as TRL's default bf16 is slow"),
        (1, (7, 5), (False, True, False), (False, True, False), ""),
    ],
)
def test_a_precision_that_is_set_stays_and_the_default_is_float32_where_bf16_is_slow(
    gpus, count, capability, wish, expected, note
):
    """Both are `use_cpu`, `bf16` and `fp16`."""
    gpus(count, capability)
    settled = settle(*wish)
    assert settled[:3] == expected
    assert note in " ".join(settled[3])
    assert bool(settled[3]) == bool(note)


def test_fp16_is_refused_on_a_cpu(gpus):
    gpus(0)
    with pytest.raises(ConfigError, match="`fp16` is true, but this run is on a CPU"):
        settle(False, None, True)


def test_on_a_cpu_deepspeed_compiles_nothing_at_the_start(gpus, monkeypatch):
    """Else the operator is built when processes find each other: 70 s of CPU for one that gloo stands in for."""
    import deepspeed.ops

    gpus(0)
    monkeypatch.delitem(vars(deepspeed.ops), "__compatible_ops__", raising=False)
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    builder = deepspeed.ops.op_builder.cpu.ShareMemCommBuilder
    monkeypatch.setattr(builder, "load", lambda self: pytest.fail("it was compiled"))
    settle(True, False, False)
    backend = importlib.import_module("deepspeed.comm.torch")
    monkeypatch.setattr(backend, "get_accelerator", CPU_Accelerator)
    assert backend.build_shm_op() is None


@pytest.mark.parametrize(
    ("told", "wish", "then"),
    [("bf16", False, "no"), ("no", True, "bf16"), ("fp16", True, "bf16"), ("no", False, "no")],
)
def test_accelerates_precision_becomes_the_recipes(gpus, monkeypatch, told, wish, then):
    gpus(1)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", told)
    monkeypatch.setenv("ACCELERATE_CONFIG_DS_FIELDS", "zero_stage,mixed_precision,gradient_clipping")
    settle(False, wish, False)
    assert os.environ["ACCELERATE_MIXED_PRECISION"] == then
    assert os.environ["ACCELERATE_CONFIG_DS_FIELDS"] == "zero_stage,gradient_clipping"


def test_one_process_trains_on_one_gpu_however_many_are_in_sight(monkeypatch, tmp_path):
    stock = GRPOConfig.__post_init__

    def sees_four(config):
        stock(config)
        config._n_gpu = 4  # as transformers does

    monkeypatch.setattr(GRPOConfig, "__post_init__", sees_four)
    assert SalesGRPOConfig(output_dir=str(tmp_path), bf16=False).n_gpu == 1
