"""Checks of the output folder, and of the checkpoint to resume from.

Refuses to read a checkpoint's state. `checkpoint.identity` compares a checkpoint with the run.
"""

import difflib
import fcntl
import logging
import shutil
import tempfile
from datetime import datetime
from pathlib import Path
from typing import BinaryIO

from transformers.trainer_utils import get_last_checkpoint

from salesrl_trl.errors import ConfigError
from salesrl_trl.names import LOG_FILE

logger = logging.getLogger(__name__)


def check_output_dir(path: Path | str) -> None:
    """Make the output folder. Raises `ConfigError` if no file can be written there."""
    folder = Path(path).expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(
            f"nothing can be written to `output_dir` {str(path)!r} ({error.strerror}). Expected a folder, or a place "
            "for one, with free space and the right to write. Name another."
        ) from None


def claim_output_dir(path: Path | str) -> BinaryIO:
    """Keep the output folder for this run, until the returned file is closed or the process ends.

    Raises `ConfigError` if another run has it: the two would overwrite each other's checkpoints.
    """
    log = (Path(path).expanduser() / LOG_FILE).open("ab")
    try:
        fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        log.close()
        raise ConfigError(
            f"another run writes to `output_dir` {str(path)!r} now. Expected a folder of its own for each. Name "
            f"another, or wait until that run has ended (`fuser {log.name}` shows its processes)."
        ) from None
    except OSError as error:  # some network disks have no locks
        logger.info(f"off: the check that one run alone writes to {path} ({error.strerror})")
    return log


def free_gib(folder: Path | str) -> float:
    """Free disk of a folder, in GiB."""
    return shutil.disk_usage(Path(folder).expanduser()).free / 2**30


def check_checkpoint(path: str | None, output_dir: str) -> str | None:
    """Find the checkpoint to resume from.

    Args:
        path (`str`, *optional*):
            A checkpoint's folder, or `"true"` for the last one in `output_dir`.
        output_dir (`str`):
            The output folder.

    Returns:
        `str`, *optional*: the checkpoint's folder; `None` for a run from the start.

    Raises:
        `ConfigError`: there is no such checkpoint.
    """
    asked = str(path).lower()
    if path is None or asked == "false":
        return None
    if asked == "true" and Path(output_dir).expanduser().is_dir():
        path = get_last_checkpoint(str(Path(output_dir).expanduser())) or path
    if (Path(path).expanduser() / "trainer_state.json").is_file():
        return str(Path(path).expanduser())
    found = sorted(each.parent.name for each in Path(output_dir).expanduser().glob("checkpoint-*/trainer_state.json"))
    near = difflib.get_close_matches(Path(path).name, found, n=1)
    guess = f" Did you mean {Path(output_dir) / near[0]}?" if near else ""
    held = f"{output_dir} holds {', '.join(found)}" if found else f"{output_dir} holds none"
    raise ConfigError(f"`resume_from_checkpoint` is {path!r}, where there is no checkpoint.{guess} {held}.")


def earlier_start(output_dir: Path | str, resumes: bool) -> list[str]:
    """Lines for the banner: files of an earlier run in the output folder that this run uses or overwrites."""
    folder, notes = Path(output_dir).expanduser(), []
    kept = sorted(folder.glob("answers.rank*.sqlite"))
    if kept and not resumes:
        written = datetime.fromtimestamp(max(each.stat().st_mtime for each in kept)).isoformat(" ", "minutes")
        notes.append(
            f"8B answers and verdicts of an earlier start, last written {written}, are used again for equal requests. "
            f"Delete {folder}/answers.rank*.sqlite if the judge behind the same name has changed"
        )
    if not resumes and any(folder.glob("model*.safetensors")):
        notes.append(f"{folder} holds the policy of an earlier run, which this one will overwrite")
    return notes
