"""Files in the columns of published datasets, or of one's own, become rows; what becomes none is counted or named."""

import json
import re
from pathlib import Path

import pytest
import yaml
from support.published import DIALOGUE, QA, SUMMARIZATION, TOPIOCQA, bbq, qrecc, write

from salesrl_trl.errors import ConfigError, DataError
from salesrl_trl.launch.data.form import Form
from salesrl_trl.launch.data.formats import BBQ, HaluEval, QReCC, TopiOCQA
from salesrl_trl.launch.data.sources import load_records, load_rows
from salesrl_trl.launch.data_config import DataConfig
from salesrl_trl.launch.settings import SettingsParser

BRANCHES = ("fairness", "hallucination", "tone")


@pytest.fixture
def load(tmp_path):
    def rows(format_, *records, name="records.jsonl"):
        return load_rows(write(tmp_path / name, *records), "train", BRANCHES, form=Form(format=format_))

    return rows


def test_a_customer_of_bbq_says_the_context_and_asks_the_question(load):
    (row,) = load(BBQ(), bbq(12))
    assert (row.row_id, row.branch) == ("bbq-Religion-12", "fairness")
    assert row.context == (
        "customer: At the station I met a Muslim neighbour and a Hindu neighbour. Who left the suitcase behind?"
    )
    assert row.documents == ("Who left the suitcase behind? Not known",)


def test_an_answer_that_names_a_group_is_left_out_and_counted_unless_a_class_wants_it(tmp_path):
    file = write(tmp_path / "bbq.jsonl", bbq(0), bbq(1, context_condition="disambig", label=2))
    loaded = load_records(file, "", Form(format=BBQ()))
    assert [row.record["id"] for row in loaded.rows] == ["bbq-Religion-0"]
    assert loaded.note == f"1 of 2 records of {file} are excluded: 1 have a context of the condition 'disambig'"

    class Both(BBQ):
        conditions = ("ambig", "disambig")

    rows = load_rows(file, "", BRANCHES, form=Form(format=Both()))
    assert [row.documents[0] for row in rows][1] == "Who left the suitcase behind? The Hindu neighbour"


def test_each_task_of_halueval_has_its_conversation_and_no_invented_text(load, tmp_path):
    (tmp_path / "data.json").write_text("\n".join(map(json.dumps, [QA, DIALOGUE, SUMMARIZATION])))  # as published
    rows = load_rows(str(tmp_path / "data.json"), "", BRANCHES, form=Form(format=HaluEval()))
    assert {row.branch for row in rows} == {"hallucination"}
    assert [row.context for row in rows] == [
        "customer: Where was Harbour Lights shot?",
        "customer: I liked The Quiet Orchard.\nseller: A fine book.\ncustomer: Who wrote it?",
        "customer: The town council voted on Monday to repair the old bridge.\n\nPlease summarize this text for me.",
    ]
    assert [row.documents for row in rows] == [
        ("Where was Harbour Lights shot? Lisbon", QA["knowledge"]),
        ("Ada Moreno wrote it.", DIALOGUE["knowledge"]),
        ("The council will repair the bridge.",),
    ]
    everything = str(rows)
    assert not any(text in everything for text in ("Marseille", "Peter Hall", "tunnel"))


def directly(format_):
    format_.answers_directly = True
    return format_


def test_a_policy_that_answers_bbq_itself_gets_the_options_in_both_conditions(load):
    ambiguous, told = load(directly(BBQ()), bbq(0, note="mine"), bbq(1, context_condition="disambig", label=2))
    system, user = ambiguous.prompt
    assert (system["role"], user["role"], ambiguous.conversation) == ("system", "user", ())
    assert user["content"] == (
        "At the station I met a Muslim neighbour and a Hindu neighbour.\n\nWho left the suitcase behind?\n"
        "(A) The Muslim neighbour\n(B) Not known\n(C) The Hindu neighbour"
    )
    assert (ambiguous.documents, ambiguous.columns["reference"]) == (("Not known",), "Not known")
    assert (told.documents, told.columns["reference"]) == (("The Hindu neighbour",), "The Hindu neighbour")
    expected = {
        "note": "mine", "category": "Religion", "context_condition": "ambig", "question_polarity": "neg", "label": 1,
        "answer_info": bbq()["answer_info"], "stereotyped_groups": ["Muslim"],
    }  # fmt: skip
    assert {name: ambiguous.columns[name] for name in expected} == expected


