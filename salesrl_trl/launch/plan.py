"""The plan of a run: its settings, the parts built from them without model weights, and the trainer.

Parts are built on first access and cached. Invalid ones raise a `SalesRLError`, by checks in `checks`, `config` or
`data`. `assembly` builds the reward pipeline.
"""

import copy
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, cast

from accelerate import PartialState
from datasets import Dataset
from transformers import (
    AutoConfig,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProcessorMixin,
)
from trl import get_peft_config, get_quantization_config

from salesrl_trl.config import SalesGRPOConfig
from salesrl_trl.config.checks import check
from salesrl_trl.data.files import read_yaml
from salesrl_trl.data.pictures import picture_counter
from salesrl_trl.launch.banner import banner
from salesrl_trl.launch.checks import model as policy_checks
from salesrl_trl.launch.checks.addresses import check_vllm_server
from salesrl_trl.launch.checks.dataset import prompt_limit, prompt_of, rows_of
from salesrl_trl.launch.checks.model import model_class
from salesrl_trl.launch.data.form import Portion, Records, part_of
from salesrl_trl.launch.data.processor import load_processor
from salesrl_trl.launch.data.prompts import FittingPrompts, LengthLimit, PromptTemplate, fit_prompts, token_counter
from salesrl_trl.launch.data.sources import load_records, prompt_dataset
from salesrl_trl.launch.services_plan import ServicesPlan
from salesrl_trl.launch.settings import RunConfig
from salesrl_trl.names import StartUp
from salesrl_trl.reward.reward_loop import RewardLoop
from salesrl_trl.reward.scorer import Scorer
from salesrl_trl.telemetry.instruments import Instruments, InstrumentSettings
from salesrl_trl.types import SalesRow

if TYPE_CHECKING:
    from salesrl_trl.trainer import SalesGRPOTrainer


logger = logging.getLogger(__name__)


def overlaid(training: SalesGRPOConfig, overlay: str, changes: Mapping[str, object]) -> SalesGRPOConfig:
    """A copy of training settings with an overlay of `overlays.yaml` and further changes."""
    made = copy.copy(training)  # `replace` would resolve settings a second time
    overlays = cast(dict[str, dict[str, object]], read_yaml(Path(__file__).with_name("overlays.yaml")))
    for name, value in (overlays[overlay] | dict(changes)).items():
        was = training.__dict__[name]
        made.__dict__[name] = type(was)(value) if isinstance(was, Enum) else value
    return made


