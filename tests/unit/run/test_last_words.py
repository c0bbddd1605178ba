"""Each fault is recognised from the error that the library itself raises, or whose words its source still holds."""

import ast
import importlib.util
import os
import re
import resource
import signal
import socket
from collections import Counter
from datetime import timedelta
from pathlib import Path

import httpx
import pytest
import safetensors.torch
import torch
from huggingface_hub.utils import hf_raise_for_status
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForCausalLM, Qwen2Config

from salesrl_trl.errors import (
    ConfigError,
    DataError,
    DivergedError,
    JudgeInvalid,
    ModelNotFoundError,
    ServiceUnavailable,
    TooFewRewardsError,
)
from salesrl_trl.ground.shutdown import EXIT_FAILED
from salesrl_trl.judged.verdict import read_verdict
from salesrl_trl.launch.checks.addresses import check_models, check_rag
from salesrl_trl.launch.console import exit_with
from salesrl_trl.launch.process import FAULTS, recognised, words_of_end
from salesrl_trl.launch.settings import PRESET, SettingsParser, all_kinds
from salesrl_trl.update.run_control import RunControl


def full_disk(tmp_path):
    with open("/dev/full", "w") as file:
        file.write("x")


def files(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    opened = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 64, hard))
    try:
        for _ in range(soft):
            opened.append(os.open("/dev/null", os.O_RDONLY))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for each in opened:
            os.close(each)


