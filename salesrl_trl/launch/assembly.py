"""Builds the reward pipeline from settings: clients with limits, caches and keys, and the process it runs in."""

import contextlib
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from salesrl_trl.agents.customer import Customer
from salesrl_trl.config.checks import build_object, from_fields
from salesrl_trl.demo.services.launcher import EMBEDDED_MODEL, EmbeddedServices
from salesrl_trl.errors import ConfigError
from salesrl_trl.ground.local_disk import is_remote
from salesrl_trl.judged.budget import FREE, Budget, Price
from salesrl_trl.judged.cache import AnswerStore
from salesrl_trl.judged.chain import SalesReward
from salesrl_trl.judged.judge import Judge, JudgeClient, load_rubrics
from salesrl_trl.judged.judge_reward import JudgeReward, SecondJudge
from salesrl_trl.judged.provider import JudgeProvider, ProviderClient
from salesrl_trl.judged.rag_client import RagAnswers, RagBackend, RagClient
from salesrl_trl.launch.checks.reward import RewardParts, prepare_reward, read_reward
from salesrl_trl.launch.judge_config import JudgeProviderConfig
from salesrl_trl.launch.reward_config import RewardConfig
from salesrl_trl.launch.services_plan import NOWHERE, addresses
from salesrl_trl.record.replay import ReplayReward
from salesrl_trl.reward.batch import SampleLines
from salesrl_trl.reward.mixed import combined
from salesrl_trl.reward.remote import RemoteReward
from salesrl_trl.reward.scorer import MeterSettings, Scorer
from salesrl_trl.service.transport import Transport
from salesrl_trl.types import ALL, DEFAULT_FORMAT, JUDGE, SALES, SalesRow

if TYPE_CHECKING:
    from salesrl_trl.config import SalesGRPOConfig

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def open_reward(
    config: RewardConfig, training: "SalesGRPOConfig", rows: Sequence[SalesRow], parts: RewardParts | None = None,
    services: EmbeddedServices | None = None, *, records: bool = False,
) -> Iterator[Scorer]:  # fmt: skip
    """Check the settings, start the embedded services if no address is configured, and build the reward pipeline.

    The services stop on exit. `SalesGRPOTrainer.finish` closes the pipeline's connections.

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
            From `prepare_reward`, the default.
        services (`EmbeddedServices`, *optional*):
            From `launched_services`, the default.
        records (`bool`, *optional*, defaults to `False`):
            As in `SalesReward`.

    Raises:
        `SalesRLError`: a setting or a service is invalid.
    """
    if parts is None:
        branches = training.branches or sorted({row.branch for row in rows})
        parts = prepare_reward(config, branches, training.hybrid_reference_weight > 0)
    with addresses(config, services) as urls, _connected(config, parts, urls[0], training) as budget:

        def built_in() -> Scorer:
            reward = build_reward(
                config, parts, rows, *urls, output_dir=Path(training.output_dir), processes=training.world_size,
                process_index=training.process_index, records=records,
            )  # fmt: skip
            stays = config.asks_nobody or training.device.type == "cpu"
            return placed(reward, None if config.asks_nobody else training.reward_process, stays)

        paths, own = config.reward_funcs or [SALES], parts.functions
        rewards = [own[path] if path in own else built_in() for path in paths]
        weights = training.reward_weights or [1.0] * len(rewards)
        is_apart = training.reward_process and not config.asks_nobody
        reward = combined(rewards, weights, RemoteReward if is_apart else None)
        if (replay := config.parsed_replay()) is not None:
            rank = training.process_index
            yield ReplayReward(reward, replay.record, replay.on_miss, delays=replay.delays, rank=rank)
            return
        own_budget, reward.budget = reward.budget, reward.budget or budget
        try:
            yield reward
        finally:  # a module's function may be shared with another run
            reward.budget = own_budget


@contextlib.contextmanager
def _connected(
    config: RewardConfig, parts: RewardParts, rag_base_url: str, training: "SalesGRPOConfig"
) -> Iterator[Budget | None]:
    """Connect the built-in tool and the customer, if used, to their own clients, because their event loop is not that
    of rewards. Yields the budget to show if rewards have none."""
    customer = parts.partner if config.asks_model and isinstance(parts.partner, Customer) else None
    if parts.search is None and customer is None:
        yield None
        return
    service = config.rag_service
    own = service.client if parts.search is not None else None
    rag = None if own is None else build_object(own, "rag.client", RagBackend)
    budget = config.budget(Path(training.output_dir), training.world_size)  # one per event loop
    clients = ServiceClients(config, replace(parts, rag=rag), training.world_size, budget)
    with contextlib.ExitStack() as opened:
        if customer is not None:
            customer.connect(clients.partner())
            opened.callback(customer.close)
        if parts.search is not None:
            backend = clients.rag(rag_base_url, name_8b="tool_search")
            folder = None if service.is_embedded else Path(training.output_dir)
            stores = _stores(config, folder, training.process_index)
            parts.search.connect(RagAnswers(backend, service.score_threshold, service.top_k, DEFAULT_FORMAT, *stores))
            opened.callback(parts.search.close)
        yield budget and Budget(budget.path, budget.limits)


