"""The folder of compiled code: kernels and graphs that later starts load in place of compiling them again.

Owns the environment variables that name it. vLLM, torch, Triton, FlashInfer and CUDA's driver write the files.
Standard library only.
"""

import os
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


def folder_of(setting: str | None) -> Path | None:
    """The folder that `compile_cache_dir` means, for the versions that are installed; `None` without the setting."""
    if not setting:
        return None
    base = cache_dir() / "compiled" if setting == AUTO else Path(setting).expanduser().absolute()
    return base / f"vllm-{installed('vllm')}_torch-{installed('torch')}"


def use(folder: Path) -> None:
    """Let all compilers of this process and its children keep results there. `ConfigError` if it can't be written."""
    try:
        for name in FOLDERS.values():
            (folder / name).mkdir(parents=True, exist_ok=True)
        writable = os.access(folder, os.W_OK)
    except OSError:
        writable = False
    if not writable:
        raise ConfigError(
            f"`compile_cache_dir` leads to {folder}, which can't be written. Expected a folder of your own. Name "
            "another one, or leave the setting empty: then each library uses its own place."
        )
    os.environ |= {name: str(folder / subfolder) for name, subfolder in FOLDERS.items()} | _CONSTANT


def content_of(folder: Path) -> str:
    """`12 files, 34 MiB`, or `cold`."""
    files = [Path(path, name) for path, _, names in os.walk(folder) for name in names]
    if not files:
        return "cold"
    mib = sum(file.stat().st_size for file in files if file.is_file()) / 2**20
    return f"{len(files)} files, {mib:.0f} MiB"
