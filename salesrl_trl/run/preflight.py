"""The checks of a run in their order, before any model's weights are loaded.

Owns the order, and `Prepared`, the result of the checks. Each check is in `checks`, in `config` or in `data`.
"""

from dataclasses import dataclass, field
from pathlib import Path

from transformers.training_args import OptimizerNames
from transformers.utils import is_torchao_available

from salesrl_trl.checkpoint.identity import check_identity, identity_of, rows_of
from salesrl_trl.data.lengths import FittingPrompts, fit_prompts, token_counter
from salesrl_trl.data.sources import DEMO, is_file, load_rows
from salesrl_trl.data.templates import PromptTemplate
from salesrl_trl.demo.policy import MAX_POSITIONS, PROMPT_STYLE, policy_tokenizer
from salesrl_trl.errors import ConfigError
from salesrl_trl.run.checks.addresses import check_vllm_server
from salesrl_trl.run.checks.folders import check_checkpoint, earlier_start
from salesrl_trl.run.checks.model import check_model, load_tokenizer, positions_of, room_for_training
from salesrl_trl.run.checks.prompts import prompt_limit, prompt_of
from salesrl_trl.run.checks.reward import RewardParts, check_stand_ins, prepare_reward
from salesrl_trl.run.precision import STOCHASTIC_ARGS, STOCHASTIC_OPTIM, choose_precision
from salesrl_trl.run.settings import RunConfig
from salesrl_trl.types import DEFAULT_FORMAT, ActionFormat, SalesRow


@dataclass
class Prepared:
    """The checked rows and parts of a run, ready for training."""

    train: FittingPrompts
    held_out: FittingPrompts
    """Without rows if nothing is to be evaluated."""
    reward: RewardParts
    dtype: str | None = None
    """Number format of the policy's weights in training."""
    notes: list[str] = field(default_factory=list)
    """Findings that a user should know at the start: lines for the run's banner."""

    @property
    def rows(self) -> list[SalesRow]:
        """Training rows, then held-out rows."""
        return [*self.train.rows, *self.held_out.rows]


def prepare(config: RunConfig) -> Prepared:
    """Run all checks, with an output folder that is there. Settles the checkpoint's path and the optimizer too.

    Raises:
        `SalesRLError`: the first check that failed.
    """
    training, branches = config.training, config.training.branches
    config.telemetry.check_branches(branches)
    training.resume_from_checkpoint = check_checkpoint(training.resume_from_checkpoint, training.output_dir)

    action_format = config.reward.action_format()
    prompt = prompt_of(config.data, action_format.fields)
    train_rows = load_rows(config.data.dataset, config.data.train_split, branches, config.data.max_train_rows)
    held_out_rows = _held_out_rows(config)
    if config.model.model_name_or_path is None:
        _check_small_policy(prompt, action_format)

    own_rows = next(
        (each for each in (config.data.dataset, config.data.eval_dataset) if each not in (DEMO, None)), None
    )
    notes = check_stand_ins(config.reward, branches, own_rows)
    reward = prepare_reward(config.reward, branches, training.hybrid_reference_weight > 0)

    train, held_out = _fitting_prompts(config, prompt, train_rows, held_out_rows)
    _check_resume(config, train)
    _check_quick_evaluation(config, held_out)
    notes += [each.note for each in (train, held_out) if each.note]
    notes += earlier_start(training.output_dir, resumes=training.resume_from_checkpoint is not None)
    notes += _warm_up_note(config)
    dtype = _settle_precision(config, notes)
    return Prepared(train=train, held_out=held_out, reward=reward, dtype=dtype, notes=notes)


def _held_out_rows(config: RunConfig) -> list[SalesRow]:
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


def _check_small_policy(prompt: str | PromptTemplate, action_format: ActionFormat) -> None:
    """Raise unless the run prompts the small policy as its warm start did."""
    if prompt == PROMPT_STYLE and action_format == DEFAULT_FORMAT:
        return
    given = f"`prompt_style` is {prompt!r}" if isinstance(prompt, str) else "`prompt_template` is given"
    raise ConfigError(
        f"{given if prompt != PROMPT_STYLE else '`action_fields` is given'}, but the small demo policy is taught "
        f"with {PROMPT_STYLE!r} and the usual fields. Give `model_name_or_path`, or set `prompt_style: "
        f"{PROMPT_STYLE}` and neither `prompt_template` nor `action_fields`."
    )


def _fitting_prompts(
    config: RunConfig, prompt: str | PromptTemplate, train_rows: list[SalesRow], held_out_rows: list[SalesRow]
) -> tuple[FittingPrompts, FittingPrompts]:
    """Training rows and held-out rows whose prompts fit into the model. Looks for the model and its tokenizer."""
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
        address = training.vllm_server_base_url or f"http://{training.vllm_server_host}:{training.vllm_server_port}"
        server_room = check_vllm_server(address.rstrip("/"), training.vllm_server_timeout)
    limit = prompt_limit(config.data, training, positions, server_room)
    count = token_counter(tokenizer, training.chat_template_kwargs)
    rule = config.data.long_prompts
    return (
        fit_prompts(train_rows, prompt, count, limit, rule, "training"),
        fit_prompts(held_out_rows, prompt, count, limit, rule, "held-out"),
    )


def _check_resume(config: RunConfig, train: FittingPrompts) -> None:
    checkpoint = config.training.resume_from_checkpoint
    if checkpoint is not None:  # the trainer logs differences that are allowed
        made_of = identity_of(config.training, rows_of(train.prompts, (row.branch for row in train.rows)))
        check_identity(Path(checkpoint), made_of, config.training.allow_changed_resume)


def _check_quick_evaluation(config: RunConfig, held_out: FittingPrompts) -> None:
    processes = config.training.world_size
    if config.telemetry.quick_eval_steps and len(held_out.rows) < processes:
        raise ConfigError(
            f"a quick evaluation has {len(held_out.rows)} held-out rows for {processes} processes. Expected one for "
            "each. Hold out more (`max_eval_rows`), or set `quick_eval_steps: 0`."
        )


def _warm_up_note(config: RunConfig) -> list[str]:
    steps, warm_up = config.training.max_steps, config.training.warmup_steps
    if 0 < steps <= warm_up:
        return [f"`warmup_steps` is {warm_up:g} and `max_steps` {steps}: the learning rate is never reached"]
    return []


def _settle_precision(config: RunConfig, notes: list[str]) -> str | None:
    """Choose the number format of the policy's weights. For 16-bit weights, set the optimizer that suits them."""
    model, training = config.model, config.training
    trains_all_weights = not model.use_peft and training.deepspeed_plugin is None and not training.fsdp
    room = None
    if trains_all_weights and model.model_name_or_path is not None:
        in_this_process = training.use_vllm and training.vllm_mode == "colocate"
        room = room_for_training(
            model.model_name_or_path,
            model.model_revision,
            training.trust_remote_code,
            training.device,
            vllm_share=training.vllm_gpu_memory_utilization if in_this_process else 0.0,
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
