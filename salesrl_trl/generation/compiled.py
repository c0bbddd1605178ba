"""The folder of compiled code: kernels and graphs that later starts load in place of compiling them again.

Owns the environment variables that name it, and the notes about engines that were compiled. vLLM, torch, Triton,
FlashInfer and CUDA's driver write the files. Standard library only.
"""

import contextlib
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path

from salesrl_trl.errors import ConfigError
from salesrl_trl.ground.process import cache_dir, installed

AUTO = "auto"  # `compiled` in the package's cache folder
FOLDERS = {
    "VLLM_CACHE_ROOT": "vllm",  # torch.compile's results of the engine, what is known of a model's class, autotuning
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TRITON_CACHE_DIR": "triton",
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
    "CUDA_CACHE_PATH": "cuda",
}
"""Environment variable to the folder that it gets. All of them are read when the first file is looked for."""
_CONSTANT = {"VLLM_XLA_CACHE_PATH": "unused"}
"""vLLM before 0.26 makes this path, which lies under HOME, a part of the key of its compiled code."""
_ENGINES = "engines"


def folder_of(setting: str | None) -> Path | None:
    """The folder that `compile_cache_dir` means, for the versions that are installed; `None` without the setting."""
    if not setting:
        return None
    base = cache_dir() / "compiled" if setting == AUTO else Path(setting).expanduser().absolute()
    return base / f"vllm-{installed('vllm')}_torch-{installed('torch')}"


def use(folder: Path) -> None:
    """Let all compilers of this process and its children keep results there. `ConfigError` if it can't be written."""
    try:
        for name in (*FOLDERS.values(), _ENGINES):
            (folder / name).mkdir(parents=True, exist_ok=True)
        writable = os.access(folder / _ENGINES, os.W_OK)
    except OSError:
        writable = False
    if not writable:
        raise ConfigError(
            f"`compile_cache_dir` leads to {folder}, which can't be written. Expected a folder of your own. Name "
            "another one, or leave the setting empty: then each library uses its own place."
        )
    os.environ |= {name: str(folder / subfolder) for name, subfolder in FOLDERS.items()} | _CONSTANT


def content_of(folder: Path) -> str:
    """`12 files, 34 MiB, 1 compiled engine`, or `cold`."""
    files = [Path(path, name) for path, _, names in os.walk(folder) for name in names]
    if not files:
        return "cold"
    mib = sum(file.stat().st_size for file in files if file.is_file()) / 2**20
    engines = sum(file.parent == folder / _ENGINES for file in files)
    return f"{len(files)} files, {mib:.0f} MiB, {engines} compiled engine{'s' * (engines != 1)}"


def has_engine(folder: Path, engine: Mapping[str, object]) -> bool:
    """Whether an engine with these settings was compiled before."""
    return _note(folder, engine).is_file()


def keep_engine(folder: Path, engine: Mapping[str, object]) -> None:
    """Note that an engine with these settings was compiled, and its code is kept."""
    path = _note(folder, engine)
    partial = path.with_suffix(f".{os.getpid()}")
    with contextlib.suppress(OSError):  # on a full disk: then the next engine of these settings counts as a new one
        partial.write_text(json.dumps(engine, indent=2, default=str) + "\n", encoding="utf-8")
        partial.replace(path)


def _note(folder: Path, engine: Mapping[str, object]) -> Path:
    text = json.dumps(engine, sort_keys=True, default=str)
    return folder / _ENGINES / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"
