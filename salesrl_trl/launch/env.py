"""`python -m salesrl_trl.launch.env [--config RECIPE] [--SETTING VALUE ...] [--json]`, or `--diff RUN_A RUN_B`, or
`--has COMMIT`.

Says which code and versions a run would have here, what two runs differ in, or whether the code holds a change. Owns
the command line and its text. torch is imported only for the settings of a recipe. Exit code: 0; 1 if the runs differ
or the change is not there; 2 for bad input, and where nobody can know.
"""

import dataclasses
import json
import os
import platform
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import psutil

from salesrl_trl.config.keys import is_secret, without_keys
from salesrl_trl.errors import ConfigError
from salesrl_trl.ground import own_code
from salesrl_trl.ground.command_line import ended, parser_of
from salesrl_trl.ground.shutdown import end_tidily
from salesrl_trl.launch import software
from salesrl_trl.launch.run_record import Difference, differences, settings_text

DIFFERENT = 1
_VARIABLES = re.compile(
    r"ACCELERATE|CUDA|DS_|FLASH|HF_|HIP_|HUGGING|JAX_|LD_LIBRARY_PATH|MASTER_|MKL_|NCCL_|NVIDIA_|OMP_|PYTHON"
    r"|PYTORCH_|RANK|ROCR_|SALESRL_|TOKENIZERS_|TORCH|TRANSFORMERS_|TRITON_|VLLM_|WANDB_|WORLD_SIZE|XDG_CACHE_HOME"
)
"""Beginnings of the names of environment variables that change a run."""
_MAY_HOLD_PASSWORDS = re.compile(r"(https?|all|no)_proxy", re.IGNORECASE)


@dataclass(frozen=True)
class Facts:
    """All that can be said without torch."""

    code: own_code.Code = field(default_factory=own_code.code)
    folder: str = str(own_code.PACKAGE)  # folder of the package that this command runs
    recipes_import: str | None = field(default_factory=software.recipe_imports)  # as `folder`, of a recipe's script
    python: str = platform.python_version()
    executable: str = sys.executable
    system: str = platform.platform()
    cores: int = field(default_factory=lambda: len(os.sched_getaffinity(0)))
    memory_gib: float = field(default_factory=lambda: round(psutil.virtual_memory().total / 2**30, 1))
    gpus: list[dict[str, str]] = field(default_factory=software.gpus)
    packages: list[software.Package] = field(default_factory=software.packages)
    environment: dict[str, str] = field(default_factory=lambda: variables(os.environ))


def variables(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment variables that change a run. Only the name is shown of a variable that may hold a secret."""
    return {
        name: "(set)" if is_secret(name) or _MAY_HOLD_PASSWORDS.fullmatch(name) else str(without_keys(value))
        for name, value in sorted(environment.items())
        if _VARIABLES.match(name) or _MAY_HOLD_PASSWORDS.fullmatch(name) or name.endswith("_API_KEY")
    }


def page(facts: Facts) -> str:
    """The facts as text."""
    code = facts.code
    lines = [("package", f"salesrl_trl {code} in {facts.folder}"), ("code", f"{code.digest} (hash of all files)")]
    if facts.recipes_import != facts.folder:
        remedy = "Install this one (pip install --no-deps -e .), or put its checkout on PYTHONPATH."
        lines.append(("NOT THIS ONE", f"a recipe would import {facts.recipes_import or 'none at all'}. {remedy}"))
    lines += [
        ("python", f"{facts.python}, {facts.executable}"),
        ("platform", f"{facts.system}, {facts.cores} cores, {facts.memory_gib} GiB of memory"),
        *(("GPU", ", ".join(gpu.values())) for gpu in facts.gpus or [{"": "none (nvidia-smi shows none)"}]),
        *(("version", _version(package)) for package in facts.packages),
        *(("environment", f"{name}={value}") for name, value in facts.environment.items()),
    ]
    return "\n".join(f"{name:<12} {text}" for name, text in lines)


def _version(package: software.Package) -> str:
    extra = f", for the extra {package.extra}" if package.extra else ""
    if package.is_met:
        return f"{package.name} {package.installed or 'is not installed'} ({package.wanted}{extra})"
    return f"NOT MET: {package.name} {package.wanted} is wanted{extra}, installed: {package.installed}"


def difference_page(parts: Mapping[str, Mapping[str, Difference]]) -> str:
    """The differences of two runs as text, a line for each."""
    lines = []
    for part, values in parts.items():
        lines += [part] * bool(values)
        for name, (first, other) in values.items():
            arrow = "\n    -> " if len(f"{first}{other}") > 80 else " -> "
            lines.append(f"  {name}: {first}{arrow}{other}")
    return "\n".join(lines) or "no difference"


def main(argv: Sequence[str] | None = None) -> int:
    """Print the facts or the differences. Returns the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    return ended(argv, lambda: _show(argv))


def _show(argv: Sequence[str]) -> int:
    options, settings = parser_of("env").parse_known_args(argv)
    if settings and (options.diff or options.has):
        # a value may be a key
        names = ", ".join(argument.split("=")[0] for argument in settings if argument.startswith("-"))
        alone = "--diff" if options.diff else "--has"
        raise ConfigError(f"unknown arguments beside {alone}: {names or 'values'}. Leave them out.")
    if options.has:
        has, here = own_code.holds(options.has), own_code.code()
        text = f"{options.has} is {'' if has else 'NOT '}in the code of {own_code.PACKAGE}, {here}"
        print(json.dumps({"has": has, **dataclasses.asdict(here)}) if options.json else text)
        return 0 if has else DIFFERENT
    if options.diff:
        changes = differences(*options.diff)
        print(json.dumps(changes) if options.json else difference_page(changes))
        return DIFFERENT if any(changes.values()) else 0
    shown, recipe = Facts(), _recipe(settings) if settings else None
    if options.json:
        unmet = [package.name for package in shown.packages if not package.is_met]
        print(json.dumps({**dataclasses.asdict(shown), "unmet": unmet, "settings": recipe}, indent=2))
    else:
        print(page(shown) + (f"\n\n{settings_text(recipe)}" if recipe is not None else ""))
    return 0


def _recipe(argv: Sequence[str]) -> Mapping[str, object]:
    from salesrl_trl.launch.settings import parse

    plain = without_keys(parse(argv, None).recipe)
    assert isinstance(plain, dict)
    return plain


if __name__ == "__main__":
    end_tidily()
    sys.exit(main())
