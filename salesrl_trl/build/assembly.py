"""From settings to the reward chain: its clients, with limits, caches and keys, and the process that it runs in.

Owns the wiring. `checks.reward` checks the settings before. The clients themselves take plain arguments.
"""

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from salesrl_trl.build.checks.reward import JUDGE, RewardParts, prepare_reward
from salesrl_trl.config import JudgeProviderConfig, RewardConfig
from salesrl_trl.config.reward import SALES
from salesrl_trl.demo.services.launcher import EmbeddedServices, ServiceAddresses
from salesrl_trl.errors import ConfigError, SalesRLError
from salesrl_trl.ground.process import cache_dir
from salesrl_trl.names import SPENT_FILE
from salesrl_trl.reward.cache import AnswerStore
from salesrl_trl.reward.chain import SalesReward
from salesrl_trl.reward.judge.judge_client import JudgeClient
from salesrl_trl.reward.judge.judge_interface import Judge
from salesrl_trl.reward.judge.provider import JudgeProvider
from salesrl_trl.reward.mixed import combined
from salesrl_trl.reward.rag.rag_client import RagBackend, RagClient
from salesrl_trl.reward.remote import RemoteReward
from salesrl_trl.reward.replay import ReplayReward
from salesrl_trl.reward.sample_lines import SampleLines
from salesrl_trl.reward.scorer import Scorer
from salesrl_trl.reward.service.account import CALLS, USD, Limit
from salesrl_trl.reward.service.budget import FREE, Budget, Price
from salesrl_trl.reward.service.transport import Transport
from salesrl_trl.types import SalesRow

if TYPE_CHECKING:
    from salesrl_trl.config import SalesGRPOConfig

logger = logging.getLogger(__name__)

NOWHERE = "http://nobody.invalid/v1"
"""Stands for the address of a service that is not asked."""


@contextlib.contextmanager
def launched_services(config: RewardConfig) -> Iterator[EmbeddedServices]:
    """The embedded services, which stop on exit. Where no address is configured, they begin to start now.

    One process of each node starts them.
    """
    from accelerate import PartialState  # brings torch, which configured services do not need

    knowledge = config.knowledge_file
    services = EmbeddedServices(documents=None if knowledge is None else Path(knowledge).expanduser())
    try:
        if (config.embeds_rag or config.embeds_judge) and PartialState().is_local_main_process:
            services.launch()
        yield services
    finally:
        services.stop()


@contextlib.contextmanager
def open_reward(
    config: RewardConfig,
    training: "SalesGRPOConfig",
    rows: Sequence[SalesRow],
    parts: RewardParts | None = None,
    services: EmbeddedServices | None = None,
    *,
    records: bool = False,
) -> Iterator[Scorer]:
    """Check the settings, start the embedded services where no address is configured, and build the reward chain.

    The services stop on exit. `SalesGRPOTrainer.finish` closes the connections of the chain.

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
            From `prepare_reward`, which is called without them.
        services (`EmbeddedServices`, *optional*):
            From `launched_services`, which is called without them.
        records (`bool`, *optional*, defaults to `False`):
            As in `SalesReward`.

    Raises:
        `SalesRLError`: a setting or a service is not as expected.
    """
    if parts is None:
        branches = training.branches or sorted({row.branch for row in rows})
        parts = prepare_reward(config, branches, training.hybrid_reference_weight > 0)
    with addresses(config, services) as (rag_base_url, judge_base_url):

        def chain() -> SalesReward | RemoteReward:
            chain = build_reward(
                config,
                parts,
                rows,
                rag_base_url,
                judge_base_url,
                output_dir=Path(training.output_dir),
                processes=training.world_size,
                process_index=training.process_index,
                records=records,
            )
            stays = config.asks_nobody or training.device.type == "cpu"
            return placed(chain, None if config.asks_nobody else training.reward_process, stays)

        rewards = [chain() if path == SALES else parts.functions[path] for path in config.reward_funcs or [SALES]]
        weights = training.reward_weights or [1.0] * len(rewards)
        replay = config.parsed_replay()
        if replay is None:
            yield combined(rewards, weights, training.reward_process)
            return
        reward = combined(rewards, weights, training.reward_process and not config.asks_nobody)
        yield ReplayReward(reward, replay.record, replay.on_miss, delays=replay.delays, rank=training.process_index)


