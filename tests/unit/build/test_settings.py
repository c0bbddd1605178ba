"""Settings from a recipe and the command line, and messages about those that are refused."""

import dataclasses
import json
import re
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from salesrl_trl.config.keys import FORMER
from salesrl_trl.errors import ConfigError
from salesrl_trl.launch.data.formats import ROWS
from salesrl_trl.launch.data_config import DataConfig
from salesrl_trl.launch.judge_config import PartnerSettings
from salesrl_trl.launch.reward_config import RewardConfig
from salesrl_trl.launch.services_plan import StepSettings
from salesrl_trl.launch.settings import all_kinds, names_of_settings, parse, parse_part
from salesrl_trl.launch.settings_help import FIRST, GROUPS, OWN_TEXTS, answer_help, settings, shown
from salesrl_trl.types import DEFAULT_FORMAT

ROOT = Path(__file__).parents[3]


def test_the_command_line_wins_over_the_recipe():
    arguments = ["--max_steps", "7", "--branches", "fairness", "--branch_kl", '{"fairness": {"beta": 0.2}}']
    config = parse([*arguments], ROOT / "recipes/debug.yaml")
    assert config.training.max_steps == 7
    assert config.training.branches == ["fairness"]
    assert config.training.kl_targets()["fairness"].beta == 0.2


def test_weights_of_a_recipe_are_of_its_own_functions():
    recipe = ROOT / "salesrl_trl/launch/recipes/search.yaml"
    own = ["--reward_funcs", "judge", "my_rewards.brief"]
    config = parse(own, recipe)
    assert config.training.reward_weights is None
    assert [note for note in config.notes if "`reward_weights` [1.0, -0.05, 0.0] are ignored" in note]
    assert config.recipe["reward_weights"] is None  # what repeats the run
    assert parse([*own, "--reward_weights", "1", "0.2"], recipe).training.reward_weights == [1.0, 0.2]
    same = parse(["--reward_funcs", "judge", "search_rewards.searches", "search_rewards.found"], recipe)
    assert same.training.reward_weights == [1.0, -0.05, 0.0]


def test_metrics_of_a_recipes_function_leave_with_it():
    recipe = ROOT / "salesrl_trl/launch/recipes/search.yaml"
    both = ["search_rewards.Searches", "search_rewards.Found"]
    config = parse(["--reward_funcs", "judge", "search_rewards.searches", "my_rewards.brief"], recipe)
    assert config.telemetry.quick_eval_figures == config.recipe["quick_eval_figures"] == both[:1]
    assert [note for note in config.notes if "`quick_eval_figures` ['search_rewards.Found'] are ignored" in note]
    for functions, figures in (
        ("my_rewards.brief", []),
        ("my_rewards.found(k=1)", both[1:]),  # metrics find a function by its name
        ("judge search_rewards.searches search_rewards.found", both),
    ):
        assert parse(["--reward_funcs", *functions.split()], recipe).telemetry.quick_eval_figures == figures
    with pytest.raises(ConfigError, match="`quick_eval_best` is 'found'"):
        parse(["--reward_funcs", "my_rewards.brief", "--quick_eval_best", "found"], recipe).telemetry.check_branches(
            []
        )


@pytest.mark.parametrize("argv", ["--tools", "--tools --seed 2", "--tools=", "--tools []", ""])
def test_a_list_without_entries_replaces_the_recipes(tmp_path, argv):
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("output_dir: x\n" + ("tools: [search]\n" if argv else "tools: null\n"), encoding="utf-8")
    assert parse(argv.split(), recipe).reward.tools == []


@pytest.mark.parametrize("name", ["branches", "quick_eval_figures", "reward_funcs", "reward_weights", "verbose"])
def test_every_list_can_be_empty(name):
    """It then has the default of its class, as without the recipe's."""
    recipe = ROOT / "recipes/dialogue.yaml"
    for argv in ([f"--{name}"], [f"--{name}="], [f"--{name}", "[]"]):
        assert parse(argv, recipe).recipe[name] == (None if name == "reward_weights" else [])


