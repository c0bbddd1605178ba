"""The embedded services of a run: where no address is configured, each node has its own.

`assembly` builds the clients that ask them.
"""

import contextlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path

from salesrl_trl.demo.services.launcher import EmbeddedServices, ServiceAddresses
from salesrl_trl.errors import SalesRLError
from salesrl_trl.launch.reward_config import RewardConfig

logger = logging.getLogger(__name__)

NOWHERE = "http://nobody.invalid/v1"  # stands for the address of a service that is not asked


@contextlib.contextmanager
def launched_services(config: RewardConfig) -> Iterator[EmbeddedServices]:
    """The embedded services, which stop on exit. Where no address is configured, one process of each node has them
    begin to start now."""
    from accelerate import PartialState  # brings torch, which configured services do not need

    services = EmbeddedServices(documents=_documents(config))
    try:
        if (config.embeds_rag or config.embeds_judge) and PartialState().is_local_main_process:
            services.launch()
        yield services
    finally:
        services.stop()


def _documents(config: RewardConfig) -> Path | None:
    path = config.rag_service.knowledge_file
    return None if path is None else Path(path).expanduser()


def _log_embedded(config: RewardConfig, at: ServiceAddresses) -> None:
    used = [f"RAG {at.rag_base_url}"] * config.embeds_rag + [f"judge {at.judge_base_url}"] * config.embeds_judge
    logger.info(f"embedded: {', '.join(used)}")


@contextlib.contextmanager
def addresses(config: RewardConfig, services: EmbeddedServices | None = None) -> Iterator[tuple[str, str]]:
    """The addresses of the RAG service and the judge. Embedded ones are started where none is configured; all ranks
    learn those of their own node. `services`: from `launched_services`, which is called without them."""
    rag = config.rag_service.base_url
    if not (config.embeds_rag or config.embeds_judge):
        yield rag or NOWHERE, NOWHERE
        return
    with contextlib.ExitStack() as stack:
        if services is None and "WORLD_SIZE" not in os.environ:
            here = stack.enter_context(EmbeddedServices(documents=_documents(config)))
            _log_embedded(config, here)
        else:
            here = _of_this_node(config, services or stack.enter_context(launched_services(config)))
        yield rag or here.rag_base_url, here.judge_base_url


def _of_this_node(config: RewardConfig, services: EmbeddedServices) -> ServiceAddresses:
    from accelerate import PartialState  # brings torch, which a process alone does not need
    from accelerate.utils import gather_object

    state = PartialState()
    started: ServiceAddresses | SalesRLError | None = None
    if state.is_local_main_process:
        try:
            started = services.start()
            _log_embedded(config, started)
        except SalesRLError as error:
            started = error
    everywhere = gather_object([started])
    for result in everywhere:
        if isinstance(result, SalesRLError):
            raise result
    here = everywhere[state.process_index - state.local_process_index]  # of this node's main process
    assert isinstance(here, ServiceAddresses)
    return here
