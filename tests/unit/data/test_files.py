"""Copies of data on a faster disk: equal to the original, made once, and anew when it changes."""

import os

import pytest

from salesrl_trl.data.files import copied
from salesrl_trl.errors import ConfigError


def test_a_copy_is_made_once_and_again_when_the_original_changes(tmp_path):
    origin, fast = tmp_path / "rows.jsonl", tmp_path / "fast"
    origin.write_text("one")
    copy = copied(origin, fast)
    before = copy.stat().st_ino
    assert (copy.read_text(), copy.suffix, copy.parent) == ("one", ".jsonl", fast)
    assert copied(origin, fast).stat().st_ino == before
    origin.write_text("two")
    os.utime(origin, ns=(1, 1))
    assert copied(origin, fast).read_text() == "two"


def test_equal_names_of_other_folders_are_kept_apart(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "rows.jsonl").write_text(name)
    fast = tmp_path / "fast"
    assert [copied(tmp_path / name / "rows.jsonl", fast).read_text() for name in "ab"] == ["a", "b"]
    assert copied(tmp_path / "c", fast) == tmp_path / "c"
    with pytest.raises(ConfigError, match=r"could not be copied to .*rows.jsonl \(File exists\)"):
        copied(tmp_path / "a/rows.jsonl", tmp_path / "b" / "rows.jsonl")
