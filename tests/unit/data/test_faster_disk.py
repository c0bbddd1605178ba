"""Copies of data on a faster disk: equal to the original, made once, and anew when it changes."""

import os

import pytest

from salesrl_trl.data import faster_disk
from salesrl_trl.data.faster_disk import copied
from salesrl_trl.errors import ConfigError


@pytest.mark.parametrize("is_folder", [False, True])
def test_a_copy_is_made_once_and_again_when_the_original_changes(tmp_path, is_folder, monkeypatch):
    origin, fast = tmp_path / "rows.jsonl", tmp_path / "fast"
    content = origin / "part" if is_folder else origin
    content.parent.mkdir(exist_ok=True)
    content.write_text("one")
    made = []
    stock = faster_disk._replace
    monkeypatch.setattr(faster_disk, "_replace", lambda *args: made.append(args) or stock(*args))
    for text, count in (("one", 1), ("one", 1), ("two", 2)):
        if content.read_text() != text:
            content.write_text(text)
            os.utime(content, ns=(1, 1))
        copy = copied(origin, fast)
        assert (copy / "part" if is_folder else copy).read_text() == text
        assert (len(made), copy.suffix, copy.parent) == (count, ".jsonl", fast)


def test_equal_names_of_other_folders_are_kept_apart(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "rows.jsonl").write_text(name)
    fast = tmp_path / "fast"
    assert [copied(tmp_path / name / "rows.jsonl", fast).read_text() for name in "ab"] == ["a", "b"]
    assert copied(tmp_path / "c", fast) == tmp_path / "c"
    with pytest.raises(ConfigError, match=r"could not be copied to .*rows.jsonl \(File exists\)"):
        copied(tmp_path / "a", tmp_path / "b" / "rows.jsonl")


def test_a_folder_is_not_copied_into_itself(tmp_path):
    store = tmp_path / "store"
    (store / "table").mkdir(parents=True)
    (store / "table/rows").write_text("1")
    with pytest.raises(ConfigError, match="which is to be copied there"):
        copied(store, store / "copies")
    assert [path.name for path in store.rglob("*")] == ["table", "rows"]
