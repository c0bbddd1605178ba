"""Tests depend on nothing that outlives them, and leave nothing behind: no runs of the checkout, no caches of a user.

- `begin` gives the process, and so its children, an empty home folder.
- `refuse`, an audit hook, refuses files in the checkout's `runs/` and `outputs/`, in a user's own caches, and a child
  whose working folder is in the checkout. `conftest.py` runs the tests themselves in another one.
"""

import os
import shutil
import sys
import tempfile
import urllib.parse
from pathlib import Path

ROOT = Path(__file__).parents[2]
_HOME_BEFORE = "HOME_BEFORE_TESTS"
"""Environment variable with the user's own home folder. Processes that have it share the empty one."""
_FOLDERS = (
    "HF_DATASETS_CACHE", "HF_HOME", "HF_HUB_CACHE", "MPLCONFIGDIR", "SALESRL_CACHE_DIR", "TORCH_EXTENSIONS_DIR",
    "TORCH_HOME", "TRITON_CACHE_DIR", "VLLM_CACHE_ROOT", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME",
)  # fmt: skip
"""Variables that lead to caches outside of the home folder."""
_WITH_PATHS = {
    "open", "os.listdir", "os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.scandir", "os.truncate",
    "sqlite3.connect",
}  # fmt: skip
"""Events whose first argument is a path."""

_made: list[str] = []
_forbidden: tuple[str, ...] = ()
_touched: list[str] = []
"""What was refused since the last `check`."""


class Touched(BaseException):
    """A test touched what outlives it. Code that handles every `Exception` does not hide it."""


def begin() -> None:
    """Before any import of a package that looks for a cache."""
    global _forbidden
    if _HOME_BEFORE not in os.environ:
        os.environ[_HOME_BEFORE] = os.path.expanduser("~")
        os.environ["HOME"] = tempfile.mkdtemp(prefix="home-of-tests-")
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(ROOT))))
        for name in _FOLDERS:
            os.environ.pop(name, None)
        _made.append(os.environ["HOME"])
    used = (sys.prefix, sys.base_prefix, ROOT, tempfile.gettempdir())  # an environment may lie in a cache
    caches = (Path(os.environ[_HOME_BEFORE], name) for name in (".cache", ".config", ".triton"))
    kept = [each for each in caches if not any(Path(other).is_relative_to(each) for other in used)]
    _forbidden = tuple(map(str, (ROOT / "runs", ROOT / "outputs", *kept)))
    sys.addaudithook(refuse)


def end() -> None:
    """Remove the empty home folder, in the process that made it."""
    for folder in _made:
        shutil.rmtree(folder, ignore_errors=True)


def refuse(event: str, arguments: tuple[object, ...]) -> None:
    """The audit hook. Raises `Touched`."""
    if event in _WITH_PATHS:
        for path in arguments[: 2 if event == "os.rename" else 1]:
            if _absolute(path).startswith(_forbidden):
                _refuse(f"{event} of {path!r}")
    elif event == "subprocess.Popen" and arguments[2] and Path(_absolute(arguments[2])).is_relative_to(ROOT):
        _refuse(f"a child in {arguments[2]!r}: {arguments[1]!r}")


def _absolute(path: object) -> str:
    """A path as text; empty for a file descriptor, and for what has no folder."""
    if path is None:
        return os.getcwd()
    if isinstance(path, str) and path.startswith("file:"):  # SQLite's address of a file
        path = urllib.parse.unquote(urllib.parse.urlsplit(path).path)
    path = os.fsdecode(path) if isinstance(path, str | bytes | os.PathLike) else ""
    # A relative one may be below an open folder, as where a tree is removed. Tests run in a folder of their own.
    return os.path.normpath(path) if os.path.isabs(path) else ""


def _refuse(what: str) -> None:
    _touched.append(what)
    raise Touched(f"{what}. Tests use `tmp_path`, and files of the checkout that git has.")


def check() -> None:
    """Fail if something was refused and nobody heard of it."""
    found = [*_touched]
    _touched.clear()
    assert not found, f"refused: {'; '.join(found)}. Tests use `tmp_path`, and files of the checkout that git has."
