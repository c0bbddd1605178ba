"""Rubrics: packaged, replaced, missing."""

import pytest

from salesrl_trl.errors import ConfigError
from salesrl_trl.reward.judge.judge_client import load_rubrics


def test_both_default_branches_have_a_rubric_that_asks_for_the_verdicts_fields():
    for rubric in load_rubrics(("fairness", "hallucination")).values():
        assert '"candidate"' in rubric
        assert '"reference"' in rubric


def test_a_users_file_wins_over_the_packaged_one(tmp_path):
    (tmp_path / "fairness.txt").write_text("mine", encoding="utf-8")
    rubrics = load_rubrics(("fairness", "hallucination"), str(tmp_path))
    assert rubrics["fairness"] == "mine"
    assert "grounding" in rubrics["hallucination"]


def test_all_rubrics_that_are_missing_are_told_together(tmp_path):
    (tmp_path / "price.txt").write_text("mine", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"rubrics are missing: tone\.txt, honesty\.txt\. Expected"):
        load_rubrics(("tone", "price", "fairness", "honesty"), str(tmp_path))


@pytest.mark.parametrize(("content", "message"), [(b"caf\xe9", r"line 1, byte 4 \(0xe9\)"), (b" \n", "is empty")])
def test_a_rubric_that_says_nothing_readable_is_refused(tmp_path, content, message):
    (tmp_path / "fairness.txt").write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        load_rubrics(("fairness",), str(tmp_path))


def test_a_rubric_of_absurd_size_is_refused(tmp_path):
    (tmp_path / "fairness.txt").write_bytes(b"a" * (2**24 + 1))
    with pytest.raises(ConfigError, match=r"fairness\.txt can't be read \(larger than 16 MiB\)"):
        load_rubrics(("fairness",), str(tmp_path))
