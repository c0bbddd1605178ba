"""Completions for a recorder, as rollouts hand them over."""

from array import array

from salesrl_trl.record.reader import record_file, recorded
from salesrl_trl.record.writer import Batch, Entry, Recorder
from salesrl_trl.telemetry.completion_record import Call, CompletionRecord, Judged
from salesrl_trl.types import Outcome, Reward

PROMPT = [{"role": "user", "content": "客户: 多少钱? I'm a nurse."}]
ANSWER = {"text": "It costs 5980 yuan.", "passages": [{"id": "d1", "text": "price", "score": 0.5}], "took_ms": 1.5}


def call(**given):
    fields = {"service": "rag_8b", "path": "/v1/rag/8b", "time": 1.0, "seconds": 0.25, "failure": ""}
    return Call(**{**fields, "request": b'{"query": "price"}', "answer": b'{"answer": "5980"}', **given})


def notes():
    judged = {"fairness": Judged(candidate=0.75, reference=0.5, reason="说得好", provider="judge")}
    calls = [call(failure="rag_8b_timeout", answer=None), call()]
    return CompletionRecord(
        action={"rewritten_query": "price"}, answer=ANSWER, reference=ANSWER, verdicts=judged, calls=calls
    )


def entry(place=0, text="an action", reward=0.75, **given):
    """`reward` is a `Reward`, or its value."""
    if not isinstance(reward, Reward):
        outcome = Outcome.INFRA if reward is None else Outcome.OK
        earned = {"reference_value": 0.5, "components": {"judge": reward}, "seconds": {"judge": 0.1}}
        earned |= {name: given.pop(name) for name in ("reason", "components", "seconds") if name in given}
        reward = Reward(outcome=outcome, value=reward, **earned)
    fields = {
        "row": "r1", "branch": "fairness", "prompt": PROMPT, "text": text, "tokens": 12, "place": place,
        "prompt_group": place // 2, "reward": reward, "record": notes(),
    }  # fmt: skip
    return Entry(**{**fields, **given})


def batch(step=1, entries=None, mode="train", **given):
    entries = [entry()] if entries is None else entries
    advantages = None if mode == "eval" else array("d", [0.5] * len(entries))
    return Batch(step=step, mode=mode, number=step, entries=entries, advantages=advantages, **given)


def write(folder, batches, **given):
    """Record these batches. Returns the completions of the record."""
    recorder = Recorder(record_file(folder, 0), **given)
    for one in batches:
        recorder.record(one)
    recorder.close()
    return list(recorded(folder))
