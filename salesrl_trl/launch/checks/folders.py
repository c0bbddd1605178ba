"""Checks of the output folder, and its lock. `checkpoint` checks checkpoints."""

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
from salesrl_trl.launch.process import stat_of
from salesrl_trl.names import LOCK_FILE

logger = logging.getLogger(__name__)

ORPHAN_PATIENCE_S = 120.0  # longest wait for a run whose launcher has died


def check_output_dir(path: Path | str) -> None:
    """Create the output folder. Raises `ConfigError` if it is not writable."""
    folder = Path(path).expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(f"nothing can be written to `output_dir` {str(path)!r} ({error.strerror}).") from None


def claim_output_dir(path: Path | str) -> TextIO:
    """Lock the output folder until the returned file is closed or the process ends. Another run there is an error,
    except that a run whose launcher has died gets time to save its state and end."""
    lock = (Path(path).expanduser() / LOCK_FILE).open("a+", encoding="utf-8")
    until = time.monotonic() + ORPHAN_PATIENCE_S
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            lock.seek(0)
            owner = lock.read().strip() or "another process"
        except OSError as error:  # some network disks lack locks
            logger.info(f"{lock.name} can't be locked against other runs ({error.strerror})")
            break
        process = re.match(rf"process (\d+) on {re.escape(socket.gethostname())},", owner)
        stat = None if process is None else stat_of(int(process[1]))
        is_orphan = stat is not None and stat[1] == 1  # its parent died
        if not is_orphan or time.monotonic() > until:
            lock.close()
            remedy = "Use another folder, or wait until that run has ended."
            raise ConfigError(f"another run is writing to `output_dir` {str(path)!r}: {owner}. {remedy}")
        logger.info(f"waiting for a run whose launcher has died, and which is still writing to {path}: {owner}")
        time.sleep(2)
    lock.truncate(0)
    lock.write(f"process {os.getpid()} on {socket.gethostname()}, since {datetime.now():%Y-%m-%d %H:%M:%S}\n")
    lock.flush()
    return lock


def free_gib(folder: Path | str) -> float:
    """Free disk space of a folder, in GiB."""
    return shutil.disk_usage(Path(folder).expanduser()).free / 2**30
