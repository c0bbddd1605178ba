"""Names that people know from another system, and what each is here: of verl's configuration (0.5 to 0.9), and of
scripts with upper-case names.

Owns the table. `settings` and `settings_help` answer an unknown name by it, `translate` converts a configuration by
it, and `scripts/make_coming_from.py` makes docs/COMING_FROM.md of it. Imports no torch.
"""

from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from math import ceil
from pathlib import PurePath
from typing import Any, NamedTuple

import yaml

Given = Mapping[str, Any]
"""Values by the names of `NAMES`."""
Converter = Callable[[Any, Given], Mapping[str, object]]
"""From a value, and all that is given with it, to settings and their values. A dot names an entry of a setting. What
can't be converted raises one of `UNCONVERTED`."""
UNCONVERTED = (LookupError, TypeError, ValueError, AttributeError)


class Name(NamedTuple):
    """What a name of another system is here."""

    here: str = ""
    """The settings; empty: there is none."""
    note: str = ""
    """How they differ; or why there is none, and what does the same."""
    convert: Converter | None = None


_ACTOR, _ROLLOUT, _MODEL = (f"actor_rollout_ref.{part}" for part in ("actor", "rollout", "model"))
GROUP, PROMPTS, MINI = f"{_ROLLOUT}.n", "data.train_batch_size", f"{_ACTOR}.ppo_mini_batch_size"
MICRO, EPOCHS = f"{_ACTOR}.ppo_micro_batch_size_per_gpu", f"{_ACTOR}.ppo_epochs"
GPUS, NODES = "trainer.n_gpus_per_node", "trainer.nnodes"
REWARD, REWARD_NAME = "custom_reward_function.path", "custom_reward_function.name"


def _same(setting: str, note: str = "") -> Name:
    return Name(setting, note, lambda value, _: {setting: value})


def _among(setting: str, values: Mapping[object, object], note: str = "") -> Name:
    return Name(setting, note, lambda value, _: {setting: values[value]})


def _where(setting: str, switch: str, values: Mapping[object, object] | None = None, off: object = None) -> Name:
    """A setting that has its value only where a switch of verl is on."""

    def convert(value: Any, given: Given) -> Mapping[str, object]:
        is_on = given.get(switch, True)
        return {setting: value if values is None else values[value]} if is_on else {setting: off}

    return Name(setting, f"where `{switch}` is on", convert)


def _steps(setting: str, strategy: str = "", note: str = "") -> Name:
    """A number of verl's steps as optimizer steps. Zero and less is never."""

    def convert(value: Any, given: Given) -> Mapping[str, object]:
        number = round(value * updates(given)) if value and value > 0 else None
        return {strategy: "steps" if number else "no", setting: number} if strategy else {setting: number}

    return Name(", ".join(filter(None, (strategy, setting))), note or "in optimizer steps", convert)


def _split(prompts: int, given: Given) -> tuple[int, int]:
    """Prompts of an optimizer step, and optimizer steps that go once over the prompts."""
    mini = min(int(given.get(MINI) or prompts), prompts)
    return mini, ceil(prompts / mini)


def updates(given: Given) -> int:
    """Optimizer steps in a step of verl."""
    times = _split(int(given[PROMPTS]), given)[1] if given.get(PROMPTS) else 1
    return times * int(given.get(EPOCHS) or 1)


def processes(given: Given) -> int:
    return int(given.get(GPUS) or 1) * int(given.get(NODES) or 1)


def _sizes(_: Any, given: Given) -> Mapping[str, object]:
    """verl counts prompts of all GPUs, and here a size counts completions of a process."""
    group, ranks = int(given[GROUP]), processes(given)
    mini, times = _split(int(given[PROMPTS]), given)
    share, rest = divmod(mini * group, ranks)
    share = group * ceil(mini / ranks) if rest else share
    most = min(int(given.get(MICRO) or group), share)
    size = next(size for size in range(most, 0, -1) if share % size == 0)
    steps = share // size
    sizes = {"per_device_train_batch_size": size, "gradient_accumulation_steps": steps}
    return sizes | ({"steps_per_generation": steps * times} if times > 1 else {})


def _file(setting: str) -> Name:
    def convert(value: Any, _: Given) -> Mapping[str, object]:
        [file] = [value] if isinstance(value, str) else value
        return {setting: file}

    return Name(setting, "one file: join several", convert)


def _reward_function(value: Any, given: Given) -> Mapping[str, object]:
    path = PurePath(value).with_suffix("")
    parts = path.parts[-1:] if path.is_absolute() or ".." in path.parts else path.parts
    return {"reward_funcs": [".".join((*parts, given.get(REWARD_NAME, "compute_score")))]}


