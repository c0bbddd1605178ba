"""Settings of the scoring services: addresses, limits, and the weights of the reward components."""

import re
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

from salesrl_trl.config.checks import (
    Count,
    NotNegative,
    Positive,
    Range,
    Share,
    check,
    check_settings,
    check_url,
    check_value,
    entry_of,
    structure,
)
from salesrl_trl.config.keys import is_secret, takes_former_names
from salesrl_trl.demo.packaged import CASSETTE, FILE
from salesrl_trl.judged.budget import CALLS, USD, Budget, Limit
from salesrl_trl.judged.rag_client import RESERVED_FIELDS
from salesrl_trl.judged.scoring import MISSING_RULES
from salesrl_trl.launch.judge_config import (
    JudgeMeterSettings,
    JudgeModeSettings,
    JudgeProviderConfig,
    Judges,
    PartnerSettings,
    judges_of,
    partner_of,
)
from salesrl_trl.names import SPENT_FILE
from salesrl_trl.record.reader import record_files
from salesrl_trl.reward.batch import LINE_KINDS
from salesrl_trl.types import DEFAULT_FORMAT, JUDGE, MCP, SALES, SEARCH, ActionFormat

_LOW_REWARD = Range(-sys.float_info.max, 0.5, "a low reward compared with the judge's 0 to 1")


@dataclass(frozen=True, kw_only=True)
class ReplaySettings:
    """`replay`, checked."""

    run: str
    on_miss: Annotated[str, ("fail", "nearest", "live")] = ""
    delays: bool = False

    @property
    def record(self) -> Path:
        return FILE if self.run == CASSETTE else Path(self.run).expanduser()


@dataclass(frozen=True, kw_only=True)
class Attempts:
    rag: Count = 3
    judge: Count = 3


@dataclass(frozen=True, kw_only=True)
class RagSettings:
    """`rag`, checked."""

    base_url: Annotated[str, check_url] | None = None
    """Address of the RAG service, before `/v1/rag/...`. Without one, the recipe starts the embedded service."""
    api_key_env: str | None = None
    """Name of the environment variable with the service's API key."""
    client: str | None = None
    """Dotted path of your own client for a service with another API: a class that derives from
    `salesrl_trl.RagBackend`. It replaces the address above and sets its own limits."""
    top_k: Annotated[int, Range(1, 50)] = 3
    """Maximum number of passages in an answer."""
    score_threshold: Annotated[float, Range(0, 1, "scores of passages are normalised")] = 0.03
    """Lowest normalised score of a passage, in [0, 1]. In the embedded service, raw conversations score about 0.09 and
    good queries 0.2 to 0.6."""
    timeout_s: Positive = 30.0
    """Timeout of one attempt at an endpoint, in seconds."""
    max_concurrency: Count = 64
    """Concurrency limit of each endpoint, over all processes."""
    knowledge_file: str | None = None
    """Your own documents for the embedded service: JSON lines of `{id, text}`, optionally with a `title`."""
    action_fields: list[str] | str = field(default_factory=lambda: list(DEFAULT_FORMAT.fields))
    """Names of the texts that the policy writes, in its JSON and in requests to the 8B endpoint. `rewritten_query`, or
    else the first one, is the search query. Other names need your own `prompt_template` and services."""

    def __post_init__(self) -> None:
        names, expected = self.action_format.fields, "Expected at least one name, and each name once."
        check(0 < len(set(names)) == len(names), f"`rag.action_fields` is {[*names]}. {expected}")
        bad = [name for name in names if name in RESERVED_FIELDS or not re.fullmatch(r"[A-Za-z_]\w*", str(name))]
        expected = f"letters, digits and _, and none of the reserved request fields: {', '.join(RESERVED_FIELDS)}"
        check(not bad, f"`rag.action_fields` names {', '.join(map(str, bad))}. Expected {expected}.")
        is_alone = self.client is None or (self.base_url is None and self.api_key_env is None)
        expected = "Expected one of them: your own class has its own."
        check(is_alone, f"`rag.client` is set together with an address or a key. {expected}")
        found = "`rag.base_url` or `rag.client` is set, but only the embedded service reads `rag.knowledge_file`."
        check(self.knowledge_file is None or self.is_embedded, found)

    @property
    def is_embedded(self) -> bool:
        return self.base_url is None and self.client is None

    @property
    def action_format(self) -> ActionFormat:
        """The names of an action's fields, and the one used as the search query."""
        names = (self.action_fields,) if isinstance(self.action_fields, str) else tuple(self.action_fields)
        usual = DEFAULT_FORMAT.query if DEFAULT_FORMAT.query in names else next(iter(names), "")
        return ActionFormat(fields=names, query=usual)


