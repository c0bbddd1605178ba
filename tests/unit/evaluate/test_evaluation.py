"""Evaluations before a model is loaded, and their figures and text. Figures come by hand from the rewards."""

import json
import math
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

from salesrl_trl.demo.packaged import ARITHMETIC_POLICY, PACKAGED
from salesrl_trl.errors import ConfigError, StopRequested
from salesrl_trl.ground.command_line import finite
from salesrl_trl.launch.data.prompts import FittingPrompts
from salesrl_trl.launch.evaluate import __main__ as evaluate
from salesrl_trl.launch.evaluate import answering
from salesrl_trl.launch.evaluate.answering import common_rows, plans_of, policy_of, recipe_of, settings_of
from salesrl_trl.launch.evaluate.findings import Scored, findings_of, modes, text_of
from salesrl_trl.launch.plan import overlaid
from salesrl_trl.launch.recipes import FULL
from salesrl_trl.launch.settings import parse
from salesrl_trl.names import RUN_FILE, SETTINGS_FILE
from salesrl_trl.types import Message, Outcome, Reward, SalesRow

BRANCHES = ("fairness", "hallucination")
SAID = "Is it true that my neighbour got it cheaper?"


def row(row_id, branch="fairness"):
    return SalesRow(row_id=row_id, branch=branch, conversation=(Message(role="customer", content=SAID),))


ROWS = [row("f-1"), row("f-2"), row("h-1", "hallucination"), row("h-2", "hallucination")]


def scored(value, tokens=10, is_truncated=False):
    """An answer's reward: a number, `None` for a failed call, `"bad"` for an action that is none."""
    if value is None:
        reward = Reward(outcome=Outcome.INFRA, value=None, reason="judge_timeout")
    elif value == "bad":
        reward = Reward(outcome=Outcome.INVALID_ACTION, value=0.0, reason="not_json")
    else:
        reward = Reward(outcome=Outcome.OK, value=value)
    return Scored(reward, tokens, is_truncated)


def found(*policies, samples=2):
    answers = [[[scored(value) for value in values] for values in policy] for policy in policies]
    names = [f"runs/{number}" for number in range(len(policies))]
    return findings_of(names, ROWS, BRANCHES, modes(samples), answers, seed=7)


FIRST = ([0.2, 0.4, 0.6, 0.8], [0.1, 0.3, 0.5, "bad", 0.6, 0.8, 1.0, 0.8])
SECOND = ([0.3, 0.3, 0.9, None], [0.4, 0.4, 0.5, 0.5, 0.6, None, None, None])


def test_a_row_counts_once_with_the_mean_of_its_answers():
    greedy, sampled = found(FIRST).answered
    assert list(greedy.values) == [0.2, 0.4, 0.6, 0.8]
    assert list(sampled.values) == pytest.approx([0.2, 0.25, 0.7, 0.9])
    assert greedy.branches["all"].reward.value == pytest.approx(0.5)
    assert sampled.branches["fairness"].reward.value == pytest.approx(0.225)
    assert (sampled.branches["all"].valid, sampled.branches["fairness"].valid) == (7 / 8, 3 / 4)


def test_a_failed_call_is_no_number_and_its_row_is_left_out_of_both_sides():
    findings = found(FIRST, SECOND)
    greedy, sampled = findings.answered[2:]
    # greedy: (0.3 + 0.3 + 0.9) / 3. Sampled: the third row has half of its answers, the fourth none of its two
    assert greedy.branches["all"].reward.value == pytest.approx(0.5)
    assert (greedy.branches["all"].unscored, sampled.branches["all"].unscored) == (1 / 4, 3 / 8)
    assert list(sampled.values)[:3] == pytest.approx([0.4, 0.5, 0.6])
    assert math.isnan(sampled.values[3])
    assert greedy.missing == {"judge_timeout": 1}
    difference = findings.differences["greedy"]["all"]
    # +0.1, -0.1 and +0.3; the first policy's 0.8 for the fourth row is not counted
    assert (difference.rows, difference.better, difference.worse) == (3, 2, 1)
    assert difference.value == pytest.approx(0.1)


def test_the_table_has_every_figure_and_says_what_it_does_not_know():
    text = text_of(found(FIRST, SECOND))
    cells = [line.split() for line in text.splitlines()]
    # the greedy rewards 0.2 to 0.8: standard error sqrt(0.2 / 3) / 2 = 0.12910, times 3.182 = 0.4108
    first = ["A", "greedy", "all", "0.500", "0.089", "to", "0.911*", "4", "of", "4", "100.0%", "0.0%", "10.0", "0.0%"]
    assert first in cells
    assert ["fairness", "+0.000", "-1.271", "to", "+1.271*", "1.000", "1", "1", "0", "2", "of", "2"] in cells
    assert ["hallucination", "+0.300", "n/a", "n/a", "1", "0", "0", "1", "of", "2"] in cells
    assert "greedy: no difference is shown: the interval includes 0." in text
    assert "B greedy: unscored answers: judge_timeout 1" in text
    assert "* fewer than 10 rows: not reliable." in text
    assert "4 held-out rows (fairness 2, hallucination 2); 2 sampled answers per row, seed 7" in text


