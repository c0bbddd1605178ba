"""`held_out_share`: training and held-out rows of one file share no conversation."""

import json

import pytest
from datasets import Dataset
from support.planned import planned
from support.published import bbq, qrecc, write

from salesrl_trl.data.branches import with_ids
from salesrl_trl.errors import ConfigError, DataError
from salesrl_trl.launch.checks.dataset import rows_of
from salesrl_trl.launch.data.form import Form, Portion
from salesrl_trl.launch.data.formats import BBQ, QReCC
from salesrl_trl.launch.data.sources import load_rows
from salesrl_trl.launch.data_config import DataConfig
from salesrl_trl.launch.reward_config import RewardConfig

BRANCHES = ("fairness", "hallucination")


def parts(file, form):
    return [load_rows(file, "", BRANCHES, form=form, part=part) for part in (Portion.TRAINING, Portion.HELD_OUT)]


def conversations(rows):
    return {row.row_id.rsplit("-", 1)[0] for row in rows}


def qrecc_file(path, conversations):
    return write(
        path, *(qrecc(number, turn, question=f"{turn}?") for number in range(conversations) for turn in range(1, 5))
    )


def test_no_conversation_is_in_both_parts_and_no_row_is_lost(tmp_path):
    training, held_out = parts(qrecc_file(tmp_path / "a.json", 200), Form(format=QReCC(), held_out_share=0.25))
    assert conversations(training).isdisjoint(conversations(held_out))
    assert len(training) + len(held_out) == 800
    assert 30 < len(conversations(held_out)) < 70  # a quarter of 200, within three standard deviations


def test_a_row_stays_in_its_part_when_the_file_grows(tmp_path):
    form = Form(format=QReCC(), held_out_share=0.25)
    _, before = parts(qrecc_file(tmp_path / "a.json", 50), form)
    training, after = parts(qrecc_file(tmp_path / "b.json", 60), form)
    assert conversations(before) <= conversations(after)
    assert conversations(before).isdisjoint(conversations(training))


def test_records_of_a_template_stay_together(tmp_path):
    file = write(
        tmp_path / "bbq.jsonl", *(bbq(at, question_index=str(at % 40), context=f"{at}.") for at in range(160))
    )
    training, held_out = parts(file, Form(format=BBQ(), held_out_share=0.3))
    template = [{int(row.row_id.rsplit("-", 1)[1]) % 40 for row in rows} for rows in (training, held_out)]
    assert template[0].isdisjoint(template[1])


def test_rows_without_a_group_stay_with_those_that_begin_alike(tmp_path):
    opening = [{"role": "customer", "content": str(at)} for at in range(40)]
    answer, question = {"role": "seller", "content": "Yes"}, {"role": "customer", "content": "And then?"}
    conversations = [[first, *more] for first in opening for more in ([], [answer, question])]
    rows = [{"branch": "fairness", "conversation": each} for each in conversations]
    training, held_out = parts(write(tmp_path / "rows.jsonl", *rows), Form(held_out_share=0.5))
    first = [{row.conversation[0].content for row in each} for each in (training, held_out)]
    assert first[0].isdisjoint(first[1])
    assert {len(row.conversation) for row in held_out} == {1, 3}


def test_a_column_says_what_parts_the_rows(tmp_path):
    rows = [
        {"branch": "fairness", "conversation": [{"role": "customer", "content": "Hi"}], "user": at % 20, "id": str(at)}
        for at in range(60)
    ]
    file = write(tmp_path / "rows.jsonl", *rows)
    with pytest.raises(DataError, match=r"of the 1 groups of .* none is .*{group: COLUMN}"):
        parts(file, Form(held_out_share=0.5))
    data = DataConfig(dataset={"path": file, "columns": {"group": "user"}}, eval_dataset={"share": 0.5})
    form = data.sources[0].form()
    training, held_out = ({int(row.row_id) % 20 for row in each} for each in parts(file, form))
    assert training.isdisjoint(held_out)
    assert len(training | held_out) == 20


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"eval_dataset": {"share": 1.0}, "dataset": "a.jsonl"}, "Expected a number, at least 0, and less than 1."),
        ({"eval_dataset": {"share": 0.1}}, "held-out rows are there already: in `eval_dataset`, or in the demo."),
        ({"dataset": "a.jsonl", "eval_dataset": {"path": "b.jsonl", "share": 0.1}}, "are there already"),
        ({"dataset": "a.jsonl", "eval_dataset": {"columns": {"id": "at"}, "share": 0.1}}, "Leave one"),
        ({"dataset": {"format": "squad"}}, "`dataset.format` is 'squad'. Expected one of: rows, bbq, halueval, qrecc"),
        ({"dataset": "a.jsonl:late"}, "'a.jsonl:late', and a local file is one split. Expected 'a.jsonl'"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings, message):
    with pytest.raises(ConfigError) as caught:
        DataConfig(**settings)
    assert message in str(caught.value)


def test_a_row_without_an_id_is_named_by_its_place_and_its_dataset(tmp_path):
    """So that a held-out row is not taken for the training row of the same place."""
    for name in ("train", "other"):
        lines = [{"prompt": f"{name} 0"}, {"prompt": f"{name} 1", "id": 0}]
        (tmp_path / f"{name}.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines), "utf-8")
    data = DataConfig(dataset=str(tmp_path / "train.jsonl"), eval_dataset=str(tmp_path / "other.jsonl"))
    plan = planned(data, RewardConfig())
    held_out = rows_of(plan.held_out_records, (), None)
    assert [row.row_id for row in plan.train_rows] == ["row-0", "0"]
    assert [row.row_id for row in held_out] == ["held-out-0", "0"]


def test_datasets_of_anybody_get_ids_where_they_have_none():
    rows = Dataset.from_list([{"prompt": "a"}, {"prompt": "b"}])
    named = rows.add_column("id", ["x", "y"])
    stream = rows.to_iterable_dataset()
    assert with_ids(rows)["id"] == ["row-0", "row-1"]
    assert with_ids({"easy": rows}, "held-out")["easy"]["id"] == ["held-out-easy-0", "held-out-easy-1"]
    assert [with_ids(given) for given in (named, stream, None)] == [named, stream, None]
