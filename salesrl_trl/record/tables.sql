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
