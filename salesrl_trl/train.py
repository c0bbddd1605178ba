"""A whole run: parse, check, build, evaluate, train, evaluate. Recipes call `main`.

Owns the order of things and nothing else. Everything that can be wrong with the settings, the data, the addresses or
the model's path stops here, before any model is loaded, with one message and exit code 2.
"""

import contextlib
import logging
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from accelerate import PartialState
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.training_args import OptimizerNames
from transformers.utils import is_torchao_available
from trl import ModelConfig, get_peft_config, get_quantization_config

from salesrl_trl.checkpoint.identity import check_identity, identity_of, rows_of
from salesrl_trl.data.lengths import FittingPrompts, fit_prompts, token_counter
from salesrl_trl.data.sources import DEMO, is_file, load_rows, prompt_dataset
from salesrl_trl.data.templates import PromptTemplate
from salesrl_trl.demo.policy import MAX_POSITIONS, PROMPT_STYLE, cached_policy, policy_tokenizer
from salesrl_trl.errors import ConfigError, SalesRLError
from salesrl_trl.evaluation.record import QuickEvalSettings
from salesrl_trl.names import LOG_FILE, Phase, StartUp
from salesrl_trl.process import collect_seldom, keep_freed_memory
from salesrl_trl.reward.chain import SalesReward
from salesrl_trl.reward.remote import RemoteReward
from salesrl_trl.run.assembly import RewardParts, open_reward, prepare_reward
from salesrl_trl.run.banner import banner
from salesrl_trl.run.console import EXIT_BAD_INPUT, EXIT_STOPPED, exit_with, keep_console, set_up_logging
from salesrl_trl.run.precision import STOCHASTIC_ARGS, STOCHASTIC_OPTIM, choose_precision
from salesrl_trl.run.preflight import (
    check_checkpoint,
    check_model,
    check_output_dir,
    check_stand_ins,
    earlier_start,
    load_tokenizer,
    positions_of,
    prompt_limit,
    prompt_of,
    room_for_training,
)
from salesrl_trl.run.probe import check_vllm_server
from salesrl_trl.run.settings import RunConfig, parse
from salesrl_trl.telemetry.instruments import Instruments, InstrumentSettings
from salesrl_trl.types import DEFAULT_FORMAT, SalesRow

if TYPE_CHECKING:
    from salesrl_trl.trainer import SalesGRPOTrainer

logger = logging.getLogger(__name__)


def main(default_config: Path, argv: Sequence[str] | None = None) -> None:
    """Run a recipe and exit.

    Args:
        default_config (`Path`):
            The recipe's YAML, used when the command line has no `--config`.
        argv (`Sequence[str]`, *optional*):
            Command-line arguments; those of the process when not given.
    """
    set_up_logging()
    try:
        config = parse(sys.argv[1:] if argv is None else argv, default_config)
        prepared = prepare(config)
    except SalesRLError as error:
        exit_with(error, EXIT_BAD_INPUT)
    if config.training.process_index == config.training.local_process_index:  # the first node's processes
        keep_console(Path(config.training.output_dir) / LOG_FILE)
    try:
        rows = [*prepared.train_rows, *prepared.eval_rows]
        with open_reward(config.reward, config.training, rows, prepared.reward) as reward:
            run(config, prepared, reward)
    except SalesRLError as error:
        exit_with(error, EXIT_STOPPED)


@dataclass
class Prepared:
    """What the checks have brought to light, ready to train on."""

    train_rows: list[SalesRow]
    eval_rows: list[SalesRow]
    """Empty where nothing is to be evaluated."""
    train_prompts: list[list[dict[str, str]]]
    """The training rows' chat messages."""
    eval_prompts: list[list[dict[str, str]]]
    reward: RewardParts
    dtype: str | None = None
    """Number format of the policy's weights in training."""
    notes: list[str] = field(default_factory=list)
    """Lines for the run's banner: what the checks found that a user should know at the start."""


