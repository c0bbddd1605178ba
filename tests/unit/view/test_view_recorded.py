"""The viewer reads what the run's own recorder writes, while it writes."""

import sqlite3
from contextlib import closing

import pytest
from support.recordings import ANSWER, PROMPT, batch, call, entry, write
from support.seconds import until

from salesrl_trl.record.reader import record_file
from salesrl_trl.record.view import queries, record_index
from salesrl_trl.record.view.queries import completion
from salesrl_trl.record.view.record_index import Index
from salesrl_trl.record.writer import Recorder
from salesrl_trl.telemetry.completion_record import CompletionRecord, Judged

REFERENCE = {**ANSWER, "text": "5980 yuan, in two parts."}


def listed(index):
    index.refresh()
    return [(item["step"], item["text"]) for item in queries.listing(index, {"order": "step_low"})["items"]]


def test_what_a_run_recorded_is_shown_whole(tmp_path):
    judged = {"fairness": Judged(candidate=0.75, reference=0.5, reason="说得好", provider="judge-b")}
    timed_out = call(failure="rag_8b_timeout", answer=None)
    calls = [timed_out, call(), call(service="judge")]
    good = CompletionRecord(
        action={"rewritten_query": "price"}, answer=ANSWER, reference=REFERENCE, verdicts=judged, calls=calls
    )
    failed = CompletionRecord(action={"rewritten_query": "?"}, calls=[timed_out])
    scored = entry(record=good, seconds={"judge": 0.1, "odd": float("nan")})
    unscored = entry(1, "another", None, reason="rag_8b_timeout", record=failed)
    write(tmp_path, [batch(1, [scored, unscored]), batch(1, mode="eval")])
    with closing(Index([tmp_path])) as index:
        index.refresh()
        told = queries.listing(index, {"provider": "judge-b", "text": "说得好"})
        [item] = told["items"]
        assert (item["reward"], item["judge_s"]) == (0.75, 0.1)
        found = completion(index, item)
        assert (found["messages"], found["action"]) == (PROMPT, {"rewritten_query": "price"})
        assert (found["answer"], found["reference"]) == (ANSWER, REFERENCE)
        assert found["seconds"] == {"judge": 0.1, "odd": "NaN"}  # a browser reads no JSON with NaN as a number
        assert [(each["service"], each["failure"], each["answer"]) for each in found["calls"]] == [
            (each.service, each.failure, each.answer and each.answer.decode()) for each in calls
        ]
        assert [(each["text"], each["reward"]) for each in found["group"]] == [("an action", 0.75), ("another", None)]
        assert queries.listing(index, {"reason": "rag_8b_timeout"})["items"][0]["reward"] is None
        [evaluated] = queries.listing(index, {"mode": "eval"})["items"]
        assert evaluated["advantage"] is None


def test_steps_that_are_taken_again_from_a_checkpoint_take_the_place_of_the_first(tmp_path):
    write(tmp_path, [batch(step, [entry(text=f"first {step}")]) for step in (1, 2, 3)])
    with closing(Index([tmp_path])) as index:
        assert listed(index) == [(1, "first 1"), (2, "first 2"), (3, "first 3")]
        write(tmp_path, [batch(2, [entry(text="again 2")]), batch(3, [entry(text="again 3")])], after=1)
        assert listed(index) == [(1, "first 1"), (2, "again 2"), (3, "again 3")]
        assert queries.listing(index, {"text": "first 3"})["total"] == 0
        assert [item["text"] for item in queries.listing(index, {"text": "again 3"})["items"]] == ["again 3"]


def test_a_rank_of_an_earlier_run_leaves_the_lists(tmp_path):
    def run(name, ranks):
        for rank in range(ranks):
            with closing(Recorder(record_file(tmp_path, rank), meta={"run": name})) as recorder:
                recorder.record(batch(1, [entry(text=f"{name} {rank}")]))

    run("first", 2)
    with closing(Index([tmp_path])) as index:
        assert listed(index) == [(1, "first 0"), (1, "first 1")]
        run("second", 1)
        assert listed(index) == [(1, "second 0")]


def test_steps_that_a_full_record_drops_leave_the_lists(tmp_path):
    path, texts = record_file(tmp_path, 0), [f"t{step} " * 9000 for step in range(60)]
    with closing(Recorder(path, most_bytes=200_000)) as recorder:
        recorder.record(batch(0, [entry(text=texts[0])]))
        until(lambda: path.exists() and recorder._queue.empty())
        with closing(Index([tmp_path])) as index:
            for step, text in enumerate(texts[1:], 1):
                recorder.record(batch(step, [entry(text=text)]))
                until(recorder._queue.empty)
                if 0 not in [step for step, _ in listed(index)]:
                    break
            assert 1 < step < 59
            assert all(text for _, text in listed(index)), "the file has no text of what it dropped"


def test_what_fails_while_it_is_read_leaves_the_index_as_it_was(tmp_path, monkeypatch):
    write(tmp_path, [batch(1, [entry(text="one")])])
    with closing(Index([tmp_path])) as index:
        assert listed(index) == [(1, "one")]
        write(tmp_path, [batch(1, [entry(text="two")]), batch(2, [entry(text="three")])])
        with monkeypatch.context() as broken:
            broken.setitem(record_index.SQL, "copy_texts", "no SQL")
            with pytest.raises(sqlite3.Error):
                index.refresh()
        assert queries.listing(index, {})["total"] == 1
        assert listed(index) == [(1, "two"), (2, "three")]
        assert [item["text"] for item in queries.listing(index, {"text": "three"})["items"]] == ["three"]
