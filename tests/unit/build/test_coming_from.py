"""Names of other systems and of earlier versions: each leads to settings that there are, and a value is converted."""

import pytest

from salesrl_trl.config import keys
from salesrl_trl.config.keys import FORMER, with_entries
from salesrl_trl.errors import ConfigError
from salesrl_trl.launch.coming_from import GONE, answer, beside, known_as, names
from salesrl_trl.launch.data_config import DataConfig
from salesrl_trl.launch.reward_config import RewardConfig
from salesrl_trl.launch.settings import names_of_settings, parse
from salesrl_trl.launch.settings_help import settings


def test_the_table_leads_to_settings_that_there_are_and_holds_none_itself():
    lines = names().values()
    here = {setting.split(".")[0] for line in lines for setting in (line.here or line.see).split(", ") if setting}
    assert (here | beside().keys()) - names_of_settings() == {"env"}
    assert not names_of_settings() & names().keys()
    assert {line.when for line in lines} - names().keys() == {""}
    assert all(line.note for line in lines if not line.here)


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("optim.lr", 1e-5, "of verl; here learning_rate: 1.0e-05"),
        ("rollout.enforce_eager", False, "of verl; here vllm_engine_kwargs: {enforce_eager: false}"),
        ("algorithm.norm_adv_by_std_in_grpo", False, "of verl; here scale_rewards: none"),
        ("trainer.save_freq", -1, "of verl; here save_strategy: 'no'"),
        ("actor.kl_loss_type", "abs", "of verl; here branch_kl.settings.estimator"),  # there is no such estimator
        ("JUDGE_MAX_RETRIES", 2, "here max_attempts: {judge: 3}"),  # and the first call
        ("max_kl", 3, "gone: it is a constant"),
    ],
)
def test_a_name_is_answered_with_its_value_here(name, value, told):
    assert answer(name, value, {}).startswith(told)


def test_a_name_of_which_several_end_alike_or_that_nobody_has_is_not_known():
    assert known_as("path") is None and known_as("learning_rat") is None and answer("path", "x", {}) == ""
    assert names()[known_as("kl_raise_factor") or ""].system == GONE


def test_a_recipe_with_names_of_other_systems_is_told_those_here(tmp_path):
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(
        "rollout: {n: 8, unheard_of: 1}\nactor_rollout_ref.rollout.temperature: 0.7\n"
        "data: {train_batch_size: 64}\ntrainer: {n_gpus_per_node: 2}\nK_ROLLOUTS: 4\nSEED: 3\nlearning_rat: 1\n"
    )
    with pytest.raises(ConfigError) as caught:
        parse([], recipe)
    for told in (
        "rollout.n (of verl; here num_generations: 8)",
        "actor_rollout_ref.rollout.temperature (of verl; here temperature: 0.7)",
        # 64 prompts x 8 completions on 2 processes are 256 for each: 8 at a time
        "data.train_batch_size (of verl; here per_device_train_batch_size: 8, gradient_accumulation_steps: 32)",
        "K_ROLLOUTS (here num_generations: 4)",
        "SEED (here seed)",
        "learning_rat (did you mean learning_rate?)",
        "rollout.unheard_of",
        "`salesrl translate FILE`",
    ):
        assert told in str(caught.value)


def test_a_command_line_with_names_of_other_systems_is_told_those_here():
    with pytest.raises(ConfigError, match=r"held_out_eval: true\).*judge_timeout_s: 30\).* \(of verl; here num_gen"):
        parse(["--val_before_train", "true", "--JUDGE_TIMEOUT_SEC=30", "actor_rollout_ref.rollout.n=4"], None)


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
        (
            {"judge_providers": [A_JUDGE], "judge_model": "m"},
            "`judge_model` is set, but .*` is a list",
        ),
        ({"judge_model": "m", "judge": "mine.Judge"}, "`judge` and `judge_providers` are both set"),
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
        "`rag_top_k` is now `rag.top_k`; the next release removes the old name"
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
