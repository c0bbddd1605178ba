"""Checks of the machine: versions, GPUs, disk and shared memory."""

import os
import platform
import shutil
from pathlib import Path

import torch
from transformers import Trainer
from transformers.utils import is_liger_kernel_available

from salesrl_trl.config import SalesGRPOConfig
from salesrl_trl.ground.process import installed
from salesrl_trl.ground.versions import packages
from salesrl_trl.launch import software
from salesrl_trl.launch.checks.folders import check_output_dir, free_gib
from salesrl_trl.launch.checks.outcome import Findings
from salesrl_trl.launch.plan import Plan
from salesrl_trl.telemetry.device import GIB

LEAST_DISK_GIB = 1.0  # free disk of the output folder; with less, even the small policy's files are at risk
SHARED_MEMORY = Path("/dev/shm")
LEAST_SHARED_GIB, USUAL_SHARED_GIB = 0.06, 1.0  # NCCL needs tens of MiB per process; Docker's default is 64 MiB
_ANSWER = "salesrl"  # an answer in a rendered conversation, followed by the end of its turn


def check_environment(plan: Plan, findings: Findings) -> None:
    """Check versions, GPUs, disk and shared memory. Only `in_depth` calls nvidia-smi, which may take a second."""
    training = plan.config.training
    _versions(training, findings)
    _devices(training, plan.in_depth, findings)
    _disk(training.output_dir, findings)
    if SHARED_MEMORY.is_dir():
        _shared_memory(training, findings)


def _versions(training: SalesGRPOConfig, findings: Findings) -> None:
    findings.figures["python"] = platform.python_version()
    for package in packages():
        if not package.is_met:
            needed, is_trl = f"{package.name}{package.wanted}", package.name == "trl"  # whose methods are overridden
            findings.add(package.finding, f'Run `pip install "{needed}"`, or scripts/install.sh.', is_failure=is_trl)
    if training.use_vllm and training.vllm_mode == "colocate":
        findings.figures["vllm"] = version = installed("vllm")
        if version is None:
            findings.fail("vLLM is not installed.", "Run scripts/install.sh, or set `use_vllm: false`.")
    if training.use_liger_kernel and not is_liger_kernel_available():
        findings.fail("`use_liger_kernel` needs liger-kernel, which is missing.", "Run `pip install liger-kernel`.")
    try:  # what transformers looks for in `train()`, after the model and vLLM have loaded
        Trainer.get_optimizer_cls_and_kwargs(training)
    except ImportError as error:
        findings.fail(f"`optim` is {training.optim.value}. {error}", "Or choose another `optim`.")
    except (ValueError, TypeError):
        pass  # some optimizers need the model


def _devices(training: SalesGRPOConfig, in_depth: bool, findings: Findings) -> None:
    gpus = software.gpus() if in_depth or not torch.cuda.is_available() else []  # nvidia-smi may take a second
    driver = gpus[0]["driver_version"] if gpus else None
    findings.figures |= {"torch": torch.__version__, "cuda": torch.version.cuda, "driver": driver}
    findings.figures["gpus"] = torch.cuda.device_count()
    if gpus and os.environ.get("CUDA_VISIBLE_DEVICES") not in ("", "-1") and not torch.cuda.is_available():
        text = f"torch {torch.__version__} can't use the {len(gpus)} GPUs of driver {driver}: it would use the CPU."
        findings.add(text, "Install the GPU packages (scripts/install.sh), or update the driver.")
    if training.device.type == "cuda":
        findings.figures["device"] = torch.cuda.get_device_name(training.device)


def _disk(output_dir: str, findings: Findings) -> None:
    check_output_dir(output_dir)
    findings.figures["disk_free_gib"] = free = free_gib(output_dir)
    if free < LEAST_DISK_GIB:
        text = f"`output_dir` {output_dir} has {free:.2f} GiB of free disk. Expected at least {LEAST_DISK_GIB:g}."
        findings.fail(text, "Free some, or use an `output_dir` on another disk.")


def _shared_memory(training: SalesGRPOConfig, findings: Findings) -> None:
    findings.figures["shm_free_gib"] = free = shutil.disk_usage(SHARED_MEMORY).free / GIB
    if free < USUAL_SHARED_GIB and (training.world_size > 1 or training.dataloader_num_workers > 0):
        text = f"{SHARED_MEMORY}, used by several processes and `dataloader_num_workers`, has {free:.2f} GiB free."
        remedy = "Start the container with `--shm-size 8g`, or delete files that earlier runs left there."
        findings.add(text, remedy, is_failure=free < LEAST_SHARED_GIB)


def check_tokenizer(plan: Plan, findings: Findings) -> None:
    """Check the tokens that end a completion, and the model's sampling flags."""
    tokenizer, generation = plan.tokenizer, plan.generation_config
    listed = generation.eos_token_id
    ends = {tokenizer.eos_token_id, *(listed if isinstance(listed, list) else [listed])} - {None}
    shown = [repr(token)[1:-1] for token in tokenizer.convert_ids_to_tokens(sorted(ends))]  # a line break may be one
    findings.figures["end_tokens"] = names = ", ".join(shown)
    turns = [{"role": role, "content": _ANSWER} for role in ("user", "assistant")]
    text = tokenizer.apply_chat_template(turns, tokenize=False, **(plan.config.training.chat_template_kwargs or {}))
    behind = tokenizer(text.rpartition(_ANSWER)[2], add_special_tokens=False)["input_ids"]
    special = next((token for token in behind if token in tokenizer.added_tokens_decoder), None)
    findings.figures["end_of_turn"] = end = None if special is None else tokenizer.convert_ids_to_tokens(special)
    if not ends.intersection(behind):
        text = f"The chat template ends a turn with {end or 'no special token'}, but only {names} ends a completion."
        where = "to `eos_token_id` in the model's generation_config.json, or set `eos_token` in tokenizer_config.json."
        findings.add(text, f"Add {special or 'the id of its end'} {where}", is_failure=end is not None)
    try:  # a model with contradicting flags can be sampled from, but not saved
        generation.validate(strict=True)
    except ValueError as error:
        text = "The model's generation_config.json contradicts itself, and transformers refuses to save such a model: "
        remedy = "Correct that file: temperature, top_p or top_k require `do_sample: true`."
        findings.fail(text + " ".join(str(error).split()), remedy)
