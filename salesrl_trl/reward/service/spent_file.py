"""The account of a run's spending: a SQLite file that all its processes share, and that outlives them.

Owns the file and its lock. One transaction adds what a process has spent, takes back what it held, and gives it a new
part. So no two processes get the same part, and one that is killed leaves its part used: its requests may have left.

The file holds numbers and names of services and settings, nothing else.
"""

import contextlib
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from salesrl_trl.errors import ConfigError
from salesrl_trl.ground.process import make_private
from salesrl_trl.reward.service.budget import NOTHING_SPENT, Account, Limit, Spent, granted

LOCK_TIMEOUT_S = 20.0
"""Longest wait for other processes that write. A transaction takes milliseconds."""
READ_TIMEOUT_S = 2.0

_SCHEMA = (
    "CREATE TABLE IF NOT EXISTS spent (service TEXT PRIMARY KEY, calls REAL NOT NULL, prompt_tokens REAL NOT NULL, "
    "completion_tokens REAL NOT NULL, usd REAL NOT NULL) WITHOUT ROWID",
    "CREATE TABLE IF NOT EXISTS limits (name TEXT PRIMARY KEY, used REAL NOT NULL, refused REAL, most REAL NOT NULL) "
    "WITHOUT ROWID",
)
_ADD = (
    "INSERT INTO spent VALUES (?, ?, ?, ?, ?) ON CONFLICT (service) DO UPDATE SET calls = calls + excluded.calls, "
    "prompt_tokens = prompt_tokens + excluded.prompt_tokens, "
    "completion_tokens = completion_tokens + excluded.completion_tokens, usd = usd + excluded.usd"
)
_SET = "REPLACE INTO limits VALUES (?, ?, ?, ?)"


class Return(NamedTuple):
    """A part that goes back to the account, perhaps for another one."""

    limit: Limit
    held: float
    """What is left of it; below 0 if more was used."""
    wants: bool
    """Whether another part is wanted."""
    request: float = 0.0
    """What a request takes of the limit. 0 if that is not known."""
    needs: bool = True
    """Whether requests wait for it."""


class SpentFile:
    """The file, written on one thread.

    Args:
        path (`Path`):
            Where it is. It is made when it is missing.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._open: sqlite3.Connection | None = None

    def exchange(self, spent: Mapping[str, Spent], returned: Sequence[Return]) -> dict[str, float]:
        """Add what was spent, and exchange parts.

        Returns:
            `dict[str, float]`: the new parts by the limits' names. 0: nothing is left.

        Raises:
            `sqlite3.Error`, `OSError`: the file can't be used. Nothing has changed then.
        """
        file = self._opened()
        with _transaction(file):
            file.executemany(
                _ADD,
                [(name, each.calls, each.prompt_tokens, each.completion_tokens, each.usd)
                 for name, each in spent.items()],
            )  # fmt: skip
            parts: dict[str, float] = {}
            account = account_of(file)
            for limit, held, wants, request, needs in returned:
                row = file.execute("SELECT used, refused FROM limits WHERE name = ?", (limit.name,)).fetchone()
                used, refused = row or (0.0, None)
                used = max(used - held, account.used(limit))  # a limit may be new in an old run
                if wants:
                    parts[limit.name] = part = granted(limit, used, request)
                    used, refused = used + part, refused if part or not needs else limit.most
                file.execute(_SET, (limit.name, used, refused, limit.most))
            return parts

    def close(self) -> None:
        """Close the file. The next use opens it again."""
        if self._open is not None:
            self._open.close()
            self._open = None

    def _opened(self) -> sqlite3.Connection:
        if self._open is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            make_private(self.path)
            file = sqlite3.connect(self.path, timeout=LOCK_TIMEOUT_S, isolation_level=None, check_same_thread=False)
            try:
                file.execute("PRAGMA journal_mode = TRUNCATE")
                with _transaction(file):  # of several processes that begin at once, one makes the tables
                    for statement in _SCHEMA:
                        file.execute(statement)
            except sqlite3.Error:
                file.close()
                raise
            self._open = file
        return self._open


@contextlib.contextmanager
def _transaction(file: sqlite3.Connection) -> Iterator[None]:
    file.execute("BEGIN IMMEDIATE")
    try:
        yield
        file.execute("COMMIT")
    finally:
        if file.in_transaction:  # not where SQLite itself has rolled back, as it does on a full disk
            file.execute("ROLLBACK")


def account_of(file: sqlite3.Connection) -> Account:
    """The account in an open file."""
    limits = file.execute("SELECT name, used, refused, most FROM limits").fetchall()
    return Account(
        services={
            name: Spent(calls=calls, prompt_tokens=prompt, completion_tokens=completion, usd=usd)
            for name, calls, prompt, completion, usd in file.execute("SELECT * FROM spent")
        },
        refused={name: refused for name, _, refused, _ in limits if refused is not None},
        taken={name: used for name, used, _, _ in limits},
        most={name: most for name, _, _, most in limits},
    )


def read_account(path: Path) -> Account:
    """The account in a file, from any process. Nothing is spent where there is no file.

    Raises:
        `ConfigError`: the file can't be read.
    """
    if not path.exists() or not path.stat().st_size:
        return NOTHING_SPENT
    try:
        # for writing: after a kill in the middle of a transaction, the first to open the file has to undo it
        file = sqlite3.connect(f"{path.absolute().as_uri()}?mode=rw", READ_TIMEOUT_S, uri=True)
        with contextlib.closing(file):
            return account_of(file)
    except (sqlite3.Error, OSError) as error:
        raise ConfigError(
            f"the account of what was spent, {path}, can't be read ({error}). Expected the file of an earlier run. "
            "See to its folder; or delete the file, to begin with nothing spent."
        ) from None
