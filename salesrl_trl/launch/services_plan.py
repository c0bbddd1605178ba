"""The part of a run's plan needed by the stages `rag` and `judge`, without torch or a tokenizer, and the embedded
services of a run, which each node starts if no address is configured."""

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
from salesrl_trl.launch.data.form import Portion, Records, part_of
from salesrl_trl.launch.data_config import DataConfig
from salesrl_trl.launch.reward_config import RewardConfig
from salesrl_trl.types import ALL, SalesRow

if TYPE_CHECKING:
    from salesrl_trl.launch.settings import RunConfig


NOWHERE = "http://nobody.invalid/v1"  # placeholder address of an unused service


@contextlib.contextmanager
def launched_services(config: RewardConfig) -> Iterator[EmbeddedServices]:
    """The embedded services, which stop on exit. If no address is configured, one process per node starts them in the
    background."""
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
    """The addresses of the RAG service and the judge. Starts embedded services if none is configured; all ranks get
    the addresses of their node. `services`: from `launched_services`, the default."""
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
    from accelerate import PartialState  # loads torch, which a single process does not need
    from accelerate.utils import gather_object

    state = PartialState()
    started: ServiceAddresses | SalesRLError | None = None
    if state.is_local_main_process:
        try:
            started = services.start()
        except SalesRLError as error:
            started = error
    everywhere = gather_object([started])
    if failed := [result for result in everywhere if isinstance(result, SalesRLError)]:
        raise failed[0]
    here = everywhere[state.process_index - state.local_process_index]  # from this node's main process
    assert isinstance(here, ServiceAddresses)
    return here


@dataclass
class StepSettings:
    """Settings of `SalesGRPOConfig`, with its defaults, for tools that do not import torch."""

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
    calls: int | None = None  # per service; 0 for a single one, `None` for a step's concurrent calls
    load: int = 0  # batches of made-up completions to score in the stage `judge`
    opened: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    """Resources that stages open for later stages, e.g. the embedded services. Closed at the end of a preflight."""

    @cached_property
    def reward(self) -> RewardParts:
        training = self.config.training
        return read_reward(self.config.reward, training.branches, training.hybrid_reference_weight > 0)

    @cached_property
    def addresses(self) -> tuple[str, str]:
        """The addresses of the RAG service and the judge. Embedded services are started, and stop with the
        preflight."""
        return self.opened.enter_context(addresses(self.config.reward))

    @cached_property
    def own_records(self) -> list[Records]:
        from salesrl_trl.launch.checks.dataset import own_records

        return own_records(self.config.data, self.config.reward)

    @cached_property
    def train_records(self) -> list[Records]:
        """The training records by dataset. Raises `DataError` for an empty dataset."""
        pairs = zip(self.config.data.sources, self.own_records, strict=True)
        parts = [(records, source.form(), source.held_out_share) for source, records in pairs]
        return [part_of(records, form, Portion.TRAINING if share else Portion.ALL) for records, form, share in parts]

    @property
    def branches_of_rows(self) -> list[str]:
        """The branches of the user's own task, if the settings name none."""
        records = (row.record for part in self.train_records for row in part.rows)
        return sorted({str(record.get("branch", ALL)) for record in records}) or [ALL]

    @cached_property
    def train_rows(self) -> list[SalesRow]:
        from salesrl_trl.launch.checks.dataset import rows_of

        data, branches = self.config.data, self.config.training.branches
        return rows_of(self.train_records, branches, data.max_train_rows, [source.entry for source in data.sources])