@contextlib.contextmanager
def addresses(config: RewardConfig, services: EmbeddedServices | None = None) -> Iterator[tuple[str, str]]:
    """The addresses of the RAG service and the judge. Embedded ones are started where no address is configured.

    All ranks learn the addresses of their own node.

    `services`: from `launched_services`, which is called without them.
    """
    if not (config.embeds_rag or config.embeds_judge):
        yield config.rag_base_url or NOWHERE, config.judge_base_url or NOWHERE
        return
    from accelerate import PartialState  # brings torch, which configured services do not need
    from accelerate.utils import gather_object

    state = PartialState()
    with contextlib.ExitStack() as stack:
        if services is None:
            services = stack.enter_context(launched_services(config))
        started: ServiceAddresses | SalesRLError | None = None
        if state.is_local_main_process:
            try:
                started = services.start()
                logger.info(f"embedded services: RAG {started.rag_base_url}, judge {started.judge_base_url}")
            except SalesRLError as error:
                started = error
        everywhere: list[ServiceAddresses | SalesRLError | None] = gather_object([started])
        failed = [each for each in everywhere if isinstance(each, SalesRLError)]
        if failed:
            raise failed[0]
        mine = everywhere[state.process_index - state.local_process_index]  # of this node's main process
        assert isinstance(mine, ServiceAddresses)
        yield config.rag_base_url or mine.rag_base_url, config.judge_base_url or mine.judge_base_url


def placed(chain: SalesReward, in_a_process: bool | None, on_cpu: bool) -> SalesReward | RemoteReward:
    """Move the chain into a process of its own, or leave it in the trainer's.

    `in_a_process`: the setting `reward_process`. `None` chooses a process of its own, except on a CPU. `on_cpu`:
    whether the run trains on a CPU.

    Raises:
        `ConfigError`: a process of its own is required and can't be had.
    """
    if in_a_process is False or (in_a_process is None and on_cpu):
        return chain
    try:
        return RemoteReward(chain)
    except ConfigError as error:
        if in_a_process:
            raise
        logger.warning(f"rewards stay in the trainer's process, where they take vLLM's time: {error}")
        return chain


class Services(NamedTuple):
    """The clients of the reward's services."""

    rag: RagBackend
    judge: Judge


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
    records: bool = False,
    keeps_references: bool = True,
) -> SalesReward:
    """Build the reward chain.

    `rows`: Training rows and held-out rows. `output_dir`: Folder of the run's own cache of answers. `records`: as in
    `SalesReward`. `keeps_references`: whether 32B answers of other runs are taken and left for them, if the settings
    say so too.

    The other arguments are those of `build_services`.
    """
    budget = budget_of(config, output_dir, processes)
    rag, judge = build_services(config, parts, rag_base_url, judge_base_url, processes, budget)
    # the embedded service has a new address in every run, so its answers are not kept
    lasting = config.rag_base_url is not None
    keeps_references = keeps_references and lasting and config.cache_answers
    chain = SalesReward(
        [
            replace(row, images=(), columns={}) for row in rows
        ],  # services and judge see text; a child process gets a copy
        rag,
        judge,
        parts.scoring,
        stages=parts.stages,
        score_threshold=config.rag_score_threshold,
        top_k=config.rag_top_k,
        deadline_s=config.reward_deadline_s,
        action_format=config.action_format(),
        announces=process_index == 0,
        lines=SampleLines(config.verbose),
        records=records,
        answers=_answer_store(config, output_dir / f"answers.rank{process_index}.sqlite" if lasting else None),
        references=AnswerStore(cache_dir() / "references.sqlite" if keeps_references else None),
    )
    chain.budget = budget
    return chain


