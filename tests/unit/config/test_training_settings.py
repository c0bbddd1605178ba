"""Settings of how a run loads, schedules and splits its work become what the machine can do, or are refused."""

from types import SimpleNamespace

import pytest
import torch
from transformers import Qwen2Config

from salesrl_trl.config import SalesGRPOConfig
from salesrl_trl.errors import ConfigError
from salesrl_trl.launch.checks import model as model_checks

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def training(**given):
    common = {"output_dir": "unused", "use_cpu": True, "bf16": False, "num_generations": 4}
    return SalesGRPOConfig(**{**common, "per_device_train_batch_size": 8, **given})


@pytest.mark.parametrize(
    ("variables", "message"),
    [({}, "this run is on a CPU"), ({"FSDP_CPU_RAM_EFFICIENT_LOADING": "true"}, "the reference policy of all others")],
)
def test_fsdp_that_would_train_something_else_is_refused(monkeypatch, variables, message):
    for name, value in {"ACCELERATE_USE_FSDP": "true", **variables}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: bool(variables))
    with pytest.raises(ConfigError, match=message):
        training(use_cpu=False)


@pytest.fixture
def card(monkeypatch):
    """Pretend a card of this compute capability, with these versions of FlashAttention."""

    def have(capability, *installed):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
        flash = {
            name: (lambda name=name: name in installed, *cards) for name, (_, *cards) in model_checks.FLASH.items()
        }
        monkeypatch.setattr(model_checks, "FLASH", flash)

    return have


@pytest.mark.parametrize(
    ("capability", "installed", "model", "chosen"),
    [
        ((9, 0), ("flash_attention_2", "flash_attention_3"), Qwen2Config(), "flash_attention_3"),
        ((8, 0), ("flash_attention_2", "flash_attention_3"), Qwen2Config(), "flash_attention_2"),
        ((9, 0), (), Qwen2Config(), "sdpa; scripts/install_flash_attn.sh installs"),
        ((7, 5), ("flash_attention_2",), Qwen2Config(), "sdpa; scripts/install_flash_attn.sh installs"),
        ((9, 0), ("flash_attention_2",), SimpleNamespace(), "eager; FlashAttention needs a GPU, 16 bits and a model"),
    ],
)
def test_auto_takes_the_fastest_attention_that_is_there_and_says_why_it_is_no_faster_one(
    card, capability, installed, model, chosen
):
    card(capability, *installed)
    name, line = model_checks.choose_attention("auto", GPU, in_16_bits=True, model=model)
    assert line.startswith(f"attention: {chosen}")
    assert (name or "eager") == chosen.split(";")[0]


@pytest.mark.parametrize("asked", ["flash_attention_2", "sdpa", "eager", "me/my-kernel", None])
def test_a_named_attention_is_kept_and_none_is_left_to_transformers(card, asked):
    card((9, 0), "flash_attention_2", "flash_attention_3")
    assert model_checks.choose_attention(asked, GPU, in_16_bits=True, model=Qwen2Config())[0] == asked


def test_attention_on_a_cpu_is_sdpa():
    sdpa = model_checks.choose_attention("auto", CPU, in_16_bits=False, model=Qwen2Config())
    assert sdpa == ("sdpa", "attention: sdpa; FlashAttention needs a GPU, 16 bits and a model that has it")
