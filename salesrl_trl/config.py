"""What a recipe may set: fields, their units and their checks.

Owns validation and nothing else. Behaviour classes receive plain arguments, never these objects. Fields that TRL or
transformers already has are theirs (`GRPOConfig`, `ModelConfig`).
"""

import json
import os
from dataclasses import dataclass, field
from typing import Any

from trl import GRPOConfig

from salesrl_trl.data.prompts import PROMPT_STYLES
from salesrl_trl.errors import ConfigError

DEFAULT_BRANCHES = ("fairness", "hallucination")


def _help(text: str, **metadata: Any) -> dict[str, Any]:
    return {"help": text, **metadata}


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


def _check_positive(config: Any, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        _check(value > 0, f"`{name}` is {value}. Expected more than 0.")


@dataclass
class DataConfig:
    """The rows to train and evaluate on.

    Args:
        dataset (`str`, *optional*, defaults to `"demo"`):
            `demo`, a `.jsonl`, `.json` or `.parquet` file, or a dataset on the hub.
        train_split (`str`, *optional*, defaults to `"train"`):
            Split to train on.
        eval_dataset (`str`, *optional*):
            Where the held-out rows come from; the same as `dataset` when not given.
        eval_split (`str`, *optional*, defaults to `"heldout"`):
            Split to evaluate on.
        max_train_rows (`int`, *optional*):
            Take the first so many training rows.
        max_eval_rows (`int`, *optional*):
            Take the first so many held-out rows.
        prompt_style (`str`, *optional*, defaults to `"instruct"`):
            `instruct` explains the task to a general chat model, `compact` is the bare conversation.
    """

    dataset: str = field(default="demo", metadata=_help("demo, a local file or a dataset on the hub"))
    train_split: str = field(default="train", metadata=_help("split to train on"))
    eval_dataset: str | None = field(
        default=None, metadata=_help("source of held-out rows; as `dataset` if not given")
    )
    eval_split: str = field(default="heldout", metadata=_help("split to evaluate on"))
    max_train_rows: int | None = field(default=None, metadata=_help("take the first so many training rows"))
    max_eval_rows: int | None = field(default=None, metadata=_help("take the first so many held-out rows"))
    prompt_style: str = field(default="instruct", metadata=_help("instruct or compact"))

    def __post_init__(self) -> None:
        _check(
            self.prompt_style in PROMPT_STYLES,
            f"`prompt_style` is {self.prompt_style!r}. Expected one of: {', '.join(PROMPT_STYLES)}.",
        )
        for name in ("max_train_rows", "max_eval_rows"):
            value = getattr(self, name)
            _check(value is None or value > 0, f"`{name}` is {value}. Expected at least 1, or nothing for all rows.")


@dataclass
class RewardConfig:
    """The services that score, and how patiently they are asked.

    Args:
        rag_base_url (`str`, *optional*):
            Address of the RAG service before `/v1/rag/...`. Without one the recipe starts the embedded service.
        rag_api_key_env (`str`, *optional*):
            Name of the environment variable that holds the RAG service's key.
        judge_base_url (`str`, *optional*):
            OpenAI-style address of the judge, `/v1` included. Without one the recipe starts the embedded judge.
        judge_model (`str`, *optional*, defaults to `"salesrl-judge"`):
            Model name to ask the judge for.
        judge_api_key_env (`str`, *optional*):
            Name of the environment variable that holds the judge's key.
        rubric_dir (`str`, *optional*):
            Folder with a `<branch>.txt` for each branch whose packaged rubric is not wanted, or that has none.
        rag_score_threshold (`float`, *optional*, defaults to `0.03`):
            Passages below this normalised score in [0, 1] are left out. Raw conversations score near 0.09 in the
            embedded service, good queries 0.2 to 0.6.
        rag_top_k (`int`, *optional*, defaults to `3`):
            Most passages to retrieve.
        rag_timeout_s (`float`, *optional*, defaults to `30.0`):
            Seconds one attempt at a RAG endpoint may take.
        judge_timeout_s (`float`, *optional*, defaults to `60.0`):
            Seconds one attempt at the judge may take.
        max_attempts (`int`, *optional*, defaults to `3`):
            Attempts for a call, the first included.
        rag_max_concurrency (`int`, *optional*, defaults to `32`):
            Calls in flight to each RAG endpoint, per process.
        judge_max_concurrency (`int`, *optional*, defaults to `32`):
            Calls in flight to the judge, per process.
        reward_deadline_s (`float`, *optional*, defaults to `300.0`):
            Seconds for all rewards of a batch. Keep it well under the process group's timeout (600 s for NCCL).
        invalid_action_reward (`float`, *optional*, defaults to `0.0`):
            Reward of a completion that is no action; the judge's scores lie in [0, 1].
    """

    rag_base_url: str | None = field(default=None, metadata=_help("RAG service; embedded if not given"))
    rag_api_key_env: str | None = field(default=None, metadata=_help("environment variable with the RAG key"))
    judge_base_url: str | None = field(default=None, metadata=_help("judge, with /v1; embedded if not given"))
    judge_model: str = field(default="salesrl-judge", metadata=_help("the judge's model name"))
    judge_api_key_env: str | None = field(default=None, metadata=_help("environment variable with the judge's key"))
    rubric_dir: str | None = field(default=None, metadata=_help("folder of <branch>.txt rubrics"))
    rag_score_threshold: float = field(default=0.03, metadata=_help("least normalised passage score"))
    rag_top_k: int = field(default=3, metadata=_help("most passages to retrieve"))
    rag_timeout_s: float = field(default=30.0, metadata=_help("seconds per attempt at a RAG endpoint"))
    judge_timeout_s: float = field(default=60.0, metadata=_help("seconds per attempt at the judge"))
    max_attempts: int = field(default=3, metadata=_help("attempts for a call, the first included"))
    rag_max_concurrency: int = field(default=32, metadata=_help("calls in flight to each RAG endpoint, per process"))
    judge_max_concurrency: int = field(default=32, metadata=_help("calls in flight to the judge, per process"))
    reward_deadline_s: float = field(default=300.0, metadata=_help("seconds for all rewards of a batch"))
    invalid_action_reward: float = field(default=0.0, metadata=_help("reward of a completion that is no action"))

    def __post_init__(self) -> None:
        _check(
            0 <= self.rag_score_threshold <= 1,
            f"`rag_score_threshold` is {self.rag_score_threshold}. Expected 0 to 1: passage scores are normalised.",
        )
        _check(1 <= self.rag_top_k <= 50, f"`rag_top_k` is {self.rag_top_k}. Expected 1 to 50.")
        _check(
            self.invalid_action_reward <= 0.5,
            f"`invalid_action_reward` is {self.invalid_action_reward}. Expected at most 0.5: it is to be a low reward "
            "beside the judge's 0 to 1.",
        )
        _check_positive(
            self,
            "rag_timeout_s",
            "judge_timeout_s",
            "max_attempts",
            "rag_max_concurrency",
            "judge_max_concurrency",
            "reward_deadline_s",
        )
        for name in ("rag_base_url", "judge_base_url"):
            url = getattr(self, name)
            _check(
                url is None or url.startswith(("http://", "https://")),
                f"`{name}` is {url!r}. Expected an address that starts with http:// or https://, or nothing for the "
                "embedded service.",
            )


@dataclass
class WarmStartConfig:
    """The small policy that is made on the spot when no `model_name_or_path` is given.

    Args:
        warm_start_steps (`int`, *optional*, defaults to `280`):
            Steps of supervised fine-tuning on the demo's draft actions.
        warm_start_seed (`int`, *optional*, defaults to `0`):
            Seed of its weights and data order. Each seed is cached by itself.
    """

    warm_start_steps: int = field(default=280, metadata=_help("SFT steps of the small policy"))
    warm_start_seed: int = field(default=0, metadata=_help("seed of the small policy"))

    def __post_init__(self) -> None:
        _check_positive(self, "warm_start_steps")


@dataclass
class SalesGRPOConfig(GRPOConfig):
    """TRL's `GRPOConfig` and what `SalesGRPOTrainer` adds to it.

    Args:
        branches (`list[str]`, *optional*, defaults to `["fairness", "hallucination"]`):
            Branch names a row may carry. Each needs a rubric.
        vllm_enforce_eager (`bool`, *optional*):
            Start vLLM without compilation and CUDA graphs: starts fast, generates two to three times slower on a GPU.
            When not given, so on a CPU, where compilation takes 20 s or more, and not on a GPU.
        vllm_load_format (`str`, *optional*, defaults to `"auto"`):
            `dummy` starts vLLM with random weights; the trainer pushes its own before the first generation.
        vllm_dtype (`str`, *optional*, defaults to `"auto"`):
            vLLM's number format; `auto` takes the one training runs in.
        vllm_engine_kwargs (`str`, *optional*, defaults to `"{}"`):
            Further `vllm.LLM` arguments as a JSON object. They win over TRL's.
        max_sampling_logp_difference (`float`, *optional*, defaults to `0.5`):
            Mean absolute difference in nats between vLLM's and the trainer's log-probs of the first batch above which
            the run stops: vLLM then samples from other weights than the ones in training. Around 0.002 in float32 and
            0.01 in bf16 when all is well.
        min_valid_reward_fraction (`float`, *optional*, defaults to `0.5`):
            A generation batch of which fewer completions could be scored is skipped: it does not move the policy.
        max_skipped_generations (`int`, *optional*, defaults to `3`):
            After so many skipped in a row the run saves a checkpoint and stops with the reason.
        held_out_eval (`bool`, *optional*, defaults to `True`):
            Evaluate on the held-out rows before the first and after the last step.
    """

    branches: list[str] = field(default_factory=lambda: list(DEFAULT_BRANCHES), metadata=_help("branch names"))
    vllm_enforce_eager: bool | None = field(default=None, metadata=_help("no compilation, no CUDA graphs"))
    vllm_load_format: str = field(default="auto", metadata=_help("auto, or dummy for a fast start"))
    vllm_dtype: str = field(default="auto", metadata=_help("vLLM's number format"))
    vllm_engine_kwargs: str = field(default="{}", metadata=_help("further vllm.LLM arguments, a JSON object"))
    max_sampling_logp_difference: float = field(default=0.5, metadata=_help("nats; above it the first step stops"))
    min_valid_reward_fraction: float = field(default=0.5, metadata=_help("below it a generation batch is skipped"))
    max_skipped_generations: int = field(default=3, metadata=_help("so many skipped in a row end the run"))
    held_out_eval: bool = field(default=True, metadata=_help("evaluate before and after training"))

    def __post_init__(self) -> None:
        _check(
            len(self.branches) > 0 and len(set(self.branches)) == len(self.branches),
            f"`branches` is {self.branches}. Expected at least one name, each once.",
        )
        self._check_groups()
        self.eval_on_start: bool = self.eval_on_start or self.held_out_eval
        super().__post_init__()
        _check(
            0 <= self.min_valid_reward_fraction <= 1,
            f"`min_valid_reward_fraction` is {self.min_valid_reward_fraction}. Expected 0 to 1.",
        )
        _check_positive(self, "max_sampling_logp_difference", "max_skipped_generations")
        _check(
            isinstance(self.parsed_engine_kwargs(), dict),
            f"`vllm_engine_kwargs` is {self.vllm_engine_kwargs!r}. Expected a JSON object of vllm.LLM arguments.",
        )

    def parsed_engine_kwargs(self) -> Any:
        """`vllm_engine_kwargs` as Python values."""
        try:
            return json.loads(self.vllm_engine_kwargs)
        except json.JSONDecodeError as error:
            raise ConfigError(
                f"`vllm_engine_kwargs` is not JSON (column {error.colno}). Expected an object such as "
                '{"max_num_batched_tokens": 8192}.'
            ) from None

    def _check_groups(self) -> None:
        """TRL checks this too, but only after it has touched the devices, and without saying what to do."""
        _check(
            self.num_generations >= 2,
            f"`num_generations` is {self.num_generations}. Expected at least 2: GRPO compares a prompt's completions.",
        )
        if self.generation_batch_size is not None:
            return
        steps = self.steps_per_generation or self.gradient_accumulation_steps
        processes = int(os.environ.get("WORLD_SIZE", "1"))  # transformers sets its own up only after this check
        batch = self.per_device_train_batch_size * processes * steps
        _check(
            batch % self.num_generations == 0,
            f"a generation batch holds {batch} completions ({self.per_device_train_batch_size} per device x "
            f"{processes} processes x {steps} steps), which `num_generations` {self.num_generations} does not divide. "
            "Expected whole groups. Change `per_device_train_batch_size`, `gradient_accumulation_steps` or "
            "`num_generations`.",
        )