def prepare(config: RunConfig) -> Prepared:
    """Look at everything that can be looked at without a model. Raises `SalesRLError`."""
    data, branches = config.data, config.training.branches
    config.telemetry.check_branches(branches)
    check_output_dir(config.training.output_dir)
    checkpoint = check_checkpoint(config.training.resume_from_checkpoint, config.training.output_dir)
    config.training.resume_from_checkpoint = checkpoint
    wanted = config.reward.action_format()
    prompt = prompt_of(data, wanted.fields)
    train_rows = load_rows(data.dataset, data.train_split, branches, data.max_train_rows)
    eval_rows = _eval_rows(config)
    if config.model.model_name_or_path is None and (prompt != PROMPT_STYLE or wanted != DEFAULT_FORMAT):
        given = f"`prompt_style` is {prompt!r}" if isinstance(prompt, str) else "`prompt_template` is given"
        raise ConfigError(
            f"{given if prompt != PROMPT_STYLE else '`action_fields` is given'}, but the small demo policy is taught "
            f"with {PROMPT_STYLE!r} and the usual fields. Give `model_name_or_path`, or set `prompt_style: "
            f"{PROMPT_STYLE}` and neither `prompt_template` nor `action_fields`."
        )
    own_rows = next((each for each in (data.dataset, data.eval_dataset) if each not in (DEMO, None)), None)
    stand_ins = check_stand_ins(config.reward, branches, own_rows)
    reward = prepare_reward(config.reward, branches, config.training.hybrid_reference_weight > 0)
    train, held_out = _fitting_prompts(config, prompt, train_rows, eval_rows)
    if checkpoint is not None:  # what there is to tell, the trainer tells
        made_of = identity_of(config.training, rows_of(train.prompts, (row.branch for row in train.rows)))
        check_identity(Path(checkpoint), made_of, config.training.allow_changed_resume)
    processes = config.training.world_size
    if config.telemetry.quick_eval_steps and len(held_out.rows) < processes:
        raise ConfigError(
            f"a quick evaluation has {len(held_out.rows)} held-out rows for {processes} processes. Expected one for "
            "each. Hold out more (`max_eval_rows`), or set `quick_eval_steps: 0`."
        )
    notes = [*stand_ins, *(each.note for each in (train, held_out) if each.note)]
    notes += earlier_start(config.training.output_dir, resumes=checkpoint is not None)
    if 0 < config.training.max_steps <= config.training.warmup_steps:
        notes.append(
            f"`warmup_steps` is {config.training.warmup_steps:g} and `max_steps` {config.training.max_steps}: the "
            "learning rate is never reached"
        )
    return Prepared(
        train_rows=train.rows,
        eval_rows=held_out.rows,
        train_prompts=train.prompts,
        eval_prompts=held_out.prompts,
        reward=reward,
        dtype=_settle_precision(config, notes),
        notes=notes,
    )


def _fitting_prompts(
    config: RunConfig, prompt: str | PromptTemplate, train_rows: list[SalesRow], eval_rows: list[SalesRow]
) -> tuple[FittingPrompts, FittingPrompts]:
    """Training rows and held-out rows whose prompts the model has room for. Looks for the model."""
    name, training = config.model.model_name_or_path, config.training
    if name is None:
        positions: int | None = MAX_POSITIONS
        tokenizer = policy_tokenizer(config.warm_start.warm_start_steps, config.warm_start.warm_start_seed)
    else:
        source = (name, config.model.model_revision, training.trust_remote_code)
        positions = positions_of(check_model(*source))
        tokenizer = load_tokenizer(*source)
    server_room = None
    if training.use_vllm and training.vllm_mode == "server":
        named = training.vllm_server_base_url or f"http://{training.vllm_server_host}:{training.vllm_server_port}"
        server_room = check_vllm_server(named.rstrip("/"), training.vllm_server_timeout)
    limit = prompt_limit(config.data, training, positions, server_room)
    count = token_counter(tokenizer, training.chat_template_kwargs)
    rule = config.data.long_prompts
    return (
        fit_prompts(train_rows, prompt, count, limit, rule, "training"),
        fit_prompts(eval_rows, prompt, count, limit, rule, "held-out"),
    )


def _settle_precision(config: RunConfig, notes: list[str]) -> str | None:
    """The number format of the policy's weights. Where it is 16 bits the optimizer is set to one that fits."""
    model, training = config.model, config.training
    whole = not model.use_peft and training.deepspeed_plugin is None and not training.fsdp
    room = None
    if whole and model.model_name_or_path is not None:
        room = room_for_training(
            model.model_name_or_path,
            model.model_revision,
            training.trust_remote_code,
            training.device,
            vllm_share=(
                training.vllm_gpu_memory_utilization if training.use_vllm and training.vllm_mode == "colocate" else 0.0
            ),
            has_reference=bool(training.kl_targets()),
            processes=training.world_size,
        )
    chosen = choose_precision(
        dtype=model.dtype,
        autocast=training.bf16 or training.fp16,
        keeps_masters=training.deepspeed_plugin is not None,
        adapters_only=model.use_peft,
        optim=training.optim.value,
        optim_args=training.optim_args,
        room=room,
        has_torchao=is_torchao_available(),
    )
    if chosen.stochastic_rounding:
        training.optim, training.optim_args = OptimizerNames(STOCHASTIC_OPTIM), STOCHASTIC_ARGS
    if chosen.note is not None:
        notes.append(chosen.note)
    return chosen.dtype


