"""Lists, figures and comparisons, against a count over the record itself."""

import json
import sqlite3
from contextlib import closing

import pytest
from support.synthetic_record import Rank, make_record

from salesrl_trl.errors import ConfigError
from salesrl_trl.record.reader import record_file, record_files
from salesrl_trl.record.view import queries
from salesrl_trl.record.view.queries import completion
from salesrl_trl.record.view.record_index import Index


def rows(*runs):
    found = []
    for number, run in enumerate(runs):
        for path in record_files(run):
            with closing(sqlite3.connect(path)) as file:
                file.row_factory = sqlite3.Row
                rank = int(path.stem[-1])
                prompts = "(SELECT body FROM texts WHERE id = prompt) AS body"
                asked = file.execute(f"SELECT *, {prompts} FROM completions")
                found += [{**dict(row), "run": number, "name": f"{number}-{rank}-{row['id']}"} for row in asked]
    return found


@pytest.fixture(scope="module")
def counted(two_runs):
    return rows(*two_runs)


def every(index, **params):
    found, after = [], ""
    while after is not None:
        answer = queries.listing(index, {**params, "after": after})
        found += answer["items"]
        assert len(found) <= answer["total"]
        after = answer["next"]
    assert len(found) == answer["total"]
    return found


@pytest.fixture
def small(tmp_path):
    """An index of a run with one rank, which a test writes to."""
    rank = Rank(tmp_path / "run", 0)
    index = Index([tmp_path / "run"])
    yield index, rank
    index.close()
    rank.file.close()


@pytest.mark.parametrize(
    ("params", "fits"),
    [
        ({}, lambda row: True),
        ({"run": "1", "branch": "fairness"}, lambda row: row["run"] == 1 and row["branch"] == "fairness"),
        ({"outcome": "infra", "reason": "rag_8b_timeout"}, lambda row: row["reason"] == "rag_8b_timeout"),
        ({"provider": "judge-b", "mode": "eval"}, lambda row: (row["provider"], row["mode"]) == ("judge-b", "eval")),
        ({"reward_min": "0.2", "reward_max": "0.4"}, lambda row: 0.2 <= (row["reward"] or -1) <= 0.4),
        ({"advantage_max": "-2"}, lambda row: (row["advantage"] or 0) <= -2),
        ({"step_min": "3", "step_max": "3"}, lambda row: row["step"] == 3),
        ({"row": "train-0003"}, lambda row: row["row"] == "train-0003"),
        ({"text": "TURN 3"}, lambda row: "turn 3" in row["text"]),
        ({"text": "%"}, lambda row: False),  # no wildcard
        ({"branch": "x' OR '1'='1"}, lambda row: False),
    ],
    ids=["none", "run", "reason", "provider", "reward", "advantage", "step", "row", "text", "no-text", "sql"],
)
def test_a_filter_finds_what_a_count_over_the_files_finds(both, counted, params, fits):
    wanted = {row["name"] for row in counted if fits(row)}
    assert {item["id"] for item in every(both, **params)} == wanted


@pytest.mark.parametrize("order", queries.ORDERS)
def test_pages_have_each_completion_once_in_order(both, order):
    found = every(both, order=order, run="0", step_min="8", step_max="10")
    assert len({item["id"] for item in found}) == len(found) == 4 * 128  # with an evaluation
    name, _, end = order.rpartition("_")
    numbers = [item[name] for item in found]
    some = sorted((number for number in numbers if number is not None), reverse=end == "high")
    assert numbers == [*some, *[None] * (len(numbers) - len(some))]  # what has no number comes last


def test_a_word_is_found_in_the_prompt_the_text_and_what_the_judge_said(small):
    index, rank = small
    asked = rank.text(json.dumps([{"role": "customer", "content": "想学<吉他>"}], ensure_ascii=False))
    rank.add(prompt=asked, text="one")
    rank.add(text="Two, WITH Guitar")
    rank.add(text="three", verdicts=[("fairness", 0.5, 0.5, "说到了吉他。", "judge")])
    rank.add(text="four", row="吉他")  # the row's id is no text
    index.refresh()
    assert sorted(item["text"] for item in every(index, text="吉他")) == ["one", "three"]
    assert [item["text"] for item in every(index, text=" guitar ")] == ["Two, WITH Guitar"]
    assert [item["text"] for item in every(index, text="<吉")] == ["one"]
    rank.add(text="five, ÜBER guitars")
    index.refresh()
    found = [item["text"] for item in every(index, text="guitar", order="step_low")]
    assert found == ["Two, WITH Guitar", "five, ÜBER guitars"]
    assert [item["text"] for item in every(index, text="über")] == ["five, ÜBER guitars"]


