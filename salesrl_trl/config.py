"""What a recipe may set: fields, their units and their checks.

Owns validation and nothing else. Behaviour classes receive plain arguments, never these objects. Fields that TRL or
transformers already has are theirs (`GRPOConfig`, `ModelConfig`).
"""

import dataclasses
import json
import os
import re
import urllib.parse
from dataclasses import dataclass, field
from typing import Any

from trl import GRPOConfig

from salesrl_trl.data.prompts import PROMPT_STYLES
from salesrl_trl.errors import ConfigError
from salesrl_trl.kl.controller import ControlLaw, KLTarget
from salesrl_trl.kl.estimators import ESTIMATORS, LARGEST_CLAMP
from salesrl_trl.kl.penalty import PenaltySettings
from salesrl_trl.reward.judge import AGGREGATIONS
from salesrl_trl.reward.provider import RESPONSE_FORMATS
from salesrl_trl.reward.scoring import MISSING_RULES

DEFAULT_BRANCHES = ("fairness", "hallucination")
ALL_STEPS = 2**62
"""More than any run has."""


def _help(text: str, **metadata: Any) -> dict[str, Any]:
    return {"help": text, **metadata}


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


def _check_choice(config: Any, name: str, choices: Any) -> None:
    value = getattr(config, name)
    _check(value in choices, f"`{name}` is {value!r}. Expected one of: {', '.join(choices)}.")


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
        _check_choice(self, "prompt_style", PROMPT_STYLES)
        for name in ("max_train_rows", "max_eval_rows"):
            value = getattr(self, name)
            _check(value is None or value > 0, f"`{name}` is {value}. Expected at least 1, or nothing for all rows.")


def _check_url(setting: str, url: str | None) -> None:
    if url is None:
        return
    _check(
        "@" not in urllib.parse.urlsplit(url).netloc,
        f"`{setting}` holds credentials. Expected an address without them: logs and errors name it. Keys go into an "
        "environment variable.",
    )
    _check(
        url.startswith(("http://", "https://")),
        f"`{setting}` is {url!r}. Expected an address that starts with http:// or https://.",
    )


def _json(setting: str, value: Any, kind: type) -> Any:
    """A setting that is a structure in YAML and its JSON on the command line."""
    expected = "a mapping" if kind is dict else "a list"
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise ConfigError(
                f"`{setting}` is not JSON (column {error.colno}). Expected {expected}, in YAML or as JSON."
            ) from None
    _check(isinstance(value, kind), f"`{setting}` is a {type(value).__name__}. Expected {expected}.")
    return value


