"""Training and held-out rows of one file share no conversation; a run on several datasets has the parts of each."""

import json
from collections import Counter

import pytest
from datasets import Dataset
from support.planned import planned
from support.published import DIALOGUE, QA, bbq, qrecc, write

from salesrl_trl.data.branches import with_ids
from salesrl_trl.errors import ConfigError, DataError
from salesrl_trl.launch.checks.dataset import rows_of, settle_held_out
from salesrl_trl.launch.data.form import Form, Portion
from salesrl_trl.launch.data.formats import BBQ, QReCC
from salesrl_trl.launch.data.prompts import fit_prompts, read_template
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
    with pytest.raises(DataError, match=r"leaves no .* group of .* \(1 in total\).*{group: COLUMN}"):
        parts(file, Form(held_out_share=0.5))
    data = DataConfig(dataset={"path": file, "columns": {"group": "user"}}, eval_dataset={"share": 0.5})
    form = data.sources[0].form()
    training, held_out = ({int(row.row_id) % 20 for row in each} for each in parts(file, form))
    assert training.isdisjoint(held_out)
    assert len(training | held_out) == 20


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"eval_dataset": {"share": 1.0}, "dataset": "a.jsonl"}, "Expected a number, at least 0 and below 1."),
        ({"eval_dataset": {"share": 0.1}}, "but `eval_dataset` or the demo already has held-out rows"),
        ({"dataset": "a.jsonl", "eval_dataset": {"path": "b.jsonl", "share": 0.1}}, "already has held-out rows"),
        ({"dataset": "a.jsonl", "eval_dataset": {"columns": {"id": "at"}, "share": 0.1}}, "already has held-out rows"),
        ({"dataset": {"format": "squad"}}, "`dataset.format` is 'squad'. Expected one of: rows, bbq, halueval, qrecc"),
        ({"dataset": "a.jsonl:late"}, "'a.jsonl:late', but a local file lacks splits. Expected 'a.jsonl'"),
        ({"dataset": [{"format": "bbq"}]}, r"`dataset\[0\]` lacks path"),
        ({"dataset": [{"path": "a.json", "formt": "bbq"}]}, r"`dataset\[0\]` has an unknown .formt."),
        ({"dataset": [{"path": "a.json", "share": 0.5}, {"path": "b.json"}]}, r"2 entries and the shares \[0.5\]"),
        (
            {"dataset": [{"path": "a.json"}], "columns": {"id": "x"}},
            "`columns` is set, but `dataset` is a",
        ),
    ],
)
def test_settings_that_cannot_work_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        DataConfig(**settings)


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


DIRECTLY = RewardConfig(reward_funcs=["judge"], judge_base_url="http://127.0.0.1:1/v1")


def names(rows):
    return Counter(row.row_id.partition(":")[0] for row in rows)


def loaded(data):
    plan = planned(data, DIRECTLY)
    return plan.train_rows, rows_of(plan.held_out_records, (), data.max_eval_rows)


@pytest.fixture
def files(tmp_path):
    own = [{"prompt": [{"role": "user", "content": f"{at}?"}], "branch": "style"} for at in range(40)]
    return {
        "bbq": write(tmp_path / "bbq.jsonl", *(bbq(at, question_index=str(at), context=f"{at}.") for at in range(80))),
        "qa": write(tmp_path / "qa.json", QA, DIALOGUE),
        "own": write(tmp_path / "own.jsonl", *own),
    }


def test_each_dataset_has_its_format_its_branch_and_its_held_out_rows(files):
    entries = [
        {"path": files["bbq"], "format": "bbq", "held_out_share": 0.25},
        {"path": files["own"], "branch": "tone", "rows": 10, "eval": {"path": files["qa"], "format": "halueval"}},
        {"path": files["own"], "held_out_share": 0.5, "columns": {"id": {"value": "x"}}},
    ]
    train, held_out = loaded(DataConfig(dataset=entries))
    assert names(train)["own"] == 10
    assert names(train)["bbq"] + names(held_out)["bbq"] == 80
    assert names(train)["own-3"] + names(held_out)["own-3"] == 40
    assert names(held_out)["own"] == 2  # the rows of HaluEval that were named for this entry
    assert {row.branch for row in train if row.row_id.startswith("own:")} == {"tone"}
    assert {row.branch for row in train} == {"fairness", "tone", "style"}
    of_bbq = next(row for row in train if row.row_id.startswith("bbq:"))
    assert of_bbq.row_id.startswith("bbq:bbq-Religion-") and of_bbq.prompt[0]["role"] == "system"
    ids = [row.row_id for row in (*train, *held_out) if not row.row_id.startswith("own-3:")]
    assert len({*ids}) == len(ids)  # also of rows without an id, which have their place


