"""Every recipe parses, every knob is set or turned somewhere, and what cannot work stops before a model is loaded."""

import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
from support import house
from support.forked import COLD_PYTHON

from salesrl_trl.checkpoint.identity import identity_of, rows_of, write_identity
from salesrl_trl.checkpoint.whole import seal
from salesrl_trl.demo.packaged import PACKAGED as SMALL_POLICY
from salesrl_trl.errors import ConfigError, DataError, StopRequested
from salesrl_trl.launch.checks.folders import claim_output_dir
from salesrl_trl.launch.checks.reward import MEANINGLESS
from salesrl_trl.launch.data.sources import PACKAGED
from salesrl_trl.launch.kept import remember_packages
from salesrl_trl.launch.memory_estimate import Estimate, Moment
from salesrl_trl.launch.plan import build_instruments
from salesrl_trl.launch.preflight.runner import prepare
from salesrl_trl.launch.settings import names_of_settings, parse
from salesrl_trl.launch.software import Card
from salesrl_trl.launch.train import main
from salesrl_trl.telemetry.instruments import InstrumentSettings

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "recipes").rglob("*.yaml"))
DEBUG = ROOT / "recipes/debug.yaml"


def prepared(*arguments):
    return prepare(parse([*arguments], DEBUG))


@pytest.fixture
def _in_this_process(monkeypatch):
    for name in ("set_up_logging", "keep_console"):  # they are for a whole process
        monkeypatch.setattr(f"salesrl_trl.launch.train.{name}", lambda *_: None)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.name)
def test_a_recipe_parses_and_has_its_script_its_launch_command_and_its_accelerate_configuration(recipe, tmp_path):
    config = parse(["--output_dir", str(tmp_path)], recipe)
    assert config.training.use_vllm
    datasets = config.data.dataset if isinstance(config.data.dataset, list) else [{"path": config.data.dataset}]
    assert {each["path"] for each in datasets} <= {*PACKAGED}
    head = recipe.read_text().split("\n\n")[0]
    assert recipe.with_suffix(".py").is_file()
    configuration = ROOT / "accelerate_configs" / recipe.name
    with_it = f"--config_file accelerate_configs/{recipe.stem}.yaml " if configuration.is_file() else ""
    assert f"accelerate launch {with_it}recipes/{recipe.stem}.py" in head.replace(" \\\n#", "")


def test_settings_are_few_and_recipes_and_presets_turn_them():
    """A setting that nobody turns should not exist: it is a constant, or an entry of another one."""
    own, turned = house.settings(house.modules()), house.turned()
    assert own.keys() <= names_of_settings()
    assert len(own) <= 60
    assert len(turned) >= 0.85 * len(own), sorted(own.keys() - turned)


def test_a_row_that_is_too_long_for_the_model_is_told_of_before_one_is_loaded(tmp_path):
    # The debug recipe has room for 320 - 64 = 256 tokens. With room for 100 - 64 = 36, some of the demo's rows fit.
    new = ["--output_dir", str(tmp_path)]  # runs/debug may hold an earlier run, of which a note tells
    fits, short = [*new, "--vllm_max_model_length", "320"], [*new, "--vllm_max_model_length", "100"]
    given = prepared(*fits)
    assert (len(given.train.prompts), len(given.held_out.prompts), given.notes) == (960, 160, [])
    with pytest.raises(DataError, match=r"of 960 training rows have prompts of more than 36 tokens .* row \d+ \(\d+"):
        prepared(*short)
    dropped = prepared(*short, "--long_prompts", "drop")
    assert len(dropped.train.rows) == len(dropped.train.prompts) < 960
    assert [note.split(" rows have")[0].split(" ", 3)[-1] for note in dropped.notes] == ["training", "held-out"]


def test_a_checkpoint_of_other_rows_or_branches_is_refused_before_a_model_is_loaded(tmp_path):
    asked = ["--output_dir", str(tmp_path), "--resume_from_checkpoint", "true"]
    for step in (8, 10):  # the last one counts
        checkpoint = tmp_path / f"checkpoint-{step}"
        checkpoint.mkdir()
        (checkpoint / "trainer_state.json").write_text("{}")
        seal(checkpoint, processes=1, has_optimizer=True)
    config = parse(asked, DEBUG)
    plan = prepare(config)
    assert config.training.resume_from_checkpoint == str(checkpoint)
    rows = rows_of(plan.train.prompts, [row.branch for row in plan.train.rows])
    write_identity(checkpoint, identity_of(config.training, rows), inside_a_batch=False)
    seal(checkpoint, processes=1, has_optimizer=True)
    prepared(*asked)
    other = [*asked, "--max_train_rows", "100"]
    with pytest.raises(ConfigError, match=r"checkpoint-10 belongs to another run: training rows was 960 .*, is 100 "):
        prepared(*other)
    prepared(*other, "--allow_changed_resume", "true")


