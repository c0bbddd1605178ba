"""`salesrl translate`: a recipe of a verl configuration, which the parser of a run reads."""

import pytest
import yaml
from datasets import Dataset

from salesrl_trl.build.settings import parse
from salesrl_trl.data.sources import load_rows, prompt_dataset
from salesrl_trl.data.templates import build_prompt
from salesrl_trl.translate import main

VERL = """
data:
  train_files: [~/data/train.parquet]
  val_files: val.parquet
  train_batch_size: 64
  max_prompt_length: 200
  max_response_length: 100
  return_raw_chat: true
actor_rollout_ref:
  hybrid_engine: true
  model: {path: some/model, lora_rank: 0, lora_alpha: 32}
  actor:
    optim: {lr: 3e-6}
    ppo_mini_batch_size: 32
    ppo_micro_batch_size_per_gpu: 6
    use_kl_loss: true
    kl_loss_coef: 0.01
    kl_loss_type: low_var_kl
    clip_ratio: 0.3
    clip_ratio_low: 0.2
    fsdp_config: {param_offload: false}
  rollout: {name: vllm, n: 8, top_k: -1, enforce_eager: true, max_num_seqs: 64}
algorithm: {adv_estimator: grpo}
custom_reward_function: {path: rewards/scores.py, name: right}
critic: {optim: {lr: 1.0e-5}}
trainer:
  n_gpus_per_node: 4
  total_training_steps: 100
  save_freq: 10
  test_freq: -1
  logger: [console, tensorboard]
  experiment_name: first
  default_local_dir: runs/${trainer.experiment_name}
  total_epochs: ${oc.env:EPOCHS}
"""


def translated(tmp_path, text, *options, name="verl.yaml"):
    source, recipe = tmp_path / name, tmp_path / "recipe.yaml"
    source.write_text(text)
    assert main([str(source), "--output", str(recipe), *options]) == 0
    return yaml.safe_load(recipe.read_text()), recipe


def test_the_settings_are_those_of_verl_and_its_defaults_where_they_are_not_ours(tmp_path):
    read, recipe = translated(tmp_path, VERL)
    expected = {
        "dataset": "~/data/train.parquet",
        # 32 prompts x 8 completions on 4 processes are 64 for each, 4 at a time: 6 does not divide them
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 16,
        "steps_per_generation": 32,  # of 64 prompts
        "max_steps": 200,  # two optimizer steps in each of verl's
        "save_steps": 20,
        "eval_strategy": "no",
        "vllm_max_model_length": 300,
        "epsilon": 0.2,
        "delta": 3.0,
        "beta": 0.01,
        "use_bias_correction_kl": False,  # verl's KL has no importance ratio as a factor
        "kl_estimator": "k3",
        "top_k": 0,
        "vllm_engine_kwargs": {"enforce_eager": True, "max_num_seqs": 64},
        "reward_funcs": ["rewards.scores.right"],
        "report_to": ["tensorboard"],
        "output_dir": "runs/first",
        "learning_rate": 3e-6,
    }
    assert {name: read.get(name) for name in expected} == expected
    assert "lora_alpha" not in read and "use_peft" not in read
    text = recipe.read_text()
    for line in (
        "num_generations: 8 # rollout.n: 8\n",
        "weight_decay: 0.01 # actor.optim.weight_decay: 0.01, the default\n",
        "--num_processes 4 -m salesrl_trl.train",
        "#   trainer.total_epochs: ${oc.env:EPOCHS} is not known\n",
        "#   critic.*: GRPO has no critic\n",
        "#   data.return_raw_chat\n",
        "#   hybrid_engine: vllm_mode: colocate is the default\n",
        "#   rollout.val_kwargs.do_sample: False. evaluations sample",
    ):
        assert line in text
    assert translated(tmp_path, VERL.replace("default_local_dir", "project_name"))[0]["output_dir"] == (
        "checkpoints/runs/first/first"
    )


def test_the_recipe_is_read_by_the_parser_of_a_run(tmp_path, monkeypatch):
    config = parse(["--per_device_eval_batch_size", "8"], translated(tmp_path, VERL, "--processes", "1")[1])
    assert (config.training.gradient_accumulation_steps, config.training.steps_per_generation) == (64, 128)
    assert (config.training.max_steps, config.training.learning_rate, config.model.use_peft) == (200, 3e-6, False)


def test_without_a_kl_loss_there_is_no_coefficient_and_an_odd_size_is_rounded_to_whole_groups(tmp_path):
    text = VERL.replace("use_kl_loss: true", "use_kl_loss: false").replace(
        "mini_batch_size: 32", "mini_batch_size: 33"
    )
    read, _ = translated(tmp_path, text.replace("n: 8,", "n: 5,").replace("per_node: 4", "per_node: 8"))
    assert "beta" not in read and "kl_estimator" not in read
    # 33 prompts x 5 = 165 completions on 8 processes: 5 groups of 5 for each, rounded up
    assert read["per_device_train_batch_size"] * read["gradient_accumulation_steps"] == 25


