"""A file in other columns: which fields come from where, and the messages about names."""

import json
import re
from pathlib import Path

import pytest
import yaml
from support.published import bbq, write

from salesrl_trl.errors import ConfigError, DataError
from salesrl_trl.launch.data.sources import load_rows
from salesrl_trl.launch.data_config import DataConfig
from salesrl_trl.launch.settings import SettingsParser

BRANCHES = ("fairness", "hallucination", "tone")


@pytest.fixture
def load(tmp_path):
    def rows(columns, *records, **settings):
        file = write(tmp_path / "own.jsonl", *records)
        return load_rows(
            file, "train", BRANCHES, form=DataConfig(dataset={"columns": columns, **settings}).sources[0].form()
        )

    return rows


RECORD = {
    "uid": 7,
    "messages": [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "The price?"},
    ],
    "facts": "It costs 5 yuan.",
    "meta": {"owner": {"tenant": "t1"}},
}
COLUMNS = {
    "id": "uid",
    "branch": {"value": "tone"},
    "conversation": "messages",
    "documents": "facts",
    "tenant_id": "meta.owner.tenant",
}


@pytest.mark.parametrize("columns", [COLUMNS, json.dumps(COLUMNS)], ids=["YAML", "JSON"])
def test_fields_come_from_other_columns_from_inside_of_them_and_from_constants(load, columns):
    (row,) = load(columns, RECORD)
    assert (row.row_id, row.branch, row.tenant_id, row.documents) == ("7", "tone", "t1", ("It costs 5 yuan.",))
    assert row.context == "customer: Hi\nseller: Hello\ncustomer: The price?"


@pytest.mark.parametrize(
    ("entry", "value"),
    [
        ("turns", "The price?"),
        ("turns", ["Hi", "Hello", "The price?"]),
        ("turns", [{"role": "customer", "content": "The price?"}]),
        (
            {"column": "turns", "role": "from", "content": "value", "roles": {"human": "customer", "gpt": "seller"}},
            [{"from": "gpt", "value": "Hello"}, {"from": "human", "value": "The price?"}],
        ),
    ],
    ids=["text", "texts in turn", "turns", "keys and roles of their own"],
)
def test_conversations_of_other_shapes_are_read(load, entry, value):
    (row,) = load({"conversation": entry}, {"branch": "tone", "turns": value})
    assert row.conversation[-1].content == "The price?"
    roles = ["customer", "seller", "customer"]
    assert [message.role for message in row.conversation] == roles[-len(row.conversation) :]


def test_columns_that_are_not_mapped_stay_and_what_a_reward_reads_is_mapped_too(load):
    columns = {"branch": {"value": "tone"}, "reference": "meta.owner.tenant", "criteria": {"value": ["It is short."]}}
    (row,) = load(columns, {**RECORD, "id": "a", "branch": "x", "conversation": RECORD["messages"]})
    assert (row.row_id, row.branch) == ("a", "tone")
    assert (row.columns["reference"], row.columns["criteria"]) == ("t1", ["It is short."])


def test_columns_win_over_a_format(load):
    columns = {"branch": {"value": "tone"}, "tenant_id": "additional_metadata.version"}
    (row,) = load(columns, bbq(), format="bbq")
    assert (row.row_id, row.branch, row.tenant_id) == ("bbq-Religion-0", "tone", "a")


def test_a_column_that_is_not_there_is_told_beside_those_that_are(load):
    told = (
        r"has no column 'meta\.owner\.tennant', from which `columns` takes 'conversation'\. Did you mean "
        r"'meta\.owner\.tenant'\? There are: uid, messages, facts, meta, meta\.owner, meta\.owner\.tenant\. Correct"
    )
    with pytest.raises(DataError, match=told):
        load({**COLUMNS, "conversation": "meta.owner.tennant"}, RECORD)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"branch": {"column": "a"}}, "has another form. Expected the name of a column, or {value: CONSTANT}."),
        ({"conversation": {"column": "a", "speaker": "b"}}, "or {column: NAME, role: KEY, content: KEY, roles: {"),
        ("{", "`dataset.columns` is not JSON"),
        ("[]", "`dataset.columns` is a list. Expected a mapping."),
    ],
)
def test_a_mapping_of_another_form_is_refused_before_a_file_is_read(columns, message):
    with pytest.raises(ConfigError) as caught:
        DataConfig(dataset={"columns": columns})
    assert message in str(caught.value)


def test_every_recipe_of_the_page_is_read_as_settings_of_the_data(tmp_path):
    page = (Path(__file__).parents[3] / "docs/DATA.md").read_text(encoding="utf-8")
    blocks = [block for block in re.findall(r"```yaml\n(.*?)```", page, re.S) if block.startswith(("#", "dataset:"))]
    read = []
    for block in blocks:
        (tmp_path / "recipe.yaml").write_text(block)
        (data,) = SettingsParser((DataConfig,)).read(["--config", str(tmp_path / "recipe.yaml")])
        read.append([source.entry.format for source in data.sources])
        if isinstance(given := yaml.safe_load(block)["dataset"], dict):
            assert data.sources[0].form().columns.keys() == given.get("columns", {}).keys()
    assert read == [["rows"], ["bbq", "halueval", "rows"], ["bbq"], ["halueval"], ["qrecc"], ["topiocqa"]]


def test_held_out_rows_have_the_form_of_the_training_rows_or_their_own():
    of_bbq = {"path": "a.jsonl", "format": "bbq", "columns": {"id": "uid"}}
    (data,) = DataConfig(dataset=of_bbq, eval_dataset="b.jsonl").sources
    assert (type(data.eval_form().format), data.eval_form().columns) == (type(data.form().format), data.form().columns)
    (data,) = DataConfig(dataset={**of_bbq, "path": "demo"}, eval_dataset={"format": "rows", "columns": {}}).sources
    assert (data.eval_form().format, data.eval_form().columns) == (None, {})
    assert (data.train_source, data.eval_source) == (("demo", "train"), ("demo", "heldout"))


def test_a_split_stands_behind_the_name_of_a_dataset():
    (data,) = DataConfig(dataset="me/talks:main", eval_dataset="me/talks:late").sources
    assert (data.train_source, data.eval_source) == (("me/talks", "main"), ("me/talks", "late"))
    (data,) = DataConfig(dataset="me/talks:main", eval_dataset='{"columns": {}}').sources
    assert (data.train_source, data.eval_source) == (("me/talks", "main"), ("me/talks", "heldout"))
    assert DataConfig(dataset="at:12.jsonl").sources[0].train_source == ("at:12.jsonl", "train")
