"""A whole run: parse, check, build, evaluate, train, evaluate. Recipes call `main`.

Owns the order of things and nothing else. Everything that can be wrong with the settings, the data, the addresses or
the model's path stops here, before any model is loaded, with one message and exit code 2.
"""

import contextlib
import difflib
import logging
import signal
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import stamina
import transformers
import yaml
from accelerate import PartialState
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.training_args import OptimizerNames
from transformers.utils import is_torchao_available
from trl import ModelConfig, TrlParser, get_peft_config, get_quantization_config

from salesrl_trl.checkpoint.identity import check_identity, identity_of, rows_of
from salesrl_trl.config import DataConfig, RewardConfig, SalesGRPOConfig, TelemetryConfig, WarmStartConfig
from salesrl_trl.data.lengths import FittingPrompts, fit_prompts, token_counter
from salesrl_trl.data.sources import DEMO, is_file, load_rows, prompt_dataset
from salesrl_trl.data.templates import PromptTemplate
from salesrl_trl.data.text import unreadable
from salesrl_trl.demo.policy import MAX_POSITIONS, PROMPT_STYLE, cached_policy, policy_tokenizer
from salesrl_trl.errors import ConfigError, SalesRLError
from salesrl_trl.evaluation.record import QuickEvalSettings
from salesrl_trl.process import collect_seldom, keep_freed_memory
from salesrl_trl.reward.chain import SalesReward
from salesrl_trl.reward.remote import RemoteReward
from salesrl_trl.run.assembly import RewardParts, open_reward, prepare_reward
from salesrl_trl.run.banner import LOG_NAME, banner, keep_console
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
from salesrl_trl.telemetry import perf
from salesrl_trl.telemetry.instruments import Instruments, InstrumentSettings
from salesrl_trl.telemetry.logs import LINE_FORMAT, TIME_FORMAT, LeaveOut
from salesrl_trl.types import DEFAULT_FORMAT, SalesRow

if TYPE_CHECKING:
    from salesrl_trl.trainer import SalesGRPOTrainer

logger = logging.getLogger(__name__)

EXIT_BAD_INPUT = 2
EXIT_STOPPED = 3
"""A run that started and had to stop, for example because too little could be scored."""


@dataclass
class RunConfig:
    """All settings of a run, by owner."""

    data: DataConfig
    reward: RewardConfig
    warm_start: WarmStartConfig
    telemetry: TelemetryConfig
    training: SalesGRPOConfig
    model: ModelConfig
    notes: list[str] = field(default_factory=list)
    """Lines for the banner: what was set otherwise than the recipe says."""


_SETTINGS = (DataConfig, RewardConfig, WarmStartConfig, TelemetryConfig, SalesGRPOConfig, ModelConfig)
STAND_IN = "small_policy"
"""A recipe's key: settings that hold where it names no model, so that the packaged small policy stands in."""


def main(default_config: Path, argv: Sequence[str] | None = None) -> None:
    """Run a recipe and exit.

    Args:
        default_config (`Path`):
            The recipe's YAML, used when the command line has no `--config`.
        argv (`Sequence[str]`, *optional*):
            Command-line arguments; those of the process when not given.
    """
    _quiet()
    try:
        config = parse(sys.argv[1:] if argv is None else argv, default_config)
        prepared = prepare(config)
    except SalesRLError as error:
        _say_and_exit(error, EXIT_BAD_INPUT)
    if config.training.process_index == config.training.local_process_index:  # the first node's processes
        keep_console(Path(config.training.output_dir) / LOG_NAME)
    try:
        rows = [*prepared.train_rows, *prepared.eval_rows]
        with open_reward(config.reward, config.training, rows, prepared.reward) as reward:
            run(config, prepared, reward)
    except SalesRLError as error:
        _say_and_exit(error, EXIT_STOPPED)


def parse(argv: Sequence[str], default_config: Path) -> RunConfig:
    """Settings from `--config FILE.yaml` (else `default_config`) with command-line overrides.

    Raises:
        `ConfigError`: an unknown key, a missing file, a value outside its range.
    """
    argv = [part for each in argv for part in (each.split("=", 1) if each.startswith("--config=") else [each])]
    if "--config" not in argv:
        argv = ["--config", str(default_config), *argv]
    parser = _Parser(_SETTINGS, allow_abbrev=False)
    if argv[-1] == "--config":
        raise ConfigError("`--config` has no file behind it. Expected a recipe's YAML.")
    options = {option for action in parser._actions for option in action.option_strings}
    named = (each.split("=")[0] for each in argv if each.startswith("--"))  # without a value: it may be a key
    unknown = [name for name in named if name not in {*options, "--config"}]
    if unknown:
        raise ConfigError(f"unknown arguments: {_with_guesses(unknown, options)}. Correct them; `--help` lists all.")
    _check_keys(Path(argv[argv.index("--config") + 1]), {action.dest for action in parser._actions})
    try:
        config = RunConfig(*parser.parse_args_and_config(argv))
    except ConfigError:
        raise
    except (ValueError, TypeError) as error:
        raise ConfigError(f"the settings do not work: {error}") from error
    config.notes = parser.stand_in
    return config


