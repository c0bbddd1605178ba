"""The form of a dataset, and the messages about rows of another form."""

import json
import math

import pytest

from salesrl_trl.errors import DataError
from salesrl_trl.launch.data.prompts import build_prompt
from salesrl_trl.launch.data.sources import build_dataset, load_rows, prompt_dataset
from salesrl_trl.types import SalesRow

BRANCHES = ("fairness", "hallucination")
GOOD = {"branch": "fairness", "conversation": [{"role": "customer", "content": "How much is it?"}]}


@pytest.fixture
def dataset(tmp_path):
    def write(*records, name="rows.jsonl"):
        path = tmp_path / name
        path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
        return str(path)

    return write


def load(source, **kwargs):
    return load_rows(source, "train", BRANCHES, **kwargs)


def test_a_row_may_give_its_prompt_which_is_used_as_it_is(dataset):
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 3 + 4?"}]
    for prompt, context in ((turns, "system: Be brief.\nuser: What is 3 + 4?"), ("3 + 4 =", "3 + 4 =")):
        (row,) = load_rows(dataset({"prompt": prompt, "answer": "7"}), "train")
        assert (row.branch, row.context, row.columns) == ("all", context, {"answer": "7"})
        assert build_prompt(row, None) == prompt
    (row,) = load(dataset(GOOD))
    assert build_prompt(row, None) == [{"role": "user", "content": "How much is it?"}]


PHONE = "13800000000"
TURNS = GOOD["conversation"]


def with_turns(*turns):
    return {**GOOD, "conversation": [{"role": role, "content": content} for role, content in turns]}


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"branch": "fairness", "prompt": ""}, "`prompt` is str of length 0"),
        ({"branch": "fairness", "prompt": [{"content": PHONE}]}, "turn 0 of `prompt` is dict of length 1"),
        ({"conversation": TURNS}, "branch None"),
        ({"branch": "fairness"}, "`conversation` is missing"),
        ({**GOOD, "branch": "price"}, "branch 'price' is not configured. Expected one of: fairness, hallucination"),
        ({**GOOD, "conversation": PHONE}, "`conversation` is str"),
        (with_turns(("system", "hi")), "turn 0 of `conversation` has role 'system'"),
        (with_turns(("customer", " ")), "turn 0 of `conversation` has role 'customer' and content str of length 1"),
        (with_turns(("customer", PHONE), ("seller", PHONE)), "the seller has the last turn"),
        ({**GOOD, "documents": PHONE}, "`documents` is str"),
        ({**GOOD, "tenant_id": ["t"]}, "`tenant_id` is list of length 1. Expected a text"),
    ],
)
def test_a_malformed_row_is_refused_with_its_place_and_without_quoting_it(dataset, record, message):
    with pytest.raises(DataError, match=rf"line 2, row 1 \(counted from 0\): {message}") as caught:
        load(dataset(GOOD, record))
    assert PHONE not in str(caught.value)
    with pytest.raises(DataError, match=r"row 1 \(counted from 0; id 'r-7'\): "):
        load(dataset(GOOD, {**record, "id": "r-7"}))


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"conversation": TURNS}, r"branch, .* fairness, hallucination\. Got: conversation\. Expected prompt"),
        ({"branch": "fairness", "question": "How much?"}, r"prompt or conversation\. Got: branch, question"),
    ],
)
def test_a_missing_column_is_named_beside_what_was_got(dataset, record, message):
    with pytest.raises(DataError, match=f"lacks the column {message}"):
        load(dataset(record))


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json"])
def test_an_empty_dataset_is_refused(dataset, name):
    with pytest.raises(DataError, match="is empty"):
        load(dataset(name=name))


def test_a_file_that_is_not_there_is_refused_with_what_is(tmp_path):
    (tmp_path / "trian.jsonl").write_text("")
    (tmp_path / "folder.jsonl").mkdir()
    with pytest.raises(DataError, match=r"there is no dataset file .*train\.jsonl\. Did you mean 'trian\.jsonl'\?"):
        load(str(tmp_path / "train.jsonl"))
    with pytest.raises(DataError, match=r"folder\.jsonl\. It is a folder or a device\. Expected"):
        load(str(tmp_path / "folder.jsonl"))
    with pytest.raises(DataError, match=r"there is no dataset file .*a\.jsonl\. Expected"):
        load(str(tmp_path / "absent" / "a.jsonl"))


def test_a_folder_whose_files_are_damaged_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "train.jsonl").write_text("{]")
    with pytest.raises(DataError, match=r"could not be loaded with split 'train' \(DatasetGenerationError\)"):
        load(str(tmp_path / "rows"))


def test_a_hub_name_that_can_not_be_reached_is_refused():
    with pytest.raises(DataError, match="could not be loaded with split 'train'"):
        load("nobody/no-such-dataset")


