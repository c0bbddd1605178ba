"""The checkpoint that a run goes on from, chosen by all ranks together.

Owns this choice. `whole` says which folders are whole, `identity` whether one is of this run.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from accelerate.logging import get_logger
from accelerate.utils import gather_object

from salesrl_trl.checkpoint.identity import Identity, check_identity
from salesrl_trl.checkpoint.whole import Manifest, find, read
from salesrl_trl.config import SalesGRPOConfig
from salesrl_trl.errors import ConfigError

T = TypeVar("T")

logger = get_logger(__name__)


def choose_on_all_ranks(
    asked: str | os.PathLike[str] | bool | None, args: SalesGRPOConfig, identity: Identity
) -> Path | None:
    """`whole.find` on all ranks, then `check_identity`. A collective. Logs differences that are allowed.

    The first process of each machine reads all files. The others compare sizes, and follow the first of all.

    Raises:
        `ConfigError`: on all ranks, if any rank refuses the checkpoint.
    """
    with_digests = args.local_process_index == 0
    allowed = args.allow_changed_resume
    found = _agreed(lambda: find(asked, args.output_dir, with_digests=with_digests, without_manifest=allowed))
    if found is None:
        return None
    checkpoint: Path = found
    for note in _agreed(lambda: check_identity(checkpoint, identity, allowed)):
        logger.warning(note)
    manifest = read(found)
    saved_by = manifest.processes if isinstance(manifest, Manifest) else args.world_size
    if saved_by != args.world_size:
        logger.warning(
            f"{found} was saved by {saved_by} processes, and this run has {args.world_size}: their random generators "
            "begin anew, so that completions differ from those of a run without a stop. The prompts are the same"
        )
    return found


def _agreed(work: Callable[[], T]) -> T:
    """The first rank's result. Raises the `ConfigError` of any rank on all of them."""
    result: T | None = None
    refused: str | None = None
    try:
        result = work()
    except ConfigError as error:
        refused = str(error)
    gathered = gather_object([(result, refused)])
    if refusals := [refusal for _, refusal in gathered if refusal is not None]:
        raise ConfigError(refusals[0])
    first: T = gathered[0][0]
    return first
