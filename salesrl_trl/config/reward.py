"""Settings of the services that score: addresses, limits, and the weights of the reward's components.

Keys are named by their environment variable, and never held. `build.checks.reward` compares the settings with the
branches.
"""

import re
from dataclasses import dataclass, field

from salesrl_trl.config.checks import (
    about,
    check,
    check_choice,
    check_finite,
    check_positive,
    check_types,
    check_url,
    structure,
)
from salesrl_trl.config.judge import JudgeProviderConfig, judge_providers_of
from salesrl_trl.config.replay import ReplayConfig
from salesrl_trl.config.spending_limits import check_budget
from salesrl_trl.reward.judge.judge_client import AGGREGATIONS
from salesrl_trl.reward.judge.noise import MIN_CALLS
from salesrl_trl.reward.judge.provider import RESPONSE_FORMATS
from salesrl_trl.reward.rag.rag_client import RESERVED_FIELDS
from salesrl_trl.reward.sample_lines import KINDS
from salesrl_trl.reward.scoring import MISSING_RULES
from salesrl_trl.types import DEFAULT_FORMAT, ActionFormat

SALES = "sales"
"""The packaged chain, in `reward_funcs`."""


@dataclass
class RewardConfig(ReplayConfig):
    """The services that score, the limits of calls to them, and the formula of the reward.

    Args:
        allow_stand_ins (`bool`, *optional*, defaults to `False`):
            Whether the embedded RAG service and judge may score your own rows, branches and rubrics. They know only
            the demo, so the scores mean nothing: for trying things. Without it such a run is refused.
        knowledge_file (`str`, *optional*):
            Documents for the embedded RAG service, instead of the demo's: JSON lines of `{id, text}`, perhaps with a
            `title`.
        rag_base_url (`str`, *optional*):
            Address of the RAG service, before `/v1/rag/...`. Without one the recipe starts the embedded service.
        rag_api_key_env (`str`, *optional*):
            Name of the environment variable that holds the RAG service's key.
        judge_base_url (`str`, *optional*):
            OpenAI-style address of the judge, `/v1` included. Without one the recipe starts the embedded judge.
        judge_model (`str`, *optional*, defaults to `"salesrl-judge"`):
            Name of the judge's model.
        judge_response_format (`str`, *optional*, defaults to `"auto"`):
            `response_format` of the one judge, as in `JudgeProviderConfig`.
        judge_max_completion_tokens (`int`, *optional*, defaults to `512`):
            Most tokens of a verdict of the one judge. A model that thinks needs more.
        judge_tokens_per_minute (`int`, *optional*):
            `tokens_per_minute` of the one judge, as in `JudgeProviderConfig`.
        judge_api_key_env (`str`, *optional*):
            Name of the environment variable that holds the judge's key.
        judge_providers (`list`, *optional*):
            Several judges instead of the one above, in fallback order: a list of mappings with the fields of
            `JudgeProviderConfig`, as JSON on the command line.
        judge_repeats (`int`, *optional*, defaults to `1`):
            Verdicts for each answer.
        judge_aggregation (`str`, *optional*, defaults to `"mean"`):
            The one score of several verdicts: their `mean`, `median` or `min`.
        reward_funcs (`list[str]`, *optional*, defaults to none):
            Dotted paths of reward functions of your own, in place of the RAG service and the judge: of TRL's
            signature, or with `@per_completion` or `@per_group`. `sales` among them is the packaged chain.
            `reward_weights` weighs them.
        judge (`str`, *optional*):
            Dotted path of a judge of your own, a class that derives from `salesrl_trl.reward.judge.base.Judge`. It
            replaces the judges above, which need no address then.
        reward_stages (`list[str]`, *optional*, defaults to none):
            Dotted paths of stages of your own, in their order: classes that derive from
            `salesrl_trl.reward.stage.RewardStage`.
        rubric_dir (`str`, *optional*):
            Folder with files `<branch>.txt`. Each replaces the packaged rubric of a branch, or adds one.
        branch_reward_weights (`dict`, *optional*):
            Branch to component to weight, for example `{"fairness": {"judge": 0.8, "margin": 0.2}}`. Components are
            `judge`, `margin`, `retrieval`, `format`, `judge_<rubric>`, and those of `reward_stages`. A branch that is
            not named has the weight of `judge` alone.
        missing_component (`str`, *optional*, defaults to `"none"`):
            Rule for a completion without one of its components: `none` gives no reward, `reweight` uses the others.
        action_fields (`list[str]`, *optional*, defaults to `["user_profile", "rewritten_query", "history_summary"]`):
            Names of the texts that the policy writes, in its JSON and in requests to the 8B endpoint. Other names need
            a `prompt_template` that asks for them, and services of your own that accept them.
        query_field (`str`, *optional*):
            The field that is searched with, which is never empty. Defaults to `rewritten_query`, or else to the first.
        rag_score_threshold (`float`, *optional*, defaults to `0.03`):
            Lowest normalised score of a passage, in [0, 1]. In the embedded service raw conversations score near 0.09
            and good queries 0.2 to 0.6. With most embedding models unrelated texts score 0.2 to 0.6.
        rag_top_k (`int`, *optional*, defaults to `3`):
            Most passages of an answer.
        rag_timeout_s (`float`, *optional*, defaults to `30.0`):
            Seconds that one attempt at a RAG endpoint may take.
        judge_timeout_s (`float`, *optional*, defaults to `60.0`):
            Seconds that one attempt at the judge may take.
        max_attempts (`int`, *optional*, defaults to `3`):
            Attempts of a call, the first included. An answer that says when to come back is not counted.
        judge_max_attempts (`int`, *optional*):
            The same for calls to a judge. Defaults to `max_attempts`. 1 for no retries: a completion whose verdict
            failed is then missing at once.
        rag_max_concurrency (`int`, *optional*, defaults to `64`):
            Most calls in flight to each RAG endpoint, of all processes together.
        judge_max_concurrency (`int`, *optional*, defaults to `64`):
            Most calls in flight to a judge, of all processes together.
        initial_concurrency (`int`, *optional*, defaults to `8`):
            Calls in flight to each service at the start, of each process. The limit grows by half with each round of
            answers until the service says 429.
        hedge_fraction (`float`, *optional*, defaults to `0.05`):
            Largest share of calls that are repeated because they are late; 0 for none.
        outage_patience_s (`float`, *optional*, defaults to `30.0`):
            Seconds that calls wait for a service that is down, counted from the start of the outage. After that they
            fail at once, except for single probes. Calls do not wait for a judge with a fallback, nor for the 32B
            endpoint if no reward and no baseline counts its answer.
        denied_cooldown_s (`float`, *optional*, defaults to `60.0`):
            Longest pause in seconds between two probes of a service that refuses the key, or whose quota is used up.
            The first pause is a second, and each one is twice as long as the last.
        max_calls (`int`, *optional*):
            Most requests to all services of the reward together, of the run and its resumes: every one that leaves
            counts. At the limit the run saves and ends.
        max_usd (`float`, *optional*):
            Most US dollars for judges, of the run and its resumes, by the prices in `judge_providers`.
        warm_up_services (`bool`, *optional*, defaults to `True`):
            Whether to ask both RAG endpoints and every judge once before the first step. The run stops if a necessary
            one can't answer.
        preflight_calls (`int`, *optional*):
            Calls of a preflight to each RAG endpoint and each judge: 0 for a single one, else 8 or more. Defaults to
            the calls that a step has in flight, from 32 to 128. Each judge is asked for so many verdicts.
        cache_answers (`bool`, *optional*, defaults to `True`):
            Whether to keep the 8B answers of a configured RAG service, and their verdicts, in `output_dir`. A resumed
            run then does not ask again. The files hold texts of customers and services in plain form. Without it only
            equal calls that are in flight at the same time are shared.
        reference_cache (`str`, *optional*):
            File that keeps the answers of a configured 32B endpoint for later runs. Defaults to `references.sqlite` in
            `$SALESRL_CACHE_DIR`, or else in `salesrl_trl` under `$XDG_CACHE_HOME` or `~/.cache`. An empty string keeps
            them for this run only. Delete the file when the endpoint's knowledge changes: the warm-up compares only 8
            of its answers.
        reward_deadline_s (`float`, *optional*, defaults to `300.0`):
            Seconds that a completion's reward may take from its start, and a batch from the start of its last one.
            Keep it well below the time-out of the process group (600 s for NCCL).
        verbose (`list[str]`, *optional*, defaults to none):
            Lines about every single completion, with its row's id. `scoring` shows rewards, failures and seconds.
            `completions` and `rag` show the texts of the policy and of the RAG service, which quote customers.
        invalid_action_reward (`float`, *optional*, defaults to `0.0`):
            Reward of a completion that is no valid action. The judge's scores are in [0, 1].
    """

    allow_stand_ins: bool = field(
        default=False, metadata=about("Let embedded services score rows and rubrics unknown to them.")
    )
    knowledge_file: str | None = field(default=None, metadata=about("Documents for the embedded RAG service."))
    rag_base_url: str | None = field(default=None, metadata=about("Address of the RAG service; default: embedded."))
    rag_api_key_env: str | None = field(default=None, metadata=about("Environment variable with the RAG key."))
    judge_base_url: str | None = field(
        default=None, metadata=about("Address of the judge, with /v1; default: embedded.")
    )
    judge_model: str = field(default="salesrl-judge", metadata=about("Name of the judge's model."))
    judge_response_format: str = field(
        default="auto", metadata=about("How the judge is held to the schema: auto, json_schema, text.")
    )
    judge_max_completion_tokens: int = field(
        default=512, metadata=about("Most tokens of a verdict, the judge's thoughts included.")
    )
    judge_tokens_per_minute: int | None = field(
        default=None, metadata=about("Most tokens of any minute of the one judge.")
    )
    judge_api_key_env: str | None = field(default=None, metadata=about("Environment variable with the judge's key."))
    judge_providers: list[object] | str | None = field(
        default=None, metadata=about("Several judges, in fallback order.")
    )
    judge_repeats: int = field(default=1, metadata=about("Verdicts for each answer."))
    judge_aggregation: str = field(
        default="mean", metadata=about("Score of several verdicts: `mean`, `median` or `min`.")
    )
    reward_funcs: list[str] = field(
        default_factory=list, metadata=about(f"Dotted paths of reward functions; `{SALES}` is the packaged chain.")
    )
    judge: str | None = field(default=None, metadata=about("Dotted path of a judge of your own."))
    reward_stages: list[str] = field(
        default_factory=list, metadata=about("Dotted paths of reward stages of your own.")
    )
    rubric_dir: str | None = field(default=None, metadata=about("Folder of <branch>.txt rubrics."))
    branch_reward_weights: dict[str, object] | str | None = field(
        default=None, metadata=about("Branch to component to weight; default: the judge alone.")
    )
    missing_component: str = field(
        default="none", metadata=about("Rule for a missing component: `none` (no reward) or `reweight`.")
    )
    action_fields: list[str] = field(
        default_factory=lambda: list(DEFAULT_FORMAT.fields),
        metadata=about("Names of the texts that the policy writes."),
    )
    query_field: str | None = field(default=None, metadata=about("The field of `action_fields` to search with."))
    rag_score_threshold: float = field(default=0.03, metadata=about("Lowest score of a passage, in [0, 1]."))
    rag_top_k: int = field(default=3, metadata=about("Most passages of an answer."))
    rag_timeout_s: float = field(default=30.0, metadata=about("Seconds of one attempt at a RAG endpoint."))
    judge_timeout_s: float = field(default=60.0, metadata=about("Seconds of one attempt at the judge."))
    max_attempts: int = field(default=3, metadata=about("Attempts of a call, the first included."))
    judge_max_attempts: int | None = field(
        default=None, metadata=about("Attempts of a call to a judge; default: `max_attempts`.")
    )
    rag_max_concurrency: int = field(
        default=64, metadata=about("Most calls in flight to each RAG endpoint, of all processes.")
    )
    judge_max_concurrency: int = field(
        default=64, metadata=about("Most calls in flight to a judge, of all processes.")
    )
    initial_concurrency: int = field(
        default=8, metadata=about("Calls in flight at the start, per process and service.")
    )
    hedge_fraction: float = field(default=0.05, metadata=about("Largest share of late calls that are repeated."))
    outage_patience_s: float = field(default=30.0, metadata=about("Seconds that calls wait for a dead service."))
    denied_cooldown_s: float = field(
        default=60.0, metadata=about("Longest pause between probes after a refused key, in seconds.")
    )
    max_calls: int | None = field(default=None, metadata=about("Most requests to all services of the reward."))
    max_usd: float | None = field(default=None, metadata=about("Most US dollars for judges, by their prices."))
    warm_up_services: bool = field(default=True, metadata=about("Ask every service once before the first step."))
    preflight_calls: int | None = field(
        default=None, metadata=about("Calls of a preflight to each service; default: those of a step.")
    )
    cache_answers: bool = field(default=True, metadata=about("Keep answers and verdicts in `output_dir`."))
    reference_cache: str | None = field(default=None, metadata=about("File that keeps 32B answers; empty for none."))
    reward_deadline_s: float = field(default=300.0, metadata=about("Seconds that a completion's reward may take."))
    verbose: list[str] = field(
        default_factory=list, metadata=about(f"Lines about single completions: {', '.join(KINDS)}.")
    )
    invalid_action_reward: float = field(default=0.0, metadata=about("Reward of a completion that is no action."))

    def action_format(self) -> ActionFormat:
        """The names of an action's fields, and the one that is searched with."""
        names = tuple(self.action_fields)
        usual = DEFAULT_FORMAT.query if DEFAULT_FORMAT.query in names else names[0]
        return ActionFormat(fields=names, query=self.query_field or usual)

    def _check_action(self) -> None:
        names = self.action_fields
        check(
            len(names) > 0 and len(set(names)) == len(names),
            f"`action_fields` is {names}. Expected at least one name, and each name once.",
        )
        bad = [name for name in names if name in RESERVED_FIELDS or not re.fullmatch(r"[A-Za-z_]\w*", str(name))]
        check(
            not bad,
            f"`action_fields` names {', '.join(map(str, bad))}. Expected letters, digits and _, and none of the "
            f"other fields of a request: {', '.join(RESERVED_FIELDS)}.",
        )
        check(
            self.query_field is None or self.query_field in names,
            f"`query_field` is {self.query_field!r}. Expected one of `action_fields`: {', '.join(names)}.",
        )

    @property
    def uses_services(self) -> bool:
        """Whether the packaged chain scores, with its RAG service and its judge."""
        return not self.asks_nobody and (not self.reward_funcs or SALES in self.reward_funcs)

    @property
    def embeds_rag(self) -> bool:
        """Whether the embedded RAG service answers."""
        return self.uses_services and self.rag_base_url is None

    @property
    def embeds_judge(self) -> bool:
        """Whether the embedded judge scores."""
        return (
            self.uses_services and self.judge is None and self.judge_base_url is None and self.judge_providers is None
        )

    def __post_init__(self) -> None:
        check_types(self)
        check_finite(self)
        self.check_replay()
        check(
            self.knowledge_file is None or self.embeds_rag or self.asks_nobody,
            "`knowledge_file` is given beside `rag_base_url`: only the embedded RAG service reads it. Expected one of "
            "them.",
        )
        check(
            0 <= self.rag_score_threshold <= 1,
            f"`rag_score_threshold` is {self.rag_score_threshold}. Expected 0 to 1: passage scores are normalised.",
        )
        check(1 <= self.rag_top_k <= 50, f"`rag_top_k` is {self.rag_top_k}. Expected 1 to 50.")
        check(
            self.invalid_action_reward <= 0.5,
            f"`invalid_action_reward` is {self.invalid_action_reward}. Expected at most 0.5: a low reward beside the "
            "judge's 0 to 1.",
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
            "judge_max_completion_tokens",
            "reward_deadline_s",
            "denied_cooldown_s",
        )
        for kind in self.verbose:
            check(kind in KINDS, f"`verbose` names {kind!r}. Expected some of: {', '.join(KINDS)}.")
        attempts = self.judge_max_attempts
        check(
            attempts is None or attempts > 0, f"`judge_max_attempts` is {attempts}. Expected at least 1, or nothing."
        )
        check(0 <= self.hedge_fraction <= 1, f"`hedge_fraction` is {self.hedge_fraction}. Expected 0 to 1.")
        check(
            self.preflight_calls is None or self.preflight_calls == 0 or self.preflight_calls >= MIN_CALLS,
            f"`preflight_calls` is {self.preflight_calls}. Expected 0, or {MIN_CALLS} or more: fewer verdicts show no "
            "noise.",
        )
        check(self.outage_patience_s >= 0, f"`outage_patience_s` is {self.outage_patience_s}. Expected 0 or more.")
        self._check_action()
        check_choice(self, "judge_aggregation", AGGREGATIONS)
        check_choice(self, "judge_response_format", RESPONSE_FORMATS)
        check_choice(self, "missing_component", MISSING_RULES)
        check_url("rag_base_url", self.rag_base_url)
        check_url("judge_base_url", self.judge_base_url)
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
        check_budget(self, self.parsed_judge_providers())
        self.parsed_branch_weights()

    def parsed_judge_providers(self) -> list[JudgeProviderConfig]:
        """`judge_providers`, checked; empty without any."""
        return judge_providers_of(self.judge_providers)

    def parsed_branch_weights(self) -> dict[str, dict[str, float]]:
        """`branch_reward_weights`, checked without the branches; empty without any."""
        if self.branch_reward_weights is None:
            return {}
        weights = structure("branch_reward_weights", self.branch_reward_weights, dict)
        for branch, components in weights.items():
            check(
                isinstance(components, dict) and all(isinstance(w, int | float) for w in components.values()),
                f"`branch_reward_weights` of {branch!r} is {components!r}. Expected a mapping of component to number.",
            )
        return weights
