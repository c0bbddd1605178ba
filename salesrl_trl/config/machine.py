"""Device, number format and data loader of a run: those of the recipe, as far as the machine has them.

Owns these decisions and the lines that report them, for `training` and the banner. Starts nothing.
"""

import os

import torch
from accelerate.utils import str_to_bool

from salesrl_trl.errors import ConfigError

_OLDEST_WITH_BF16 = (8, 0)
"""CUDA compute capability of Ampere. Older cards emulate bf16, which is slower than float32."""


def settle(use_cpu: bool, bf16: bool | None, fp16: bool) -> tuple[bool, bool, bool, list[str]]:
    """Settle the device and the precision on this machine: `use_cpu`, `bf16`, `fp16`, and lines about differences from
    TRL's, with their reasons. Without a GPU the CPU is used in any case. A `bf16` of `None` is TRL's default: bf16,
    unless `fp16` is set. It becomes float32 where bf16 is slow; a `bf16` of `True` stays.

    accelerate and DeepSpeed follow the result too: it replaces the precision in the environment variables that
    `accelerate launch` sets for this process. Raises `ConfigError` if FSDP can't
    work as it is set up, or `fp16` is set on a CPU.
    """
    wish = "bf16" if (not fp16 if bf16 is None else bf16) else "fp16" if fp16 else "float32"
    launched_on_cpu = str_to_bool(os.environ.get("ACCELERATE_USE_CPU", "false")) == 1
    on_cpu = use_cpu or launched_on_cpu or not torch.accelerator.is_available()
    if has_fsdp():
        _check_fsdp(on_cpu)
    precision, notes, slow = wish, list[str](), ""
    if on_cpu:
        if fp16:
            raise ConfigError(
                "`fp16` is true, and this run is on a CPU, where accelerate has no fp16. Expected a GPU, or neither "
                "`fp16` nor `bf16`, which is float32. Leave `fp16` out."
            )
        slow = "this run is on a CPU"
    else:
        # transformers checks the chips of other makers
        is_nvidia = torch.cuda.is_available() and torch.version.hip is None
        local = int(os.environ.get("LOCAL_RANK", "0"))
        if wish == "bf16" and is_nvidia and torch.cuda.get_device_capability(local) < _OLDEST_WITH_BF16:
            slow = f"{torch.cuda.get_device_name()} lacks it"
    if slow and wish == "bf16":
        if bf16:
            notes.append(f"precision: bf16, as `bf16: true` says. It is slow because {slow}. Leave it out for float32")
        else:
            precision = "float32"
            notes.append(f"precision: float32. TRL's default is bf16, slow here because {slow}. `bf16: true` keeps it")
    if on_cpu and str_to_bool(os.environ.get("ACCELERATE_USE_DEEPSPEED", "false")):
        import deepspeed.ops  # a run without DeepSpeed does without it

        # one operator is compiled at the start of a run; without this entry all are tried, by compilers
        vars(deepspeed.ops)["__compatible_ops__"] = {"deepspeed_shm_comm": False}
        notes.append(
            "DeepSpeed's collectives over shared memory, compiled in a minute or two, are left out: gloo's do"
        )
    configured = _hand_to_accelerate("no" if precision == "float32" else precision)
    if configured not in (None, "no", precision, wish):
        why = "this run is on a CPU" if on_cpu else "the settings decide"
        notes.append(f"accelerate's configuration has mixed_precision {configured}: not used, {why}")
    return on_cpu, precision == "bf16", precision == "fp16", notes


def has_fsdp() -> bool:
    return bool(str_to_bool(os.environ.get("ACCELERATE_USE_FSDP", "false")))


def _check_fsdp(on_cpu: bool) -> None:
    if on_cpu:
        raise ConfigError(
            "the accelerate configuration asks for FSDP, and this run is on a CPU, where accelerate would train whole "
            "copies without a word. Expected GPUs. On a CPU use accelerate_configs/zero3.yaml."
        )
    if str_to_bool(os.environ.get("FSDP_CPU_RAM_EFFICIENT_LOADING", "false")):
        raise ConfigError(
            "the accelerate configuration has `fsdp_cpu_ram_efficient_loading: true`, with which one process alone "
            "loads weights, and the reference policy of all others has none. Expected false, as in "
            "accelerate_configs/fsdp2.yaml."
        )


def _hand_to_accelerate(precision: str) -> str | None:
    """Write the precision to the variables of accelerate and DeepSpeed. Returns accelerate's earlier value."""
    earlier = os.environ.get("ACCELERATE_MIXED_PRECISION")
    if earlier is not None:
        os.environ["ACCELERATE_MIXED_PRECISION"] = precision
    fields = os.environ.get("ACCELERATE_CONFIG_DS_FIELDS")
    if fields is not None:  # with `mixed_precision` in this list, DeepSpeed refuses another precision than the file's
        kept = [name for name in fields.split(",") if name != "mixed_precision"]
        os.environ["ACCELERATE_CONFIG_DS_FIELDS"] = ",".join(kept)
    return earlier


def device_line(device: torch.device, processes: int) -> str:
    """`2 processes, NVIDIA H200 (140 GiB) each`, or the CPU's cores, threads and memory."""
    several = f"{processes} processes" if processes > 1 else "1 process"
    if device.type == "cpu":
        gib = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
        cores, threads = len(os.sched_getaffinity(0)), torch.get_num_threads()
        return f"{several} on the CPU: {cores} cores, {threads} threads each; {gib:.0f} GiB of memory"
    if device.type != "cuda":
        return f"{several} on {device.type}"
    properties = torch.cuda.get_device_properties(device)
    return f"{several}, {properties.name} ({properties.total_memory / 2**30:.0f} GiB) each"