def test_what_is_left_out_has_the_value_of_verl_where_a_run_would_have_another(tmp_path):
    text = VERL.replace("    kl_loss_coef: 0.01\n", "").replace("    clip_ratio_low: 0.2\n", "")
    text = text.replace("lora_rank: 0, lora_alpha: 32", "lora_rank: 8").replace(
        "kl_loss_type: low_var_kl", "kl_loss_type: kl"
    )
    read, recipe = translated(tmp_path, text, "--processes", "1")
    expected = {
        "beta": 0.001,
        "use_bias_correction_kl": True,  # without it k1 does nothing
        "epsilon": 0.2,  # verl's clip_ratio does nothing beside the two that it has defaults for
        "epsilon_high": 0.2,
        "lora_alpha": 16,
        "lora_dropout": 0.0,
        "lora_target_modules": "all-linear",
    }
    assert {name: read.get(name) for name in expected} == expected
    assert parse(["--per_device_eval_batch_size", "8"], recipe).model.lora_target_modules == "all-linear"


def test_a_script_is_read_as_a_shell_reads_it(tmp_path):
    script = r"""
    MODEL=${MODEL:-some/model}
    SET=$MODEL.json
    LENGTH=$((1024 * 2)) NOW=`date`
    if [[ "$A" == "b" ]]; then echo "x: y: ["; fi
    main data.val_files=${ROOT:-${HOME}/data}/b.parquet actor_rollout_ref.model.path=$MODEL data.train_files=$SET \
        data.max_prompt_length=$LENGTH data.train_batch_size=$NONE actor_rollout_ref.rollout.n=null \
        reward.custom_reward_function.path=mine.py actor_rollout_ref.actor.optim.clip_grad=0.5
    """
    read, recipe = translated(tmp_path, script, name="run.sh")
    expected = {
        "model_name_or_path": "some/model",
        "dataset": "some/model.json",
        "eval_dataset": "~/data/b.parquet",
        "max_prompt_tokens": 2048,
        "reward_funcs": ["mine.compute_score"],
        "max_grad_norm": 0.5,
    }
    assert {name: read.get(name) for name in expected} == expected
    text = recipe.read_text()
    assert "# data.train_batch_size: 1024, the default\n" in text  # and not as if the script said it
    assert "data.train_batch_size: $NONE is not known\n" in text and "rollout.n: None is not known\n" in text


def test_the_words_of_a_script_are_a_configuration(tmp_path):
    script = """
    set -x
    FILES=$HOME/data  # of the shell
    python3 -m verl.trainer.main_ppo algorithm.adv_estimator=gae \\
        data.train_files="['$FILES/a.parquet','$FILES/b.parquet']" +data.seed=${SEED:-7} \\
        actor_rollout_ref.actor.optim.lr=1e-6 data.train_batch_size=16 actor_rollout_ref.rollout.n=4 $@
    """
    read, recipe = translated(tmp_path, script, name="run.sh")
    assert (read["seed"], read["learning_rate"], read["num_generations"]) == (7, 1e-6, 4)
    assert read["dataset"] == [{"path": "~/data/a.parquet"}, {"path": "~/data/b.parquet"}]
    assert "reward_funcs" not in read
    for line in (
        "algorithm.adv_estimator: gae. advantages are those of GRPO",
        "reward_funcs: verl scores by a row's data_source",
    ):
        assert line in recipe.read_text()


def test_files_to_evaluate_on_are_those_of_the_entries_where_there_are_as_many(tmp_path):
    text = "data: {train_files: [a.json, b.json], val_files: %s}"
    read, _ = translated(tmp_path, text % "[c.json, d.json]")
    assert read["dataset"] == [{"path": "a.json", "eval": "c.json"}, {"path": "b.json", "eval": "d.json"}]
    assert "eval_dataset" not in read  # a run refuses it beside several datasets
    read, recipe = translated(tmp_path, text % "c.json")
    assert read["dataset"] == [{"path": "a.json"}, {"path": "b.json"}]
    assert "#   data.val_files: c.json. eval_dataset" in recipe.read_text()


@pytest.mark.parametrize("text", ["a: 1\n", "[1]", "a: ]", ""])
def test_a_file_that_is_no_configuration_of_verl_is_refused(tmp_path, capsys, text):
    (tmp_path / "other.yaml").write_text(text)
    assert main([str(tmp_path / "other.yaml")]) == 2
    assert "Expected" in capsys.readouterr().err
    assert main([str(tmp_path / "othr.yaml")]) == 2
    assert "Did you mean" in capsys.readouterr().err


def test_a_parquet_of_verl_is_read_with_its_system_turn_and_its_columns(tmp_path):
    row = {
        "data_source": "sums",
        "prompt": [{"role": "system", "content": "Add."}, {"role": "user", "content": "1 + 2 ="}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "3"},
        "extra_info": {"split": "train", "index": 0},
    }
    Dataset.from_list([row]).to_parquet(str(tmp_path / "train.parquet"))
    rows = load_rows(str(tmp_path / "train.parquet"), "train")
    dataset = prompt_dataset([build_prompt(row, None) for row in rows], rows, for_functions=True)
    assert {name: dataset[0][name] for name in row} == row
