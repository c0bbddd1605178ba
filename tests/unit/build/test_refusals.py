"""All that the stages of a start refuse is told in one message, and nothing that only follows from it."""

import pytest

from salesrl_trl.errors import ConfigError, ConfigErrors, Refusals
from salesrl_trl.launch.data_config import DataConfig
from salesrl_trl.launch.preflight.runner import prepare
from salesrl_trl.launch.recipes import FULL
from salesrl_trl.launch.settings import parse


def refused(make):
    """The messages of a start's refusals, of which there are several."""
    with pytest.raises(ConfigErrors) as caught:
        make()
    return [str(error) for error in caught.value.errors]


def begins(texts, *beginnings):
    assert len(texts) == len(beginnings), texts
    for text, beginning in zip(texts, beginnings, strict=True):
        assert text.startswith(beginning), text


@pytest.mark.parametrize("given", [{"dataset": ""}, {"eval_dataset": ""}, {"eval_dataset": {"path": ""}}])
def test_a_source_that_can_be_none_is_refused(given):
    with pytest.raises(ConfigError, match=rf"^`{next(iter(given))}(\.path)?` is "):
        DataConfig(**given)


def test_stages_go_on_behind_a_failure_and_tell_the_same_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given = ["--rubric_dir", "absent", "--rag_base_url", "http://127.0.0.1:9"]
    config = parse([*given, "--output_dir", str(tmp_path / "out")], FULL)
    begins(
        refused(lambda: prepare(config)),
        "`rubric_dir` is 'absent', which is no folder.",
        "the RAG service does not answer at `rag.base_url`",
    )


def test_the_message_numbers_the_refusals():
    found = Refusals()
    for number in (1, 1, 2):  # the same is kept once
        found.check(False, f"`a` is {number}.\nExpected more.")
    with pytest.raises(ConfigErrors) as caught:
        found.tell()
    assert str(caught.value).splitlines() == [
        "2 things can't work. Correct all of them:", "  1. `a` is 1. Expected more.", "  2. `a` is 2. Expected more.",
    ]  # fmt: skip