@dataclass
class Plan(ServicesPlan):
    """A run before its model is loaded. Stages resolve some of its settings, e.g. the checkpoint's path."""

    config: RunConfig
    in_depth: bool = False  # whether stages may run slow checks, as in a preflight but not at the start of a run
    dtype: str | None = None  # number format of the trained weights, set by the stage `memory`
    notes: list[str] = field(default_factory=list)  # banner lines
    policy: PreTrainedModel | None = None  # with its weights

    @property
    def rows(self) -> list[SalesRow]:
        """Training rows, then held-out rows, whose prompts fit."""
        return [*self.train.rows, *self.held_out.rows]

    @cached_property
    def prompt(self) -> str | PromptTemplate | None:
        """The user's template, the name of a built-in style, or `None` for the rows' own prompts."""
        return prompt_of(self.config.data, self.config.reward)

    @cached_property
    def held_out_records(self) -> list[Records]:
        """The held-out records: a share of each dataset, or another source. Empty if nothing is evaluated. Raises
        `DataError` if a dataset has none."""
        directly = not self.config.reward.has_chain
        return [
            part_of(self.own_records[number], source.form(), Portion.HELD_OUT)
            if source.held_out_share
            else replace(load_records(*source.eval_source, source.eval_form(directly)), row_name="held-out")
            for number, source in enumerate(self.config.data.sources if self.evaluates else ())
        ]

    @property
    def evaluates(self) -> bool:
        training = self.config.training
        is_asked = training.held_out_eval or training.eval_strategy != "no"
        return bool(is_asked or self.config.telemetry.quick_eval_steps)

    @cached_property
    def held_out_rows(self) -> list[SalesRow]:
        return rows_of(self.held_out_records, self.config.training.branches, self.config.data.max_eval_rows)

    @cached_property
    def model_config(self) -> PretrainedConfig:
        return policy_checks.check_model(*self.config.policy_source)

    @cached_property
    def processor(self) -> ProcessorMixin | None:
        """The processor of a vision policy; `None` for a text policy."""
        return load_processor(*self.config.policy_source) if policy_checks.reads_pictures(self.model_config) else None

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        if self.processor is not None:
            tokenizer: PreTrainedTokenizerBase = self.processor.tokenizer
            tokenizer.chat_template = tokenizer.chat_template or self.processor.chat_template
            return tokenizer
        return policy_checks.load_tokenizer(*self.config.policy_source)

    @cached_property
    def generation_config(self) -> GenerationConfig:
        own = policy_checks.generation_config_of(*self.config.policy_source[:2])
        return own or GenerationConfig.from_model_config(self.model_config)

    @cached_property
    def limit(self) -> LengthLimit | None:
        """The longest prompt, considering the vLLM server's length if there is one. Shortens a built-in recipe's
        lengths that exceed the model's maximum length."""
        training, server_room = self.config.training, None
        positions = policy_checks.positions_of(self.model_config)
        if positions is not None:
            training.vllm_max_model_length = self._shortened("vllm_max_model_length", positions, positions)
            room = min(positions, training.vllm_max_model_length or positions)
            training.max_completion_length = self._shortened("max_completion_length", room - 1, room // 2)
        if training.use_vllm and training.vllm_mode == "server":
            expected = "Expected e.g. `--vllm_server_base_url http://127.0.0.1:8000`, or `vllm_mode: colocate`."
            has_host = training.vllm_server_host != type(training).vllm_server_host
            is_given = training.vllm_server_base_url is not None or has_host
            check(is_given, f"`vllm_mode` is server, and no address is given. {expected}")
            url = training.vllm_server_base_url or f"http://{training.vllm_server_host}:{training.vllm_server_port}"
            server_room = check_vllm_server(url.rstrip("/"), training.vllm_server_timeout)
        return prompt_limit(training, positions, server_room)

    def _shortened(self, name: str, most: int, length: int) -> int | None:
        """A length setting, or a shorter value if a built-in recipe's value is too long."""
        was: int | None = vars(self.config.training)[name]
        if was is None or was <= most or name in self.config.given:
            return was
        self.config.recipe[name] = length
        self.notes.append(f"`{name}` is {length} instead of the recipe's {was}, which exceeds the model's positions")
        return length

    @cached_property
    def train(self) -> FittingPrompts:
        return self._fitting(self.train_rows, "training")

    @cached_property
    def held_out(self) -> FittingPrompts:
        return self._fitting(self.held_out_rows, "held-out")

    @cached_property
    def datasets(self) -> tuple[Dataset, Dataset | None]:
        """The trainer's training and held-out datasets; `None` without held-out rows. Raises `DataError`."""
        functions, first = bool(self.config.reward.reward_funcs), len(self.train.prompts)
        train = prompt_dataset(self.train.prompts, self.train.rows, for_functions=functions)
        held_out = prompt_dataset(self.held_out.prompts, self.held_out.rows, first, for_functions=functions)
        return train, held_out or None

    def _fitting(self, rows: list[SalesRow], name: str) -> FittingPrompts:
        kwargs = self.config.training.chat_template_kwargs
        pictures = None if self.processor is None else picture_counter(self.processor, kwargs)
        count = token_counter(self.tokenizer, kwargs)
        return fit_prompts(rows, self.prompt, count, self.limit, self.config.data.long_prompts, name, pictures)


def build_instruments(config: RunConfig) -> Instruments:
    peak = None if config.telemetry.peak_tflops is None else config.telemetry.peak_tflops * 1e12
    settings = InstrumentSettings(trace_steps=config.telemetry.traced_steps(), peak_flops=peak)
    return Instruments(settings, config.training.device, Path(config.training.output_dir))


def take_policy(plan: Plan, instruments: Instruments) -> None:
    """Load the plan's policy, unless it is loaded. The main process logs the banner first."""
    phase = instruments.timeline.phase
    with phase(StartUp.IMPORTS):
        import salesrl_trl.trainer  # noqa: F401 (imports vLLM, slowly)
    with phase(StartUp.POLICY):
        if plan.policy is None:
            if PartialState().is_main_process:
                notes = [*plan.config.notes, *plan.config.training.machine_notes, *plan.notes]
                for line in banner(plan.config, (plan.train.rows, plan.held_out.rows), notes):
                    logger.info(line)
                plan.config.training.machine_notes.clear()  # the trainer logs new ones
            plan.config.training.is_introduced = True
            plan.policy = load_policy(plan.config, plan.dtype)


def build_trainer(plan: Plan, reward: Scorer | RewardLoop, instruments: Instruments) -> "SalesGRPOTrainer":
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
            partner=plan.reward.partner,
        )  # fmt: skip


def load_policy(config: RunConfig, dtype: str | None) -> PreTrainedModel:
    """The policy's model in this number format, loaded directly to this rank's device. DeepSpeed and FSDP place it
    later."""
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
    """The recipe's settings outside of the trainer's, by names such as `reward.max_calls`."""
    owners = {"data": config.data, "reward": config.reward, "telemetry": config.telemetry, "model": config.model}
    names = [(owner, field.name) for owner, part in owners.items() for field in fields(part)]
    return {f"{owner}.{name}": config.recipe[name] for owner, name in names if name in config.recipe}
