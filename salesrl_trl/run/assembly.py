"""From settings to the reward chain: which clients, with which limits, caches and keys, in which process.

Owns the wiring and the checks that need branches and environment. The clients themselves take plain arguments.
"""

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from accelerate import PartialState
from accelerate.utils import gather_object

from salesrl_trl.config import JudgeProviderConfig, RewardConfig, SalesGRPOConfig
from salesrl_trl.demo.policy import cache_dir
from salesrl_trl.demo.services.launcher import EmbeddedServices
from salesrl_trl.errors import ConfigError, SalesRLError, ServiceError
from salesrl_trl.reward.cache import AnswerStore
from salesrl_trl.reward.chain import SalesReward
from salesrl_trl.reward.judge.client import JudgeClient, load_rubrics
from salesrl_trl.reward.judge.provider import JudgeProvider
from salesrl_trl.reward.rag.client import RagBackend, RagClient
from salesrl_trl.reward.rag.embedding import SERVICE as EMBEDDING
from salesrl_trl.reward.rag.vector_store import VectorStoreRag, has_table
from salesrl_trl.reward.remote import RemoteReward
from salesrl_trl.reward.scoring import OTHER_RUBRIC, Scoring, default_weights
from salesrl_trl.reward.service.transport import Transport
from salesrl_trl.run.preflight import read_key
from salesrl_trl.run.probe import check_models, check_rag
from salesrl_trl.types import SalesRow

logger = logging.getLogger(__name__)

JUDGE = "judge"
"""Service name of the one judge of `judge_base_url`; several have their provider's name behind it."""


@dataclass
class RewardParts:
    """What the checks have brought to light."""

    scoring: Scoring
    rubrics: dict[str, str]
    rag_key: str | None = field(repr=False)
    embedding_key: str | None = field(repr=False)
    judge_keys: dict[str, str | None] = field(repr=False)
    """By provider name."""
    reference_weighed: bool
    """Whether the reference's score is in a reward or a baseline."""
    notes: list[str] = field(default_factory=list)
    """Lines for the run's banner."""


def prepare_reward(config: RewardConfig, branches: Sequence[str], hybrid_baseline: bool = False) -> RewardParts:
    """Check what can be checked without a model: rubrics, weights, keys, and that configured addresses answer.

    Args:
        config (`RewardConfig`):
            Settings.
        branches (`Sequence[str]`):
            Branch names.
        hybrid_baseline (`bool`, *optional*, defaults to `False`):
            Whether `hybrid_reference_weight` is more than 0.

    Raises:
        `SalesRLError`: what is wrong, and what to do.
    """
    weights = config.parsed_branch_weights()
    unknown = sorted(weights.keys() - set(branches))
    if unknown:
        raise ConfigError(
            f"`branch_reward_weights` names the branches {unknown}. Expected some of {list(branches)}. Correct it, or "
            "`branches`."
        )
    if config.vector_store_path is not None and not has_table(config.vector_store_path):
        raise ConfigError(
            f"`vector_store_path` is {config.vector_store_path}, where there is no store. Expected a folder that "
            "scripts/build_vector_store.py wrote. Build it, or correct the path."
        )
    scoring = Scoring(
        weights={**default_weights(branches), **weights},
        missing=config.missing_component,
        invalid_action=config.invalid_action_reward,
    )
    unjudged = [branch for branch in branches if not scoring.rubrics(branch)]
    if hybrid_baseline and unjudged:
        raise ConfigError(
            f"`hybrid_reference_weight` is more than 0, but `branch_reward_weights` has no judge in {unjudged}, so "
            "that the reference has no score there. Expected `judge`, `margin` or `judge_<rubric>` in each branch."
        )
    rubrics = load_rubrics(_rubric_names(scoring, branches), config.rubric_dir)
    parts = RewardParts(
        scoring=scoring,
        rubrics=rubrics,
        rag_key=read_key(config.rag_api_key_env, "rag_api_key_env"),
        embedding_key=read_key(config.embedding_api_key_env, "embedding_api_key_env"),
        judge_keys=_judge_keys(config),
        reference_weighed=hybrid_baseline or any("margin" in weighed for weighed in scoring.weights.values()),
    )
    if config.rag_base_url is not None:
        parts.notes += check_rag(config.rag_base_url, parts.rag_key)
    if config.judge_base_url is not None:
        parts.notes += check_models(config.judge_base_url, parts.judge_keys[JUDGE], config.judge_model)
    if config.vector_store_path is not None and config.embedding_base_url and config.embedding_model:
        address = {"service": "embedding service", "setting": "embedding_base_url"}
        parts.notes += check_models(config.embedding_base_url, parts.embedding_key, config.embedding_model, **address)
    _check_providers(config, parts)
    return parts