def test_prompts_of_two_kinds_are_refused_and_a_template_makes_them_one(files, tmp_path):
    texts = write(tmp_path / "texts.jsonl", {"prompt": "1?"})
    rows, _ = loaded(DataConfig(dataset=[{"path": files["own"], "eval": texts}, {"path": texts, "eval": texts}]))
    with pytest.raises(DataError, match=r"1 of 41 training rows are texts, such as that of 'texts:row-0'"):
        fit_prompts(rows, None, len, None, "error", "training")
    template = tmp_path / "prompt.jinja"
    template.write_text("{{ prompt }}")
    fit_prompts(rows, read_template(str(template), ()), lambda prompts: [1] * len(prompts), None, "error", "training")


def test_shares_are_those_of_the_training_rows_and_a_beginning_has_them_too(files):
    entries = [
        {"path": files["bbq"], "format": "bbq", "share": 0.25, "eval": files["bbq"]},
        {"path": files["own"], "share": 0.75, "eval": files["own"]},
    ]
    data = DataConfig(dataset=json.dumps(entries))  # as on the command line
    train, _ = loaded(data)
    # All 40 rows of one's own are 0.75 of the run: 40 / 0.75 x 0.25 = 13.3 of BBQ's 80
    assert names(train) == {"own": 40, "bbq": 13}
    assert names(loaded(DataConfig(dataset=entries, max_train_rows=16))[0]) == {"own": 12, "bbq": 4}
    of_bbq = [int(row.row_id.rpartition("-")[2]) for row in train if row.row_id.startswith("bbq")]
    assert of_bbq == sorted(of_bbq) and of_bbq[-1] > 40  # from all over the file
    assert loaded(DataConfig(dataset=entries))[0] == train  # the same for a run that goes on


def test_the_branch_of_an_entry_is_that_of_its_held_out_rows_with_columns_of_their_own(files, tmp_path):
    held_out = write(tmp_path / "held_out.jsonl", {"question": "1?", "branch": "other"})
    entry = {"path": files["own"], "branch": "tone", "eval": {"path": held_out, "columns": {"prompt": "question"}}}
    assert {row.branch for rows in loaded(DataConfig(dataset=[entry])) for row in rows} == {"tone"}


def test_files_without_held_out_rows_have_some_held_out_and_a_line_for_each(files):
    data = DataConfig(dataset=[{"path": files["bbq"], "format": "bbq"}, {"path": files["own"], "held_out_share": 0.5}])
    notes = [settle_held_out(source) for source in data.sources]
    assert notes[0].startswith(f"10% of the rows of {files['bbq']} are held out") and notes[1] is None
    assert names(loaded(data)[1]).keys() == {"bbq", "own"}


def test_a_row_is_named_by_its_own_file_and_an_empty_file_is_told(files, tmp_path):
    bad = write(tmp_path / "bad.jsonl", {"prompt": "a", "branch": "style"}, {"prompt": 7, "branch": "style"})
    data = DataConfig(dataset=[{"path": files["own"]}, {"path": bad}])
    with pytest.raises(
        DataError, match=r"bad.jsonl, line 2, row 1 \(counted from 0; id 'bad:row-1'\): `prompt` is int"
    ):
        loaded(data)
    (tmp_path / "none.jsonl").touch()
    data = DataConfig(dataset=[{"path": files["own"]}, {"path": str(tmp_path / "none.jsonl")}])
    with pytest.raises(DataError, match=r"none\.jsonl is empty"):
        loaded(data)
