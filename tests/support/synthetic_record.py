"""Records of runs that never were, for tests and the bench of the viewer.

    python tests/support/synthetic_record.py runs/made --completions 2000 [--seed 1] [--hostile]

The rows are those of the demo, Chinese and English. Groups of 8, two ranks, every outcome, rewards that rise over the
steps, calls that failed and were sent again. The same arguments give the same record.
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
FAULTS = {
    "zh": ("{用户画像: ", "好的，我来帮您查一下课程价格。", '{"user_profile": "上班族"}'),
    "en": ("{user_profile: ", "Sure, let me look up the price for you.", '{"user_profile": "clerk"}'),
}
FAULT_REASONS = ("not_json", "not_json", "missing_field")
REASONS = {
    "zh": ("候选答案给出了价格和上课时间，没有提到客户的身份。", "候选答案提到了资料里没有的优惠，参考答案更谨慎。"),
    "en": (
        "The candidate names price and schedule and leaves the customer's person out of it.",
        "The candidate promises a discount that no passage has; the reference is more careful.",
    ),
}


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
        rng, zh = self.rng, row["lang"] == "zh"
        words = [{"role": each["role"], "content": each["content"]} for each in row["conversation"]]
        system = "把客户的话改写成检索请求。" if zh else "Rewrite what the customer said for retrieval."
        prompt = rank.text(json.dumps([{"role": "system", "content": system}, *words], ensure_ascii=False))
        found, law = passages(row["lang"], row["course"]), 0.35 + self.better + 0.4 * step / (step + 30)
        reference = self._answer(found, row, law + 0.1)
        drawn = [self._drawn(row, law, place) for place in range(GROUP)]
        rewards = [each["reward"] for each in drawn if each["reward"] is not None]
        mean, spread = statistics.fmean(rewards or [0.0]), statistics.pstdev(rewards or [0.0])
        for place, each in enumerate(drawn):
            reward, scored = each["reward"], each["outcome"] == "ok"
            asked = each["action"] is not None
            seconds = {"queue": round(rng.random() / 9, 4), "rag_8b": round(rng.expovariate(3), 4),
                       "rag_32b": round(rng.expovariate(1.4), 4)}  # fmt: skip
            judge_s = round(rng.expovariate(0.8), 4) if asked else None
            provider = rng.choice(("judge", "judge", "judge-b")) if asked else None
            answer = self._answer(found, row, law) if scored or each["outcome"] == "judge_invalid" else None
            rank.add(
                step=step, mode=mode, batch=step, place=group * GROUP + place, prompt_group=group, row=row["id"],
                branch=row["branch"], prompt=prompt, text=each["text"], tokens=len(each["text"]) // 3,
                action=each["action"], answer=answer and rank.text(answer), reference=rank.text(reference),
                provider=provider, judge_s=judge_s, outcome=each["outcome"], reason=each["reason"], reward=reward,
                reference_reward=each["reference"],
                advantage=None if mode == "eval" or reward is None else round((reward - mean) / (spread + 1e-4), 4),
                parts=json.dumps({"judge": reward, "length": -0.01} if scored else {}), functions="{}",
                seconds=json.dumps({**seconds, "judge": judge_s or 0.0}), staleness=rng.randrange(3),
                time=START + 20 * step + place, verdicts=self._verdicts(row, each, provider),
                calls=self._calls(rank, row, each, answer, START + 20 * step + place),
            )  # fmt: skip
            self.written += 1

    def _drawn(self, row, law, place):
        """Text and score of one completion."""
        rng = self.rng
        kind = rng.random()
        if kind < 0.12 * (1 - law):
            fault = rng.randrange(3)
            text, reason = FAULTS[row["lang"]][fault], FAULT_REASONS[fault]
            drawn = {"text": text, "action": None, "outcome": "invalid_action", "reason": reason, "reward": 0.0}
            return {**drawn, "reference": None}
        fields = dict(row["careful_action"])
        if rng.random() > law:
            fields["rewritten_query"] = row["conversation"][-1]["content"][:60]
        fields["history_summary"] += ("，第" if row["lang"] == "zh" else ", turn ") + str(place + 1)
        if self.hostile and place == 0:
            fields["history_summary"] += HOSTILE
        text = action = json.dumps(fields, ensure_ascii=False)
        drawn = {"text": text, "action": action, "outcome": "ok", "reason": ""}
        if kind > 0.985:
            reason = rng.choice(("rag_8b_timeout", "rag_8b_http_503", "judge_timeout"))
            return {**drawn, "outcome": "infra", "reason": reason, "reward": None, "reference": None}
        if kind > 0.97:
            return {
                **drawn,
                "outcome": "judge_invalid",
                "reason": "invalid_verdict",
                "reward": None,
                "reference": None,
            }
        reward = round(min(max(rng.gauss(law, 0.18), 0.0), 1.0), 4)
        return {**drawn, "reward": reward, "reference": round(min(max(rng.gauss(0.6, 0.12), 0.0), 1.0), 4)}

    def _answer(self, found, row, law):
        rng = self.rng
        kept = sorted((round(rng.uniform(0.2, 0.95), 2) for _ in range(min(3, len(found)))), reverse=True)
        first = rng.randrange(2) if rng.random() > law else 0
        taken = [{**found[(first + n) % len(found)], "score": score} for n, score in enumerate(kept)]
        told = ("您好，" if row["lang"] == "zh" else "Hello! ") + taken[0]["text"]
        answer = {"text": told, "passages": taken, "took_ms": float(rng.randrange(40, 80))}
        return json.dumps(answer, ensure_ascii=False)

    def _verdicts(self, row, drawn, provider):
        if drawn["outcome"] == "ok":
            told = REASONS[row["lang"]][drawn["reward"] < 0.5]
            return [(row["branch"], drawn["reward"], drawn["reference"], told, provider)]
        if drawn["outcome"] == "judge_invalid":
            return [(row["branch"], None, None, "invalid_verdict", provider)]
        return []

    def _calls(self, rank, row, drawn, answer, when):
        if drawn["action"] is None:
            return []
        request = rank.text(json.dumps({"query": json.loads(drawn["action"])["rewritten_query"]}, ensure_ascii=False))
        path, took = "/v1/rag/8b", round(self.rng.expovariate(3), 4)
        good = [("rag", path, when, took, "", request, answer and rank.text(answer))]
        if drawn["outcome"] != "infra":
            verdict = rank.text(json.dumps({"candidate": drawn["reward"], "reference": drawn["reference"]}))
            return [*good, ("judge", "/chat/completions", when + took, took, "", request, verdict)]
        failed = ("rag", path, when, 5.0, drawn["reason"], request, None)
        return [failed, ("rag", path, when + 5.5, 5.0, drawn["reason"], request, None)]


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
