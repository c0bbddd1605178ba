-- Named SQL statements of the viewer's database, loaded by `view.record_index`.

-- name: tables
-- Texts are lower-case and in their own tables, because SQLite scans tables of short rows faster.
CREATE TABLE completions (
    n INTEGER PRIMARY KEY AUTOINCREMENT, run, rank, id,
    step, mode, batch, place, prompt_group, row, branch, outcome, reason, provider,
    reward, reference_reward, advantage, judge_s, tokens, staleness, time,
    prompt
);
CREATE INDEX by_file ON completions (run, rank, step);
CREATE INDEX by_row ON completions (row, step);
CREATE INDEX by_prompt ON completions (prompt);
CREATE TABLE prompts (n INTEGER PRIMARY KEY, run, rank, id INTEGER, text, UNIQUE (run, rank, id));
CREATE TABLE texts (n INTEGER PRIMARY KEY, text, excerpt);
CREATE TRIGGER forget AFTER DELETE ON completions BEGIN DELETE FROM texts WHERE n = old.n; END;

-- name: copy
-- Copies a run file's completions after the last one read, with the columns of `completions` above.
INSERT INTO completions
SELECT NULL, :run, :rank, c.id,
    c.step, c.mode, c.batch, c.place, c.prompt_group, c.row, c.branch, c.outcome, c.reason, c.provider,
    c.reward, c.reference_reward, c.advantage, c.judge_s, c.tokens, c.staleness, c.time,
    (SELECT n FROM prompts WHERE run = :run AND rank = :rank AND id = c.prompt)
FROM source.completions c WHERE c.id > :last AND c.id <= :upto ORDER BY c.id

-- name: copy_texts
INSERT INTO texts
SELECT n, lower_case(c.text || char(10) || coalesce(
    (SELECT group_concat(reason, char(10)) FROM source.verdicts WHERE completion = c.id), '')), substr(c.text, 1, 600)
FROM completions k CROSS JOIN source.completions c ON c.id = k.id WHERE n > :before

-- name: find
-- A list condition.
(n IN (SELECT n FROM texts WHERE instr(text, ?)) OR prompt IN (SELECT n FROM prompts WHERE instr(text, ?)))

-- name: overview
SELECT step, branch, sum(many) AS many, sum(scored) AS scored, sum(reward) / sum(scored) AS reward,
    sum(reference) / sum(referred) AS reference, json_group_object(outcome, many) AS outcomes
FROM (
    SELECT step, branch, outcome, count(*) AS many, count(reward) AS scored, total(reward) AS reward,
        count(reference_reward) AS referred, total(reference_reward) AS reference
    FROM completions WHERE run = :run AND mode = :mode GROUP BY step, branch, outcome
) GROUP BY step, branch ORDER BY step, branch

-- name: compared
CREATE TEMP TABLE compared AS
WITH last AS (
    SELECT run, row, max(step) AS step FROM completions
    WHERE mode = :mode AND run IN (:one, :other) AND reward IS NOT NULL GROUP BY run, row
), mean AS (
    SELECT c.run, c.row, c.branch, c.step, avg(c.reward) AS reward, count(*) AS many
    FROM completions c JOIN last USING (run, row, step) WHERE c.mode = :mode AND c.reward IS NOT NULL GROUP BY 1, 2
)
SELECT a.row, a.branch, a.step AS one_step, a.reward AS one, b.step AS other_step, b.reward AS other,
    b.reward - a.reward AS change
FROM mean a JOIN mean b USING (row) WHERE a.run = :one AND b.run = :other

-- name: changes
SELECT count(*) AS total, avg(change) AS change, total(change > 0) AS better, total(change < 0) AS worse FROM compared

-- name: group
SELECT * FROM completions
WHERE row = :row AND step = :step AND run = :run AND mode = :mode AND batch = :batch AND prompt_group = :prompt_group
ORDER BY rank, place, id

-- name: run
SELECT count(*) AS many, min(step) AS first, max(step) AS last, max(time) AS time,
    max(provider > '' OR reference_reward IS NOT NULL) AS judged
FROM completions WHERE run = ?