_SIZES = Name(
    "per_device_train_batch_size, gradient_accumulation_steps, steps_per_generation",
    "verl counts prompts of all GPUs; here per_device_train_batch_size x gradient_accumulation_steps x processes are "
    "the completions of an optimizer step. More mini-batches than one: steps_per_generation is so many times "
    "gradient_accumulation_steps",
    _sizes,
)
_LORA, _KL = f"{_MODEL}.lora_rank", f"{_ACTOR}.use_kl_loss"
_ENGINE = ("enforce_eager", "max_num_seqs", "max_num_batched_tokens", "enable_chunked_prefill", "enable_prefix_caching")
_SCHEDULES = {"constant": "constant_with_warmup", "cosine": "cosine"}
_CRITIC = Name(note="GRPO trains no critic")
_LAUNCH = Name(note="`accelerate launch --num_processes N` has the number of processes")
_SHARDING = Name(note="accelerate's configuration shards: accelerate_configs/fsdp2.yaml, zero3.yaml")
_RAY = Name(note="there is no Ray: `accelerate launch` starts the processes")
_LENGTHS = Name(
    "max_prompt_tokens, vllm_max_model_length",
    "the engine has room for prompt and completion",
    lambda value, given: {
        "max_prompt_tokens": value,
        "vllm_max_model_length": value + given["data.max_response_length"],
    },
)