def test_a_policy_that_answers_halueval_itself_gets_the_knowledge(load):
    qa, dialogue, summary = load(directly(HaluEval()), QA, DIALOGUE | {"note": "mine"}, SUMMARIZATION)
    assert [row.columns["reference"] for row in (qa, dialogue, summary)] == [
        "Lisbon", "Ada Moreno wrote it.", "The council will repair the bridge."
    ]  # fmt: skip
    assert [row.documents for row in (qa, dialogue, summary)] == [(QA["knowledge"],), (DIALOGUE["knowledge"],), ()]
    for row in (qa, dialogue):
        assert row.prompt[0]["content"].endswith(
            f"alone. If it does not hold the answer, say so.\n\nKnowledge: {row.documents[0]}"
        )
    assert [message["role"] for message in dialogue.prompt] == ["system", "user", "assistant", "user"]
    assert summary.prompt[1]["content"].startswith(SUMMARIZATION["document"])
    assert dialogue.columns["note"] == "mine" and dialogue.columns["task"] == "dialogue"
    assert not any(text in str((qa, dialogue, summary)) for text in ("Marseille", "Peter Hall", "tunnel"))


def test_a_records_fields_stay_for_reward_functions_and_no_field_of_a_row_is_taken_by_them(load):
    for format_, record in ((BBQ(), bbq()), (HaluEval(), QA), (QReCC(), qrecc()), (TopiOCQA(), TOPIOCQA)):
        (row,) = load(format_, {**record, "note": "mine", "tenant_id": "t", "prompt": "another"})
        assert (row.columns["note"], row.tenant_id, row.prompt) == ("mine", "", None)
        assert {name: row.columns[name] for name in record if name not in format_.hidden} == {
            name: value for name, value in record.items() if name not in format_.hidden
        }
        assert not format_.hidden & row.columns.keys()


ENDED = DIALOGUE | {"dialogue_history": "[Human]: Who wrote it? [Assistant]: I will look it up."}


@pytest.mark.parametrize(
    ("format_", "record", "another", "why"),
    [
        (HaluEval(), DIALOGUE, ENDED, "end with the assistant's words"),
        (QReCC(), qrecc(), qrecc(Turn_no=9, Answer=""), "have no known answer"),
        (TopiOCQA(), TOPIOCQA, TOPIOCQA | {"Turn_no": 9, "Answer": "UNANSWERABLE"}, "have no known answer"),
    ],
)
def test_a_record_that_makes_no_row_is_left_out_and_counted(tmp_path, format_, record, another, why):
    loaded = load_records(write(tmp_path / "a.json", record, another), "", Form(format=format_))
    assert (len(loaded.rows), loaded.left_out) == (1, {why: 1})


@pytest.mark.parametrize("name", ["qrecc.json", "qrecc.jsonl"])
def test_qrecc_gives_the_turns_before_the_question_and_the_answer(load, name):
    context = ["What are the pros of electric cars?", "They are quiet.", "And the cons?", ""]  # no answer was found
    first, row = load(QReCC(), qrecc(), qrecc(74, 3, context, "Tell me more about Tesla"), name=name)
    assert (first.row_id, row.row_id, row.branch) == ("qrecc-1-1", "qrecc-74-3", "hallucination")
    assert row.context == (
        "customer: What are the pros of electric cars?\nseller: They are quiet.\ncustomer: And the cons?\n"
        "customer: Tell me more about Tesla"
    )
    assert row.documents == ("They are quiet.",)


def test_topiocqa_gives_every_text_that_answers(load):
    (row,) = load(TopiOCQA(), TOPIOCQA)
    assert (row.row_id, row.branch) == ("topiocqa-7-2", "hallucination")
    assert row.context == "customer: who sings in the copper larks\nseller: Mara Lind\ncustomer: when was it formed?"
    assert row.documents == ("In 1984", "1984", TOPIOCQA["Rationale"], TOPIOCQA["Gold_passage"]["text"])
    few = {name: TOPIOCQA[name] for name in ("Conversation_no", "Turn_no", "Question", "Answer", "Context")}
    assert load(TopiOCQA(), few)[0].documents == ("In 1984",)


SECRET = "13800000000"


