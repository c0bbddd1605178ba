"""From settings and checked rows to the trainer: its instruments, model, tokenizer and datasets.

Owns the loading of the policy. `assembly` builds the reward chain.
"""

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from accelerate import PartialState
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from trl import ModelConfig, get_peft_config, get_quantization_config

from salesrl_trl.data.sources import prompt_dataset
from salesrl_trl.demo.policy import cached_policy
from salesrl_trl.names import StartUp
from salesrl_trl.reward.chain import SalesReward
from salesrl_trl.reward.remote import RemoteReward
from salesrl_trl.run.banner import banner
from salesrl_trl.run.preflight import Prepared
from salesrl_trl.run.settings import RunConfig
from salesrl_trl.telemetry.instruments import Instruments, InstrumentSettings

if TYPE_CHECKING:
    from salesrl_trl.trainer import SalesGRPOTrainer

logger = logging.getLogger(__name__)


def build_instruments(config: RunConfig) -> Instruments:
    """The instruments that the settings ask for."""
    telemetry = config.telemetry
    settings = InstrumentSettings(
        enabled=telemetry.timing,
        perf_steps=telemetry.perf_logging_steps,
        trace_steps=telemetry.traced_steps(),
        trace_bytes=int(telemetry.trace_max_mb * 1e6),
        heartbeat_s=telemetry.heartbeat_s,
        peak_flops=None if telemetry.peak_tflops is None else telemetry.peak_tflops * 1e12,
    )
    return Instruments(settings, config.training.device, Path(config.training.output_dir))


def build_trainer(
    config: RunConfig, prepared: Prepared, reward: SalesReward | RemoteReward, instruments: Instruments
) -> "SalesGRPOTrainer":
    """Load the policy and build the trainer, with vLLM's engine. The main process logs the banner first."""
    phase, train, held_out = instruments.timeline.phase, prepared.train, prepared.held_out
    with phase(StartUp.POLICY):
        from salesrl_trl.trainer import SalesGRPOTrainer  # imports vLLM, which takes seconds

        path = config.model.model_name_or_path
        if path is None:
            path = str(cached_policy(config.warm_start.warm_start_steps, config.warm_start.warm_start_seed))
        if PartialState().is_main_process:
            for line in _banner(config, prepared, path):
                logger.info(line)
        model = _load_model(path, config.model, prepared.dtype, config.training.trust_remote_code)
    with phase(StartUp.ENGINE):
        return SalesGRPOTrainer(
            model,
            reward,
            config.training,
            instruments=instruments,
            quick_eval=config.telemetry.quick_eval(),
            train_dataset=prompt_dataset(train.prompts),
            eval_dataset=prompt_dataset(held_out.prompts, first_index=len(train.prompts))
            if held_out.prompts
            else None,
            processing_class=AutoTokenizer.from_pretrained(
                path, revision=config.model.model_revision, trust_remote_code=config.training.trust_remote_code
            ),
            peft_config=get_peft_config(config.model),
        )


def _load_model(path: str, config: ModelConfig, dtype: str | None, trust_remote_code: bool) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(
        path,
        revision=config.model_revision,
        trust_remote_code=trust_remote_code,
        attn_implementation=config.attn_implementation,
        dtype=dtype,
        quantization_config=get_quantization_config(config),
    )


def _banner(config: RunConfig, prepared: Prepared, policy_path: str) -> list[str]:
    return banner(
        config.data,
        config.reward,
        config.training,
        config.model,
        policy_path=policy_path,
        rows=(len(prepared.train.rows), len(prepared.held_out.rows)),
        notes=[*config.notes, *config.training.machine_notes, *prepared.notes, *prepared.reward.notes],
    )
