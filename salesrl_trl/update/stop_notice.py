"""Word of a stop from the process that was told to, to all others, beside their collectives.

Owns how the others learn of it while they wait for something of their own, for example rewards: a key in the store by
which torch's processes have found each other, looked at by a thread. That a run ends, and after which step, all agree
on in a collective, which is the trainer's.
"""

import contextlib
import itertools
import logging
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch.distributed
from torch.distributed import distributed_c10d

logger = logging.getLogger(__name__)

POLL_S = 0.25
"""Seconds between two looks. A look is one small message to the first process."""
PATIENCE = timedelta(seconds=10)
"""With a store that does not answer."""
_runs = itertools.count()  # counted by all processes alike, so that each run has a key of its own


@contextlib.contextmanager
def watched(requested: Callable[[], str | None], told: Callable[[str], None]) -> Iterator[None]:
    """While active, tell the other processes what asked this one for a stop, and be told what asked them.

    Every process enters it as often as any other. One process alone has nothing to watch.

    Args:
        requested (`Callable[[], str | None]`):
            What asked this process for a stop; `None` as long as nothing has.
        told (`Callable[[str], None]`):
            Called at most once, from another thread, with what asked another process first.
    """
    number = next(_runs)
    if not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1:
        yield
        return
    # A connection of its own: others may wait on theirs.
    store = distributed_c10d._get_default_store().clone()  # type: ignore[attr-defined]
    store.set_timeout(PATIENCE)
    over = threading.Event()
    arguments = (store, f"salesrl_trl/stop/{number}", requested, told, over)
    thread = threading.Thread(target=_watch, args=arguments, name="stop notice", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _watch(
    store: Any, key: str, requested: Callable[[], str | None], told: Callable[[str], None], over: threading.Event
) -> None:
    try:
        while not over.wait(POLL_S):
            reason = requested()
            if reason is not None:
                store.set(key, reason)
                return
            if store.check([key]):
                told(store.get(key).decode())
                return
    except RuntimeError as error:  # the first process is gone: no collective would find it either
        logger.warning(
            f"other processes can't be told of a stop ({type(error).__name__}); they learn of it at a step's end"
        )