def placed(chain: JudgeReward, in_a_process: bool | None, on_cpu: bool) -> JudgeReward | RemoteReward:
    """Move the pipeline to its own process, or keep it in the trainer's. `in_a_process`: the setting `reward_process`;
    `None` selects a separate process, except on a CPU."""
    if in_a_process is False or (in_a_process is None and on_cpu):
        return chain
    try:
        return RemoteReward(chain)
    except ConfigError as error:
        if in_a_process:
            raise
        logger.warning(f"rewards stay in the trainer's process, where they slow down vLLM: {error}")
        return chain


def build_reward(
    config: RewardConfig, parts: RewardParts, rows: Sequence[SalesRow], rag_base_url: str, judge_base_url: str, *,
    output_dir: Path | None, processes: int = 1, process_index: int = 0, records: bool = False,
) -> JudgeReward:  # fmt: skip
    """Build the built-in reward: the pipeline, or with `judge` in `reward_funcs` only the judge, which needs no rows.

    `output_dir`: folder of the run's answer cache and budget; without it, nothing is cached or counted.
    """
    budget = None if output_dir is None else config.budget(output_dir, processes)
    clients, direct = ServiceClients(config, parts, processes, budget), config.judges_answers
    # an embedded service's address changes with every run, so its answers are not cached
    is_kept = not (config.embeds_judge if direct else config.rag_service.is_embedded)
    answers, references = _stores(config, output_dir if is_kept else None, process_index)
    common: dict[str, Any] = {
        "deadline_s": config.reward_deadline_s,
        "stages": parts.stages,
        "lines": SampleLines(config.verbose),
        "records": records,
        "answers": answers,
        "second": clients.second_judge(),
    }
    judge = clients.judge(judge_base_url)
    if direct:
        reward = JudgeReward(judge, parts.scoring, **common)
    else:
        reward = SalesReward(
            # services and judge see text; a child process gets a copy
            [replace(row, images=(), columns={}) for row in rows],
            clients.rag(rag_base_url),
            judge,
            parts.scoring,
            score_threshold=config.rag_service.score_threshold,
            top_k=config.rag_service.top_k,
            action_format=config.rag_service.action_format,
            references=references,
            **common,
        )
    reward.budget = budget
    return reward


def _stores(config: RewardConfig, output_dir: Path | None, process_index: int) -> tuple[AnswerStore, AnswerStore]:
    """Stores of answers and references: in `output_dir`, or in memory without it or `cache_answers`."""
    if output_dir is None or not config.cache_answers:
        return AnswerStore() if config.cache_answers else AnswerStore(most=0), AnswerStore()
    of_rank = f".rank{process_index}"  # SQLite shares a file between processes on a local disk only
    references = output_dir / f"references{of_rank if is_remote(output_dir) else ''}.sqlite"
    return AnswerStore(output_dir / f"answers{of_rank}.sqlite"), AnswerStore(references)


def judge_reward(
    rubric: str | Mapping[str, str] | None = None, *, output_dir: str = "", **settings: Any
) -> JudgeReward:
    """The built-in judge as a reward function, for a trainer's `reward_funcs`.

        judge = judge_reward(judge_providers={"base_url": "https://api.openai.com/v1", "model": "gpt-4.1-mini",
                                              "api_key_env": "OPENAI_API_KEY"})
        trainer = SalesGRPOTrainer(model, [judge, my_function], training, dataset)

    It reads the columns `prompt`, and if present `reference`, `documents`, `criteria` and `branch`.

    Args:
        rubric (`str` or `Mapping[str, str]`, *optional*):
            The rubric, or one per value of the column `branch`. Defaults to the built-in one.
        output_dir (`str`, *optional*):
            The trainer's folder, for cached verdicts and spending. Required for `max_calls` and `max_usd`.
        settings:
            Settings of `RewardConfig`, e.g. `judge_providers` and `judge_timeout_s`.

    Raises:
        `ConfigError`: a setting is invalid, or no judge is configured.
    """
    config = RewardConfig(reward_funcs=[JUDGE], **settings)
    if config.embeds_judge:
        raise ConfigError("`judge_reward` lacks `judge_providers`: an address and a model, or the path of a class.")
    if not output_dir and (config.max_calls is not None or config.max_usd is not None):
        raise ConfigError("`judge_reward` has a limit but no `output_dir`, which stores the count. Expected both.")
    rubrics = {ALL: rubric} if isinstance(rubric, str) else dict(rubric or {})
    parts = read_reward(config, [*rubrics] or [ALL], rubrics=rubrics)
    processes, index = (int(os.environ.get(name, default)) for name, default in (("WORLD_SIZE", 1), ("RANK", 0)))
    return build_reward(
        config, parts, (), NOWHERE, NOWHERE, processes=processes, process_index=index,
        output_dir=Path(output_dir) if output_dir else None,
    )  # fmt: skip


