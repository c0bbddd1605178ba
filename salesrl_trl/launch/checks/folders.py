"""Checks of the output folder, and its lock. `train` and the stages call them. `checkpoint` looks at checkpoints."""

import fcntl
import logging
import os
import re
import shutil
import socket
import tempfile
import time
from datetime import datetime
from pathlib import Path
from typing import TextIO

from salesrl_trl.errors import ConfigError
from salesrl_trl.ground.process import stat_of
from salesrl_trl.names import LOCK_FILE

logger = logging.getLogger(__name__)

ORPHAN_PATIENCE_S = 120.0  # longest wait for a run whose launcher has died


def check_output_dir(path: Path | str) -> None:
    """Make the output folder. Raises `ConfigError` if no file can be written there."""
    folder = Path(path).expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(
            f"nothing can be written to `output_dir` {str(path)!r} ({error.strerror}). Name another, with free space "
            "and the right to write."
        ) from None


def claim_output_dir(path: Path | str) -> TextIO:
    """Keep the output folder for this run, until the returned file is closed or the process ends. Another run there is
    an error, but one whose launcher has died is waited for: it saves its state and ends."""
    lock = (Path(path).expanduser() / LOCK_FILE).open("a+", encoding="utf-8")
    until = time.monotonic() + ORPHAN_PATIENCE_S
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            lock.seek(0)
            owner = lock.read().strip() or "another process"
        except OSError as error:  # some network disks have no locks
            logger.info(f"off: the check that one run alone writes to {lock.name} ({error.strerror})")
            break
        process = re.match(r"process (\d+) on (\S+),", owner)
        is_here = process is not None and process[2] == socket.gethostname()
        stat = stat_of(int(process[1])) if process is not None and is_here else None
        is_orphan = stat is not None and stat[1] == 1  # its parent has died
        if not is_orphan or time.monotonic() > until:
            lock.close()
            raise ConfigError(
                f"another run writes to `output_dir` {str(path)!r} now: {owner}. Name another, or wait "
                "until that run has ended."
            )
        logger.info(f"waiting for the run that still writes to {path}, and whose launcher is gone: {owner}")
        time.sleep(2)
    lock.truncate(0)
    lock.write(f"process {os.getpid()} on {socket.gethostname()}, since {datetime.now():%Y-%m-%d %H:%M:%S}\n")
    lock.flush()
    return lock


def free_gib(folder: Path | str) -> float:
    """Free disk of a folder, in GiB."""
    return shutil.disk_usage(Path(folder).expanduser()).free / 2**30