@contextlib.contextmanager
def open_reward(
    config: RewardConfig, training: SalesGRPOConfig, rows: Sequence[SalesRow], parts: RewardParts | None = None
) -> Iterator[SalesReward | RemoteReward]:
    """All that a trainer needs to score with: the checks, the embedded services where no address is configured, and
    the chain, in the process that it belongs to. The services stop on exit; `SalesGRPOTrainer.finish` closes the
    chain's connections.

        with open_reward(RewardConfig(), training, rows) as reward:
            trainer = SalesGRPOTrainer(model, reward, training, train_dataset=build_dataset(rows, "instruct"))

    Args:
        config (`RewardConfig`):
            Settings of the services.
        training (`SalesGRPOConfig`):
            The trainer's settings: branches, device, processes, output folder.
        rows (`Sequence[SalesRow]`):
            Training rows and held-out rows.
        parts (`RewardParts`, *optional*):
            From `prepare_reward`, which is called when they are not given.

    Raises:
        `SalesRLError`: what is wrong, and what to do.
    """
    if parts is None:
        parts = prepare_reward(config, training.branches, training.hybrid_reference_weight > 0)
    with addresses(config) as (rag_base_url, judge_base_url):
        chain = build_reward(
            config,
            parts,
            rows,
            rag_base_url,
            judge_base_url,
            output_dir=Path(training.output_dir),
            processes=training.world_size,
            process_index=training.process_index,
        )
        yield placed(chain, config.reward_process, training.device.type == "cpu")


@contextlib.contextmanager
def addresses(config: RewardConfig) -> Iterator[tuple[str, str]]:
    """The addresses of the RAG service and the judge, with embedded ones started where none is configured.

    One process of each node starts them and stops them again; all ranks learn the addresses of their own node.
    """
    if not (config.embeds_rag or config.embeds_judge):
        yield config.rag_base_url or "", config.judge_base_url or ""
        return
    state = PartialState()
    knowledge = config.knowledge_file
    services = EmbeddedServices(documents=None if knowledge is None else Path(knowledge).expanduser())
    started: Any = None
    if state.is_local_main_process:
        try:
            started = services.start()
            logger.info(f"embedded services: RAG {started.rag_base_url}, judge {started.judge_base_url}")
        except SalesRLError as error:
            started = error
    try:
        everywhere = gather_object([started])
        node_main = state.process_index - state.local_process_index
        mine = everywhere[node_main]
        failed = [item for item in everywhere if isinstance(item, SalesRLError)]
        if failed:
            raise failed[0]
        yield config.rag_base_url or mine.rag_base_url, config.judge_base_url or mine.judge_base_url
    finally:
        services.stop()


def placed(chain: SalesReward, in_a_process: bool | None, on_cpu: bool) -> SalesReward | RemoteReward:
    """The chain, in a process of its own where that is wanted."""
    if in_a_process is None and on_cpu:
        return chain
    try:
        return RemoteReward(chain) if in_a_process is not False else chain
    except ConfigError as error:
        if in_a_process:
            raise
        logger.warning(f"rewards stay in the trainer's process, where they take vLLM's time: {error}")
        return chain


