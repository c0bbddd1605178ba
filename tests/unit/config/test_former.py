"""Entries of settings by dotted names, and settings by the names that they had before."""

import pytest

from salesrl_trl.config import keys
from salesrl_trl.config.keys import FORMER, with_entries
from salesrl_trl.errors import ConfigError
from salesrl_trl.launch.data_config import DataConfig
from salesrl_trl.launch.reward_config import RewardConfig
from salesrl_trl.launch.settings import parse
from salesrl_trl.launch.settings_help import settings

A_JUDGE = {"base_url": "http://judge/v1", "model": "m"}


def test_a_former_name_leads_to_a_setting_or_an_entry_that_there_is():
    assert {*FORMER.values()} <= settings().keys()
    assert not FORMER.keys() & settings().keys()


@pytest.mark.parametrize(
    ("given", "made"),
    [
        ({"judge_base_url": "http://judge/v1", "judge_model": "m"}, {"judge_providers": A_JUDGE}),
        ({"judge_model": None, "max_steps": 1}, {"max_steps": 1}),  # as recipes listed it
        ({"judge": "mine.Judge"}, {"judge_providers": "mine.Judge"}),
        ({"rag": "mine.Client", "rag.timeout_s": 5}, {"rag": {"client": "mine.Client", "timeout_s": 5}}),
        ({"dataset": "a.jsonl", "dataset_format": "bbq"}, {"dataset": {"path": "a.jsonl", "format": "bbq"}}),
        ({"judge_mode": "group", "judge_orders": 4}, {"judge_mode": {"mode": "group", "orders": 4}}),
        (
            {"branch_kl": '{"a": {"beta": 0.1}}', "kl_law_settings": '{"max_step": 3}'},  # as on a command line
            {"branch_kl": {"a": {"beta": 0.1}, "settings": {"law_settings": {"max_step": 3}}}},
        ),
    ],
)  # fmt: skip
def test_what_is_given_by_another_name_is_an_entry_of_its_setting(given, made):
    assert with_entries(given) == made


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"judge_providers": [A_JUDGE], "judge_model": "m"}, "`judge_model` is given beside .*providers`, a list"),
        ({"judge_model": "m", "judge": "mine.Judge"}, "`judge` is given beside `judge_providers`"),
    ],
)
def test_an_entry_beside_another_form_of_its_setting_is_refused(given, message):
    with pytest.raises(ConfigError, match=message):
        with_entries(given)


def test_classes_take_former_names_and_one_line_says_the_new_one(caplog):
    keys._place.cache_clear()
    rag = {"base_url": "http://rag:1", "top_k": 5}
    for _ in range(2):
        assert RewardConfig(rag_base_url="http://rag:1", rag_top_k=5) == RewardConfig(rag=rag)
    assert [line for line in caplog.messages if "rag_top_k" in line] == [
        "`rag_top_k` is `rag.top_k` now. The old name goes with the next release"
    ]
    assert DataConfig("a.jsonl", dataset_format="bbq").dataset == {"path": "a.jsonl", "format": "bbq"}
    with pytest.raises(TypeError, match="unexpected keyword argument 'rag_top'"):
        RewardConfig(rag_top=5)


def test_recipes_and_command_lines_take_both_and_the_command_line_wins(tmp_path):
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(
        "judge_base_url: http://judge/v1\njudge_model: m\nrag: {top_k: 7}\nkl_update_steps: 9\nbeta: 0.1\n"
    )
    words = ["--judge-model=other", "--rag.timeout_s", "5", "--action_fields", "a", "b", "--output_dir", "x"]
    config = parse([*words, "--branch_kl.settings.law", "fixed"], recipe)
    [judge] = config.reward.judges.providers
    assert (judge.base_url, judge.model) == ("http://judge/v1", "other")
    rag = config.reward.rag_service
    assert (rag.top_k, rag.timeout_s, rag.action_format.fields) == (7, 5, ("a", "b"))
    settings_of_kl = config.training.kl_settings
    assert (settings_of_kl.update_steps, settings_of_kl.law) == (9, "fixed")
    with pytest.raises(ConfigError, match=r"`rag` has an unknown 'timeout'. Did you mean 'timeout_s'"):
        parse(["--rag.timeout", "5", "--output_dir", "x"], recipe)
