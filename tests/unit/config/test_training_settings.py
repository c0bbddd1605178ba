"""Settings of how a run loads, schedules and splits its work become what the machine can do, or are refused."""

import os
from types import SimpleNamespace

import pytest
import torch
from transformers import Qwen2Config

from salesrl_trl.config import SalesGRPOConfig
from salesrl_trl.config.trl_settings import follow
from salesrl_trl.errors import ConfigError
from salesrl_trl.launch.checks import model as model_checks

CPU, GPU = torch.device("cpu"), torch.device("cuda")
ON_PLATEAU = {"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "steps"}


def training(**given):
    common = {"output_dir": "unused", "use_cpu": True, "bf16": False, "num_generations": 4}
    return SalesGRPOConfig(**{**common, "per_device_train_batch_size": 8, **given})


@pytest.mark.parametrize(("cores", "processes", "workers"), [(2, 1, 0), (16, 1, 4), (64, 4, 4), (192, 1, 16)])
def test_workers_of_the_loader_are_a_quarter_of_the_process_s_cores(monkeypatch, cores, processes, workers):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(cores))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
    config = training(dataloader_num_workers=-1, dataloader_prefetch_factor=4, dataloader_pin_memory=True)
    assert config.dataloader_num_workers == workers
    assert config.dataloader_prefetch_factor == (4 if workers else None)
    assert not config.dataloader_pin_memory  # no GPU
    assert training(dataloader_num_workers=3).dataloader_num_workers == 3


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"lr_scheduler_type": "plateau"}, "`lr_scheduler_type` is 'plateau'. Expected one of: linear, "),
        ({"lr_scheduler_type": "reduce_lr_on_plateau"}, "`eval_strategy` is no. Expected evaluations during training"),
        ({**ON_PLATEAU, "lr_scheduler_kwargs": {"patients": 2}}, "unexpected keyword argument 'patients'"),
        ({"lr_scheduler_type": "warmup_stable_decay"}, "missing 1 required positional argument: 'num_decay_steps'"),
    ],
)
def test_a_schedule_without_what_it_needs_is_refused(given, message):
    with pytest.raises(ConfigError, match=message):
        training(**given)


def test_a_rate_falls_when_the_reward_of_evaluations_no_longer_rises_and_not_when_nothing_could_be_scored():
    config = training(**ON_PLATEAU, lr_scheduler_kwargs='{"patience": 0, "factor": 0.5}', learning_rate=1.0)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, **config.lr_scheduler_kwargs)
    rates = []
    for reward in (0.3, 0.4, None, 0.5, 0.4):
        follow({"eval_reward": reward}, config, schedule)
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates == [1.0, 1.0, 1.0, 1.0, 0.5]
    with pytest.raises(ConfigError, match="`metric_for_best_model` is eval_reward, which evaluations do not have"):
        follow({"eval_loss": 0.1}, config, None)
    follow({}, training(), None)  # no schedule that looks at evaluations


# vLLM


def test_an_engine_over_more_gpus_than_there_are_processes_is_refused(monkeypatch):
    with pytest.raises(ConfigError, match="`vllm_tensor_parallel_size` is 2, and there are 1 processes"):
        training(use_vllm=True, vllm_tensor_parallel_size=2)
    training(use_vllm=True, vllm_tensor_parallel_size=2, vllm_mode="server")  # the server's own setting counts


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