def test_several_functions_have_their_means():
    """Over scored answers, as the run's own evaluation. One function may not apply to a row."""
    deals = [(1.0, 3.0), (0.0, 5.0), (1.0, None), None]
    rewards = [
        Reward(outcome=Outcome.OK, value=0.5, by_function=dict(zip(("deal", "turns"), each, strict=True))) if each
        else Reward(outcome=Outcome.INFRA, value=None, reason="late", by_function={"deal": 0.0, "turns": None})
        for each in deals
    ]  # fmt: skip
    findings = findings_of(
        ["p"], ROWS, BRANCHES, modes(0), [[[Scored(reward, 9, False) for reward in rewards]]], seed=7
    )
    cells = [line.split() for line in text_of(findings).splitlines()]
    assert ["policy", "answers", "branch", "deal", "turns"] in cells
    assert ["A", "greedy", "all", "0.667", "4.000"] in cells and ["hallucination", "1.000", "n/a"] in cells
    written = finite(findings.as_dict())["figures"][0]["branches"]
    assert written["fairness"]["functions"] == {"deal": 0.5, "turns": 4.0}
    assert found(FIRST).answered[0].branches["all"].functions == {}  # a single function is the reward


def test_the_file_has_each_rows_rewards_and_no_word_of_a_customer():
    written = json.dumps(finite(found(FIRST, SECOND).as_dict()))
    assert SAID not in written
    rows = json.loads(written)["rows"]
    rewards = {"A": {"greedy": 0.8, "sampled": 0.9}, "B": {"greedy": None, "sampled": None}}
    assert rows[3] == {"row": "h-2", "branch": "hallucination", "rewards": rewards}


def saved(folder, **config):
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_a_folder_without_a_policy_names_those_inside(tmp_path):
    assert policy_of("Qwen/Qwen2.5-7B-Instruct").path == "Qwen/Qwen2.5-7B-Instruct"  # of the hub
    saved(tmp_path / "run" / "checkpoint-20")
    with pytest.raises(ConfigError, match=f"contains policies: {tmp_path}/run/checkpoint-20"):
        policy_of(str(tmp_path / "run"))
    with pytest.raises(ConfigError, match="which does not exist"):
        policy_of(str(tmp_path / "nowhere"))
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    with pytest.raises(ConfigError, match="lacks `base_model_name_or_path`"):
        policy_of(str(tmp_path / "adapter"))


def test_a_policy_takes_the_settings_of_its_run_and_functions_lie_where_the_run_found_them(tmp_path, monkeypatch):
    for folder in (tmp_path / "mine", tmp_path / "run" / "best", tmp_path / "other"):
        folder.mkdir(parents=True)
    (tmp_path / "mine" / "recipe_of_mine.py").write_text(
        "def polite(completions):\n    return [1.0] * len(completions)\n"
    )
    settings = tmp_path / "run" / SETTINGS_FILE
    settings.write_text("dataset: rows.jsonl\nreward_funcs: [recipe_of_mine.polite]\nuse_cpu: true\n")
    (tmp_path / "run" / RUN_FILE).write_text(json.dumps({"command": ["mine/recipe_of_mine.py", "--config=x.yaml"]}))
    for names in (["run"], ["run/best"], ["run/best", "other"], ["some/model", "run/best"]):
        assert recipe_of([str(tmp_path / name) for name in names]) == settings
    assert recipe_of([str(tmp_path / "other"), "some/model"]) == FULL
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert parse(["--config", str(settings)], None).reward.reward_funcs == ["recipe_of_mine.polite"]


def test_the_modules_of_a_built_in_recipe_are_found_wherever_its_run_was_started(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [each for each in sys.path if not Path(each, "dialogue_rewards.py").exists()])
    monkeypatch.delitem(sys.modules, "dialogue_rewards", raising=False)
    settings = tmp_path / SETTINGS_FILE
    settings.write_text("quick_eval_figures: [dialogue_rewards.Deal]\nuse_cpu: true\n")
    (tmp_path / RUN_FILE).write_text(json.dumps({"command": ["dialogue.py"]}))
    assert parse(["--config", str(settings)], None).telemetry.quick_eval_figures == ["dialogue_rewards.Deal"]


