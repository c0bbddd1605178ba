"""Whether the package's files are still those that this process imported."""

import hashlib
import logging
import sys
from pathlib import Path

logger = logging.getLogger(__name__)

PACKAGE = __name__.partition(".")[0]
_told = set[str]()
_imported: dict[str, tuple[object, bytes]] = {}  # by module: its spec, which a reload replaces, and its file's hash


def warn_of_changes() -> None:
    """Log, once, the files whose content is not what this process imported. Modules that were imported since the last
    call are noted as they are now."""
    changed = list[str]()
    for name, module in sorted(sys.modules.items()):
        if name.partition(".")[0] == PACKAGE and (file := getattr(module, "__file__", None)):
            path = Path(file)
            now = hashlib.sha256(path.read_bytes()).digest() if path.is_file() else b""
            spec, before = _imported.get(name, (None, b""))
            if spec is not module.__spec__:
                _imported[name] = module.__spec__, now
            elif now != before and name not in _told:
                changed.append(name)
    _told.update(changed)
    if changed:
        logger.warning(
            f"{', '.join(changed)}: the file has changed since this process imported it, and the run uses the older "
            "code. Restart the kernel, or the process, to use the new code"
        )
