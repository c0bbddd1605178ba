"""The key of a service, from the environment or from a file that its owner alone can read.

Owns where a key comes from. `launch.checks.reward` and the demo's RAG service call it. Standard library only.
"""

import os
import stat

from salesrl_trl.errors import ConfigError

MOST_BYTES = 4096  # longest file of a key. Tokens with claims in them have a thousand characters.


def find_key(variable: str) -> str | None:
    """The key in the environment variable, or in the file that `<variable>_FILE` names; `None` if neither is set.

    Raises `ConfigError` if both are set, or the file can't be read, can be read by others, is empty or too large. The
    message shows neither key nor path: whoever mistakes one variable for the other has the key there.
    """
    key, path = os.environ.get(variable), os.environ.get(f"{variable}_FILE")
    if not path:
        return key or None
    if key:
        raise ConfigError(f"{variable} and {variable}_FILE are both set. Expected one of them. Unset the other.")
    where = f"the file that the environment variable {variable}_FILE names"
    try:
        # Without waiting for the writer of a named pipe.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            status = os.fstat(file.fileno())
            content = file.read(MOST_BYTES + 1) if stat.S_ISREG(status.st_mode) else b""
    except OSError as error:
        raise ConfigError(f"{where} can't be read ({error.strerror}). Expected a file with the key alone.") from None
    if status.st_mode & 0o077 and stat.S_ISREG(status.st_mode):
        raise ConfigError(
            f"{where} has the permissions {stat.S_IMODE(status.st_mode):03o}, so that other users can get at the key. "
            f'Expected a file of its owner alone: chmod 600 "${variable}_FILE"'
        )
    if not content.strip() or len(content) > MOST_BYTES:
        size = f"more than {MOST_BYTES} bytes" if len(content) > MOST_BYTES else "no key"
        raise ConfigError(f"{where} holds {size}. Expected a file with the key alone.")
    return content.decode("utf-8", errors="replace").strip()