FULL = ROOT / "recipes/full.yaml"


def test_rows_and_functions_of_ones_own_need_no_branch_no_template_and_no_service(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "my_own_rewards.py").write_text("def right(completions, answer, **kwargs):\n    return answer\n")
    rows = tmp_path / "rows.jsonl"
    record = {"prompt": [{"role": "user", "content": "What is 3 + 4?"}], "answer": "7"}
    rows.write_text("".join(json.dumps({**record, "id": str(n), "group": n}) + "\n" for n in range(9)))
    asked = ["--dataset", str(rows), "--reward_funcs", "my_own_rewards.right", "--output_dir", str(tmp_path)]
    asked += ["--model_name_or_path", str(SMALL_POLICY), "--vllm_max_model_length", "512"]
    asked += ["--max_completion_length", "9"]
    plan = prepare(parse(asked, FULL))
    assert plan.train.prompts[0] == record["prompt"]
    training = plan.config.training
    assert (training.branches, training.kl_targets(), plan.config.reward.branch_reward_weights) == (["all"], {}, None)
    (note,) = [note for note in plan.config.notes if "`sales_chain` settings are ignored" in note]
    assert "prompt_template, branches, branch_kl" in note
    assert parse([*asked, "--prompt_template", "compact"], FULL).data.prompt_template == "compact"


def test_a_packaged_recipe_is_taken_by_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    config = parse(["--config", "own", "--output_dir", str(tmp_path)], FULL)
    assert config.reward.reward_funcs == ["own_rewards.right"]
    assert prepare(config).reward.functions  # they lie beside it


def test_what_the_embedded_services_do_not_know_they_score_only_where_that_is_asked_for(tmp_path):
    (tmp_path / "tone.txt").write_text("mine", encoding="utf-8")
    rows, knowledge = tmp_path / "rows.jsonl", tmp_path / "knowledge.jsonl"
    rows.write_text('{"branch": "tone", "conversation": [{"role": "customer", "content": "Hi"}]}\n')
    knowledge.write_text('{"id": "a", "text": "We open at nine."}\n')
    asked = ["--dataset", str(rows), "--branches", "tone", "--branch_kl", "{}", "--held_out_eval", "false",
             "--quick_eval_steps", "0", "--rubric_dir", str(tmp_path)]  # fmt: skip
    asked += ["--quick_eval_best", "reward", "--output_dir", str(tmp_path / "run")]  # without an earlier run
    asked += ["--per_device_train_batch_size", "8"]
    said = r"ignores rubrics, including yours \(tone\.txt\).*`judge_providers`.*rows\.jsonl from the"
    with pytest.raises(ConfigError, match=said):
        prepared(*asked)
    with pytest.raises(ConfigError, match="ignores rubrics, including yours") as caught:
        prepared(*asked, "--knowledge_file", str(knowledge))
    assert "course catalogue" not in str(caught.value)
    plan = prepared(*asked, "--allow_stand_ins", "true")
    assert (plan.reward.rubrics, plan.held_out.rows) == ({"tone": "mine"}, [])  # nothing evaluates
    assert [note.split("(")[0] for note in plan.notes] == ["THE SCORES MEAN NOTHING in this run "] * 2


@pytest.mark.parametrize(
    "more", ["", "--judge_base_url {url} --judge_model salesrl-judge"], ids=["embedded", "own start"]
)
def test_own_rows_that_the_embedded_judge_scores_by_its_own_rubric_are_warned_of_once(tmp_path, more, httpserver):
    httpserver.expect_request("/v1/models").respond_with_json({"data": [{"id": "salesrl-judge"}]})
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(f'{{"prompt": "What is {number} + 1?"}}\n' for number in range(40)))
    asked = ["--output_dir", str(tmp_path / "run"), "--reward_funcs", "judge", "--max_completion_length", "9"]
    asked += ["--model_name_or_path", str(SMALL_POLICY), *more.format(url=httpserver.url_for("/v1")).split()]
    own = prepare(parse([*asked, "--dataset", str(rows)], FULL))
    (note,) = [note for note in own.notes if MEANINGLESS in note]
    assert "rows.jsonl" in note
    demo = prepare(parse([*asked, "--dataset", "demo_search"], FULL))
    assert not [note for note in demo.notes if MEANINGLESS in note]