VERL: dict[str, Name] = {
    # Data
    "data.train_files": _file("dataset"),
    "data.val_files": _file("eval_dataset"),
    "data.prompt_key": Name("columns", "{prompt: KEY}", lambda v, _: {} if v == "prompt" else {"columns.prompt": v}),
    "data.image_key": Name("columns", "{images: KEY}", lambda v, _: {} if v == "images" else {"columns.images": v}),
    "data.max_prompt_length": _LENGTHS,
    "data.max_response_length": _same("max_completion_length"),
    "data.truncation": _among("long_prompts", {"error": "error", "left": "truncate_oldest_turns"}),
    "data.filter_overlong_prompts": Name("long_prompts", "drop", lambda v, _: {"long_prompts": "drop"} if v else {}),
    PROMPTS: _SIZES,
    "data.train_max_samples": Name("max_train_rows", "", lambda v, _: {"max_train_rows": v if v > 0 else None}),
    "data.val_max_samples": Name("max_eval_rows", "", lambda v, _: {"max_eval_rows": v if v > 0 else None}),
    "data.val_batch_size": Name("per_device_eval_batch_size", "completions of a process"),
    "data.shuffle": _same("shuffle_dataset"),
    "data.seed": _same("seed"),
    "data.reward_fn_key": Name(note="every column of the row goes to the reward functions"),
    "data.custom_cls.*": Name("dataset_format", "the dotted path of a class that derives from DatasetFormat"),
    # Policy
    f"{_MODEL}.path": _same("model_name_or_path"),
    f"{_MODEL}.trust_remote_code": _same("trust_remote_code"),
    f"{_MODEL}.enable_gradient_checkpointing": _same("gradient_checkpointing"),
    _LORA: Name("use_peft, lora_r", "", lambda v, _: {"use_peft": True, "lora_r": v} if v else {"use_peft": False}),
    f"{_MODEL}.lora_alpha": _where("lora_alpha", _LORA),
    f"{_MODEL}.target_modules": Name(
        "lora_target_modules",
        f"where `{_LORA}` is on",
        lambda v, given: {"lora_target_modules": [v] if isinstance(v, str) else v} if given.get(_LORA, True) else {},
    ),
    f"{_MODEL}.use_remove_padding": Name("shared_prompts", "auto packs without padding"),
    # Update
    MINI: _SIZES,
    MICRO: _SIZES,
    EPOCHS: _same("num_iterations"),
    f"{_ACTOR}.ppo_max_token_len_per_gpu": _where("shared_prompts", f"{_ACTOR}.use_dynamic_bsz", off="auto"),
    f"{_ACTOR}.use_dynamic_bsz": Name("shared_prompts", "auto, or a limit of tokens in a pass"),
    f"{_ACTOR}.optim.lr": _same("learning_rate"),
    f"{_ACTOR}.optim.weight_decay": _same("weight_decay"),
    f"{_ACTOR}.optim.betas": Name("adam_beta1, adam_beta2", "", lambda v, _: {"adam_beta1": v[0], "adam_beta2": v[1]}),
    f"{_ACTOR}.optim.warmup_style": _among("lr_scheduler_type", _SCHEDULES),
    f"{_ACTOR}.optim.lr_scheduler_type": _among("lr_scheduler_type", _SCHEDULES),
    f"{_ACTOR}.optim.lr_warmup_steps_ratio": Name(
        "warmup_steps", "below 1 it is a share", lambda v, _: {"warmup_steps": v} if v else {}
    ),
    f"{_ACTOR}.optim.lr_warmup_steps": _steps("warmup_steps"),
    _KL: Name("beta", "off: 0", lambda v, _: {} if v else {"beta": 0.0}),
    f"{_ACTOR}.kl_loss_coef": _where("beta", _KL, off=0.0),
    f"{_ACTOR}.kl_loss_type": _where(
        "kl_estimator", _KL, {"low_var_kl": "k3", "k3": "k3", "kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2"}
    ),
    f"{_ACTOR}.clip_ratio": _same("epsilon"),
    f"{_ACTOR}.clip_ratio_low": _same("epsilon"),
    f"{_ACTOR}.clip_ratio_high": _same("epsilon_high"),
    f"{_ACTOR}.clip_ratio_c": _same("delta", "the bound of the ratio at negative advantages; verl has 3 by default"),
    f"{_ACTOR}.entropy_coeff": _same("entropy_coef"),
    f"{_ACTOR}.loss_agg_mode": _among(
        "loss_type",
        {"token-mean": "dapo", "seq-mean-token-mean": "grpo", "seq-mean-token-sum-norm": "dr_grpo"},
        "token-mean is dapo, seq-mean-token-mean grpo, seq-mean-token-sum-norm dr_grpo",
    ),
    f"{_ACTOR}.policy_loss.loss_mode": _among(
        "importance_sampling_level", {"vanilla": "token", "gspo": "sequence"}, "vanilla is token, gspo sequence"
    ),
    f"{_ACTOR}.grad_clip": _same("max_grad_norm"),
    f"{_ACTOR}.strategy": _SHARDING,
    "*.fsdp_config.*": _SHARDING,
    "*.ulysses_sequence_parallel_size": Name(note="no sequence is split over GPUs"),
    "*.log_prob_*": Name("shared_prompts", "has the limit of passes without gradients too"),
    # Rollouts
    f"{_ROLLOUT}.name": Name("use_vllm", "vllm", lambda v, _: {"use_vllm": {"vllm": True, "hf": False}[v]}),
    f"{_ROLLOUT}.mode": Name("rollout_lookahead", "1 and more generates while rewards come in; 0 is on-policy"),
    GROUP: _same("num_generations"),
    f"{_ROLLOUT}.temperature": _same("temperature"),
    f"{_ROLLOUT}.top_p": _same("top_p"),
    f"{_ROLLOUT}.top_k": Name("top_k", "-1 is 0", lambda value, _: {"top_k": max(value, 0)}),
    f"{_ROLLOUT}.gpu_memory_utilization": _same("vllm_gpu_memory_utilization"),
    f"{_ROLLOUT}.tensor_model_parallel_size": _same("vllm_tensor_parallel_size"),
    f"{_ROLLOUT}.max_model_len": _same("vllm_max_model_length"),
    f"{_ROLLOUT}.free_cache_engine": _same("vllm_enable_sleep_mode"),
    **{f"{_ROLLOUT}.{name}": _same(f"vllm_engine_kwargs.{name}") for name in _ENGINE},
    f"{_ROLLOUT}.val_kwargs.n": _same("num_generations_eval"),
    f"{_ROLLOUT}.val_kwargs.*": Name(note="evaluations sample as training does; those of quick_eval_steps are greedy"),
    f"{_ROLLOUT}.multi_turn.*": Name(note="a script gives TRL's `tools` to SalesGRPOTrainer"),
    # Rewards and advantages
    REWARD: Name("reward_funcs", "[MODULE.FUNCTION], in the working folder or beside the recipe", _reward_function),
    REWARD_NAME: Name("reward_funcs", "[MODULE.FUNCTION]"),
    "reward_model.*": Name(note="a script gives a reward model to SalesGRPOTrainer; examples/reward_model.py"),
    "algorithm.adv_estimator": Name("", "advantages are GRPO's", lambda v, _: {"grpo": {}}[v]),
    "algorithm.norm_adv_by_std_in_grpo": _among("scale_rewards", {True: "group", False: "none"}),
    "algorithm.use_kl_in_reward": Name("beta", "the KL is a term of the loss, and no reward"),
    "algorithm.kl_ctrl.*": Name("branch_kl", "{BRANCH: {beta: 0.1, low: 0.02, high: 0.06}} moves beta; docs/KL.md"),
    "algorithm.rollout_correction.*": Name("vllm_importance_sampling_mode", "TRL corrects by default"),
    **dict.fromkeys(("algorithm.gamma", "algorithm.lam", "critic.*", "trainer.critic_warmup"), _CRITIC),
    # The run
    "trainer.total_epochs": _same("num_train_epochs"),
    "trainer.total_training_steps": _steps("max_steps"),
    "trainer.save_freq": _steps("save_steps", "save_strategy"),
    "trainer.test_freq": _steps("eval_steps", "eval_strategy", "whole; quick_eval_steps takes a sample"),
    "trainer.val_before_train": _same("held_out_eval"),
    GPUS: _LAUNCH,
    NODES: _LAUNCH,
    "trainer.logger": Name(
        "report_to",
        "the console is always there",
        lambda v, _: {"report_to": [name for name in ([v] if isinstance(v, str) else v) if name != "console"]},
    ),
    "trainer.project_name": Name("project", "and WANDB_PROJECT", lambda v, _: {"project": v, "env.WANDB_PROJECT": v}),
    "trainer.experiment_name": _same("run_name"),
    "trainer.default_local_dir": _same("output_dir"),
    "trainer.resume_mode": Name(
        "resume_from_checkpoint", "auto", lambda v, _: {"auto": {"resume_from_checkpoint": v}, "disable": {}}[v]
    ),
    "trainer.resume_from_path": _same("resume_from_checkpoint"),
    "trainer.max_actor_ckpt_to_keep": _same("save_total_limit"),
    "trainer.log_val_generations": _same("held_out_examples"),
    **dict.fromkeys(
        ("trainer.rollout_data_dir", "trainer.validation_data_dir"), Name("record", "true keeps every completion")
    ),
    "*profiler.*": Name("trace_steps", "writes trace.json"),
    **dict.fromkeys(("ray_init.*", "ray_kwargs.*", "trainer.ray_wait_register_center_timeout"), _RAY),
}
"""By the names of verl's ppo_trainer.yaml. `*` stands for any text."""

