"""The recorder of one rank of a run: its file, the id of the run, and what a resume keeps. `components` calls it."""

from collections.abc import Mapping
from pathlib import Path

from transformers import TrainerState

from salesrl_trl import __version__
from salesrl_trl.checkpoint.whole import STATE_FILE
from salesrl_trl.config import SalesGRPOConfig
from salesrl_trl.recording.reader import as_json, record_files
from salesrl_trl.recording.schema import rank_of, record_file
from salesrl_trl.recording.writer import Recorder


def recorder_of(args: SalesGRPOConfig, weights: Mapping[str, float], resumed: str | None, run: str) -> Recorder:
    """The recorder of this rank. Its file holds the weight of each of several functions. The record goes on where the
    checkpoint `resumed` lies in its folder; that of another `run` is kept beside."""
    folder, after = Path(args.output_dir), None
    if resumed is not None and Path(resumed).resolve().parent == folder.resolve():
        after = TrainerState.load_from_json(str(Path(resumed, STATE_FILE))).global_step
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
