"""The recorder of one rank of a run: its file, the id of the run, and what a resume keeps. `components` calls it."""

from collections.abc import Mapping
from pathlib import Path

from accelerate.logging import get_logger
from accelerate.utils import broadcast_object_list
from transformers import TrainerState

from salesrl_trl import __version__
from salesrl_trl.checkpoint.whole import STATE_FILE
from salesrl_trl.config import SalesGRPOConfig
from salesrl_trl.errors import ConfigError
from salesrl_trl.recording.reader import as_json, record_files, run_of
from salesrl_trl.recording.schema import rank_of, record_file
from salesrl_trl.recording.writer import Recorder

logger = get_logger(__name__)


def recorder_of(args: SalesGRPOConfig, weights: Mapping[str, float], resumed: str | None, run: str) -> Recorder:
    """The recorder of this rank; a collective. Its file holds the weight of each of several functions. The record goes
    on where the checkpoint `resumed` lies in its folder and is of the same `run`; another run's is kept beside. Raises
    `ConfigError` where the first rank's file can't be read."""
    folder = Path(args.output_dir)
    after, before = None, None
    if resumed is not None and Path(resumed).resolve().parent == folder.resolve():  # of a run in this folder
        after = TrainerState.load_from_json(str(Path(resumed, STATE_FILE))).global_step
        before = run_of(record_file(folder, 0))
    is_unread = after is not None and before is None and record_file(folder, 0).exists()
    is_anothers, is_unread = broadcast_object_list([before not in (None, run), is_unread])
    if is_unread:  # as another run's, it would be deleted
        raise ConfigError(
            f"{record_file(folder, 0)} can't be read now. Expected the record of the run that goes on. Wait until no "
            "other process locks it, or move it away."
        )
    if is_anothers:
        after = None
        logger.warning(f"{resumed} is of another run than the record in {folder}, which is kept beside a new one")
    gib, clean = args.parsed_record()
    gone = [path for path in record_files(folder) if (rank_of(path) or 0) >= args.world_size]
    return Recorder(
        record_file(folder, args.process_index),
        most_bytes=int(gib * 2**30),
        clean=clean,
        meta={
            "run": run,
            "salesrl_trl": __version__,
            "process": str(args.process_index),
            "output_dir": args.output_dir,
            **({"weights": as_json(weights)} if len(weights) > 1 else {}),
        },
        after=after,
        others=gone if args.local_process_index == 0 else (),
    )