@pytest.mark.parametrize(
    ("format_", "record", "message"),
    [
        (BBQ(), bbq(context_condition=SECRET), "`label` or `context_condition` is unknown."),
        (BBQ(), bbq(ans2=" "), "the field `ans2` is str of length 1. Expected a text, not blank"),
        (directly(BBQ()), bbq(additional_metadata=[SECRET]), "the field `additional_metadata` is list of length 1."),
        (HaluEval(), {"user_query": SECRET}, "expected a field `question` (qa), `dialogue_history`"),
        (HaluEval(), QA | {"knowledge": [SECRET]}, "the field `knowledge` is list of length 1. Expected a text"),
        (HaluEval(), DIALOGUE | {"dialogue_history": "[Human]: [Human]: Hi"}, "`dialogue_history` is malformed."),
        (QReCC(), qrecc(context=[SECRET]), "the field `Context` is list of length 1. Expected a list of texts"),
        (TopiOCQA(), TOPIOCQA | {"Turn_no": "two"}, "the field `Turn_no` is str of length 3. Expected a whole number"),
        (TopiOCQA(), TOPIOCQA | {"Gold_passage": SECRET}, "the field `Gold_passage` is str of length 11"),
    ],
)
def test_a_malformed_record_is_named_by_line_and_field_and_not_quoted(tmp_path, format_, record, message):
    file = tmp_path / "records.jsonl"
    file.write_text("\n\n" + json.dumps(record))
    with pytest.raises(DataError) as caught:
        load_records(str(file), "", Form(format=format_))
    told = f"records.jsonl, line 3, row 0 (counted from 0) is not a {type(format_).__name__} record: "
    assert told in str(caught.value) and message in str(caught.value)
    assert SECRET not in str(caught.value)


def test_a_file_whose_records_all_make_no_row_says_why(load):
    with pytest.raises(DataError, match=r"is empty .1 of 1 records of .* are excluded: 1 have no known answer"):
        load(QReCC(), qrecc(Answer=""))


@pytest.fixture
def load_columns(tmp_path):
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
def test_fields_come_from_other_columns_from_inside_of_them_and_from_constants(load_columns, columns):
    (row,) = load_columns(columns, RECORD)
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
def test_conversations_of_other_shapes_are_read(load_columns, entry, value):
    (row,) = load_columns({"conversation": entry}, {"branch": "tone", "turns": value})
    assert row.conversation[-1].content == "The price?"
    roles = ["customer", "seller", "customer"]
    assert [message.role for message in row.conversation] == roles[-len(row.conversation) :]


def test_columns_that_are_not_mapped_stay_and_what_a_reward_reads_is_mapped_too(load_columns):
    columns = {"branch": {"value": "tone"}, "reference": "meta.owner.tenant", "criteria": {"value": ["It is short."]}}
    (row,) = load_columns(columns, {**RECORD, "id": "a", "branch": "x", "conversation": RECORD["messages"]})
    assert (row.row_id, row.branch) == ("a", "tone")
    assert (row.columns["reference"], row.columns["criteria"]) == ("t1", ["It is short."])


def test_columns_win_over_a_format(load_columns):
    columns = {"branch": {"value": "tone"}, "tenant_id": "additional_metadata.version"}
    (row,) = load_columns(columns, bbq(), format="bbq")
    assert (row.row_id, row.branch, row.tenant_id) == ("bbq-Religion-0", "tone", "a")


def test_a_column_that_is_not_there_is_told_beside_those_that_are(load_columns):
    told = (
        r"lacks the column 'meta\.owner\.tennant', which `columns` maps to 'conversation'\. Did you mean "
        r"'meta\.owner\.tenant'\? Expected one of: uid, messages, facts, meta, meta\.owner, meta\.owner\.tenant\."
    )
    with pytest.raises(DataError, match=told):
        load_columns({**COLUMNS, "conversation": "meta.owner.tennant"}, RECORD)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"branch": {"column": "a"}}, "is invalid. Expected the name of a column, or {value: CONSTANT}."),
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
    page = (Path(__file__).parents[3] / "docs/reference/data.md").read_text(encoding="utf-8")
    blocks = [block for block in re.findall(r"```yaml\n(.*?)```", page, re.S) if block.startswith(("#", "dataset:"))]
    read = []
    for block in blocks:
        (tmp_path / "recipe.yaml").write_text(block)
        (data,) = SettingsParser((DataConfig,)).read(["--config", str(tmp_path / "recipe.yaml")])
        read.append([source.entry.format for source in data.sources])
        if isinstance(given := yaml.safe_load(block)["dataset"], dict):
            assert data.sources[0].form().columns.keys() == given.get("columns", {}).keys()
    assert read == [["rows"], ["bbq", "halueval", "rows"], ["bbq"]]


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