def test_another_recipe_can_be_named(tmp_path):
    other = tmp_path / "mine.yaml"
    other.write_text("output_dir: x\nmax_steps: 3\n", encoding="utf-8")
    for given in (["--config", str(other)], [f"--config={other}"]):
        assert parse(given, ROOT / "recipes/debug.yaml").training.max_steps == 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- 1\n", "contains a list. Expected a mapping"),
        ("loss_type: dapo\nmax_steps: many\n", "invalid settings"),
        ("dataset: 7\n", "`dataset` is of type int. Expected a text, or a list"),
        ("judge_model: 7\n", "`judge_providers.model` is of type int. Expected a text"),
        ("small_policy: compact\n", "`small_policy` of .* is a str. Expected a mapping"),
        ("small_policy:\n  prompt_templat: compact\n", r"prompt_templat \(did you mean prompt_template\?\)"),
        ("env: {'': x}\n", "invalid settings: .*Invalid argument"),
        ("branches: &a [*a]\n", "unhashable|recursion"),
    ],
    ids=lambda text: text[:20],
)
def test_a_recipe_that_cannot_work_is_refused(tmp_path, text, message):
    recipe = tmp_path / "bad.yaml"
    recipe.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=message):
        parse([], recipe)


def test_a_recipe_that_is_not_yaml_is_refused_without_its_text(tmp_path):
    recipe = tmp_path / "bad.yaml"
    recipe.write_text("max_steps: 1\nhub_token: secret: x\n", encoding="utf-8")
    told = r"is not YAML: mapping values are not allowed here \(line 2, column 18\)"
    with pytest.raises(ConfigError, match=told) as e:
        parse([], recipe)
    recipe.with_name("other.yaml").write_text("beta: 0\nbranches: [a, b\nhub_token: secret\n")
    with pytest.raises(ConfigError, match=r"is not YAML: expected .* \(line 3, column 10\)"):
        parse([], recipe.with_name("other.yaml"))
    assert "secret" not in str(e.value)
    assert e.value.__cause__ is None and e.value.__suppress_context__


def test_aliases_of_a_recipe_are_read_and_no_device_is(tmp_path):
    recipe = tmp_path / "aliases.yaml"
    recipe.write_text("output_dir: &a x\nrun_name: *a\nsmall_policy: {<<: {beta: 0.5}}\n", encoding="utf-8")
    assert parse([], recipe).training.run_name == "x"
    (tmp_path / "endless.yaml").symlink_to("/dev/zero")
    with pytest.raises(ConfigError, match=r"no recipe .*full\.yml\. Did you mean 'full\.yaml'\?"):
        parse(["--config", str(ROOT / "recipes/full.yml")], None)
    with pytest.raises(ConfigError, match="no recipe"):
        parse([], tmp_path / "endless.yaml")


def test_a_setting_that_was_replaced_is_refused_with_what_replaces_it():
    told = r"--kl-raise-factor \(gone: .* at most by max_step of branch_kl.settings.law_settings; "
    with pytest.raises(ConfigError, match=told):
        parse(["--kl-raise-factor", "1.2"], None)


def told(capsys, *words, code=0):
    with pytest.raises(SystemExit) as ended:
        answer_help(["--max_steps", "3", "--help", *words])
    assert ended.value.code == code
    read = capsys.readouterr()
    return "".join((read.out if code == 0 else read.err).split())


def test_the_settings_of_help_are_those_of_the_classes_with_their_defaults():
    fields = {field.name: field for kind in all_kinds() for field in dataclasses.fields(kind) if field.init}
    assert names_of_settings() == fields.keys() >= OWN_TEXTS.keys()
    for name, field in fields.items():
        if isinstance(field.default, int | float | str | None) and name != "optim":  # torch's version decides
            assert settings()[name].default == shown(getattr(field.default, "value", field.default)), name
        assert settings()[name].text, name
    constants = re.compile(r"[A-Z_]{3,}|.*\w\(.*")
    assert [name for name, each in settings().items() if constants.fullmatch(each.default)] == ["lora_task_type"]
    shape = dataclasses.fields(PartnerSettings)[0].default, DEFAULT_FORMAT.fields, ROWS, PartnerSettings().kind
    named = ("partner.name", "rag.action_fields", "dataset.format", "partner.kind")
    assert tuple(map(shown, shape)) == tuple(settings()[name].default for name in named)


