"""A recipe's device and precision become what the machine can do, for accelerate and DeepSpeed too."""

import importlib
import os

import pytest
import torch
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
from trl import GRPOConfig

from salesrl_trl.config import SalesGRPOConfig
from salesrl_trl.config.trl_settings import settle
from salesrl_trl.errors import ConfigError


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
        (0, None, (False, None, False), (True, False, False), "float32. TRL's default is bf16, slow"),
        (0, None, (False, False, False), (True, False, False), ""),
        (1, (9, 0), (False, True, False), (False, True, False), ""),
        (1, (9, 0), (False, None, False), (False, True, False), ""),
        (1, (9, 0), (False, None, True), (False, False, True), ""),
        (1, (9, 0), (True, True, False), (True, True, False), ""),
        (1, (7, 5), (False, None, False), (False, False, False), "float32. TRL's default is bf16, slow"),
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
    with pytest.raises(ConfigError, match="`fp16` is true, and this run is on a CPU"):
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