UPPER_CASE: dict[str, Name] = {
    "JUDGE_MAX_WORKERS": _same("judge_max_concurrency", "of all processes together"),
    "JUDGE_TIMEOUT_SEC": _same("judge_timeout_s"),
    "JUDGE_MAX_RETRIES": Name("max_attempts", "the first call counts", lambda v, _: {"max_attempts.judge": v + 1}),
    "PARETO_PRINT_EVERY": _same("quick_eval_steps", "each prints a line [Pareto@STEP], where there are branches"),
    "MAX_NEW_TOKENS_TRAIN": _same("max_completion_length"),
    "MAX_NEW_TOKENS_EVAL": Name("max_completion_length", "evaluations have that of training"),
    "GRPO_BATCH_SIZE": Name("per_device_train_batch_size", "completions of a process: prompts x num_generations"),
    "K_ROLLOUTS": _same("num_generations"),
    "KL_TARGET_*": Name("branch_kl", "`low` and `high` of the branch, a band around the target; docs/KL.md"),
    "BETA_*": Name("branch_kl", "`beta` of the branch"),
    "EVAL_EVERY": _steps("eval_steps", "eval_strategy", "whole; quick_eval_steps takes a sample"),
}
"""Others are told by the same name in lower case, where there is such a setting."""
NAMES = VERL | UPPER_CASE


def flat(given: Mapping[Any, Any], before: str = "") -> dict[str, Any]:
    """`{"a": {"b": 1}}` as `{"a.b": 1}`. What Hydra's classes need is left out."""
    found = dict[str, Any]()
    for name, value in given.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{before}{name}.")
        elif name != "_target_":
            found[f"{before}{name}"] = value
    return found


def nested(settings: Mapping[str, object]) -> dict[str, Any]:
    """`{"a.b": 1}` as `{"a": {"b": 1}}`."""
    found = dict[str, Any]()
    for name, value in settings.items():
        first, dot, rest = name.partition(".")
        found[first] = {**found.get(first, {}), rest: value} if dot else value
    return found


def known_as(name: str) -> str | None:
    """The key of `NAMES` for a name, which may lack its first parts: `"rollout.n"`. `None` if it has none."""
    ends = [key for key in NAMES if key == name or key.endswith(f".{name}")]
    return ends[0] if len(ends) == 1 else next((key for key in NAMES if fnmatchcase(name, key)), None)


def converted(key: str, value: object, given: Given) -> Mapping[str, object] | None:
    """The settings here of a value. `None` where it can't be converted, or by itself alone says too little."""
    convert = NAMES[key].convert
    try:
        return None if convert is None else convert(value, given)
    except UNCONVERTED:
        return None


def flow(settings: Mapping[str, object]) -> str:
    """`"num_generations: 8, vllm_engine_kwargs: {enforce_eager: true}"`."""
    return yaml.safe_dump(dict(settings), default_flow_style=True, sort_keys=False, width=10**6).strip()[1:-1]


def answer(name: str, value: object = None, given: Given | None = None) -> str:
    """What a name of another system is here, with the converted value if one is given. Empty for other names."""
    key = known_as(name)
    if key is None:
        return ""
    entry, of = NAMES[key], "of verl; " * (key in VERL)
    settings = None if value is None else converted(key, value, given or {})
    text = ": ".join(filter(None, (flow(nested(settings)) if settings else entry.here, entry.note)))
    return f"{of}here {text}" if entry.here else f"{of}not here: {entry.note}"
