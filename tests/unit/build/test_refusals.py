"""All that can't work at a start is told in one message, and nothing that only follows from it."""

import json

import pytest

from salesrl_trl.config import SalesGRPOConfig
from salesrl_trl.errors import ConfigError, ConfigErrors, Refusals
from salesrl_trl.launch.data_config import DataConfig
from salesrl_trl.launch.preflight.runner import prepare
from salesrl_trl.launch.recipes import FULL
from salesrl_trl.launch.reward_config import RewardConfig
from salesrl_trl.launch.settings import parse

JUDGES = [
    {"name": "a", "base_url": "http://127.0.0.1:9/v1", "model": "m", "temperature": "hot", "weigt": 2},
    {"name": "b", "base_url": "ftp://x", "model": "m"},
]


def refused(make):
    """The messages of a start's refusals, of which there are several."""
    with pytest.raises(ConfigErrors) as caught:
        make()
    return [str(error) for error in caught.value.errors]


def begins(texts, *beginnings):
    assert len(texts) == len(beginnings), texts
    for text, beginning in zip(texts, beginnings, strict=True):
        assert text.startswith(beginning), text


def test_a_class_tells_all_its_refusals_with_their_paths():
    texts = refused(lambda: RewardConfig(judge_providers=JUDGES, hedge_fraction=3, verbose=["all"], max_usd=2.0))
    begins(  # not that no judge has a price: the judges are refused, so nobody knows
        texts,
        "`hedge_fraction` is 3. Expected a number, 0 or more, and at most 1.",
        "`judge_providers[a]` has an unknown 'weigt'. Did you mean 'weight'?",
        "`judge_providers[a].temperature` is 'hot'. Expected a number.",
        "`judge_providers[b].base_url` is no address.",
        "`verbose` names 'all'.",
    )


def test_settings_of_training_tell_groups_and_coefficients_together(tmp_path):
    texts = refused(
        lambda: SalesGRPOConfig(
            output_dir=str(tmp_path),
            branches=["a"],
            branch_kl={"b": {"beta": 0.1}, "a": {"beta": 0.1, "hi": 0.2}},
            temperature=12,
            num_generations=1,
            per_device_train_batch_size=3,
        )
    )
    begins(  # not that groups of 1 or 8 do not fit into a batch: how large they are to be is not known
        texts,
        "`temperature` is 12.",
        "`num_generations` is 1.",
        "`branch_kl` names b.",
        "`branch_kl.a` has an unknown 'hi'. Did you mean 'high'?",
    )


def test_a_single_refusal_is_told_as_it_is():
    with pytest.raises(ConfigError) as caught:
        RewardConfig(hedge_fraction=3)
    assert type(caught.value) is ConfigError
    assert str(caught.value).startswith("`hedge_fraction` is 3.")


@pytest.mark.parametrize("source", ["~nobody-here/x.jsonl", f"{'x' * 300}.jsonl", "", {"path": ""}])
@pytest.mark.parametrize("name", ["dataset", "eval_dataset"])
def test_a_source_that_can_be_none_is_refused(name, source):
    if name == "eval_dataset" or isinstance(source, str):
        with pytest.raises(ConfigError, match=rf"^`{name}(\.path)?` is "):
            DataConfig(**{name: source})


def test_a_recipe_tells_names_types_ranges_files_and_packages_in_one_list(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recipe = tmp_path / "own.json"  # JSON is YAML
    settings = {
        "dataset": "absent.jsonl",
        "model_name_or_path": "./no_model",
        "reward_funcs": ["my_rewards.right"],
        "learning_rat": 1e-5,
        "max_train_rows": -3,
        "output_dir": str(tmp_path / "out"),
    }
    recipe.write_text(json.dumps(settings))

    def start():
        found = Refusals()
        config = parse(["--beta2", "3", "--max_steps", "abc", "--preset", "none_such"], recipe, found)
        prepare(config, found)

    begins(
        refused(start),
        "unknown arguments: --beta2 (did you mean --beta?).",
        "`--preset` names none_such.",
        f"{recipe} has unknown keys: learning_rat (did you mean learning_rate?).",
        "the settings do not work: argument --max_steps/--max-steps: invalid int value: 'abc'.",
        "`max_train_rows` is -3.",
        "there is no dataset file absent.jsonl.",
        "`model_name_or_path` is './no_model', where there is nothing.",
        "`reward_funcs` is 'my_rewards.right', and there is no module 'my_rewards'.",
    )


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
        found.check(lambda: False, f"`a` is {number}.\nExpected more.")
    with pytest.raises(ConfigErrors) as caught:
        found.tell()
    assert str(caught.value).splitlines() == [
        "2 things can't work. Correct all of them:", "  1. `a` is 1. Expected more.", "  2. `a` is 2. Expected more.",
    ]  # fmt: skip
