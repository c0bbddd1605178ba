"""What was not run, and how to have it run, as the last lines of `scripts/test.sh`: the lists of its several runs of
pytest stand far above them, and name files.

The script sets `TO` for a run whose list the last one shows: a file. It sets `BEFORE` for the last one: that list.
"""

import json
import os
from collections import Counter
from pathlib import Path

TO, BEFORE = "SKIPPED_TESTS_TO", "SKIPPED_TESTS_BEFORE"
_given = {name: os.environ.pop(name, None) for name in (TO, BEFORE)}  # tests start pytest too


def tell(config):
    """Print the number of skipped tests by reason, or keep it for the last run."""
    if set(_given.values()) == {None} or hasattr(config, "workerinput"):  # a worker's are the main process's too
        return
    reports = config.pluginmanager.get_plugin("terminalreporter").stats.get("skipped", ())
    found = Counter(report.longrepr[2].removeprefix("Skipped: ") for report in reports)
    if _given[TO] is not None:
        Path(_given[TO]).write_text(json.dumps(found), encoding="utf-8")
    else:
        found.update(json.loads(_given[BEFORE] or "{}"))
        for reason, count in sorted(found.items()):
            print(f"test: skipped: {count} test{'s' * (count > 1)}: {reason}")
