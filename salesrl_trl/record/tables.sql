CREATE TABLE meta (name TEXT PRIMARY KEY, value TEXT) WITHOUT ROWID;
CREATE TABLE texts (id INTEGER PRIMARY KEY, digest BLOB NOT NULL UNIQUE, body BLOB NOT NULL);
CREATE TABLE completions (
    id INTEGER PRIMARY KEY,
    step INTEGER NOT NULL,       -- first optimizer step that trained on it; for evaluations, steps done
    mode TEXT NOT NULL,          -- 'train' or 'eval'
    batch INTEGER NOT NULL,      -- generation batch, the same on all ranks
    place INTEGER NOT NULL,      -- index in the batch
    prompt_group INTEGER NOT NULL, -- shared by a prompt's completions within step, mode and batch, on all ranks
    row TEXT NOT NULL,           -- id of the dataset row, e.g. 'row-17'; for a stream, a hash of its columns
    branch TEXT NOT NULL,
    prompt INTEGER NOT NULL REFERENCES texts, -- JSON: a text, or messages {role, content}
    text TEXT NOT NULL,          -- the completion; for a conversation, its last message
    turns INTEGER REFERENCES texts, -- for a conversation with tools: JSON of all messages after the prompt
    tokens INTEGER,              -- number of tokens
    digest BLOB NOT NULL,        -- of prompt and text, or turns: `reader.digest_of`
    action TEXT,                 -- JSON object of the fields; NULL without a valid action
    answer INTEGER REFERENCES texts,    -- 8B endpoint: JSON {text, passages: [{id, text, score}], took_ms}
    reference INTEGER REFERENCES texts, -- 32B endpoint: the same
    provider TEXT,               -- of the first verdict
    judge_s REAL,                -- seconds for all verdicts
    outcome TEXT NOT NULL,       -- ok, invalid_action, judge_invalid, infra
    reason TEXT NOT NULL,        -- short code, or ''
    reward REAL,                 -- NULL if a service or the judge failed
    reference_reward REAL,       -- of the reference, scored the same way
    advantage REAL,              -- against its group; NULL in an evaluation
    parts TEXT NOT NULL,         -- JSON object: components of the reward
    functions TEXT NOT NULL,     -- JSON object: values of several reward functions
    seconds TEXT NOT NULL,       -- JSON object: seconds of each stage; 'queue' is the longest wait for the concurrency limit
    staleness INTEGER NOT NULL,  -- optimizer steps between the weights that sampled it and the step
    time REAL NOT NULL           -- Unix time
);
CREATE INDEX completions_by_step ON completions (step);
CREATE INDEX completions_by_digest ON completions (digest);
CREATE INDEX completions_by_row ON completions (row, step);
CREATE TABLE verdicts (
    completion INTEGER NOT NULL REFERENCES completions,
    rubric TEXT NOT NULL,        -- 'judge' for the branch's own, else 'judge_<name>'; or a function's name
    candidate REAL,              -- score in [0, 1] of the 8B answer, or the function's value; NULL without one
    reference REAL,              -- score in [0, 1] of the reference; NULL without one
    reason TEXT NOT NULL,        -- the reason, or a failure's code
    provider TEXT NOT NULL,
    PRIMARY KEY (completion, rubric)
) WITHOUT ROWID;
CREATE TABLE calls (
    id INTEGER PRIMARY KEY,
    completion INTEGER REFERENCES completions,
    service TEXT NOT NULL,
    path TEXT NOT NULL,
    time REAL NOT NULL,          -- Unix time of sending
    seconds REAL NOT NULL,
    failure TEXT NOT NULL,       -- code, '' on success
    request INTEGER REFERENCES texts,
    answer INTEGER REFERENCES texts
);
CREATE INDEX calls_by_completion ON calls (completion);