def test_a_text_in_parts_or_without_messages_is_searched_too(small):
    index, rank = small
    parts = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "the left one"}]}]
    rank.add(prompt=rank.text(json.dumps(parts)), text="a")
    rank.add(prompt=rank.text(json.dumps("plain words")), text="b")
    index.refresh()
    assert [item["text"] for item in every(index, text="left")] == ["a"]
    assert [item["text"] for item in every(index, text="plain")] == ["b"]
    assert completion(index, {"id": "0-0-1"})["messages"] == [{"role": "user", "content": "[image]\nthe left one"}]


def test_the_figures_of_a_step_are_those_of_its_completions(small):
    index, rank = small
    rank.add(reward=0.5, reference_reward=0.75)
    rank.add(reward=0.0, outcome="invalid_action", reason="not_json")
    rank.add(outcome="infra", reason="rag_8b_timeout")
    rank.add(branch="hallucination", outcome="infra")
    rank.add(mode="eval", reward=1.0)
    index.refresh()
    told = queries.overview(index, {"run": "0"})["steps"]
    assert told == [
        # A failed call is no number: the mean is over two of three.
        {"step": 1, "branch": "fairness", "many": 3, "scored": 2, "reward": 0.25, "reference": 0.75,
         "outcomes": {"infra": 1, "invalid_action": 1, "ok": 1}},
        {"step": 1, "branch": "hallucination", "many": 1, "scored": 0, "reward": None, "reference": None,
         "outcomes": {"infra": 1}},
    ]  # fmt: skip


def test_two_runs_are_compared_where_each_row_was_last_seen(tmp_path):
    one, other = Rank(tmp_path / "one", 0), Rank(tmp_path / "other", 0)
    one.add(row="r", step=1, reward=0.9)  # not the last
    one.add(row="r", step=2, reward=0.2)
    one.add(row="r", step=2, reward=0.4)
    one.add(row="r", step=2, outcome="infra")  # not a number
    other.add(row="r", step=5, reward=0.8)
    one.add(row="same", reward=0.5)
    other.add(row="same", reward=0.5)
    one.add(row="alone", reward=0.5)
    index = Index([tmp_path / "one", tmp_path / "other"])
    index.refresh()
    told = queries.comparison(index, {"one": "0", "other": "1"})
    assert [(row["row"], row["one_step"], row["other_step"]) for row in told["rows"]] == [("r", 2, 5), ("same", 1, 1)]
    assert told["rows"][0]["change"] == pytest.approx(0.5)  # 0.8 - (0.2 + 0.4) / 2
    assert (told["total"], told["better"], told["worse"]) == (2, 1, 0)
    index.close()
    one.file.close()
    other.file.close()


def test_reading_leaves_the_record_as_it_is(tmp_path):
    path = record_file(make_record(tmp_path / "run", 1), 0)
    before = path.read_bytes()
    with closing(Index([tmp_path / "run"])) as index:
        index.refresh()
        completion(index, {"id": "0-0-1"})
    assert path.read_bytes() == before


def test_a_folder_without_a_record_is_refused(tmp_path):
    (tmp_path / "runs").mkdir()
    with pytest.raises(ConfigError, match=r"runz does not exist\. Did you mean '.*runs"):
        Index([tmp_path / "runz"])
    with pytest.raises(ConfigError, match=r"does not contain a record .*`--record true`"):
        Index([tmp_path / "runs"])


@pytest.mark.parametrize("params", [{"order": "id; DROP"}, {"reward_max": "nan"}, {"run": "x"}, {"after": "a~b"}])
def test_a_question_that_makes_no_sense_is_refused(both, params):
    with pytest.raises(ValueError, match=r"not a number|unknown order|could not convert"):
        queries.listing(both, params)
