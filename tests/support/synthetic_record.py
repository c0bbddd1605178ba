"""Records of runs that never were, for tests and the bench of the viewer.

    python tests/support/synthetic_record.py runs/made --completions 2000 [--seed 1] [--hostile]

Rows of the demo, two ranks, every outcome, rewards that rise over the steps. The same arguments give the same record.
"""

import argparse
import json
import random
import sqlite3
import statistics
from contextlib import closing
from functools import cache
from pathlib import Path

from salesrl_trl.record.reader import digest, record_file
from salesrl_trl.record.writer import add_text, insert, opened

DEMO = Path(__file__).parents[2] / "salesrl_trl" / "demo" / "rows"
GROUP = 8
GROUPS_A_STEP = 8
START = 1_750_000_000.0
HOSTILE = "<script>document.title = 'owned'</script><img src=x onerror=\"document.title='owned'\">"
FAULTS = {"{用户画像: ": "not_json", "好的，我来查价格。": "not_json", '{"user_profile": "上班族"}': "missing_field"}
SAID = ("答案给出了价格，没有提到客户的身份。 It leaves her out.", "候选答案没有依据。 No passage has it.")
RATES = {"queue": 9, "rag_8b": 3, "rag_32b": 1.4, "judge": 0.8}


def lines(name):
    """Rows of a file of the demo."""
    return [json.loads(line) for line in (DEMO / name).read_text("utf-8").splitlines()]


class Rank:
    """One rank's file, as a run writes it: rows at its end, in transactions of a step."""

    def __init__(self, run, rank, **meta):
        self.file = opened(record_file(run, rank), {"rank": str(rank), **meta})
        self.file.isolation_level = None
        self.file.execute("PRAGMA synchronous=OFF")

    def text(self, content):
        """The id of a text."""
        return add_text(self.file, content)

    def add(self, verdicts=(), calls=(), **columns):
        """A completion, with its verdicts and calls. Returns its id."""
        columns = {
            "step": 1, "mode": "train", "batch": 1, "place": 0, "prompt_group": 0, "row": "row-1",
            "branch": "fairness", "text": "{}", "outcome": "ok", "reason": "", "parts": "{}", "functions": "{}",
            "seconds": "{}", "staleness": 0, "time": START, **columns,
        }  # fmt: skip
        columns.setdefault("prompt", self.text(json.dumps([{"role": "customer", "content": "Hello?"}])))
        columns["digest"] = digest(f"{columns['prompt']} {columns['text']}")
        made = insert(self.file, "completions", columns)
        self.file.executemany("INSERT INTO verdicts VALUES (?, ?, ?, ?, ?, ?)", [(made, *each) for each in verdicts])
        names = ("service", "path", "time", "seconds", "failure", "request", "answer")
        for call in calls:
            insert(self.file, "calls", {"completion": made, **dict(zip(names, call, strict=True))})
        return made


@cache
def passages(lang, course):
    """Passages of the demo's catalogue."""
    found = [each for each in lines("knowledge.jsonl") if each["lang"] == lang and each["course"] == course]
    return [{"id": each["id"], "text": each["text"]} for each in found] or [{"id": f"{lang}-none", "text": "-"}]