@dataclass(kw_only=True)
class JudgeProviderConfig:
    """One entry of `judge_providers`.

    Args:
        name (`str`):
            In metrics, logs and reason codes.
        base_url (`str`):
            OpenAI-style address, `/v1` included.
        model (`str`):
            Model name to ask for.
        api_key_env (`str`, *optional*):
            Name of the environment variable that holds the key.
        weight (`float`, *optional*, defaults to `1.0`):
            Share of the verdicts beside the others' weights; 0 for a provider that only steps in.
        max_concurrency (`int`, *optional*):
            Calls in flight in all; `judge_max_concurrency` when not given.
        timeout_s (`float`, *optional*):
            Seconds one attempt may take; `judge_timeout_s` when not given.
        response_format (`str`, *optional*, defaults to `"auto"`):
            `json_schema` holds the model to the verdict's schema, `text` asks for it in words, `auto` tries the first
            and falls back to the second.
        temperature (`float`, *optional*, defaults to `0.0`):
            `null` for models that take none.
        max_completion_tokens (`int`, *optional*, defaults to `512`):
            Room for the verdict, and for a reasoning model's thoughts.
        extra_body (`dict`, *optional*):
            Further fields of every request, for example `{"chat_template_kwargs": {"enable_thinking": false}}`.
        usd_per_million_prompt_tokens (`float`, *optional*, defaults to `0.0`):
            Price, for the cost metrics.
        usd_per_million_completion_tokens (`float`, *optional*, defaults to `0.0`):
            Price, for the cost metrics.
    """

    name: str
    base_url: str
    model: str
    api_key_env: str | None = None
    weight: float = 1.0
    max_concurrency: int | None = None
    timeout_s: float | None = None
    response_format: str = "auto"
    temperature: float | None = 0.0
    max_completion_tokens: int = 512
    extra_body: dict[str, Any] = field(default_factory=dict)
    usd_per_million_prompt_tokens: float = 0.0
    usd_per_million_completion_tokens: float = 0.0

    def __post_init__(self) -> None:
        where = f"judge_providers[{self.name}]"
        _check(
            bool(re.fullmatch(r"[A-Za-z0-9_-]+", str(self.name))),
            f"a provider of `judge_providers` is named {self.name!r}. Expected letters, digits, - and _.",
        )
        _check_url(f"{where}.base_url", self.base_url)
        _check(self.weight >= 0, f"`{where}.weight` is {self.weight}. Expected 0 or more.")
        _check(
            self.response_format in RESPONSE_FORMATS,
            f"`{where}.response_format` is {self.response_format!r}. Expected one of: {', '.join(RESPONSE_FORMATS)}.",
        )
        _check(isinstance(self.extra_body, dict), f"`{where}.extra_body` is no mapping. Expected fields of a request.")
        for name in ("max_concurrency", "timeout_s", "max_completion_tokens"):
            value = getattr(self, name)
            _check(value is None or value > 0, f"`{where}.{name}` is {value}. Expected more than 0.")


