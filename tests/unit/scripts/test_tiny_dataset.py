"""scripts/create_tiny_dataset.py: rows as they were, the same ones each time."""

from collections import Counter

import pytest
from support.published import bbq, write

from salesrl_trl.data.files import load_documents
from salesrl_trl.launch.data.sources import load_records, load_rows
from scripts import create_tiny_dataset as tool

BRANCHES = ("fairness", "hallucination")


@pytest.mark.parametrize("name", ["tiny.jsonl", "tiny.parquet"])
def test_the_rows_are_those_of_the_source_in_their_order(tmp_path, name):
    out, of_all = tmp_path / name, load_rows("demo", "train", BRANCHES)
    assert tool.main(["--source", "demo", "--rows", "9", "--out", str(out)]) == 0
    assert load_rows(str(out), "train", BRANCHES) == of_all[:9]
    kept, packaged = load_records(str(out), "").rows, load_records("demo", "train").rows[:9]
    assert [row.record for row in kept] == [row.record for row in packaged]  # with all columns
    again = tmp_path / "drawn.jsonl"
    assert tool.main(["--source", str(out), "--rows", "5", "--seed", "1", "--out", str(again)]) == 0
    drawn = load_rows(str(again), "train", BRANCHES)
    assert drawn == [row for row in of_all[:9] if row in drawn]
    assert len(drawn) == 5


def test_rows_of_another_form_are_written_in_the_columns_of_a_row(tmp_path, capsys):
    source = write(tmp_path / "bbq.jsonl", bbq(0), bbq(1, context_condition="disambig"), bbq(2, question="Who ran?"))
    out, knowledge = tmp_path / "rows.jsonl", tmp_path / "documents.jsonl"
    given = ["--source", source, "--dataset_format", "bbq", "--columns", '{"tenant_id": {"value": "t1"}}']
    assert tool.main([*given, "--out", str(out), "--knowledge_out", str(knowledge)]) == 0
    assert "1 of 3 records" in capsys.readouterr().out
    rows = load_rows(str(out), "train", BRANCHES)
    assert [(row.row_id, row.tenant_id) for row in rows] == [("bbq-Religion-0", "t1"), ("bbq-Religion-2", "t1")]
    assert [document.text for document in load_documents(knowledge)] == [row.documents[0] for row in rows]
    assert tool.main(["--source", source, "--columns", '{"id": "nam"}', "--out", str(tmp_path / "b.jsonl")]) == 2
    assert "lacks the column 'nam'" in capsys.readouterr().err


def test_documents_of_two_files_are_joined_as_their_rows_are(tmp_path):
    """docs/reference/data.md joins files of two formats, for a run with two branches."""
    files = write(tmp_path / "a.jsonl", bbq(0), bbq(1, question="Who ran?")), write(tmp_path / "b.jsonl", bbq(0))
    lines = []
    for number, file in enumerate(files):
        out, knowledge = tmp_path / f"{number}.jsonl", tmp_path / f"d{number}.jsonl"
        given = ["--source", file, "--dataset_format", "bbq", "--out", str(out), "--knowledge_out", str(knowledge)]
        assert tool.main(given) == 0
        lines.append({*knowledge.read_text().splitlines()})
    assert len(lines[0]) == 2
    assert lines[1] < lines[0]  # so that `sort -u` leaves it once


def test_a_seed_draws_the_same_rows_and_branches_have_equal_shares():
    branches = ["a"] * 90 + ["b"] * 9 + ["c"]
    drawn = tool.chosen(branches, 21, True, 3)
    assert drawn == tool.chosen(branches, 21, True, 3) != tool.chosen(branches, 21, True, 4)
    assert Counter(branches[place] for place in drawn) == {"a": 11, "b": 9, "c": 1}
    assert drawn == sorted(set(drawn))
    assert tool.chosen(branches, 500, False, 3) == list(range(100))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"branch": null, "conversation": []}', "branch None is not configured. Expected one of: a."),
        ("[" * 100_000, "line 2 can't be read (RecursionError)"),
    ],
    ids=["empty branch", "deep"],
)
def test_a_line_without_a_row_is_named(line, message, tmp_path, capsys):
    rows, out = tmp_path / "rows.jsonl", tmp_path / "tiny.jsonl"
    rows.write_text('{"branch": "a", "conversation": [{"role": "customer", "content": "Hi"}]}\n' + line)
    assert tool.main(["--source", str(rows), "--out", str(out)]) == tool.EXIT_USAGE
    assert message in capsys.readouterr().err
    assert not out.exists()
