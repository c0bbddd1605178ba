"""The tables of a record: one SQLite file for each rank, in the folder `record` of a run.

Owns names and columns. Others may read them: `PRAGMA user_version` is `VERSION`, and a column keeps its meaning within
a version.

- `completions`: a row for each completion, in the order in which batches were trained on or evaluated.
- `verdicts`: what was said of it, one row for each rubric of a judge, and for each reward function, or column that it
  logged, that said more than a number.
- `calls`: the requests that were sent on its way, hedges and retries too. A request for a reference that was asked for
  ahead of its completions has no completion. A request for a whole group or batch has a row for each completion. Of a
  tool that a conversation called: `tool_` and its name, its arguments, its result, and the turn as the path.
- `texts`: what is long or repeats: prompts, answers, the content of calls. Each once, as zlib-compressed UTF-8.
- `meta`: facts of the run. `run` is its id, the same in the files of all ranks, and after a resume too. `weights` is a
  JSON object: the weight of each of several reward functions.
"""

import re
from pathlib import Path

VERSION = 1
FOLDER = "record"  # in the output folder of a run
SUFFIX = ".sqlite"
PACKED = ".gz"  # ends the name of a file that is compressed, for reading alone

TABLES = """
CREATE TABLE meta (name TEXT PRIMARY KEY, value TEXT) WITHOUT ROWID;
CREATE TABLE texts (id INTEGER PRIMARY KEY, digest BLOB NOT NULL UNIQUE, body BLOB NOT NULL);
CREATE TABLE completions (
    id INTEGER PRIMARY KEY,
    step INTEGER NOT NULL,       -- optimizer step that trained on it first; of an evaluation: steps done
    mode TEXT NOT NULL,          -- 'train' or 'eval'
    batch INTEGER NOT NULL,      -- generation batch, the same on all ranks
    place INTEGER NOT NULL,      -- in the batch
    prompt_group INTEGER NOT NULL, -- the same for completions of one prompt, within step, mode and batch, on all ranks
    row TEXT NOT NULL,           -- id of the dataset's row, such as 'row-17'; of a stream a hash of its columns
    branch TEXT NOT NULL,
    prompt INTEGER NOT NULL REFERENCES texts, -- JSON: a text, or messages {role, content}
    text TEXT NOT NULL,          -- what the policy wrote; of a conversation its last message
    turns INTEGER REFERENCES texts, -- of a conversation with tools: JSON of all messages behind the prompt
    tokens INTEGER,              -- its tokens
    digest BLOB NOT NULL,        -- of prompt and text, or turns: `reader.digest_of`
    action TEXT,                 -- JSON object of the fields; NULL without a valid action
    answer INTEGER REFERENCES texts,    -- 8B endpoint: JSON {text, passages: [{id, text, score}], took_ms}
    reference INTEGER REFERENCES texts, -- 32B endpoint: the same
    provider TEXT,               -- of the first verdict
    judge_s REAL,                -- seconds for all verdicts
    outcome TEXT NOT NULL,       -- ok, invalid_action, judge_invalid, infra
    reason TEXT NOT NULL,        -- short code, '' where there is nothing to say
    reward REAL,                 -- NULL where a service or the judge failed
    reference_reward REAL,       -- of the reference, by the same law
    advantage REAL,              -- against its group; NULL in an evaluation
    parts TEXT NOT NULL,         -- JSON object: components of the reward
    functions TEXT NOT NULL,     -- JSON object: numbers of several reward functions
    seconds TEXT NOT NULL,       -- JSON object: seconds of each stage; 'queue' is the longest wait for a slot
    staleness INTEGER NOT NULL,  -- optimizer steps between the weights that sampled it and the step
    time REAL NOT NULL           -- Unix time
);
CREATE INDEX completions_by_step ON completions (step);
CREATE INDEX completions_by_digest ON completions (digest);
CREATE INDEX completions_by_row ON completions (row, step);
CREATE TABLE verdicts (
    completion INTEGER NOT NULL REFERENCES completions,
    rubric TEXT NOT NULL,        -- 'judge' for that of the branch, else 'judge_' and its name; or a function's name
    candidate REAL,              -- score in [0, 1] of the 8B answer, or the function's number; NULL without one
    reference REAL,              -- score in [0, 1] of the reference; NULL without one
    reason TEXT NOT NULL,        -- words, or the code of a failure
    provider TEXT NOT NULL,
    PRIMARY KEY (completion, rubric)
) WITHOUT ROWID;
CREATE TABLE calls (
    id INTEGER PRIMARY KEY,
    completion INTEGER REFERENCES completions,
    service TEXT NOT NULL,
    path TEXT NOT NULL,
    time REAL NOT NULL,          -- Unix time at which it was sent
    seconds REAL NOT NULL,
    failure TEXT NOT NULL,       -- code, '' for an answer
    request INTEGER REFERENCES texts,
    answer INTEGER REFERENCES texts
);
CREATE INDEX calls_by_completion ON calls (completion);
"""


def record_file(run: Path, rank: int) -> Path:
    return run / FOLDER / f"rank-{rank}{SUFFIX}"


def rank_of(path: Path) -> int | None:
    """The rank of a file by its name. `None` where it has another name, such as that of a backup."""
    match = re.fullmatch(rf"rank-(\d+){re.escape(SUFFIX)}", path.name)
    return None if match is None else int(match[1])