class Maker:
    """Writes a record, step by step. `better`: how much higher rewards are than those of another run."""

    def __init__(self, run, *, ranks=2, seed=0, better=0.0, hostile=False):
        self.rng, self.better, self.hostile = random.Random(seed), better, hostile
        self.ranks = [Rank(run, rank, world_size=str(ranks)) for rank in range(ranks)]
        self.rows, self.held_out = lines("train.jsonl"), lines("heldout.jsonl")
        self.at = self.written = 0

    def close(self):
        for rank in self.ranks:
            rank.file.close()

    def step(self, step, mode="train"):
        """One step of every rank."""
        for rank in self.ranks:
            rank.file.execute("BEGIN")
            for group in range(GROUPS_A_STEP):
                rows = self.rows if mode == "train" else self.held_out
                self._group(rank, step, mode, group, rows[self.at % len(rows)])
                self.at += 1
            rank.file.execute("COMMIT")

    def _group(self, rank, step, mode, group, row):
        rng, when = self.rng, START + 20 * step
        prompt = rank.text(json.dumps(row["conversation"], ensure_ascii=False))
        law, reference = 0.35 + self.better + 0.4 * step / (step + 30), rank.text(self._answer(row))
        drawn = [self._drawn(row, law, place) for place in range(GROUP)]
        rewards = [each["reward"] for each in drawn if each["reward"] is not None] or [0.0]
        mean, spread = statistics.fmean(rewards), statistics.pstdev(rewards)
        for place, each in enumerate(drawn):
            reward, asked = each["reward"], each["action"] is not None
            judged = each["outcome"] in ("ok", "judge_invalid")
            seconds = {name: round(rng.expovariate(rate), 4) for name, rate in RATES.items()}
            provider = rng.choice(("judge", "judge", "judge-b")) if asked else None
            answer = rank.text(self._answer(row)) if judged else None
            said = SAID[reward < 0.5] if reward is not None else each["reason"]
            verdict = (row["branch"], reward, each["reference_reward"], said, provider)
            rank.add(
                **each, step=step, mode=mode, batch=step, place=group * GROUP + place, prompt_group=group,
                row=row["id"], branch=row["branch"], prompt=prompt, tokens=len(each["text"]) // 3, answer=answer,
                reference=reference, provider=provider, judge_s=seconds["judge"] if asked else None,
                advantage=None if mode == "eval" or reward is None else round((reward - mean) / (spread + 1e-4), 4),
                parts=json.dumps({"judge": reward, "length": -0.01} if each["outcome"] == "ok" else {}),
                seconds=json.dumps(seconds), staleness=rng.randrange(3), time=when + place,
                verdicts=[verdict] if judged else [],
                calls=self._calls(rank, each, answer, when + place) if asked else [],
            )  # fmt: skip
            self.written += 1

    def _drawn(self, row, law, place):
        """Text and score of one completion."""
        rng = self.rng
        kind = rng.random()
        missing = {"reward": None, "reference_reward": None}
        if kind < 0.12 * (1 - law):
            text = rng.choice([*FAULTS])
            fault = {"action": None, "outcome": "invalid_action", "reason": FAULTS[text]}
            return {**missing, **fault, "text": text, "reward": 0.0}
        fields = dict(row["careful_action"])
        fields["history_summary"] += f", turn {place + 1}" + HOSTILE * (self.hostile and place == 0)
        action = json.dumps(fields, ensure_ascii=False)
        drawn = {**missing, "text": action, "action": action, "outcome": "ok", "reason": ""}
        if kind > 0.985:
            reason = rng.choice(("rag_8b_timeout", "rag_8b_http_503", "judge_timeout"))
            return {**drawn, "outcome": "infra", "reason": reason}
        if kind > 0.97:
            return {**drawn, "outcome": "judge_invalid", "reason": "invalid_verdict"}
        scores = {"reward": rng.gauss(law, 0.18), "reference_reward": rng.gauss(0.6, 0.12)}
        return {**drawn, **{name: round(min(max(score, 0.0), 1.0), 4) for name, score in scores.items()}}

    def _answer(self, row):
        scores = sorted((round(self.rng.uniform(0.2, 0.95), 2) for _ in range(3)), reverse=True)
        found = passages(row["lang"], row["course"])
        taken = [{**passage, "score": score} for passage, score in zip(found, scores, strict=False)]
        answer = {"text": taken[0]["text"], "passages": taken, "took_ms": float(self.rng.randrange(40, 80))}
        return json.dumps(answer, ensure_ascii=False)

    def _calls(self, rank, drawn, answer, when):
        request = rank.text(json.dumps({"query": json.loads(drawn["action"])["rewritten_query"]}, ensure_ascii=False))
        path, took = "/v1/rag/8b", round(self.rng.expovariate(3), 4)
        if drawn["outcome"] == "infra":
            return [("rag", path, when + later, 5.0, drawn["reason"], request, None) for later in (0, 5.5)]
        verdict = rank.text(json.dumps({"candidate": drawn["reward"], "reference": drawn["reference_reward"]}))
        judged = ("judge", "/chat/completions", when + took, took, "", request, verdict)
        return [("rag", path, when, took, "", request, answer), judged]


def make_record(run, completions, **given):
    """A record of about as many completions, in whole steps; every tenth step is followed by an evaluation."""
    maker, step = Maker(run, **given), 0
    while maker.written < completions:
        step += 1
        maker.step(step)
        if step % 10 == 0 and maker.written < completions:
            maker.step(step, "eval")
    maker.close()
    return run


def count(run):
    """Completions in all ranks' files."""
    total = 0
    for path in sorted((run / "record").glob("rank-*.sqlite")):
        with closing(sqlite3.connect(path)) as file:
            total += file.execute("SELECT count(*) FROM completions").fetchone()[0]
    return total


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--completions", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--better", type=float, default=0.0)
    parser.add_argument("--hostile", action="store_true")
    args = parser.parse_args()
    make_record(args.run, args.completions, seed=args.seed, better=args.better, hostile=args.hostile)
    print(f"{count(args.run)} completions in {args.run}")
