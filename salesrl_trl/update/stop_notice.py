"""Notice of a stop, from the process that was asked to stop to all others, without a collective.

The others may be waiting, for example for rewards. A thread of each process looks at a key in the store by which
torch's processes found each other. Owns the key and the thread. `stopping`, its only user, owns the collective in
which all processes agree on the last step.
"""

import contextlib
import itertools
import logging
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta

import torch.distributed
from torch.distributed import distributed_c10d

logger = logging.getLogger(__name__)

POLL_S = 0.25
"""Seconds between two looks. A look is one small message to the first process."""
PATIENCE = timedelta(seconds=10)
"""Longest wait for an answer of the store."""
_runs = itertools.count()  # all processes count alike, so that each run has its own key


@contextlib.contextmanager
def watched(requested: Callable[[], str | None], stop: Callable[[str], None]) -> Iterator[None]:
    """Inside the block, notify the other processes of a stop, and be notified by them. All processes must enter it
    equally often. `requested` returns who asked this process to stop, `None` before that. `stop` is called at most
    once, from another thread, with who asked another process first."""
    number = next(_runs)
    if not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1:
        yield
        return
    # A separate connection: others may wait on the existing one.
    store = distributed_c10d._get_default_store().clone()  # type: ignore[attr-defined]
    store.set_timeout(PATIENCE)
    over = threading.Event()
    arguments = (store, f"salesrl_trl/stop/{number}", requested, stop, over)
    thread = threading.Thread(target=_watch, args=arguments, name="stop notice", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def all_arrive(step: int) -> bool:
    """Whether all processes come here within `PATIENCE`, after the same number of optimizer steps. No collective: the
    others may wait in one, after an error on this process alone."""
    if not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1:
        return True
    number, world = next(_runs), torch.distributed.get_world_size()
    keys = [f"salesrl_trl/arrived/{number}/{rank}" for rank in range(world)]
    try:
        store = distributed_c10d._get_default_store().clone()  # type: ignore[attr-defined]
        store.set(keys[torch.distributed.get_rank()], str(step))
        store.wait(keys, PATIENCE)
        return {store.get(key) for key in keys} == {str(step).encode()}
    except RuntimeError:  # in vain, or the process with the store is gone
        return False


def _watch(
    store: distributed_c10d.Store,
    key: str,
    requested: Callable[[], str | None],
    stop: Callable[[str], None],
    over: threading.Event,
) -> None:
    try:
        while not over.wait(POLL_S):
            reason = requested()
            if reason is not None:
                store.set(key, reason)
                return
            if store.check([key]):
                stop(store.get(key).decode())
                return
    except RuntimeError as error:  # the first process is gone, so that collectives fail too
        logger.warning(
            f"other processes can't be notified of a stop ({type(error).__name__}). They stop at the end of a step."
        )
