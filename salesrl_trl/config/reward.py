"""The services that score. Owns addresses, limits, and how components become a reward.

Keys are named by their environment variable, never held. What depends on the branches is checked in `assembly`.
"""

import dataclasses
import re
from dataclasses import dataclass, field
from typing import Any

from salesrl_trl.config.checks import about, check, check_choice, check_finite, check_positive, check_url, structure
from salesrl_trl.reward.judge.client import AGGREGATIONS
from salesrl_trl.reward.judge.provider import RESPONSE_FORMATS
from salesrl_trl.reward.rag.client import RESERVED_FIELDS
from salesrl_trl.reward.scoring import MISSING_RULES
from salesrl_trl.types import DEFAULT_FORMAT, ActionFormat


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
        check(
            bool(re.fullmatch(r"[A-Za-z0-9_-]+", str(self.name))),
            f"a provider of `judge_providers` is named {self.name!r}. Expected letters, digits, - and _.",
        )
        check_finite(self, f"{where}.")
        check_url(f"{where}.base_url", self.base_url)
        check(self.weight >= 0, f"`{where}.weight` is {self.weight}. Expected 0 or more.")
        check(
            self.response_format in RESPONSE_FORMATS,
            f"`{where}.response_format` is {self.response_format!r}. Expected one of: {', '.join(RESPONSE_FORMATS)}.",
        )
        check(isinstance(self.extra_body, dict), f"`{where}.extra_body` is no mapping. Expected fields of a request.")
        for name in ("max_concurrency", "timeout_s", "max_completion_tokens"):
            value = getattr(self, name)
            check(value is None or value > 0, f"`{where}.{name}` is {value}. Expected more than 0.")


