"""From settings and checked rows to the trainer: its instruments, model, tokenizer, datasets and trackers' settings.

Owns the loading of the policy, and the reading of its files ahead of it. `assembly` builds the reward chain.
"""

import contextlib
import logging
import threading
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
from accelerate import PartialState
from transformers import AutoConfig, PreTrainedModel
from transformers.utils.hub import try_to_load_from_cache
from trl import get_peft_config, get_quantization_config

from salesrl_trl.launch.banner import banner
from salesrl_trl.launch.checks.model import model_class
from salesrl_trl.launch.plan import Plan
from salesrl_trl.launch.settings import RunConfig
from salesrl_trl.names import StartUp
from salesrl_trl.reward.reward_loop import RewardLoop
from salesrl_trl.reward.scorer import Scorer
from salesrl_trl.telemetry.instruments import Instruments, InstrumentSettings
from salesrl_trl.timing import TimingContext

if TYPE_CHECKING:
    from salesrl_trl.trainer import SalesGRPOTrainer

logger = logging.getLogger(__name__)


def build_instruments(config: RunConfig) -> Instruments:
    """The instruments that the settings ask for."""
    telemetry = config.telemetry
    settings = InstrumentSettings(
        trace_steps=telemetry.traced_steps(),
        peak_flops=None if telemetry.peak_tflops is None else telemetry.peak_tflops * 1e12,
    )
    return Instruments(settings, config.training.device, Path(config.training.output_dir))


def take_policy(plan: Plan, instruments: Instruments) -> None:
    """Load the policy of the plan, unless it is there. The main process logs the banner first."""
    phase = instruments.timeline.phase
    with phase(StartUp.IMPORTS):
        import salesrl_trl.trainer  # noqa: F401 (imports vLLM, which takes seconds)
    with phase(StartUp.POLICY):
        if plan.policy is None:
            if PartialState().is_main_process:
                notes = [*plan.config.notes, *plan.config.training.machine_notes, *plan.notes]
                for line in banner(plan.config, (plan.train.rows, plan.held_out.rows), notes):
                    logger.info(line)
                plan.config.training.machine_notes.clear()  # the trainer logs those that were not told
            plan.config.training.is_introduced = True
            plan.policy = load_policy(plan.config, plan.dtype)


def build_trainer(plan: Plan, reward: Scorer | RewardLoop, instruments: Instruments) -> "SalesGRPOTrainer":
    """Build the trainer, with vLLM's engine, after `take_policy`."""
    take_policy(plan, instruments)
    assert plan.policy is not None
    from salesrl_trl.trainer import RolloutTrainer, SalesGRPOTrainer

    config, (train, held_out) = plan.config, plan.datasets
    config.training.beside = settings_beside_the_trainers(config)
    kind = RolloutTrainer if config.training.mode == "rollouts" else SalesGRPOTrainer
    with instruments.timeline.phase(StartUp.ENGINE):
        return kind(
            plan.policy, reward, config.training, instruments=instruments, quick_eval=config.telemetry.quick_eval(),
            train_dataset=train, eval_dataset=held_out, processing_class=plan.processor or plan.tokenizer,
            peft_config=get_peft_config(config.model), tools=[*plan.reward.tools] or None,
        )  # fmt: skip


def load_policy(config: RunConfig, dtype: str | None) -> PreTrainedModel:
    """The policy's model in this number format, loaded straight to this rank's device. DeepSpeed and FSDP place it
    themselves, later."""
    model, training = config.model, config.training
    stays = training.device.type == "cpu" or training.is_sharded
    path, where = config.policy_path, {"revision": model.model_revision}
    where["trust_remote_code"] = training.trust_remote_code
    kind = model_class(AutoConfig.from_pretrained(path, **where))
    return kind.from_pretrained(
        path, **where, attn_implementation=model.attn_implementation, dtype=dtype,
        quantization_config=get_quantization_config(model), device_map=None if stays else {"": training.device},
    )  # fmt: skip


def settings_beside_the_trainers(config: RunConfig) -> dict[str, object]:
    """The settings that are not the trainer's, as the recipe gives them, by names such as `reward.max_calls`."""
    owners = {"data": config.data, "reward": config.reward, "telemetry": config.telemetry, "model": config.model}
    return {
        f"{owner}.{field.name}": config.recipe[field.name]
        for owner, part in owners.items()
        for field in fields(part)
        if field.name in config.recipe
    }


_READERS = 4  # files that are read at once: one stream does not use up a fast disk


def weight_files(name_or_path: str, revision: str | None = None) -> list[Path]:
    """The model's files of weights on this machine: in its folder, or in the hub's cache. Empty if there are none."""
    folder = Path(name_or_path).expanduser()
    if not folder.is_dir():
        config = try_to_load_from_cache(name_or_path, "config.json", revision=revision)
        if not isinstance(config, str):
            return []
        folder = Path(config).parent
    return sorted(folder.glob("*.safetensors")) or sorted(folder.glob("*.bin"))


def begin_read_ahead(name_or_path: str, revision: str | None, timed: TimingContext) -> None:
    """Read the model's files in the background. Other code tells of a wrong name, and of a file that can't be read."""

    def work() -> None:
        with contextlib.suppress(OSError, ValueError), timed:
            read_ahead(weight_files(name_or_path, revision))

    threading.Thread(target=work, name="read ahead", daemon=True).start()


def read_ahead(files: Sequence[Path]) -> int:
    """Read files into the page cache, unless they are more than free memory. Returns their bytes, or 0."""
    size = sum(file.stat().st_size for file in files)
    if size > psutil.virtual_memory().available:
        return 0
    errors = list[OSError]()

    def read(part: Sequence[Path]) -> None:
        buffer = bytearray(16 * 2**20)
        try:
            for file in part:
                with file.open("rb", buffering=0) as opened:
                    while opened.readinto(buffer):  # without Python's lock
                        pass
        except OSError as error:
            errors.append(error)

    parts = [files[first::_READERS] for first in range(_READERS)]
    readers = [threading.Thread(target=read, args=[part], daemon=True) for part in parts]  # a run may end meanwhile
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    if errors:
        raise errors[0]
    return size