@dataclass
class RewardConfig:
    """The services that score, and how patiently they are asked.

    Args:
        rag_base_url (`str`, *optional*):
            Address of the RAG service before `/v1/rag/...`. Without one the recipe starts the embedded service.
        rag_api_key_env (`str`, *optional*):
            Name of the environment variable that holds the RAG service's key.
        vector_store_path (`str`, *optional*):
            Folder that `scripts/build_vector_store.py` wrote, searched in place of a RAG service.
        embedding_base_url (`str`, *optional*):
            OpenAI-style address of the embeddings that the store was built with, `/v1` included.
        embedding_model (`str`, *optional*):
            The embedding model's name there.
        embedding_api_key_env (`str`, *optional*):
            Name of the environment variable that holds the embedding service's key.
        embedding_max_chars (`int`, *optional*, defaults to `6000`):
            Length to which a question is cut before it is embedded.
        judge_base_url (`str`, *optional*):
            OpenAI-style address of the judge, `/v1` included. Without one the recipe starts the embedded judge.
        judge_model (`str`, *optional*, defaults to `"salesrl-judge"`):
            Model name to ask the judge for.
        judge_api_key_env (`str`, *optional*):
            Name of the environment variable that holds the judge's key.
        judge_providers (`list`, *optional*):
            Several judges instead of the one above, in fallback order: a list of mappings as in
            `JudgeProviderConfig`, on the command line as JSON.
        judge_repeats (`int`, *optional*, defaults to `1`):
            Verdicts for each answer.
        judge_aggregation (`str`, *optional*, defaults to `"mean"`):
            How several verdicts become one: mean, median or min.
        rubric_dir (`str`, *optional*):
            Folder with a `<branch>.txt` for each branch whose packaged rubric is not wanted, or that has none.
        branch_reward_weights (`dict`, *optional*):
            Branch to component to weight, for example `{"fairness": {"judge": 0.8, "margin": 0.2}}`. Components are
            `judge`, `margin`, `retrieval`, `format` and `judge_<rubric>`. A branch that is not named weighs `judge`
            alone.
        missing_component (`str`, *optional*, defaults to `"none"`):
            A completion that lacks a component has no reward (`none`), or the others stand in for it (`reweight`).
        rag_score_threshold (`float`, *optional*, defaults to `0.03`):
            Passages below this normalised score in [0, 1] are left out. Raw conversations score near 0.09 in the
            embedded service, good queries 0.2 to 0.6. By most embedding models unrelated texts score 0.2 to 0.6.
        rag_top_k (`int`, *optional*, defaults to `3`):
            Most passages to retrieve.
        rag_timeout_s (`float`, *optional*, defaults to `30.0`):
            Seconds one attempt at a RAG endpoint may take.
        judge_timeout_s (`float`, *optional*, defaults to `60.0`):
            Seconds one attempt at the judge may take.
        max_attempts (`int`, *optional*, defaults to `3`):
            Attempts of a call that may fail, the first included. Being told to come back later is no failure.
        rag_max_concurrency (`int`, *optional*, defaults to `64`):
            Most calls in flight to each RAG endpoint, of all processes together.
        judge_max_concurrency (`int`, *optional*, defaults to `64`):
            Most calls in flight to a judge, of all processes together.
        initial_concurrency (`int`, *optional*, defaults to `8`):
            Calls in flight to each service at first, of each process. The limit grows by half with each round of
            answers until the service says 429.
        hedge_fraction (`float`, *optional*, defaults to `0.05`):
            Most extra requests for calls that are late, as a share of all; 0 for none.
        outage_patience_s (`float`, *optional*, defaults to `30.0`):
            Seconds that calls wait for a service that is down to come back, counted from when it went down; after that
            they fail at once, single probes aside.
        reward_process (`bool`, *optional*):
            Run the reward chain in a process of its own, where it takes no time from vLLM, which is Python too. When
            not given, so on a GPU, and not on a CPU, where it is one more process for a few cores.
        warm_up_services (`bool`, *optional*, defaults to `True`):
            Ask both RAG endpoints and every judge once before the first step, and stop if a needed one can't answer.
        cache_answers (`bool`, *optional*, defaults to `True`):
            Keep the 8B answers of a configured RAG service, and the verdicts on them, in `output_dir`, so that a
            resumed run does not ask again. They hold what customers and services said, in plain text. Without it
            nothing outlives a call, and equal calls are shared only while they are under way.
        reference_cache (`str`, *optional*):
            File that keeps the 32B endpoint's answers for later runs; `references.sqlite` in `$SALESRL_CACHE_DIR`, or
            else in `~/.cache/salesrl_trl`, when not given. Delete it when the endpoint's knowledge changes; an empty
            string keeps none.
        reward_deadline_s (`float`, *optional*, defaults to `300.0`):
            Seconds that a completion's reward may take from its start; a batch takes no longer from its last one. Keep
            it well under the process group's timeout (600 s for NCCL).
        invalid_action_reward (`float`, *optional*, defaults to `0.0`):
            Reward of a completion that is no action; the judge's scores lie in [0, 1].
    """

    rag_base_url: str | None = field(default=None, metadata=_help("RAG service; embedded if not given"))
    rag_api_key_env: str | None = field(default=None, metadata=_help("environment variable with the RAG key"))
    vector_store_path: str | None = field(default=None, metadata=_help("local vector store in place of a RAG service"))
    embedding_base_url: str | None = field(default=None, metadata=_help("embeddings of the store, with /v1"))
    embedding_model: str | None = field(default=None, metadata=_help("the embedding model's name"))
    embedding_api_key_env: str | None = field(default=None, metadata=_help("environment variable with that key"))
    embedding_max_chars: int = field(default=6000, metadata=_help("characters of a question that are embedded"))
    judge_base_url: str | None = field(default=None, metadata=_help("judge, with /v1; embedded if not given"))
    judge_model: str = field(default="salesrl-judge", metadata=_help("the judge's model name"))
    judge_api_key_env: str | None = field(default=None, metadata=_help("environment variable with the judge's key"))
    judge_providers: list[Any] | str | None = field(default=None, metadata=_help("several judges, in fallback order"))
    judge_repeats: int = field(default=1, metadata=_help("verdicts for each answer"))
    judge_aggregation: str = field(default="mean", metadata=_help("mean, median or min of several verdicts"))
    rubric_dir: str | None = field(default=None, metadata=_help("folder of <branch>.txt rubrics"))
    branch_reward_weights: dict[str, Any] | str | None = field(
        default=None, metadata=_help("branch to component to weight; the judge alone if not given")
    )
    missing_component: str = field(default="none", metadata=_help("none or reweight"))
    rag_score_threshold: float = field(default=0.03, metadata=_help("least normalised passage score"))
    rag_top_k: int = field(default=3, metadata=_help("most passages to retrieve"))
    rag_timeout_s: float = field(default=30.0, metadata=_help("seconds per attempt at a RAG endpoint"))
    judge_timeout_s: float = field(default=60.0, metadata=_help("seconds per attempt at the judge"))
    max_attempts: int = field(default=3, metadata=_help("attempts for a call, the first included"))
    rag_max_concurrency: int = field(default=64, metadata=_help("most calls in flight to each RAG endpoint, in all"))
    judge_max_concurrency: int = field(default=64, metadata=_help("most calls in flight to a judge, in all"))
    initial_concurrency: int = field(default=8, metadata=_help("calls in flight at first, per process and service"))
    hedge_fraction: float = field(default=0.05, metadata=_help("most extra requests for late calls"))
    outage_patience_s: float = field(default=30.0, metadata=_help("seconds a call waits for a dead service"))
    reward_process: bool | None = field(default=None, metadata=_help("run the reward chain in its own process"))
    warm_up_services: bool = field(default=True, metadata=_help("ask every service once before the first step"))
    cache_answers: bool = field(default=True, metadata=_help("keep answers and verdicts in output_dir"))
    reference_cache: str | None = field(default=None, metadata=_help("file that keeps 32B answers; empty for none"))
    reward_deadline_s: float = field(default=300.0, metadata=_help("seconds that a completion's reward may take"))
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
            "initial_concurrency",
            "judge_repeats",
            "embedding_max_chars",
            "reward_deadline_s",
        )
        _check(0 <= self.hedge_fraction <= 1, f"`hedge_fraction` is {self.hedge_fraction}. Expected 0 to 1.")
        _check(self.outage_patience_s >= 0, f"`outage_patience_s` is {self.outage_patience_s}. Expected 0 or more.")
        _check_choice(self, "judge_aggregation", AGGREGATIONS)
        _check_choice(self, "missing_component", MISSING_RULES)
        _check_url("rag_base_url", self.rag_base_url)
        _check_url("judge_base_url", self.judge_base_url)
        self._check_vector_store()
        _check(
            self.judge_providers is None or self.judge_base_url is None,
            "both `judge_providers` and `judge_base_url` are given. Expected one of them: list that address among the "
            "providers.",
        )
        self.parsed_judge_providers()
        self.parsed_branch_weights()

    def _check_vector_store(self) -> None:
        _check_url("embedding_base_url", self.embedding_base_url)
        embedding = (self.embedding_base_url, self.embedding_model)
        if self.vector_store_path is None:
            _check(
                embedding == (None, None),
                "`embedding_base_url` or `embedding_model` is given without `vector_store_path`. Expected all three.",
            )
            return
        _check(
            self.rag_base_url is None,
            "both `rag_base_url` and `vector_store_path` are given. Expected one of them to retrieve from.",
        )
        _check(
            None not in embedding,
            "`vector_store_path` is given without `embedding_base_url` and `embedding_model`. Expected those that the "
            "store was built with.",
        )

    def parsed_judge_providers(self) -> list[JudgeProviderConfig]:
        """`judge_providers`, checked; empty where none are given."""
        if self.judge_providers is None:
            return []
        known = {each.name for each in dataclasses.fields(JudgeProviderConfig)}
        providers = []
        for entry in _json("judge_providers", self.judge_providers, list):
            _check(isinstance(entry, dict), f"`judge_providers` holds a {type(entry).__name__}. Expected mappings.")
            lacking, unknown = {"name", "base_url", "model"} - entry.keys(), entry.keys() - known
            _check(
                not lacking and not unknown,
                f"a provider of `judge_providers` lacks {sorted(lacking)} and has unknown {sorted(unknown)}. Expected "
                f"name, base_url and model, and perhaps {', '.join(sorted(known - {'name', 'base_url', 'model'}))}.",
            )
            providers.append(JudgeProviderConfig(**entry))
        names = [provider.name for provider in providers]
        _check(
            bool(names) and len(set(names)) == len(names) and any(provider.weight for provider in providers),
            f"`judge_providers` names {names}. Expected at least one provider, each name once, one with a weight.",
        )
        return providers

    def parsed_branch_weights(self) -> dict[str, dict[str, float]]:
        """`branch_reward_weights`, as far as can be checked without the branches; empty where none are given."""
        if self.branch_reward_weights is None:
            return {}
        weights = _json("branch_reward_weights", self.branch_reward_weights, dict)
        for branch, components in weights.items():
            _check(
                isinstance(components, dict) and all(isinstance(w, int | float) for w in components.values()),
                f"`branch_reward_weights` of {branch!r} is {components!r}. Expected a mapping of component to number.",
            )
        return weights  # type: ignore[no-any-return]


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
class TelemetryConfig:
    """What is measured and told of a run.

    Args:
        timing (`bool`, *optional*, defaults to `True`):
            Measure the phases of each step, throughput and memory. Without it there are no heartbeats and no trace.
        perf_logging_steps (`int`, *optional*, defaults to `1`):
            Log throughput, utilisation and memory at every so many-th step, over the steps since the last time; takes
            effect at steps that are logged at all (`logging_steps`).
        peak_tflops (`float`, *optional*):
            Dense bf16 peak of one device in TFLOP/s, for utilisation on a chip that the table does not know.
        trace_steps (`str`, *optional*, defaults to `"1:50"`):
            Steps that go into `trace.json`: first and last, `"100:"` for all from there on, `""` for no trace. A step
            that fails goes into it whatever its number.
        trace_max_mb (`float`, *optional*, defaults to `64.0`):
            Largest trace in MB. Spans beyond it are left out.
        heartbeat_s (`float`, *optional*, defaults to `10.0`):
            Tell of a phase that lasts longer, then at every doubling; 0 for never.
        quick_eval_steps (`int`, *optional*, defaults to `0`):
            Evaluate greedily at every so many-th step; 0 for never.
        quick_eval_rows (`int`, *optional*, defaults to `16`):
            Held-out rows of such an evaluation, the same all through the run, spread evenly over the branches.
        quick_eval_best (`str`, *optional*):
            Keep the best policy in `OUTPUT_DIR/best`, by `reward` (the mean over all rows), `worst_branch`, or the
            score of the branch named here. An evaluation of which less than `min_valid_reward_fraction` of a branch
            could be scored is never the best.
    """

    timing: bool = field(default=True, metadata=_help("measure phases, throughput and memory"))
    perf_logging_steps: int = field(default=1, metadata=_help("log throughput and memory at every so many-th step"))
    peak_tflops: float | None = field(default=None, metadata=_help("bf16 peak of a chip the table does not know"))
    trace_steps: str = field(default="1:50", metadata=_help("steps in trace.json, FIRST:LAST; empty for none"))
    trace_max_mb: float = field(default=64.0, metadata=_help("largest trace.json"))
    heartbeat_s: float = field(default=10.0, metadata=_help("tell of a phase that lasts longer; 0 for never"))
    quick_eval_steps: int = field(default=0, metadata=_help("greedy evaluation at every so many-th step; 0 for never"))
    quick_eval_rows: int = field(default=16, metadata=_help("held-out rows of a quick evaluation"))
    quick_eval_best: str | None = field(
        default=None, metadata=_help("keep the best policy by: reward, worst_branch or a branch")
    )

    def __post_init__(self) -> None:
        _check_positive(self, "perf_logging_steps", "trace_max_mb", "quick_eval_rows")
        for name in ("heartbeat_s", "quick_eval_steps"):
            value = getattr(self, name)
            _check(value >= 0, f"`{name}` is {value}. Expected 0 for never, or more.")
        peak = self.peak_tflops
        _check(peak is None or peak > 0, f"`peak_tflops` is {peak}. Expected more than 0, such as 989.4.")
        self.traced_steps()

    def traced_steps(self) -> range:
        """`trace_steps` as numbers, counted from 1."""
        if not self.trace_steps:
            return range(0)
        match = re.fullmatch(r"(\d+):(\d*)", str(self.trace_steps))
        steps = range(int(match[1]), int(match[2]) + 1 if match[2] else ALL_STEPS) if match else range(0)
        _check(
            len(steps) > 0,
            f"`trace_steps` is {self.trace_steps!r}. Expected FIRST:LAST such as '1:50', FIRST: for all from there "
            "on, or nothing for no trace; in YAML between quotes, or 1:50 is read as 110.",
        )
        return steps

    def check_branches(self, branches: list[str]) -> None:
        """Raises `ConfigError` where the best policy is to be found by a branch that there is none of."""
        known = ("reward", "worst_branch", *branches)
        _check(
            self.quick_eval_best is None or self.quick_eval_best in known,
            f"`quick_eval_best` is {self.quick_eval_best!r}. Expected one of: {', '.join(known)}.",
        )


