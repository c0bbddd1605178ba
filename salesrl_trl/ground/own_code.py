"""The package's own files: their version, hash and commit."""

import functools
import hashlib
import importlib.metadata
import json
import subprocess
from dataclasses import dataclass
from pathlib import Path

from salesrl_trl import __version__
from salesrl_trl.errors import ConfigError

PACKAGE = Path(__file__).parents[1]  # the running package's folder
_GIT_S = 10.0
_SHORTEST = 7  # characters of a commit prefix, if no repository can tell whether it is unique


@dataclass(frozen=True)
class Code:
    """The running package's version and origin."""

    version: str
    digest: str  # hash of all its files: equal digests mean equal code, wherever it is stored
    commit: str | None  # of the checkout, or of the repository that pip installed from; `None` if neither is known
    changed_files: int  # files of the checkout that differ from the commit, including new ones

    def __str__(self) -> str:
        changed = f", changed files: {self.changed_files}" if self.changed_files else ""
        return f"{self.version} ({f'commit {self.commit}{changed}' if self.commit else f'hash {self.digest}'})"


@functools.cache
def code() -> Code:
    """The version, hash and commit of the package's files, when this process first asks for them."""
    digest = hashlib.sha256()
    for path in sorted(PACKAGE.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            digest.update(f"{path.relative_to(PACKAGE)}\0".encode() + path.read_bytes())
    commit, changed = _commit(), _git("status", "--porcelain") if _is_checkout() else None
    return Code(__version__, digest.hexdigest()[:12], commit and commit[:12], len((changed or "").splitlines()))


def holds(commit: str) -> bool:
    """Whether the code is at this commit or a later one. Raises `ConfigError` if that can't be determined."""
    if not _is_checkout():
        if len(commit) >= _SHORTEST and (_commit() or "").startswith(commit):
            return True
    elif (known := _git("rev-parse", "-q", "--verify", "--end-of-options", f"{commit}^{{commit}}")) and (
        _git("merge-base", known, "HEAD") == known
    ):
        return True
    elif _git("rev-parse", "--is-shallow-repository") == "false":
        return False
    raise ConfigError(
        f"whether {PACKAGE} holds {commit} can't be known: it is {code()}, without its history (no checkout, or "
        f"a shallow clone). Compare its hash, {code().digest}, with a checkout's, or run `git fetch --unshallow`."
    )


def _is_checkout() -> bool:
    return bool(_git("ls-files", "__init__.py"))  # an installed package may be inside another project's checkout


def _commit() -> str | None:
    if _is_checkout():
        return _git("rev-parse", "HEAD")
    for installed in importlib.metadata.distributions(name=PACKAGE.name):
        if Path(str(installed.locate_file(PACKAGE.name))).resolve() == PACKAGE.resolve():
            noted = json.loads(installed.read_text("direct_url.json") or "{}")
            return noted.get("vcs_info", {}).get("commit_id")  # type: ignore[no-any-return]
    return None


def _git(*arguments: str) -> str | None:
    try:
        command = ["git", "-C", str(PACKAGE), *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=_GIT_S, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