def _eval_rows(config: RunConfig) -> list[SalesRow]:
    data, training = config.data, config.training
    if not training.held_out_eval and training.eval_strategy == "no" and not config.telemetry.quick_eval_steps:
        return []
    if data.eval_dataset is None and is_file(data.dataset):
        raise ConfigError(
            f"`dataset` is the file {data.dataset} and `eval_dataset` is not given: evaluated on its training rows, a "
            "policy's figures say nothing. Expected a file of held-out rows in `eval_dataset`. Give one, or set "
            "`held_out_eval: false` and `quick_eval_steps: 0`."
        )
    return load_rows(data.eval_dataset or data.dataset, data.eval_split, training.branches, data.max_eval_rows)


def run(config: RunConfig, prepared: Prepared, reward: SalesReward | RemoteReward) -> None:
    """Load, train, evaluate before and after, save."""
    if config.training.device.type == "cpu":
        keep_freed_memory()
    instruments = build_instruments(config)
    try:
        instruments.start(PartialState().is_main_process)
        trainer = _build_trainer(config, prepared, reward, instruments)
        try:
            _train(config, trainer, instruments)
        except BaseException:
            with contextlib.suppress(Exception):  # the run's own error is the one to tell
                trainer.finish()
            raise
        trainer.finish()
    finally:
        instruments.close()


def _train(config: RunConfig, trainer: "SalesGRPOTrainer", instruments: Instruments) -> None:
    collect_seldom()
    if config.reward.warm_up_services:
        with instruments.timeline.phase(StartUp.WARM_UP):
            trainer.warm_up()
    with _stops_on_sigterm(trainer):
        trainer.train(resume_from_checkpoint=config.training.resume_from_checkpoint)
    with instruments.timeline.phase(Phase.CHECKPOINT):
        trainer.save_model(config.training.output_dir)
    trainer.raise_if_stopped()  # before an evaluation that nothing could be scored in
    if config.training.held_out_eval:
        trainer.evaluate()


@contextlib.contextmanager
def _stops_on_sigterm(trainer: "SalesGRPOTrainer") -> Iterator[None]:
    """What ends a run from outside, a scheduler for example, ends it with a checkpoint."""
    before = signal.signal(signal.SIGTERM, lambda *_: trainer.request_stop("SIGTERM"))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


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


def _build_trainer(
    config: RunConfig,
    prepared: Prepared,
    reward: SalesReward | RemoteReward,
    instruments: Instruments,
) -> "SalesGRPOTrainer":
    phase, telemetry = instruments.timeline.phase, config.telemetry
    with phase(StartUp.POLICY):
        from salesrl_trl.trainer import SalesGRPOTrainer  # brings vLLM: bad input is told without waiting for it

        path = config.model.model_name_or_path
        if path is None:
            path = str(cached_policy(config.warm_start.warm_start_steps, config.warm_start.warm_start_seed))
        if PartialState().is_main_process:
            for line in _banner(config, prepared, path):
                logger.info(line)
        model = _load_model(path, config.model, prepared.dtype, config.training.trust_remote_code)
    with phase(StartUp.ENGINE):
        trainer = SalesGRPOTrainer(
            model,
            reward,
            config.training,
            instruments=instruments,
            quick_eval=QuickEvalSettings(
                steps=telemetry.quick_eval_steps, rows=telemetry.quick_eval_rows, best=telemetry.quick_eval_best
            ),
            train_dataset=prompt_dataset(prepared.train_prompts),
            eval_dataset=_eval_dataset(prepared),
            processing_class=AutoTokenizer.from_pretrained(
                path, revision=config.model.model_revision, trust_remote_code=config.training.trust_remote_code
            ),
            peft_config=get_peft_config(config.model),
        )
    return trainer


def _banner(config: RunConfig, prepared: Prepared, policy_path: str) -> list[str]:
    return banner(
        config.data,
        config.reward,
        config.training,
        config.model,
        policy_path=policy_path,
        rows=(len(prepared.train_rows), len(prepared.eval_rows)),
        notes=[*config.notes, *config.training.machine_notes, *prepared.notes, *prepared.reward.notes],
    )


def _eval_dataset(prepared: Prepared) -> Dataset | None:
    if not prepared.eval_prompts:
        return None
    return prompt_dataset(prepared.eval_prompts, first_index=len(prepared.train_prompts))


def _load_model(path: str, config: ModelConfig, dtype: str | None, trust_remote_code: bool) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(
        path,
        revision=config.model_revision,
        trust_remote_code=trust_remote_code,
        attn_implementation=config.attn_implementation,
        dtype=dtype,
        quantization_config=get_quantization_config(config),
    )