@dataclass
class SalesGRPOConfig(GRPOConfig):
    """TRL's `GRPOConfig` and what `SalesGRPOTrainer` adds to it.

    Args:
        branches (`list[str]`, *optional*, defaults to `["fairness", "hallucination"]`):
            Branch names a row may carry. Each needs a rubric.
        branch_kl (`dict`, *optional*):
            Branch to KL coefficient and target band in nats per token, for example
            `{"fairness": {"beta": 0.1, "low": 0.02, "high": 0.06}}`, perhaps with `beta_min` and `beta_max` (when not
            given, a hundredth and a hundred times `beta`). Without `low` and `high` a coefficient stays as it is. A
            branch that is not named has the fixed coefficient `beta`. Where all coefficients are 0 there is no KL, and
            no reference model is loaded.
        kl_control (`bool`, *optional*, defaults to `True`):
            Move the coefficients. Without it they stay, and the bands are only watched.
        kl_estimator (`str`, *optional*, defaults to `"k3"`):
            `k1`, `k2` or `k3`, as in http://joschu.net/blog/kl-approx.html; TRL has k3. With `use_bias_correction_kl`
            k1 and k3 have the KL's gradient on average, k2 has another one; without it k2 has, and k1 has none.
        kl_log_ratio_clamp (`float`, *optional*, defaults to `10.0`):
            Log-ratio in nats beyond which the penalty goes on as a straight line, up to 40; 0 for TRL's own formula,
            which overflows at 88.
        kl_update_steps (`int`, *optional*, defaults to `5`):
            Optimizer steps over which a branch's KL is measured before its coefficient moves.
        kl_cooldown_steps (`int`, *optional*, defaults to `0`):
            Optimizer steps after a change that are not measured.
        kl_raise_factor (`float`, *optional*, defaults to `1.15`):
            Factor of a coefficient whose branch is above its band.
        kl_lower_factor (`float`, *optional*, defaults to `0.85`):
            Factor of a coefficient whose branch is below its band.
        kl_recentre (`float`, *optional*, defaults to `0.5`):
            Share of such a step taken at the edges inside the band, and less towards its centre; 0 for none.
        kl_trend_windows (`float`, *optional*, defaults to `2.0`):
            A coefficient stays where the KL, going on as in the last window, is back in the band after so many; 0 to
            act at once.
        hybrid_reference_weight (`float`, *optional*, defaults to `0.0`):
            w in [0, 1]: a group's baseline is (1 - w) times its mean reward and w times the reward of the frozen 32B
            endpoint's answer. 0 is GRPO. A group without a reference has w = 0 and is counted.
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
        rollout_lookahead (`int`, *optional*, defaults to `0`):
            Optimizer steps that rollouts may be ahead of the one in training: so many later generation batches are
            generated, and are being scored, meanwhile. 0 is on-policy, with TRL's own results. More hides slow rewards
            and costs staleness of at most so many steps, which importance ratios correct: those of vLLM's sampling
            log-probs, or without vLLM the ratio of the clipped loss.
        scored_groups_first (`bool`, *optional*, defaults to `True`):
            While rewards are still out, train on the micro-batches whose groups are scored. The same update but for
            the order of its micro-batches and of completions within them; not done where a loss depends on those.
        references_ahead (`bool`, *optional*, defaults to `True`):
            Ask the 32B endpoint for the reference answers of a step's rows one step before its completions are there.
        held_out_eval (`bool`, *optional*, defaults to `True`):
            Evaluate on the held-out rows before the first and after the last step.
    """

    branches: list[str] = field(default_factory=lambda: list(DEFAULT_BRANCHES), metadata=_help("branch names"))
    branch_kl: dict[str, Any] | str | None = field(
        default=None, metadata=_help("branch to KL coefficient and band; `beta` for all if not given")
    )
    kl_control: bool = field(default=True, metadata=_help("let the coefficients follow their branches' KL"))
    kl_estimator: str = field(default="k3", metadata=_help("k1, k2 or k3"))
    kl_log_ratio_clamp: float = field(default=10.0, metadata=_help("nats; 0 for no clamp"))
    kl_update_steps: int = field(default=5, metadata=_help("optimizer steps in a window of the KL"))
    kl_cooldown_steps: int = field(default=0, metadata=_help("unmeasured optimizer steps after a change"))
    kl_raise_factor: float = field(default=1.15, metadata=_help("factor of a coefficient above its band"))
    kl_lower_factor: float = field(default=0.85, metadata=_help("factor of a coefficient below its band"))
    kl_recentre: float = field(default=0.5, metadata=_help("share of a step taken inside the band"))
    kl_trend_windows: float = field(default=2.0, metadata=_help("windows by which the KL's course is extended"))
    hybrid_reference_weight: float = field(default=0.0, metadata=_help("the 32B reference's share of the baseline"))
    vllm_enforce_eager: bool | None = field(default=None, metadata=_help("no compilation, no CUDA graphs"))
    vllm_load_format: str = field(default="auto", metadata=_help("auto, or dummy for a fast start"))
    vllm_dtype: str = field(default="auto", metadata=_help("vLLM's number format"))
    vllm_engine_kwargs: str = field(default="{}", metadata=_help("further vllm.LLM arguments, a JSON object"))
    max_sampling_logp_difference: float = field(default=0.5, metadata=_help("nats; above it the first step stops"))
    min_valid_reward_fraction: float = field(default=0.5, metadata=_help("below it a generation batch is skipped"))
    max_skipped_generations: int = field(default=3, metadata=_help("so many skipped in a row end the run"))
    rollout_lookahead: int = field(default=0, metadata=_help("optimizer steps that rollouts may be ahead"))
    scored_groups_first: bool = field(default=True, metadata=_help("train on what is scored while the rest is out"))
    references_ahead: bool = field(default=True, metadata=_help("ask for reference answers one step ahead"))
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
        self._check_lookahead()
        self._check_kl()
        _check(
            isinstance(self.parsed_engine_kwargs(), dict),
            f"`vllm_engine_kwargs` is {self.vllm_engine_kwargs!r}. Expected a JSON object of vllm.LLM arguments.",
        )

    def _check_lookahead(self) -> None:
        ahead = self.rollout_lookahead
        _check(ahead >= 0, f"`rollout_lookahead` is {ahead}. Expected 0, or optimizer steps to be ahead.")
        _check(
            ahead == 0 or not self.use_vllm or self.vllm_importance_sampling_correction,
            f"`rollout_lookahead` is {ahead} with `vllm_importance_sampling_correction: false`: nothing would correct "
            "for rollouts of earlier weights. Expected the correction, or a lookahead of 0.",
        )

    def _check_kl(self) -> None:
        _check_choice(self, "kl_estimator", ESTIMATORS)
        clamp = self.kl_log_ratio_clamp
        _check(
            0 <= clamp <= LARGEST_CLAMP,
            f"`kl_log_ratio_clamp` is {clamp}. Expected 0 for none, or up to {LARGEST_CLAMP:g}: the ratio times the "
            "estimate grows as e^(2 * clamp), which overflows above 44.",
        )
        weight = self.hybrid_reference_weight
        _check(0 <= weight <= 1, f"`hybrid_reference_weight` is {weight}. Expected 0 to 1.")
        _check(
            weight == 0 or self.multi_objective_aggregation == "sum_then_normalize",
            "`hybrid_reference_weight` is more than 0 with `multi_objective_aggregation: normalize_then_sum`, which "
            "has no group baseline. Expected `sum_then_normalize`.",
        )
        _check(
            self.kl_estimator != "k1" or self.use_bias_correction_kl or not self.kl_targets(),
            "`kl_estimator: k1` with `use_bias_correction_kl: false` pulls nowhere: its gradient is zero on average. "
            "Expected the correction, or k2 or k3.",
        )
        self.kl_law()
        self.kl_targets()

    def kl_targets(self) -> dict[str, KLTarget]:
        """Coefficient and band of every branch, in the order of `branches`; empty where there is no KL at all."""
        given = {} if self.branch_kl is None else _json("branch_kl", self.branch_kl, dict)
        unknown = sorted(set(given) - set(self.branches))
        _check(
            not unknown,
            f"`branch_kl` names {', '.join(unknown)}. Expected some of: {', '.join(self.branches)}. Name your "
            "branches in it, or give `--branch_kl {} --beta 0.05` for one coefficient.",
        )
        _check(
            not self.beta or set(given) != set(self.branches),
            f"`beta` is {self.beta} and `branch_kl` names every branch, so that `beta` says nothing. Expected one of "
            "them: leave out `beta`, or give `--branch_kl {}` for one coefficient.",
        )
        known = {each.name for each in dataclasses.fields(KLTarget)}
        targets = {}
        for branch in self.branches:
            entry = given.get(branch, {"beta": self.beta})
            _check(
                isinstance(entry, dict) and "beta" in entry and set(entry) <= known,
                f"`branch_kl` of {branch!r} is {entry!r}. Expected `beta`, and perhaps {', '.join(sorted(known))}.",
            )
            try:
                targets[branch] = KLTarget(**entry)
            except ConfigError as error:
                raise ConfigError(f"`branch_kl` of {branch!r}: {error}") from error
        return targets if any(target.beta for target in targets.values()) else {}

    def kl_law(self) -> ControlLaw | None:
        """How the coefficients move; `None` where they don't."""
        law = ControlLaw(
            update_steps=self.kl_update_steps,
            cooldown_steps=self.kl_cooldown_steps,
            raise_factor=self.kl_raise_factor,
            lower_factor=self.kl_lower_factor,
            recentre=self.kl_recentre,
            trend_windows=self.kl_trend_windows,
        )
        return law if self.kl_control else None

    def kl_penalty(self) -> PenaltySettings:
        """How a token's KL is estimated and weighed."""
        return PenaltySettings(
            estimator=self.kl_estimator,
            clamp=self.kl_log_ratio_clamp,
            bias_correction=self.use_bias_correction_kl,
            level=self.importance_sampling_level,
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