# before the byte, the line has `{"branch": "caf`: 15 bytes
LATIN = json.dumps(GOOD).encode() + b'\n{"branch": "caf\xe9", "conversation": []}\n'
NOT_UTF_8 = r"line 2.* byte 16 \(0xe9\) is not UTF-8: is it Latin-1"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("rows.jsonl", json.dumps(GOOD).encode() + b"\ncustomer 13800000000\n", "line 2 is not JSON"),
        ("rows.jsonl", LATIN, NOT_UTF_8),
        ("rows.json", LATIN, NOT_UTF_8),
        ("rows.json", b'[{"branch": 13800000000}, }]', "can't be read as"),
        ("rows.parquet", b"13800000000", "can't be read as"),
    ],
    ids=["line", "encoding", "encoding of JSON", "JSON", "Parquet"],
)
def test_a_damaged_file_is_refused_by_its_place_and_without_its_text(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=f"{name},? {message}") as caught:
        load(str(tmp_path / name))
    assert "13800000000" not in str(caught.value)


def test_a_byte_order_mark_is_no_part_of_the_first_row(tmp_path):
    (tmp_path / "rows.jsonl").write_bytes(b"\xef\xbb\xbf" + json.dumps(GOOD).encode())
    assert len(load(str(tmp_path / "rows.jsonl"))) == 1


def test_roles_of_chat_data_are_read_like_the_conversations_own(dataset):
    turns = [("user", "Hi"), ("assistant", "Hello"), ("seller", "How can I help?"), ("customer", "The price?")]
    conversation = [{"role": role, "content": content} for role, content in turns]
    (row,) = load(dataset({**GOOD, "conversation": conversation}))
    assert row.context == "customer: Hi\nseller: Hello\nseller: How can I help?\ncustomer: The price?"


def test_nothing_but_the_prompt_an_index_and_the_branch_travels_through_the_trainer(dataset):
    built = build_dataset(load(dataset(GOOD, GOOD)), "compact", first_index=10)
    assert built.column_names == ["prompt", "row", "branch", "id"]
    assert built["row"] == [10, 11]
    assert built[0]["prompt"] == [{"role": "user", "content": "customer: How much is it?"}]


def test_half_a_surrogate_pair_in_a_file_is_replaced_in_every_field(dataset):
    turns = [{"role": "customer", "content": "half \ud83d"}]
    odd = {"conversation": turns, "documents": ["\ude00"], "id": "\ud83d", "answer": {"\ud83d": ["\ud83d"]}}
    (row,) = load(dataset({**GOOD, **odd}))
    assert (row.context, row.documents, row.row_id) == ("customer: half \ufffd", ("\ufffd",), "\ufffd")
    assert row.columns["answer"] == {"\ufffd": ["\ufffd"]}
    made = SalesRow(row_id="\ud83d", branch="all", prompt="\ud83d", columns={"answer": "\ud83d"})  # of a script's own
    table = prompt_dataset(["\ud83d"], [made], for_functions=True)
    assert (table[0]["prompt"], table[0]["answer"], table[0]["id"]) == ("\ufffd", "\ufffd", "\ufffd")


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (False, "false"), (7.0, "7.0"), (2**53 + 1, "9007199254740993"), (None, ""), (math.nan, "")],
    ids=str,
)
def test_an_id_is_what_the_file_writes(dataset, value, text):
    names = ("tenant_id", "contact_id", "account_id", "message_id")
    (row,) = load(dataset({**GOOD, "id": value, **dict.fromkeys(names, value)}))
    assert {*row.ids.as_dict().values()} == {text}
    assert row.row_id == (text or "row-0")


@pytest.mark.parametrize(
    ("values", "fault"),
    [
        ([1, "1"], r"\(line 2 of its file\): the column `extra` has str of length 1, and an earlier row int"),
        ([1, None, 2**64], r"\(line 3 of its file\): the column `extra` has an integer beyond 64 bits"),
        ([{"a": {"b": 1}}, {"a": {"b": -(2**70)}}], r"\(line 2 .* an integer beyond 64 bits"),
        ([[1], ["a"]], r"\(line 2 of its file\): the column `extra` has list"),
    ],
    ids=str,
)
def test_values_that_no_table_holds_are_told_by_line_column_and_kind(dataset, values, fault):
    rows = load(dataset(*({**GOOD, "extra": value} for value in values)))
    with pytest.raises(DataError, match=fault):
        prompt_dataset(["?"] * len(rows), rows, for_functions=True)


@pytest.mark.parametrize("name", ["prompts", "completions", "trainer_state", "log_extra", "log_metric", "row"])
def test_a_column_with_a_name_of_the_trainers_is_refused(dataset, name):
    with pytest.raises(DataError, match=f"the rows have the column `{name}`, a name that the trainer reserves"):
        prompt_dataset(["?"], load(dataset({**GOOD, name: 1})), for_functions=True)