class _Parser(TrlParser):
    """TRL's parser with two changes: what argparse cannot read is a `ConfigError`, not a page of usage and an exit;
    and a recipe's `small_policy` settings hold where no model is named."""

    def parse_args_and_config(self, args: Sequence[str], **kwargs: Any) -> Any:
        options = (each.split("=")[0] for each in args if each.startswith("--"))
        self._given = {option[2:].replace("-", "_") for option in options}  # either is read: --max-steps, --max_steps
        self.stand_in: list[str] = []
        return super().parse_args_and_config(args, **kwargs)

    def set_defaults_with_config(self, **config: Any) -> Any:
        stand_in = config.pop(STAND_IN, {})
        if stand_in and "model_name_or_path" not in self._given and config.get("model_name_or_path") is None:
            changed = []
            for name, value in stand_in.items():
                if name not in self._given and value != config.get(name):
                    otherwise = f" (not {config[name]})" if name in config else ""
                    changed.append(name if isinstance(value, dict) else f"{name} {value}{otherwise}")
            self.stand_in = [
                f"no model is named: the recipe's settings for the small policy hold, {', '.join(changed)}"
            ]
            config |= stand_in
        return super().set_defaults_with_config(**config)

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"the settings do not work: {message}. `--help` lists all.")


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
        with instruments.timeline.phase("warm_up"):
            trainer.warm_up()
    with _stops_on_sigterm(trainer):
        trainer.train(resume_from_checkpoint=config.training.resume_from_checkpoint)
    with instruments.timeline.phase(perf.CHECKPOINT):
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
    with phase("policy"):
        from salesrl_trl.trainer import SalesGRPOTrainer  # brings vLLM: bad input is told without waiting for it

        path = config.model.model_name_or_path
        if path is None:
            path = str(cached_policy(config.warm_start.warm_start_steps, config.warm_start.warm_start_seed))
        if PartialState().is_main_process:
            for line in _banner(config, prepared, path):
                logger.info(line)
        model = _load_model(path, config.model, prepared.dtype, config.training.trust_remote_code)
    with phase("engine"):
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


def _check_keys(path: Path, known: set[str]) -> None:
    if not path.is_file():
        raise ConfigError(f"there is no recipe {path}. Expected a YAML file. Correct --config.")
    try:
        recipe = yaml.safe_load(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}, {unreadable(error)}.") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not YAML: {error}") from error
    if not isinstance(recipe, dict):
        raise ConfigError(f"{path} holds a {type(recipe).__name__}. Expected a mapping of settings.")
    stand_in = recipe.get(STAND_IN) or {}
    unknown = sorted((set(recipe) | set(stand_in)) - known - {"env", STAND_IN})
    if unknown:
        raise ConfigError(
            f"{path} has unknown keys: {_with_guesses(unknown, known)}. Expected settings of DataConfig, "
            "RewardConfig, WarmStartConfig, TelemetryConfig, SalesGRPOConfig or trl's ModelConfig. Correct or remove "
            "them; `--help` lists all."
        )


def _with_guesses(names: Sequence[Any], known: set[str]) -> str:
    """`"learning_rat (did you mean learning_rate?)"`."""
    guesses = {name: difflib.get_close_matches(str(name), known, n=1) for name in names}
    return ", ".join(f"{name}" + (f" (did you mean {near[0]}?)" if near else "") for name, near in guesses.items())


def _say_and_exit(error: SalesRLError, code: int) -> None:
    sys.stderr.write(f"\n{type(error).__name__}: {error}\n")
    sys.stderr.flush()
    raise SystemExit(code)


_LEFT_OUT = {
    # at every weight push on a CPU, about the one module that has no weights
    "vllm.model_executor.model_loader.reload.layerwise": "RotaryEmbedding: Failed to load weights",
    # a branch without rows in a step has no mean, which TensorBoard rightly does not draw
    "transformers.integrations.integration_utils": 'Trainer is attempting to log a value of "None"',
}
"""Logger to a phrase of the records it is not to emit."""


def _quiet() -> None:
    """Our own lines on stderr; third parties only when they warn."""
    logging.basicConfig(level=logging.WARNING, format=LINE_FORMAT, datefmt=TIME_FORMAT)
    logging.getLogger("salesrl_trl").setLevel(logging.INFO)
    warnings.filterwarnings("ignore", "`torch.distributed.reduce_op` is deprecated")  # vLLM looks at every attribute
    transformers.utils.logging.disable_progress_bar()
    stamina.instrumentation.set_on_retry_hooks([])  # failures are counted by reason, not told call by call
    for name, phrase in _LEFT_OUT.items():
        logging.getLogger(name).addFilter(LeaveOut(phrase))