def build_reward(
    config: RewardConfig,
    parts: RewardParts,
    rows: Sequence[SalesRow],
    rag_base_url: str,
    judge_base_url: str,
    *,
    output_dir: Path,
    processes: int = 1,
    process_index: int = 0,
) -> SalesReward:
    """The reward chain.

    Args:
        config (`RewardConfig`):
            Settings.
        parts (`RewardParts`):
            From `prepare_reward`.
        rows (`Sequence[SalesRow]`):
            Training rows and held-out rows.
        rag_base_url (`str`):
            The configured RAG service, or the embedded one.
        judge_base_url (`str`):
            The configured judge, or the embedded one. Not used where `judge_providers` are configured.
        output_dir (`Path`):
            Where the run's own cache lies.
        processes (`int`, *optional*, defaults to `1`):
            Processes that share the limits.
        process_index (`int`, *optional*, defaults to `0`):
            Which of them this is.
    """

    def transport(service: str, max_concurrency: int, timeout_s: float, patience_s: float | None = None) -> Transport:
        return Transport(
            service,
            max_concurrency=max(max_concurrency // processes, 1),
            attempt_timeout_s=timeout_s,
            max_attempts=config.max_attempts,
            initial_concurrency=config.initial_concurrency,
            outage_patience_s=config.outage_patience_s if patience_s is None else patience_s,
            denied_cooldown_s=config.denied_cooldown_s,
            hedge_fraction=config.hedge_fraction,
        )

    def retrieval(service: str, patience_s: float | None = None) -> Transport:
        return transport(service, config.rag_max_concurrency, config.rag_timeout_s, patience_s)

    # Without the reference a row can still be judged: its outage is waited out only where its score is weighed.
    patience_32b_s = None if parts.reference_weighed else 0.0
    rag = _vector_store(config, parts, retrieval, patience_32b_s) or RagClient(
        rag_base_url,
        transport_8b=retrieval("rag_8b"),
        transport_32b=retrieval("rag_32b", patience_32b_s),
        api_key=parts.rag_key,
    )
    configured = config.parsed_judge_providers()
    providers = [
        _provider(
            each,
            parts.judge_keys[each.name],
            transport(
                f"{JUDGE}_{each.name}" if configured else JUDGE,
                each.max_concurrency or config.judge_max_concurrency,
                each.timeout_s or config.judge_timeout_s,
            ),
        )
        for each in configured or [_only_provider(config, judge_base_url)]
    ]
    judge = JudgeClient(providers, parts.rubrics, repeats=config.judge_repeats, aggregation=config.judge_aggregation)
    # the embedded service has another address in every run
    lasting = config.rag_base_url is not None or config.vector_store_path is not None
    return SalesReward(
        rows,
        rag,
        judge,
        parts.scoring,
        score_threshold=config.rag_score_threshold,
        top_k=config.rag_top_k,
        deadline_s=config.reward_deadline_s,
        action_format=config.action_format(),
        announces=process_index == 0,
        answers=_answer_store(config, output_dir / f"answers.rank{process_index}.sqlite" if lasting else None),
        references=AnswerStore(_reference_file(config.reference_cache) if lasting else None),
    )


def _vector_store(
    config: RewardConfig,
    parts: RewardParts,
    transport: Callable[[str, float | None], Transport],
    patience_32b_s: float | None,
) -> RagBackend | None:
    if config.vector_store_path is None or config.embedding_base_url is None or config.embedding_model is None:
        return None
    return VectorStoreRag(
        config.vector_store_path,
        embedding_base_url=config.embedding_base_url,
        embedding_model=config.embedding_model,
        api_key=parts.embedding_key,
        transport_8b=transport(EMBEDDING, None),
        transport_32b=transport(EMBEDDING, patience_32b_s),
        max_text_chars=config.embedding_max_chars,
    )


def _check_providers(config: RewardConfig, parts: RewardParts) -> None:
    """Raise when none of several judges answers; tell of those that do not."""
    providers, failures = config.parsed_judge_providers(), []
    for each in providers:
        try:
            key, setting = parts.judge_keys[each.name], f"judge_providers[{each.name}].base_url"
            parts.notes += check_models(each.base_url, key, each.model, setting=setting)
        except ServiceError as error:
            failures.append(error)
            logger.warning(str(error))
    if providers and len(failures) == len(providers):
        raise failures[0]


def _rubric_names(scoring: Scoring, branches: Sequence[str]) -> tuple[str, ...]:
    """Every branch's own, and those that weights name."""
    named = [component for weights in scoring.weights.values() for component in weights]
    others = [name.removeprefix(OTHER_RUBRIC) for name in named if name.startswith(OTHER_RUBRIC)]
    return tuple(dict.fromkeys((*branches, *others)))


def _judge_keys(config: RewardConfig) -> dict[str, str | None]:
    providers = config.parsed_judge_providers()
    if not providers:
        return {JUDGE: read_key(config.judge_api_key_env, "judge_api_key_env")}
    return {each.name: read_key(each.api_key_env, f"judge_providers[{each.name}].api_key_env") for each in providers}


def _only_provider(config: RewardConfig, base_url: str) -> JudgeProviderConfig:
    return JudgeProviderConfig(name=JUDGE, base_url=base_url, model=config.judge_model)


def _provider(config: JudgeProviderConfig, api_key: str | None, transport: Transport) -> JudgeProvider:
    return JudgeProvider(
        name=config.name,
        base_url=config.base_url,
        model=config.model,
        transport=transport,
        api_key=api_key,
        weight=config.weight,
        response_format=config.response_format,
        temperature=config.temperature,
        max_completion_tokens=config.max_completion_tokens,
        extra_body=config.extra_body,
        usd_per_million_prompt_tokens=config.usd_per_million_prompt_tokens,
        usd_per_million_completion_tokens=config.usd_per_million_completion_tokens,
    )


def _answer_store(config: RewardConfig, path: Path | None) -> AnswerStore:
    return AnswerStore(path) if config.cache_answers else AnswerStore(keep=0)


def _reference_file(setting: str | None) -> Path | None:
    if setting is not None:
        return Path(setting).expanduser() if setting else None
    return cache_dir() / "references.sqlite"
