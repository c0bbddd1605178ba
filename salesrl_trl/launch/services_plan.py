"""The part of a run's plan that the stages `rag` and `judge` read, without torch or a tokenizer, and the embedded
services of a run: where no address is configured, each node has its own."""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from salesrl_trl.demo.services.launcher import EmbeddedServices, ServiceAddresses
from salesrl_trl.errors import SalesRLError
from salesrl_trl.launch.checks.reward import RewardParts, read_reward
from salesrl_trl.launch.data.form import Portion, part_of
from salesrl_trl.launch.data_config import DataConfig
from salesrl_trl.launch.reward_config import RewardConfig
from salesrl_trl.types import ALL, SalesRow

if TYPE_CHECKING:
    from salesrl_trl.launch.data.form import Records
    from salesrl_trl.launch.settings import RunConfig


NOWHERE = "http://nobody.invalid/v1"  # stands for the address of a service that is not asked


@contextlib.contextmanager
def launched_services(config: RewardConfig) -> Iterator[EmbeddedServices]:
    """The embedded services, which stop on exit. Where no address is configured, one process of each node has them
    begin to start now."""
    path = config.rag_service.knowledge_file
    services = EmbeddedServices(documents=None if path is None else Path(path).expanduser())
    try:
        if (config.embeds_rag or config.embeds_judge) and os.environ.get("LOCAL_RANK", "0") == "0":
            services.launch()
        yield services
    finally:
        services.stop()


@contextlib.contextmanager
def addresses(config: RewardConfig, services: EmbeddedServices | None = None) -> Iterator[tuple[str, str]]:
    """The addresses of the RAG service and the judge. Embedded ones are started where none is configured; all ranks
    learn those of their own node. `services`: from `launched_services`, which is called without them."""
    rag = config.rag_service.base_url
    if not (config.embeds_rag or config.embeds_judge):
        yield rag or NOWHERE, NOWHERE
        return
    with contextlib.ExitStack() as stack:
        here = _of_this_node(services or stack.enter_context(launched_services(config)))
        yield rag or here.rag_base_url, here.judge_base_url


def _of_this_node(services: EmbeddedServices) -> ServiceAddresses:
    if "WORLD_SIZE" not in os.environ:
        return services.start()
    from accelerate import PartialState  # brings torch, which a process alone does not need
    from accelerate.utils import gather_object

    state = PartialState()
    started: ServiceAddresses | SalesRLError | None = None
    if state.is_local_main_process:
        try:
            started = services.start()
        except SalesRLError as error:
            started = error
    everywhere = gather_object([started])
    for result in everywhere:
        if isinstance(result, SalesRLError):
            raise result
    here = everywhere[state.process_index - state.local_process_index]  # of this node's main process
    assert isinstance(here, ServiceAddresses)
    return here


@dataclass
class StepSettings:
    """The settings of `SalesGRPOConfig`, with its defaults, that tools read without its import of torch."""

    output_dir: str = "trainer_output"
    branches: list[str] = field(default_factory=list)
    hybrid_reference_weight: float = 0.0
    min_valid_reward_fraction: float = 0.5
    num_generations: int = 8
    per_device_train_batch_size: int = 8
    gradient_accumulation_steps: int = 1
    steps_per_generation: int | None = None
    generation_batch_size: int | None = None
    seed: int = 42
    scale_rewards: str = "group"
    reward_weights: list[float] | None = None

    def __post_init__(self) -> None:
        if self.generation_batch_size is None:
            steps = self.steps_per_generation or self.gradient_accumulation_steps
            processes = int(os.environ.get("WORLD_SIZE", "1"))
            self.generation_batch_size = self.per_device_train_batch_size * steps * processes

    @property
    def process_index(self) -> int:
        return int(os.environ.get("RANK", "0"))


@dataclass
class ServicesConfig:
    data: DataConfig
    reward: RewardConfig
    training: StepSettings


@dataclass
class ServicesPlan:
    config: "ServicesConfig | RunConfig"
    in_depth: bool = True
    calls: int | None = None  # to each service, 0 for a single one; `None` for as many as a step has in flight
    load: int = 0  # batches of made-up completions that the stage `judge` scores
    opened: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    """What stages opened for later ones, such as the embedded services. The end of a preflight closes it."""

    @cached_property
    def reward(self) -> RewardParts:
        training = self.config.training
        return read_reward(self.config.reward, training.branches, training.hybrid_reference_weight > 0)

    @cached_property
    def addresses(self) -> tuple[str, str]:
        """The addresses of the RAG service and the judge. Embedded ones are started, and stop with the preflight."""
        return self.opened.enter_context(addresses(self.config.reward))

    @cached_property
    def own_records(self) -> "list[Records]":
        from salesrl_trl.launch.checks.dataset import own_records

        return own_records(self.config.data, self.config.reward)

    @cached_property
    def train_records(self) -> "list[Records]":
        """The records to train on, by dataset. Raises `DataError` if one has none."""
        return [
            part_of(records, source.form(), Portion.TRAINING if source.held_out_share else Portion.ALL)
            for source, records in zip(self.config.data.sources, self.own_records, strict=True)
        ]

    @property
    def branches_of_rows(self) -> list[str]:
        """Of a task of one's own, whose settings name none."""
        records = (row.record for part in self.train_records for row in part.rows)
        return sorted({str(record.get("branch", ALL)) for record in records}) or [ALL]

    @cached_property
    def train_rows(self) -> list[SalesRow]:
        from salesrl_trl.launch.checks.dataset import rows_of

        data, branches = self.config.data, self.config.training.branches
        return rows_of(self.train_records, branches, data.max_train_rows, [source.entry for source in data.sources])