def test_help_begins_with_the_settings_of_the_sales_example_and_the_groups(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "110")
    with pytest.raises(SystemExit):
        parse(["--help"], ROOT / "recipes/debug.yaml")
    page = capsys.readouterr().out
    assert re.findall(r"^  --([\w.]+)  \(", page, flags=re.MULTILINE) == [*FIRST]
    assert len(page.splitlines()) < 100
    assert "--dataset  (demo)" in page
    table = (ROOT / "docs/sales.md").read_text("utf-8").split("| yours | setting | more |")[1].split("\n\n")[0]
    named = {FORMER.get(name, name) for name in re.findall(r"--([\w.]+)", table)}
    assert named <= {*FIRST, "eval_dataset.share"}
    counts = dict(re.findall(r"^  (\w+) +(\d+)  ", page, flags=re.MULTILINE))
    assert counts.keys() == GROUPS.keys()
    assert sum(map(int, counts.values())) == len(settings())


@pytest.mark.parametrize("group", GROUPS)
def test_help_of_a_group_names_its_settings(capsys, group):
    page = told(capsys, group)
    assert all(f"--{setting.name}(" in page for setting in settings().values() if setting.group == group)


def test_help_of_a_setting_has_its_text_its_default_and_its_entries(capsys):
    page = told(capsys, "--rag-top-k")
    assert page.startswith("rag.top_k") and "default:3" in page and "Maximumnumberofpassagesinananswer." in page
    assert "--judge_providers.temperature(0.0)" in told(capsys, "judge_providers")


def test_help_of_other_words_is_a_search_and_a_guess_where_nothing_has_them(capsys):
    page = told(capsys, "outage")
    assert "--outage_patience_s" in page and "--seed" not in page
    assert "didyoumeanrag.timeout_s," in told(capsys, "rag_timout_s", code=2)
    assert "gone:usebranch_kl.settings.law_settings.max_step" in told(capsys, "kl_max_step", code=2)
    assert "ofverl;hereheld_out_eval" in told(capsys, "val_before_train", code=2)


def test_an_unknown_argument_is_refused_without_its_value():
    with pytest.raises(ConfigError, match="--judge_api_key ") as caught:
        parse(["--judge_api_key=a-key"], ROOT / "recipes/debug.yaml")
    assert "a-key" not in str(caught.value)


def test_one_recipe_is_named_at_most():
    recipe = str(ROOT / "recipes/debug.yaml")
    with pytest.raises(ConfigError, match="needs exactly one YAML file"):
        parse(["--config", recipe, f"--config={recipe}"], ROOT / "recipes/full.yaml")
    with pytest.raises(ConfigError, match="needs exactly one YAML file"):
        parse(["--config"], ROOT / "recipes/full.yaml")


def test_a_tool_takes_any_setting_of_a_run_and_still_refuses_what_no_run_knows(tmp_path):
    kinds = (DataConfig, RewardConfig, StepSettings)
    training = ["--num_generations", "4", "--branch_kl", '{"fairness": {"beta": 0.1}}', "--bf16", "true"]
    given = ["--config", str(ROOT / "recipes/full.yaml"), "--rag_top_k", "7", *training]
    data, reward, others = parse_part(given, kinds)
    assert (data.max_eval_rows, reward.rag_service.top_k, reward.judge_timeout_s) == (128, 7, 60)
    assert (others.num_generations, others.branches) == (4, ["fairness", "hallucination"])
    data, reward, _ = parse_part([], kinds)  # without a recipe
    assert (data.max_eval_rows, reward.rag) == (None, None)
    with pytest.raises(ConfigError, match=r"--learning_rat \(did you mean --learning_rate"):
        parse_part(["--learning_rat", "1"], kinds)
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("learning_rat: 1.0\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="unknown keys: learning_rat"):
        parse_part(["--config", str(recipe)], kinds)


def test_a_runs_own_recipe_finds_functions_beside_the_recipe_that_the_run_was_started_with(tmp_path, monkeypatch):
    code, run = tmp_path / "code", tmp_path / "run"
    for folder in (code, run):
        folder.mkdir()
    (code / "beside_the_script.py").write_text("def right(completions, **_):\n    return [1.0] * len(completions)\n")
    (code / "train.py").write_text("")
    (run / "run.json").write_text(json.dumps({"command": [str(code / "train.py"), "--max_steps", "2"]}))
    (run / "config.yaml").write_text("reward_funcs: [beside_the_script.right]\ndataset: rows.jsonl\n")
    monkeypatch.setattr(sys, "path", [*sys.path])
    parse(["--config", str(run / "config.yaml"), "--output_dir", str(tmp_path / "out")], None)
    assert find_spec("beside_the_script") is not None
