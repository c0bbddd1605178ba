"""Rubrics: packaged, replaced, missing."""

import pytest

from salesrl_trl.errors import ConfigError
from salesrl_trl.reward.judge import load_rubrics


def test_both_default_branches_have_a_rubric_that_asks_for_the_verdicts_fields():
    for rubric in load_rubrics(("fairness", "hallucination")).values():
        assert '"candidate"' in rubric
        assert '"reference"' in rubric


def test_a_users_file_wins_over_the_packaged_one(tmp_path):
    (tmp_path / "fairness.txt").write_text("mine", encoding="utf-8")
    rubrics = load_rubrics(("fairness", "hallucination"), str(tmp_path))
    assert rubrics["fairness"] == "mine"
    assert "grounding" in rubrics["hallucination"]


def test_a_branch_without_a_rubric_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"branch 'tone' has no rubric. Expected a file tone\.txt"):
        load_rubrics(("tone",), str(tmp_path))