@takes_former_names
@dataclass
class RewardConfig:
    """The scoring services, their limits, and the reward formula."""

    allow_stand_ins: bool = False
    """Whether the embedded RAG service and judge may score your own rows, branches and rubrics. They only know the
    demo, so the scores are meaningless: for smoke tests. Such a run is rejected by default."""
    rag: dict[str, object] | str | None = None
    """The RAG service: a mapping with the fields of `RagSettings`, e.g. `{base_url: http://rag.internal:8801}`, or the
    dotted path of your own client. Without an address, the recipe starts the embedded service."""
    judge_providers: dict[str, object] | str | list[object] | None = None
    """The judge: a mapping with the fields of `JudgeProviderConfig`, e.g. `{base_url: http://HOST:PORT/v1, model:
    NAME}`; a list of them, each with a `name`, in fallback order; or the dotted path of a class that derives from
    `salesrl_trl.Judge`. Without an address, the recipe starts the embedded judge."""
    judge_mode: dict[str, object] | str | None = "single"
    """`single`: each call judges one completion. `group`: each call judges all completions of a prompt, with a quarter
    of the calls for groups of 8 in two orders; if it fails, its completions are judged one by one. For more options,
    use a mapping with the fields of `JudgeModeSettings`: `{mode: group, orders: 4, aggregation: min}`."""
    judge_meter: dict[str, object] | str | None = None
    """Judge drift monitor: `{second: NAME, share: 0.02, on_alarm: warn, rubric_dir: FOLDER}`. `second`, an entry of
    `judge_providers`, re-judges at most `share` of the completions, without affecting rewards. After an alarm, the run
    logs a warning and continues (`warn`), saves and stops (`stop`), or switches to the second judge's rewards
    (`second_judge`)."""
    reward_funcs: list[str] = field(default_factory=list)
    """Dotted paths of your own reward functions, with TRL's signature, `@per_completion` or `@per_group`. By default,
    or with `sales`, the built-in reward pipeline scores; with `judge`, the built-in judge scores the policy's answers
    directly, without a RAG service. `reward_weights` weights them."""
    tools: list[str] = field(default_factory=list)
    """Dotted paths of functions that the policy may call before it answers, like TRL's `tools`; `@tool` sets how
    failures are handled. `search` is the built-in tool: `search(query)` queries the RAG service of `rag`.
    `mcp:COMMAND` and `mcp:URL` are the tools of an MCP server, e.g. `mcp:python examples/mcp_server.py`."""
    partner: dict[str, object] | str | None = None
    """The other side of a conversation, which answers each turn of the policy. `customer` plays each row's column
    `persona` by rules; `{base_url: http://HOST:PORT/v1, model: NAME}`, with the fields of `PartnerSettings`, lets a
    language model play it. Or the dotted path of a class that derives from
    `salesrl_trl.agents.partner.Partner`."""
    reward_stages: list[str] = field(default_factory=list)
    """Dotted paths of your own reward stages, in order: classes that derive from
    `salesrl_trl.judged.scoring.RewardStage`."""
    rubric_dir: str | None = None
    """Folder with files `<branch>.txt`. Each replaces the built-in rubric of a branch, or adds one."""
    branch_reward_weights: dict[str, object] | str | None = None
    """Component weights by branch, e.g. `{"fairness": {"judge": 0.8, "margin": 0.2}}`. Components are `judge`,
    `margin`, `retrieval`, `format`, `judge_<rubric>`, and those of `reward_stages`. Defaults to `judge` alone."""
    missing_component: Annotated[str, MISSING_RULES] = "none"
    """Rule for a completion that lacks a component: `none` leaves it unscored, `reweight` uses the others."""
    judge_timeout_s: Positive = 60.0
    """Timeout of one attempt at the judge, in seconds."""
    max_attempts: dict[str, object] | str | int | None = 3
    """Attempts per call, including the first. Replies with a Retry-After are not counted. `{rag: 3, judge: 1}` sets
    them separately."""
    judge_max_concurrency: Count = 64
    """Concurrency limit of a judge, over all processes."""
    initial_concurrency: Count = 8
    """Initial concurrency limit of each service, per process. It grows by half with each round of answers until the
    service returns 429."""
    hedge_fraction: Share = 0.05
    """Largest share of calls that may be hedged, i.e. repeated because they are late; 0 for none."""
    outage_patience_s: NotNegative = 30.0
    """Seconds that calls wait for an unavailable service, from the start of the outage. After that they fail
    immediately, except for single probes. Calls with a fallback, or whose answer affects no reward, do not wait."""
    max_calls: Count | None = None
    """Request limit over all reward services, for the run and its resumes; every request sent counts. At the limit the
    run saves and stops."""
    max_usd: Positive | None = None
    """Spending limit for judges in US dollars, for the run and its resumes, by the prices in `judge_providers`."""
    warm_up_services: bool = True
    """Whether to call both RAG endpoints and every judge once before the first step. The run stops if a required one
    does not answer."""
    cache_answers: bool = True
    """Whether to cache verdicts and the answers of a configured RAG service in `output_dir`, so that a resumed run
    does not request them again. The files contain customers' and services' texts in plain form. `false` only shares
    answers within this run."""
    replay: dict[str, object] | str | None = None
    """Output folder of a run with `record: true`, or `demo` for the built-in record: recorded rewards are replayed
    without calling a service. Options: `{run: FOLDER, on_miss: fail, delays: false}`. A completion that is not in the
    record stays unscored (`fail`), gets the reward of the most similar completion of its row (`nearest`, for smoke
    tests), or is scored by the services (`live`). `delays` replays the recorded latencies too."""
    reward_deadline_s: Positive = 300.0
    """Deadline in seconds for a completion's reward, and for a batch from the start of its last reward. Keep it well
    below the process group's timeout (600 s for NCCL)."""
    verbose: list[str] = field(default_factory=list)
    """Log lines per completion, with its row's id. `scoring` shows rewards, failures and seconds. `completions` and
    `rag` show the texts of the policy and of the RAG service, which quote customers."""
    invalid_action_reward: Annotated[float, _LOW_REWARD] = 0.0
    """Reward of an invalid action. The judge's scores are in [0, 1]."""

    @property
    def rag_service(self) -> RagSettings:
        return entry_of("rag", RagSettings, self.rag, text="client")

    @property
    def judges(self) -> Judges:
        return judges_of(self.judge_providers)

    @property
    def judging(self) -> JudgeModeSettings:
        return entry_of("judge_mode", JudgeModeSettings, self.judge_mode, text="mode")

    def parsed_partner(self) -> PartnerSettings | None:
        """`partner`, checked; `None` without one."""
        return None if self.partner is None else partner_of(self.partner)

    def parsed_replay(self) -> ReplaySettings | None:
        """`replay`, checked; `None` without one."""
        if self.replay is None:
            return None
        replay = entry_of("replay", ReplaySettings, self.replay, text="run")
        # Another CPU's policy writes different texts, and the built-in record has to work on any machine.
        return replace(replay, on_miss=replay.on_miss or ("nearest" if replay.run == CASSETTE else "fail"))

    @property
    def asks_nobody(self) -> bool:
        """Whether rewards are only replayed from a record."""
        replay = self.parsed_replay()
        return replay is not None and replay.on_miss != "live"

    @property
    def uses_services(self) -> bool:
        """Whether the built-in judge scores, behind a RAG service or alone."""
        return not self.asks_nobody and (self.has_chain or self.judges_answers)

    @property
    def uses_rag(self) -> bool:
        """Whether the built-in reward pipeline or the built-in tool calls a RAG service."""
        return not self.asks_nobody and (self.has_chain or SEARCH in self.tools)

    @property
    def asks_model(self) -> bool:
        """Whether a language model plays the partner."""
        partner = self.parsed_partner()
        return partner is not None and partner.is_model and not self.asks_nobody

    @property
    def judges_answers(self) -> bool:
        """Whether the built-in judge scores the policy's answers directly."""
        return JUDGE in self.reward_funcs

    @property
    def has_chain(self) -> bool:
        """Whether rewards are those of the built-in pipeline, live or recorded."""
        return not self.reward_funcs or SALES in self.reward_funcs

    @property
    def embeds_rag(self) -> bool:
        return self.uses_rag and self.rag_service.is_embedded

    @property
    def embeds_judge(self) -> bool:
        return self.uses_services and self.judges.own is None and not self.judges.providers

    def __post_init__(self) -> None:
        check_settings(self)
        self.parsed_attempts()
        judges, judging, _ = self.judges, self.judging, self.rag_service
        found = "`judge_meter` is set together with `replay`, but a record lacks a second judge's scores."
        check(self.judge_meter is None or self.replay is None, found)
        self.parsed_judge_meter()
        replay, expected = self.parsed_replay(), f"Expected `{CASSETTE}`, or a run with `record: true`."
        has_record = replay is None or bool(record_files(replay.record))
        check(has_record, f"`replay` is {self.replay!r}, which lacks a record. {expected}")
        meaning = f"`{SALES}` judges a RAG service's answer to the policy's action, `{JUDGE}` the policy's own answer"
        found = f"`reward_funcs` names both `{SALES}` and `{JUDGE}`"
        check(not {SALES, JUDGE} <= {*self.reward_funcs}, f"{found}. Expected one of them: {meaning}.")
        meaning = "`orders` sets how often a group is judged, and your own judge sets its `orders` itself"
        is_alone = judging.mode == "single" or (judges.own is None and judging.repeats == 1)
        found = "`judge_mode: group` is set together with `repeats` or your own judge"
        check(is_alone, f"{found}. Expected neither: {meaning}.")
        for kind in self.verbose:
            check(kind in LINE_KINDS, f"`verbose` names {kind!r}. Expected some of: {', '.join(LINE_KINDS)}.")
        is_counted = (self.max_calls is None and self.max_usd is None) or self.uses_services or self.uses_rag
        is_counted = is_counted or self.asks_model
        found = "`max_calls` or `max_usd` is set, but neither `reward_funcs` nor `tools` calls this package's services"
        expected = f"`{SALES}`, `{JUDGE}` or the tool `{SEARCH}`: calls by your own functions are not counted"
        check(is_counted, f"{found}. Expected {expected}.")
        priced = [*judges.providers, *filter(None, [self.parsed_partner()])]
        is_priced = any(not each.price.is_free for each in priced)
        remedy = "Set `usd_per_million_prompt_tokens` in `judge_providers`."
        check(self.max_usd is None or is_priced, f"`max_usd` is set, but no judge has a price. {remedy}")
        self.parsed_branch_weights()
        words = [word for tool in self.tools if tool.startswith(MCP) for word in tool.split()]
        named = [word.partition("=")[0] for word in words if word.startswith("-") or "=" in word]
        expected = (
            "Expected it in a file that the server reads, or in `env` of `mcp_tools` in Python: settings are logged"
        )
        check(not any(map(is_secret, named)), f"`tools` has an MCP command with a key as an argument. {expected}.")

    def parsed_attempts(self) -> Attempts:
        text = str(self.max_attempts)
        value: object = int(text) if text.isdecimal() else self.max_attempts
        if isinstance(value, int | float):
            check_value("max_attempts", value, Count)
            value = {"rag": value, "judge": value}
        return entry_of("max_attempts", Attempts, value)

    def parsed_judge_meter(self) -> JudgeMeterSettings | None:
        """`judge_meter`, checked; `None` without one."""
        if self.judge_meter is None:
            return None
        meter = entry_of("judge_meter", JudgeMeterSettings, self.judge_meter)
        providers = {provider.name: provider for provider in self.judges.providers}
        others = [one for one in providers.values() if one.name != meter.second and one.weight]
        found = f"`judge_meter.second` is {meter.second!r}, and `judge_providers` names {[*providers]}"
        expected = "Expected one of them, and another one with a weight for the rewards."
        check(meter.second in providers and len(others) > 0, f"{found}. {expected}")
        check(meter.share > 0, "`judge_meter.share` is 0. Expected more than 0.")
        check(self.uses_services, "`judge_meter` is set, but no judge scores here.")
        return meter

    def parsed_branch_weights(self) -> dict[str, dict[str, float]]:
        """`branch_reward_weights`, checked without the branches; empty without any."""
        if self.branch_reward_weights is None:
            return {}
        weights = structure("branch_reward_weights", self.branch_reward_weights, dict)
        for branch, components in weights.items():
            path = f"branch_reward_weights.{branch}"
            for name, weight in structure(path, components, dict).items():
                check_value(f"{path}.{name}", weight, float)
        return weights

    def budget(self, output_dir: Path, processes: int = 1) -> Budget | None:
        """The budget of a run in this folder; `None` without limits, rates and prices."""
        providers = self.judges.providers
        places: list[tuple[str, str | None, RewardConfig | JudgeProviderConfig]] = [("", None, self)]
        places += [(f"{self.judges.place_of(judge)}.", self.judges.service_of(judge), judge) for judge in providers]
        if (partner := self.parsed_partner()) is not None and partner.is_model:
            places.append(("partner.", partner.name, partner))
            providers = (*providers, partner)
        limits = [
            Limit(name=f"{prefix}max_{kind}", kind=kind, most=most, service=service)
            for prefix, service, settings in places
            for kind, most in ((CALLS, settings.max_calls), (USD, settings.max_usd))
            if most is not None
        ]
        rates = [rate for judge in providers for rate in (judge.tokens_per_minute, judge.requests_per_minute)]
        if not limits and not any(rates) and not any(not judge.price.is_free for judge in providers):
            return None
        return Budget(output_dir / SPENT_FILE, limits, processes)