@dataclass(frozen=True)
class ServiceClients:
    """Builds the services' clients, without connecting."""

    config: RewardConfig
    parts: RewardParts
    processes: int = 1  # that share the limits
    budget: Budget | None = None  # `RewardConfig.budget`; without it, nothing is limited or counted

    def rag(self, base_url: str, name_8b: str = "rag_8b") -> RagBackend:
        """The client of the RAG service, or the user's own. `name_8b`: the 8B endpoint's name in metrics and reason
        codes."""
        config, parts = self.config, self.parts
        if parts.rag is not None:
            self._count(parts.rag.transports)
            return parts.rag
        limits = (config.rag_service.max_concurrency, config.rag_service.timeout_s, config.parsed_attempts().rag)
        # Rows can be judged without the reference, so only wait out an outage of the 32B endpoint if it counts.
        patience_32b_s = config.outage_patience_s if parts.reference_weighed else 0.0
        return RagClient(
            base_url,
            transport_8b=self._transport(name_8b, *limits),
            transport_32b=self._transport("rag_32b", *limits, patience_s=patience_32b_s),
            api_key=parts.rag_key,
        )

    def judge(self, base_url: str) -> Judge:
        """The client of the rewards' judges, or the user's own. `base_url`: the embedded judge's address."""
        config, own = self.config, self.parts.judge
        if own is not None:
            self._count(own.transports)
            return own
        meter = config.parsed_judge_meter()
        providers = [one for one in config.judges.providers if meter is None or one.name != meter.second]
        providers = providers or [JudgeProviderConfig(name=JUDGE, base_url=base_url, model=EMBEDDED_MODEL)]
        return self._judges(providers, self.parts.rubrics)

    def second_judge(self) -> SecondJudge | None:
        """The second judge of `judge_meter`."""
        config, meter = self.config, self.config.parsed_judge_meter()
        if meter is None:
            return None
        rubrics = {name: text for name, text in self.parts.rubrics.items() if name in self.parts.scoring.weights}
        if meter.rubric_dir is not None:
            rubrics = load_rubrics([*rubrics], meter.rubric_dir, direct=config.judges_answers)
        providers = [provider for provider in config.judges.providers if provider.name == meter.second]
        settings = from_fields(MeterSettings, meter, shows_text="completions" in config.verbose)
        return SecondJudge(judge=self._judges(providers, {**self.parts.rubrics, **rubrics}), settings=settings)

    def _judges(self, providers: Sequence[JudgeProviderConfig], rubrics: Mapping[str, str]) -> JudgeClient:
        config = self.config
        clients = [
            self._provider(provider, config.judges.service_of(provider), self.parts.judge_keys.get(provider.name))
            for provider in providers
        ]
        judging = config.judging
        times = {"repeats": judging.repeats, "orders": judging.orders_of_groups}
        return JudgeClient(clients, rubrics, aggregation=judging.aggregation, **times)

    def partner(self) -> ProviderClient:
        """The model that plays the partner."""
        partner = self.config.parsed_partner()
        assert partner is not None
        return ProviderClient(self._provider(partner, partner.name, self.parts.partner_key), setting="partner")

    def _provider(self, provider: JudgeProviderConfig, service: str, key: str | None) -> JudgeProvider:
        config = self.config
        transport = self._transport(
            service,
            provider.max_concurrency or config.judge_max_concurrency,
            provider.timeout_s or config.judge_timeout_s,
            config.parsed_attempts().judge,
            price=provider.price,
            tokens_per_minute=provider.tokens_per_minute,
            requests_per_minute=provider.requests_per_minute,
        )
        return from_fields(JudgeProvider, provider, transport=transport, api_key=key)

    def _transport(
        self, service: str, max_concurrency: int, timeout_s: float, max_attempts: int, price: Price = FREE,
        patience_s: float | None = None, **rates: float | None,
    ) -> Transport:  # fmt: skip
        return Transport(
            service,
            max_concurrency=max(max_concurrency // self.processes, 1),
            attempt_timeout_s=timeout_s,
            max_attempts=max_attempts,
            initial_concurrency=self.config.initial_concurrency,
            outage_patience_s=self.config.outage_patience_s if patience_s is None else patience_s,
            hedge_fraction=self.config.hedge_fraction,
            quota=None if self.budget is None else self.budget.quota(service, price, **rates),
        )

    def _count(self, transports: Mapping[str, Transport]) -> None:
        """Let the budget count the requests of a user's own client."""
        for name, transport in transports.items():
            if self.budget is not None:
                transport.count_by(self.budget.quota(name))