def budget_of(config: RewardConfig, output_dir: Path, processes: int = 1) -> Budget | None:
    """The budget of a run in this folder. `None` where nothing is limited and nothing has a price."""
    providers = config.parsed_judge_providers()
    places: list[tuple[str, str | None, RewardConfig | JudgeProviderConfig]] = [("", None, config)]
    places += [(f"judge_providers[{judge.name}].", f"{JUDGE}_{judge.name}", judge) for judge in providers]
    limits = [
        Limit(name=f"{prefix}max_{kind}", kind=kind, most=most, service=service)
        for prefix, service, settings in places
        for kind, most in ((CALLS, settings.max_calls), (USD, settings.max_usd))
        if most is not None
    ]
    rates = [judge.tokens_per_minute for judge in providers]
    if not limits and not any(rates) and not any(judge.has_price for judge in providers):
        return None
    return Budget(output_dir / SPENT_FILE, limits, processes)


def build_services(
    config: RewardConfig,
    parts: RewardParts,
    rag_base_url: str,
    judge_base_url: str,
    processes: int = 1,
    budget: Budget | None = None,
) -> Services:
    """Build the clients of the services, without a connection.

    `parts`: from `prepare_reward`. `rag_base_url`: Address of the configured RAG service, or of the embedded one.
    `judge_base_url`: Address of the configured judge, or of the embedded one. Not used with `judge_providers`.
    `processes`: number of processes that share the limits. `budget`: from `budget_of`. Nothing is limited or counted
    without it.
    """

    def transport(
        service: str,
        max_concurrency: int,
        timeout_s: float,
        max_attempts: int,
        patience_s: float | None = None,
        price: Price = FREE,
        tokens_per_minute: float | None = None,
    ) -> Transport:
        return Transport(
            service,
            max_concurrency=max(max_concurrency // processes, 1),
            attempt_timeout_s=timeout_s,
            max_attempts=max_attempts,
            initial_concurrency=config.initial_concurrency,
            outage_patience_s=config.outage_patience_s if patience_s is None else patience_s,
            hedge_fraction=config.hedge_fraction,
            quota=None if budget is None else budget.quota(service, price, tokens_per_minute),
        )

    def retrieval(service: str, patience_s: float | None = None) -> Transport:
        return transport(service, config.rag_max_concurrency, config.rag_timeout_s, attempts["rag"], patience_s)

    attempts = config.parsed_attempts()
    # A row can be judged without the reference. An outage of the 32B endpoint is waited out only if its score counts.
    patience_32b_s = None if parts.reference_weighed else 0.0
    rag = RagClient(
        rag_base_url,
        transport_8b=retrieval("rag_8b"),
        transport_32b=retrieval("rag_32b", patience_32b_s),
        api_key=parts.rag_key,
    )
    if parts.judge is None:
        return Services(rag, _judge(config, parts, transport, judge_base_url))
    if budget is not None:
        for name, each in parts.judge.transports.items():
            each.count_by(budget.quota(name))
    return Services(rag, parts.judge)


def _judge(
    config: RewardConfig, parts: RewardParts, transport: Callable[..., Transport], base_url: str
) -> JudgeClient:
    configured = config.parsed_judge_providers()
    providers = [
        _provider(
            each,
            parts.judge_keys[each.name],
            transport(
                f"{JUDGE}_{each.name}" if configured else JUDGE,
                each.max_concurrency or config.judge_max_concurrency,
                each.timeout_s or config.judge_timeout_s,
                config.parsed_attempts()["judge"],
                price=_price(each),
                tokens_per_minute=each.tokens_per_minute,
            ),
        )
        for each in configured or [_only_provider(config, base_url)]
    ]
    return JudgeClient(providers, parts.rubrics, repeats=config.judge_repeats, aggregation=config.judge_aggregation)


def _only_provider(config: RewardConfig, base_url: str) -> JudgeProviderConfig:
    return JudgeProviderConfig(
        name=JUDGE,
        base_url=base_url,
        model=config.judge_model,
    )


def _price(config: JudgeProviderConfig) -> Price:
    return Price(
        prompt_token=config.usd_per_million_prompt_tokens / 1e6,
        completion_token=config.usd_per_million_completion_tokens / 1e6,
        max_completion_tokens=config.max_completion_tokens,
    )


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
    return AnswerStore(path) if config.cache_answers else AnswerStore(most=0)
