"""`python -m salesrl_trl.launch.env [--config RECIPE] [--SETTING VALUE ...]`, or `--diff RUN_A RUN_B`, or
`--has COMMIT`.

Says which code and versions a run would have here, what two runs differ in, or whether the code holds a change. Owns
the command line and its text. torch is imported only for the settings of a recipe. Exit code: 0; 1 if the runs differ
or the change is not there; 2 for bad input, and where nobody can know.
"""

import os
import platform
import re
import sys
from collections.abc import Mapping, Sequence

import psutil

from salesrl_trl.config.keys import is_secret, without_keys
from salesrl_trl.errors import ConfigError
from salesrl_trl.ground import own_code
from salesrl_trl.ground.command_line import ended, parser_of
from salesrl_trl.ground.shutdown import end_tidily
from salesrl_trl.launch import software
from salesrl_trl.launch.run_record import differences, settings_text

DIFFERENT = 1
_VARIABLES = re.compile(
    r"ACCELERATE|CUDA|DS_|FLASH|HF_|HIP_|HUGGING|JAX_|LD_LIBRARY_PATH|MASTER_|MKL_|NCCL_|NVIDIA_|OMP_|PYTHON"
    r"|PYTORCH_|RANK|ROCR_|SALESRL_|TOKENIZERS_|TORCH|TRANSFORMERS_|TRITON_|VLLM_|WANDB_|WORLD_SIZE|XDG_CACHE_HOME"
)
"""Beginnings of the names of environment variables that change a run."""
_MAY_HOLD_PASSWORDS = re.compile(r"(https?|all|no)_proxy", re.IGNORECASE)


def variables(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment variables that change a run. Only the name is shown of a variable that may hold a secret."""
    return {
        name: "(set)" if is_secret(name) or _MAY_HOLD_PASSWORDS.fullmatch(name) else str(without_keys(value))
        for name, value in sorted(environment.items())
        if _VARIABLES.match(name) or _MAY_HOLD_PASSWORDS.fullmatch(name) or name.endswith("_API_KEY")
    }


def page() -> str:
    code, memory = own_code.code(), psutil.virtual_memory().total / 2**30
    cores = len(os.sched_getaffinity(0))
    lines = [
        ("package", f"salesrl_trl {code} in {own_code.PACKAGE}"),
        ("code", f"{code.digest} (hash of all files)"),
        ("python", f"{platform.python_version()}, {sys.executable}"),
        ("platform", f"{platform.platform()}, {cores} cores, {memory:.1f} GiB of memory"),
        *(("GPU", ", ".join(gpu.values())) for gpu in software.gpus() or [{"": "none (nvidia-smi shows none)"}]),
        *(("version", _version(package)) for package in software.packages()),
        *(("environment", f"{name}={value}") for name, value in variables(os.environ).items()),
    ]
    return "\n".join(f"{name:<12} {text}" for name, text in lines)


def _version(package: software.Package) -> str:
    extra = f", for the extra {package.extra}" if package.extra else ""
    if package.is_met:
        return f"{package.name} {package.installed or 'is not installed'} ({package.wanted}{extra})"
    return f"NOT MET: {package.name} {package.wanted} is wanted{extra}, installed: {package.installed}"


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    return ended(argv, lambda: _show(argv))


def _show(argv: Sequence[str]) -> int:
    options, settings = parser_of("env").parse_known_args(argv)
    if settings and (options.diff or options.has):
        raise ConfigError("there are settings beside `--diff` or `--has`. Expected none. Leave them out.")
    if options.has:
        has = own_code.holds(options.has)
        print(f"{options.has} is {'' if has else 'NOT '}in the code of {own_code.PACKAGE}, {own_code.code()}")
        return 0 if has else DIFFERENT
    if options.diff:
        changes = differences(*options.diff)
        for part, values in changes.items():
            for name, (first, other) in values.items():
                print(f"{part}: {name}: {first} -> {other}")
        return DIFFERENT if any(changes.values()) else 0
    print(page())
    if settings:
        from salesrl_trl.launch.settings import parse

        print(f"\n{settings_text(parse(settings, None).recipe)}")
    return 0


if __name__ == "__main__":
    end_tidily()
    sys.exit(main())