def test_what_a_recipe_ends_with_is_what_its_process_ends_with_and_its_log_keeps(tmp_path):
    command = [COLD_PYTHON, "-X", "importtime", f"{ROOT}/recipes/debug.py", "--dataset", "absent.jsonl"]
    command += ["--output_dir", str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 2
    assert "DataError: there is no dataset file" in done.stderr
    assert "Traceback" not in done.stderr
    assert "DataError: there is no dataset file" in (tmp_path / "run/run.log").read_text()
    imported = {line.rsplit("|")[-1].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    assert "salesrl_trl.launch.train" in imported
    # vLLM's CPU platform walks over all loaded modules and trips over llvmlite's, which bm25s brings
    assert "llvmlite" not in imported


def test_the_settings_of_telemetry_reach_the_instruments(tmp_path):
    given = ["--trace_steps", "4:6", "--peak_tflops", "400", "--output_dir", str(tmp_path)]
    instruments = build_instruments(parse(given, DEBUG))
    assert instruments._settings == InstrumentSettings(trace_steps=range(4, 7), peak_flops=4e14)


def test_full_fine_tuning_leaves_no_trained_weight_in_16_bits_under_plain_adamw(tiny, monkeypatch, tmp_path):
    def weighed(setup):
        gib = setup.card_gib * (1.5 if setup.weight_bytes == 4 else 0.5)
        return Estimate(card_gib=setup.card_gib, moments=(Moment(name="x", parts={"weights": gib}),), sequences=None)

    monkeypatch.setattr("salesrl_trl.launch.software.card_here", lambda device: Card("a card", 80.0))
    monkeypatch.setattr("salesrl_trl.launch.memory_estimate.estimate", weighed)
    monkeypatch.setattr("salesrl_trl.launch.preflight.memory.is_torchao_available", lambda: True)
    given = ["--model_name_or_path", str(tiny), "--prompt_template", "compact", "--dtype", "bfloat16"]
    given += ["--vllm_max_model_length", "256", "--max_completion_length", "48", "--output_dir", str(tmp_path)]
    config = parse([*given, "--use_cpu", "true", "--bf16", "false"], ROOT / "recipes/full.yaml")
    prepared = prepare(config)
    assert prepared.dtype == "bfloat16"
    optimizer = (config.training.optim, config.training.optim_args)
    assert optimizer == ("adamw_torch_8bit", "bf16_stochastic_round=True")
    assert sum("weights are trained in" in note for note in prepared.notes) == 1


@pytest.mark.usefixtures("_in_this_process")
def test_of_two_runs_in_one_folder_the_second_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("salesrl_trl.launch.train.prepare", lambda _: pytest.fail("the folder is another run's"))
    with claim_output_dir(tmp_path), pytest.raises(SystemExit) as ended:
        main(DEBUG, ["--output_dir", str(tmp_path)])
    assert ended.value.code == 2
    assert f"another run is writing to `output_dir` '{tmp_path}'" in capsys.readouterr().err
    claim_output_dir(tmp_path).close()  # that run has ended


@pytest.mark.usefixtures("_in_this_process")
@pytest.mark.parametrize("interrupted", ["parse", "prepare"])
def test_ctrl_c_ends_a_run_with_one_line_and_the_shell_s_code(interrupted, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(f"salesrl_trl.launch.train.{interrupted}", Mock(side_effect=StopRequested("Ctrl-C")))
    with pytest.raises(SystemExit) as ended:
        main(DEBUG, ["--output_dir", str(tmp_path)])
    assert ended.value.code == 75
    told = "\nRunStopped: stopped by Ctrl-C before the first step. Run the same command again.\n"
    assert capsys.readouterr().err == told


@pytest.mark.parametrize(
    ("name", "of"), [("packages_distributions", ()), ("metadata", ("torch",)), ("version", ("torch",))]
)
def test_what_is_known_of_installed_packages_is_read_once_in_a_recipe_s_process(name, of, monkeypatch):
    asked = []
    for each in ("packages_distributions", "metadata", "version"):
        monkeypatch.setattr(importlib.metadata, each, lambda *given: asked.append(given) or {"torch": ["torch"]})
    remember_packages()
    assert [getattr(importlib.metadata, name)(*of) for _ in range(2)] == [{"torch": ["torch"]}] * 2
    assert asked == [of]