def port(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        torch.distributed.TCPStore("127.0.0.1", taken.getsockname()[1], is_master=True)


class _Deadly(torch.utils.data.Dataset):
    def __init__(self, number):
        self.number = number

    def __len__(self):
        return 1

    def __getitem__(self, index):
        os.kill(os.getpid(), self.number)


def _tiny(**options):
    config = Qwen2Config(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    AutoModelForCausalLM.from_config(config, **options)


def no_compiler(tmp_path):
    build = pytest.importorskip("triton.runtime.build")
    build._find_compiler.__wrapped__("c")


def damaged(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1")
    safetensors.torch.load_file(tmp_path / "model.safetensors")


@pytest.mark.parametrize(
    ("provoke", "title"),
    [
        (full_disk, "The disk is full"),
        (files, "Too many open files"),
        (lambda _: torch.empty(2**60, dtype=torch.uint8), "Out of host memory (OOM)"),
        (port, "Port already in use"),
        (lambda _: torch.distributed.TCPStore("127.0.0.1", 0, 2, is_master=True, timeout=timedelta(milliseconds=1)),
         "Processes timed out waiting for each other"),
        (lambda _: next(iter(DataLoader(_Deadly(signal.SIGKILL), num_workers=1, timeout=1))),
         "A data loader worker died"),
        (lambda _: next(iter(DataLoader(_Deadly(signal.SIGBUS), num_workers=1, timeout=1))),
         "Out of shared memory (/dev/shm)"),
        (lambda _: _tiny(attn_implementation="flash_attention_2"), "No working attention backend"),
        (no_compiler, "Kernel compilation failed"),
        (damaged, "Corrupted weights file"),
        (lambda path: AutoConfig.from_pretrained("salesrl/absent", cache_dir=path),
         "The Hugging Face Hub is unreachable"),
        (lambda _: check_rag("http://127.0.0.1:9", None), "The RAG service isn't responding"),
        (lambda _: check_models("http://127.0.0.1:9/v1", None, "judge"), "The judge isn't responding"),
        (lambda _: check_models("http://127.0.0.1:9/v1", None, "m", who="customer"),
         "The customer isn't responding"),
    ],
    ids=lambda value: value.replace(" ", "_") if isinstance(value, str) else "",
)  # fmt: skip
def test_a_fault_that_a_cpu_can_provoke_is_recognised(provoke, title, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    if provoke is no_compiler:
        monkeypatch.setenv("PATH", str(tmp_path))
        monkeypatch.delenv("CC", raising=False)
    with pytest.raises(Exception) as raised:
        provoke(tmp_path)
    fault = recognised(raised.value)
    assert fault is not None and fault.title == title, repr(raised.value)


def _texts(source):
    """Every text in a module, `{}` for what it fills in."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.JoinedStr):
            yield "".join(part.value if isinstance(part, ast.Constant) else "{}" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


@pytest.mark.parametrize(
    ("package", "module", "title"),
    [
        ("vllm", "v1/core/kv_cache_utils.py", "Not enough memory for vLLM's KV cache"),
        ("vllm", "v1/worker/cpu_worker.py", "Not enough memory for vLLM's KV cache"),
        ("vllm", "v1/worker/utils.py", "Not enough GPU memory for vLLM"),
        ("vllm", "config/model.py", "vllm_max_model_length exceeds the model's context length"),
        ("vllm", "v1/attention/backends/registry.py", "No working attention backend"),
        ("vllm", "platforms/cuda.py", "No working attention backend"),
        ("vllm", "v1/engine/utils.py", "A vLLM or Ray worker failed to start"),
        ("vllm", "v1/executor/multiproc_executor.py", "A vLLM or Ray worker failed to start"),
        ("vllm", "v1/executor/ray_utils.py", "A vLLM or Ray worker failed to start"),
        ("torch", "utils/cpp_extension.py", "Kernel compilation failed"),
        ("salesrl_trl", "launch/checks/environment.py", "The disk is full"),
        ("salesrl_trl", "launch/checks/environment.py", "Completions never end"),
    ],
)
def test_what_is_said_where_a_cpu_cannot_provoke_it_or_before_a_run_is_recognised(package, module, title):
    root = Path(importlib.util.find_spec(package).origin).parent
    found = {fault.title for text in _texts((root / module).read_text()) if (fault := recognised(Exception(text)))}
    assert title in found


def _out_of_memory(module, function):
    space = {"__name__": module, "torch": torch}
    exec(f"def {function}(): raise torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 2 GiB')", space)
    try:
        space[function]()
    except torch.OutOfMemoryError as error:
        return error


def _too_few(**reasons):
    control = RunControl(min_valid_reward_fraction=0.5, max_skipped_generations=1)
    control.record_batch(0.0, Counter(reasons))
    control.end_step(1, is_last=False)
    return control.error


def test_the_place_tells_where_the_gpu_had_no_room():
    for module, function, title in (
        ("torch.nn.functional", "linear", "Out of GPU memory during training (OOM)"),
        ("vllm.model_executor.layers", "linear", "Not enough GPU memory for vLLM"),
        ("transformers.trainer", "_load_optimizer_and_scheduler", "Out of GPU memory on resume (OOM)"),
    ):
        assert recognised(_out_of_memory(module, function)).title == title


def test_a_cause_behind_an_error_is_recognised():
    response = httpx.Response(403, headers={"X-Error-Code": "GatedRepo"}, request=httpx.Request("GET", "https://hub"))
    with pytest.raises(ModelNotFoundError) as raised:
        try:
            hf_raise_for_status(response)
        except Exception as error:
            raise ModelNotFoundError("could not be loaded") from error
    assert recognised(raised.value).title == "The model is gated"
    assert recognised(ExceptionGroup("two", [KeyError(1), raised.value])).title == "The model is gated"
    assert recognised(KeyError(1)) is None


def test_reasons_of_missing_rewards_tell_what_is_wrong_with_a_service():
    for reason, title in (
        ("judge_http_401", "A service rejects the API key"),
        ("judge_http_429", "Rate limit: a service returns 429"),
        ("rag_8b_http_500", "The RAG service isn't responding"),
        ("rag_8b_timeout", "The RAG service isn't responding"),
        ("judge_a_unavailable", "The judge isn't responding"),
        ("customer_breaker_open", "The customer isn't responding"),
        ("judge_not_json", "The judge returns no valid verdict"),
    ):
        assert recognised(_too_few(**{reason: 3})).title == title
    assert recognised(_too_few(not_json=3)) is None


def test_a_judge_that_answers_in_prose_is_not_told_to_be_dead():
    with pytest.raises(JudgeInvalid) as raised:
        read_verdict("The first answer is better.", nonce="0" * 16, expect_reference=True)
    warm_up = ServiceUnavailable(f"the services failed their warm-up: judge m at http://j/v1: {raised.value}")
    assert {recognised(error).title for error in (raised.value, warm_up)} == {"The judge returns no valid verdict"}


def test_the_log_tells_why_a_signal_ended_the_run(tmp_path):
    log = tmp_path / "run.log"
    for number, text, title in (
        (signal.SIGABRT, "Watchdog caught collective operation timeout: Work\n{crash}: Aborted\n\nThr", "Processes"),
        (signal.SIGBUS, "{crash}: Bus error\n", "Out of shared memory (/dev/shm)"),
        (signal.SIGKILL, "", "Out of host memory (OOM)"),
        (signal.SIGKILL, "[Heartbeat] step 3/9: data_loading for 128 s. Look at: the disk", "Slow data loading"),
        (signal.SIGSEGV, "{crash}: Segmentation fault\n", "Unknown error"),
    ):
        log.write_text(text.format(crash="Fatal Python error"))
        words = words_of_end(log)
        assert words.text.splitlines()[1].startswith(title)
        assert words.code == 128 + number


def test_every_setting_of_a_remedy_exists():
    known = SettingsParser(all_kinds()).keys | {PRESET}
    for fault in FAULTS:
        for quoted in re.findall(r"`(--[^`]+)`", " ".join(fault.remedies)):
            for name in re.findall(r"--(\w+)", quoted):
                assert name in known or quoted.startswith(("--shm-size", "--ipc", "--ulimit", "--pids-limit")), name


@pytest.mark.parametrize(
    ("error", "code"),
    [(ConfigError("a"), 2), (DataError("a"), 2), (DivergedError("a"), 3), (TooFewRewardsError("a"), 75)],
    ids=lambda value: type(value).__name__,
)
def test_settings_that_only_the_trainer_finds_invalid_end_a_run_as_those_that_its_checks_find(error, code, capfd):
    with pytest.raises(SystemExit) as ended:
        exit_with(error, EXIT_FAILED)
    assert ended.value.code == code
    assert type(error).__name__ in capfd.readouterr().err


def test_causes_in_a_circle_end():
    error, other = ValueError("one"), ValueError("other")
    error.__cause__, other.__cause__ = other, error
    assert recognised(error) is None