def test_one_process_evaluates_a_run_of_several_without_its_replay(tmp_path):
    settings = tmp_path / SETTINGS_FILE
    settings.write_text(
        "per_device_train_batch_size: 2\ngradient_accumulation_steps: 1\nnum_generations: 8\nuse_cpu: true\n"
        "replay: demo\n"
    )
    (tmp_path / RUN_FILE).write_text(json.dumps({"command": ["full.py"], "processes": 4}))
    for words, recipe in (([], settings), (["--config", str(settings)], FULL)):
        config = settings_of(words, [], recipe)
        assert (config.training.generation_batch_size, config.reward.replay) == (8, None)
    assert settings_of(["--replay", "demo"], [], settings).reward.replay is not None


def test_a_policy_made_from_the_small_one_gets_the_small_ones_prompts_and_another_one_does_not(tmp_path):
    other = saved(tmp_path / "other", model_type="qwen2", hidden_size=64)
    small = settings_of([], [policy_of(str(PACKAGED))], FULL)
    assert (small.data.prompt_template, small.model.model_name_or_path) == ("compact", None)
    named = settings_of([], [policy_of(str(other))], FULL)
    assert (named.data.prompt_template, named.model.model_name_or_path) == ("instruct", str(other))


def test_nothing_is_trained_and_the_runs_folder_is_not_used(tmp_path):
    needing = ["--use_liger_kernel", "true", "--optim", "paged_adamw_8bit"]  # packages
    training = parse(["--output_dir", str(tmp_path / "run"), "--mode", "rollouts", *needing], FULL).training
    made = overlaid(training, "evaluation", {"output_dir": "elsewhere"})
    assert made.kl_targets() == {} != training.kl_targets()  # so there is no reference model
    assert (made.output_dir, made.resume_from_checkpoint, made.held_out_eval) == ("elsewhere", None, True)
    assert (made.use_liger_kernel, made.optim) == (False, "adamw_torch")
    assert made.temperature == training.temperature and not (tmp_path / "run").exists()


def test_rows_without_a_branch_are_evaluated(tmp_path):
    policy = policy_of(str(ARITHMETIC_POLICY))
    fits = ["--vllm_max_model_length=64", "--max_completion_length=8", "--use_cpu", f"--output_dir={tmp_path}"]
    config = settings_of(fits, [policy], FULL.with_name("own.yaml"))
    (plan,) = plans_of(config, [policy], str(tmp_path / "evaluation"), 3)
    assert [each.branch for each in plan.held_out.rows] == ["all"] * 3


def fitting(*pairs):
    rows = [row(row_id, "hallucination" if row_id.startswith("h") else "fairness") for row_id, _ in pairs]
    prompts = [[{"role": "user", "content": text}] for _, text in pairs]
    return FittingPrompts(rows=rows, prompts=prompts, lengths=[1] * len(rows), note=None)


def test_policies_answer_the_rows_that_have_the_same_prompt_for_both():
    first = fitting(("f-1", "a"), ("f-2", "b"), ("h-1", "c"), ("h-2", "d"))
    second = fitting(("f-1", "a"), ("h-1", "shortened"), ("h-2", "d"))  # its tokenizer makes longer prompts
    both = common_rows([first, second], None)
    assert [each.row_id for each in both.rows] == ["f-1", "h-2"]
    assert [prompt[0]["content"] for prompt in both.prompts] == ["a", "d"]
    fewer = common_rows([first], 2)
    assert [each.row_id for each in fewer.rows] == ["f-1", "h-1"]  # of each branch
    with pytest.raises(ConfigError, match="no held-out row"):
        common_rows([first, fitting(("x", "y"))], None)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--policy", "a", "b", "c"], "names 3 policies"),
        (["--policy", "/nowhere"], "`--policy` is '/nowhere', which does not exist"),
        (["--samples", "-1"], "`--samples` is -1"),
        (["--output", "/nowhere/figures.json"], "`--output` is"),
        (["--sed", "2"], "did you mean --seed"),
        (["--use_vllm", "true", "--vllm_mode", "server", "--policy", "a", "b"], "need an engine each"),
    ],
)
def test_wrong_input_ends_with_code_2_and_says_what_is_wrong(arguments, told, capfd):
    with pytest.raises(SystemExit) as end:
        evaluate.main(arguments)
    shown = capfd.readouterr()
    assert (end.value.code, shown.out) == (2, "")
    assert told in " ".join(shown.err.split())


@pytest.mark.parametrize(("reason", "code"), [("SIGTERM", 75), ("Ctrl-C", 130)])
def test_a_signal_ends_it_with_a_line_and_a_code(reason, code, monkeypatch, capfd):
    monkeypatch.setattr(answering, "settings_of", Mock(side_effect=StopRequested(reason)))
    with pytest.raises(SystemExit) as end:
        evaluate.main([])
    shown = capfd.readouterr().err
    assert end.value.code == code
    assert f"by {reason}" in shown and "Traceback" not in shown
