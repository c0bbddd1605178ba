"""The tables of a record: one SQLite file for each rank, in the folder `record` of a run.

Owns names, and columns (`tables.sql`). Others may read them: `PRAGMA user_version` is `VERSION`, and a column keeps
its meaning within a version.

- `completions`: a row for each completion, in the order in which batches were trained on or evaluated.
- `verdicts`: what was said of it, one row for each rubric of a judge, and for each reward function, or column that it
  logged, that said more than a number.
- `calls`: the requests that were sent on its way, hedges and retries too. A request for a reference that was asked for
  ahead of its completions has no completion. A request for a whole group or batch has a row for each completion. Of a
  tool that a conversation called: `tool_` and its name, its arguments, its result, and the turn as the path.
- `texts`: what is long or repeats: prompts, answers, the content of calls. Each once, as zlib-compressed UTF-8.
- `meta`: facts of the run. `run` is its id, the same in the files of all ranks, and after a resume too. `weights` is a
  JSON object: the weight of each of several reward functions. `order ID`, of the training batch whose first completion
  has this id, is a `rollout.groups.Order` as a JSON list.
"""

import re
from pathlib import Path

from salesrl_trl.names import RECORD_FOLDER

VERSION = 2
SUFFIX = ".sqlite"
PACKED = ".gz"  # ends the name of a file that is compressed, for reading alone

TABLES = Path(__file__).with_name("tables.sql").read_text(encoding="utf-8")


def record_file(run: Path, rank: int) -> Path:
    return run / RECORD_FOLDER / f"rank-{rank}{SUFFIX}"


def rank_of(path: Path) -> int | None:
    """The rank of a file by its name. `None` where it has another name, such as that of a backup."""
    match = re.fullmatch(rf"rank-(\d+){re.escape(SUFFIX)}", path.name)
    return None if match is None else int(match[1])