@dataclass
class RewardConfig:
    """The services that score, and how patiently they are asked.

    Args:
        allow_stand_ins (`bool`, *optional*, defaults to `False`):
            Let the embedded RAG service and judge, which know the demo alone, score rows, branches and rubrics of
            one's own. For trying things: the scores mean nothing. Without it such a run is refused.
        knowledge_file (`str`, *optional*):
            Documents that the embedded RAG service answers from, in place of the demo's: JSON lines of `{id, text}`,
            perhaps with a `title`.
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
        judge (`str`, *optional*):
            Dotted path of a judge of your own, a class that derives from `salesrl_trl.reward.judge.base.Judge`. It
            stands in place of the services above, which need no address then.
        reward_stages (`list[str]`, *optional*, defaults to none):
            Dotted paths of stages of your own, in their order: classes that derive from
            `salesrl_trl.reward.stage.RewardStage`.
        rubric_dir (`str`, *optional*):
            Folder with a `<branch>.txt` for each branch whose packaged rubric is not wanted, or that has none.
        branch_reward_weights (`dict`, *optional*):
            Branch to component to weight, for example `{"fairness": {"judge": 0.8, "margin": 0.2}}`. Components are
            `judge`, `margin`, `retrieval`, `format`, `judge_<rubric>`, and those of `reward_stages`. A branch that is
            not named weighs `judge` alone.
        missing_component (`str`, *optional*, defaults to `"none"`):
            A completion that lacks a component has no reward (`none`), or the others stand in for it (`reweight`).
        action_fields (`list[str]`, *optional*, defaults to `["user_profile", "rewritten_query", "history_summary"]`):
            The texts that the policy writes, by their names in its JSON and in the requests to the 8B endpoint. With
            others, a `prompt_template` has to ask for them, and services of one's own to take them.
        query_field (`str`, *optional*):
            Which of them is searched with and is never empty; `rewritten_query`, or the first where there is none.
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
            they fail at once, single probes aside. Not for a judge that another can stand in for, nor for the 32B
            endpoint where no reward and no baseline counts its answer.
        denied_cooldown_s (`float`, *optional*, defaults to `60.0`):
            Longest pause between two probes of a service that refuses the key or whose quota is used up. The first
            comes after a second, the next ones at doubling intervals.
        reward_process (`bool`, *optional*):
            Run the reward chain in a process of its own, where it takes no time from vLLM, which is Python too. When
            not given, so on a GPU, and not on a CPU, where it is one more process for a few cores.
        warm_up_services (`bool`, *optional*, defaults to `True`):
            Ask both RAG endpoints and every judge once before the first step, and stop if a needed one can't answer.
        cache_answers (`bool`, *optional*, defaults to `True`):
            Keep the 8B answers of a configured RAG service, and the verdicts on them, in `output_dir`, so that a
            resumed run does not ask again. They hold what customers and services said, in plain text. Without it
            neither outlives its call, and equal calls are shared only while they are under way.
        reference_cache (`str`, *optional*):
            File that keeps a configured 32B endpoint's answers for later runs; when not given, `references.sqlite` in
            `$SALESRL_CACHE_DIR`, or else in `salesrl_trl` under `$XDG_CACHE_HOME` or `~/.cache`. Delete it when the
            endpoint's knowledge changes (the warm-up notices what shows in 8 of its answers); an empty string keeps
            them for the run alone.
        reward_deadline_s (`float`, *optional*, defaults to `300.0`):
            Seconds that a completion's reward may take from its start; a batch takes no longer from its last one. Keep
            it well under the process group's timeout (600 s for NCCL).
        invalid_action_reward (`float`, *optional*, defaults to `0.0`):
            Reward of a completion that is no action; the judge's scores lie in [0, 1].
    """

    allow_stand_ins: bool = field(default=False, metadata=about("let embedded services score what they don't know"))
    knowledge_file: str | None = field(default=None, metadata=about("the embedded RAG service's documents"))
    rag_base_url: str | None = field(default=None, metadata=about("RAG service; embedded if not given"))
    rag_api_key_env: str | None = field(default=None, metadata=about("environment variable with the RAG key"))
    vector_store_path: str | None = field(default=None, metadata=about("local vector store in place of a RAG service"))
    embedding_base_url: str | None = field(default=None, metadata=about("embeddings of the store, with /v1"))
    embedding_model: str | None = field(default=None, metadata=about("the embedding model's name"))
    embedding_api_key_env: str | None = field(default=None, metadata=about("environment variable with that key"))
    embedding_max_chars: int = field(default=6000, metadata=about("characters of a question that are embedded"))
    judge_base_url: str | None = field(default=None, metadata=about("judge, with /v1; embedded if not given"))
    judge_model: str = field(default="salesrl-judge", metadata=about("the judge's model name"))
    judge_api_key_env: str | None = field(default=None, metadata=about("environment variable with the judge's key"))
    judge_providers: list[Any] | str | None = field(default=None, metadata=about("several judges, in fallback order"))
    judge_repeats: int = field(default=1, metadata=about("verdicts for each answer"))
    judge_aggregation: str = field(default="mean", metadata=about("mean, median or min of several verdicts"))
    judge: str | None = field(default=None, metadata=about("dotted path of a judge of your own"))
    reward_stages: list[str] = field(
        default_factory=list, metadata=about("dotted paths of stages of the reward of your own")
    )
    rubric_dir: str | None = field(default=None, metadata=about("folder of <branch>.txt rubrics"))
    branch_reward_weights: dict[str, Any] | str | None = field(
        default=None, metadata=about("branch to component to weight; the judge alone if not given")
    )
    missing_component: str = field(default="none", metadata=about("none or reweight"))
    action_fields: list[str] = field(
        default_factory=lambda: list(DEFAULT_FORMAT.fields),
        metadata=about("names of the texts that the policy writes"),
    )
    query_field: str | None = field(default=None, metadata=about("which of action_fields is searched with"))
    rag_score_threshold: float = field(default=0.03, metadata=about("least normalised passage score"))
    rag_top_k: int = field(default=3, metadata=about("most passages to retrieve"))
    rag_timeout_s: float = field(default=30.0, metadata=about("seconds per attempt at a RAG endpoint"))
    judge_timeout_s: float = field(default=60.0, metadata=about("seconds per attempt at the judge"))
    max_attempts: int = field(default=3, metadata=about("attempts for a call, the first included"))
    rag_max_concurrency: int = field(default=64, metadata=about("most calls in flight to each RAG endpoint, in all"))
    judge_max_concurrency: int = field(default=64, metadata=about("most calls in flight to a judge, in all"))
    initial_concurrency: int = field(default=8, metadata=about("calls in flight at first, per process and service"))
    hedge_fraction: float = field(default=0.05, metadata=about("most extra requests for late calls"))
    outage_patience_s: float = field(default=30.0, metadata=about("seconds a call waits for a dead service"))
    denied_cooldown_s: float = field(default=60.0, metadata=about("longest pause between probes after refusals"))
    reward_process: bool | None = field(default=None, metadata=about("run the reward chain in its own process"))
    warm_up_services: bool = field(default=True, metadata=about("ask every service once before the first step"))
    cache_answers: bool = field(default=True, metadata=about("keep answers and verdicts in output_dir"))
    reference_cache: str | None = field(default=None, metadata=about("file that keeps 32B answers; empty for none"))
    reward_deadline_s: float = field(default=300.0, metadata=about("seconds that a completion's reward may take"))
    invalid_action_reward: float = field(default=0.0, metadata=about("reward of a completion that is no action"))

    def action_format(self) -> ActionFormat:
        """What an action consists of."""
        names = tuple(self.action_fields)
        usual = DEFAULT_FORMAT.query if DEFAULT_FORMAT.query in names else names[0]
        return ActionFormat(fields=names, query=self.query_field or usual)

    def _check_action(self) -> None:
        names = self.action_fields
        check(
            len(names) > 0 and len(set(names)) == len(names),
            f"`action_fields` is {names}. Expected at least one name, each once.",
        )
        bad = [name for name in names if name in RESERVED_FIELDS or not re.fullmatch(r"[A-Za-z_]\w*", str(name))]
        check(
            not bad,
            f"`action_fields` names {', '.join(map(str, bad))}. Expected letters, digits and _, and none of what else "
            f"stands in a request: {', '.join(RESERVED_FIELDS)}.",
        )
        check(
            self.query_field is None or self.query_field in names,
            f"`query_field` is {self.query_field!r}. Expected one of `action_fields`: {', '.join(names)}.",
        )

    @property
    def embeds_rag(self) -> bool:
        """Whether the embedded RAG service answers."""
        return self.rag_base_url is None and self.vector_store_path is None

    @property
    def embeds_judge(self) -> bool:
        """Whether the embedded judge scores."""
        return self.judge is None and self.judge_base_url is None and self.judge_providers is None

    def __post_init__(self) -> None:
        check_finite(self)
        check(
            self.knowledge_file is None or self.embeds_rag,
            "`knowledge_file` is given beside `rag_base_url` or `vector_store_path`: only the embedded RAG service "
            "reads it. Expected one of them.",
        )
        check(
            0 <= self.rag_score_threshold <= 1,
            f"`rag_score_threshold` is {self.rag_score_threshold}. Expected 0 to 1: passage scores are normalised.",
        )
        check(1 <= self.rag_top_k <= 50, f"`rag_top_k` is {self.rag_top_k}. Expected 1 to 50.")
        check(
            self.invalid_action_reward <= 0.5,
            f"`invalid_action_reward` is {self.invalid_action_reward}. Expected at most 0.5: it is to be a low reward "
            "beside the judge's 0 to 1.",
        )
        check_positive(
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
            "denied_cooldown_s",
        )
        check(0 <= self.hedge_fraction <= 1, f"`hedge_fraction` is {self.hedge_fraction}. Expected 0 to 1.")
        check(self.outage_patience_s >= 0, f"`outage_patience_s` is {self.outage_patience_s}. Expected 0 or more.")
        self._check_action()
        check_choice(self, "judge_aggregation", AGGREGATIONS)
        check_choice(self, "missing_component", MISSING_RULES)
        check_url("rag_base_url", self.rag_base_url)
        check_url("judge_base_url", self.judge_base_url)
        self._check_vector_store()
        check(
            self.judge_providers is None or self.judge_base_url is None,
            "both `judge_providers` and `judge_base_url` are given. Expected one of them: list that address among the "
            "providers.",
        )
        check(
            self.judge is None or (self.judge_base_url, self.judge_providers, self.judge_api_key_env) == (None,) * 3,
            "`judge` is given beside `judge_base_url`, `judge_providers` or `judge_api_key_env`. Expected one kind of "
            "judge: a class of your own needs no address and no key.",
        )
        self.parsed_judge_providers()
        self.parsed_branch_weights()

    def _check_vector_store(self) -> None:
        check_url("embedding_base_url", self.embedding_base_url)
        embedding = (self.embedding_base_url, self.embedding_model)
        if self.vector_store_path is None:
            check(
                embedding == (None, None),
                "`embedding_base_url` or `embedding_model` is given without `vector_store_path`. Expected all three.",
            )
            return
        check(
            self.rag_base_url is None,
            "both `rag_base_url` and `vector_store_path` are given. Expected one of them to retrieve from.",
        )
        check(
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
        for entry in structure("judge_providers", self.judge_providers, list):
            check(isinstance(entry, dict), f"`judge_providers` holds a {type(entry).__name__}. Expected mappings.")
            lacking, unknown = {"name", "base_url", "model"} - entry.keys(), entry.keys() - known
            check(
                not lacking and not unknown,
                f"a provider of `judge_providers` lacks {sorted(lacking)} and has unknown {sorted(unknown)}. Expected "
                f"name, base_url and model, and perhaps {', '.join(sorted(known - {'name', 'base_url', 'model'}))}.",
            )
            providers.append(JudgeProviderConfig(**entry))
        names = [provider.name for provider in providers]
        check(
            bool(names) and len(set(names)) == len(names) and any(provider.weight for provider in providers),
            f"`judge_providers` names {names}. Expected at least one provider, each name once, one with a weight.",
        )
        return providers

    def parsed_branch_weights(self) -> dict[str, dict[str, float]]:
        """`branch_reward_weights`, as far as can be checked without the branches; empty where none are given."""
        if self.branch_reward_weights is None:
            return {}
        weights = structure("branch_reward_weights", self.branch_reward_weights, dict)
        for branch, components in weights.items():
            check(
                isinstance(components, dict) and all(isinstance(w, int | float) for w in components.values()),
                f"`branch_reward_weights` of {branch!r} is {components!r}. Expected a mapping of component to number.",
            )
        return weights  # type: ignore[no-any-return]
