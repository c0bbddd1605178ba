"""`salesrl translate`: a recipe of a verl configuration, which the parser of a run reads."""

import json

import pytest
import yaml
from datasets import Dataset

from salesrl_trl.launch.coming_from import flat
from salesrl_trl.launch.data.prompts import build_prompt
from salesrl_trl.launch.data.sources import load_rows, prompt_dataset
from salesrl_trl.launch.settings import parse
from salesrl_trl.launch.train import main as train
from salesrl_trl.launch.translate import main
from salesrl_trl.names import FINISHED_FILE

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
        "branch_kl": {"settings": {"estimator": "k3"}},
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
        "--num_processes 4 -m salesrl_trl.launch.train",
        "#   trainer.total_epochs: ${oc.env:EPOCHS} is unknown\n",
        "#   critic.optim.lr: GRPO does not use a critic\n",
        "#   model.lora_alpha: no effect, since model.lora_rank is off\n",
        "epsilon: 0.2 # actor.clip_ratio: 0.3; actor.clip_ratio_low: 0.2\n",
        "# data.train_batch_size: 64; actor.ppo_mini_batch_size: 32; actor.ppo_micro_batch_size_per_gpu: 6\n",
        "#   data.return_raw_chat\n",
        "#   hybrid_engine: vllm_mode: colocate is the default\n",
        "#   rollout.val_kwargs.do_sample: False. evaluations sample",
    ):
        assert line in text
    assert translated(tmp_path, VERL.replace("default_local_dir", "project_name"))[0]["output_dir"] == (
        "checkpoints/runs/first/first"
    )


def test_without_a_kl_loss_there_is_no_coefficient_and_an_odd_size_is_rounded_to_whole_groups(tmp_path):
    text = VERL.replace("kl_loss: true", "kl_loss: false").replace("mini_batch_size: 32", "mini_batch_size: 33")
    read, _ = translated(tmp_path, text.replace("n: 8,", "n: 5,").replace("per_node: 4", "per_node: 8"))
    assert "beta" not in read and "branch_kl" not in read
    # 33 prompts x 5 = 165 completions on 8 processes: 5 groups of 5 for each, rounded up
    assert read["per_device_train_batch_size"] * read["gradient_accumulation_steps"] == 25


def test_what_is_left_out_has_the_value_of_verl_where_a_run_would_have_another(tmp_path):
    text = VERL.replace("    kl_loss_coef: 0.01\n", "").replace("    clip_ratio_low: 0.2\n", "")
    text = text.replace("lora_rank: 0, lora_alpha: 32", "lora_rank: 8").replace("low_var_kl", "kl")
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
        "vllm_max_model_length": 2560,  # with 512 for the completion
        "reward_funcs": ["mine.compute_score"],
        "max_grad_norm": 0.5,
    }
    assert {name: read.get(name) for name in expected} == expected
    text = recipe.read_text()
    assert "# data.train_batch_size: 1024, the default; " in text  # and not as if the script said it
    assert "data.train_batch_size: $NONE is unknown\n" in text and "rollout.n: None is unknown\n" in text


def test_the_words_of_a_script_are_a_configuration(tmp_path):
    script = """
    FILES=$HOME/data  # of the shell
    python3 -m verl.trainer.main_ppo algorithm.adv_estimator=gae \\
        data.train_files="['$FILES/a.parquet','$FILES/b.parquet']" +data.seed=${SEED:-7} $@
    """
    read, recipe = translated(tmp_path, script, name="run.sh")
    assert read["seed"] == 7
    assert read["dataset"] == [{"path": "~/data/a.parquet"}, {"path": "~/data/b.parquet"}]
    assert "reward_funcs" not in read
    text = recipe.read_text()
    assert "algorithm.adv_estimator: gae. only GRPO advantages" in text
    assert "reward_funcs: verl scores by a row's data_source" in text


DAPO = """
data: {train_files: train.parquet, train_batch_size: 4, max_prompt_length: 64, max_response_length: 16}
actor_rollout_ref:
  model: {path: POLICY}
  actor: {ppo_mini_batch_size: 4, kl_loss_coef: 0.1, kl_loss_type: kl, use_kl_loss: false}
  rollout: {name: hf, n: 2}
algorithm: {adv_estimator: grpo, use_kl_in_reward: false, kl_ctrl: {type: adaptive}}
reward_model:
  reward_manager: dapo
  overlong_buffer: {enable: true, len: 8, penalty_factor: 0.5, log: true}
  reward_kwargs: {max_resp_len: 16, sympy: 1}
custom_reward_function: {path: dapo_rewards.py, name: score}
trainer: {n_gpus_per_node: 1, total_training_steps: 1, save_freq: -1, default_local_dir: OUT, logger: []}
"""
OVERLONG = "salesrl_trl.soft_overlong_punishment(max_completion_len=16, soft_punish_cache=8)"


def test_every_name_of_the_input_is_in_the_recipe_or_is_named_in_its_comments(tmp_path):
    for text in (VERL, DAPO, DAPO.replace("path: dapo_rewards.py", "path: null")):
        _, recipe = translated(tmp_path, text)
        named = {name.removeprefix("actor_rollout_ref.") for name in flat(yaml.safe_load(text))}
        assert {name for name in named if name not in recipe.read_text()} == set()


def test_the_reward_of_dapo_is_the_function_and_the_punishment_of_length(tmp_path):
    read, recipe = translated(tmp_path, DAPO)
    assert (read["reward_funcs"], read["reward_weights"]) == (["dapo_rewards.score", OVERLONG], [1.0, 0.5])
    text = recipe.read_text()
    assert "algorithm.kl_ctrl.type: no effect, since algorithm.use_kl_in_reward is off\n" in text
    assert "actor.kl_loss_coef, actor.kl_loss_type: no effect, since actor.use_kl_loss is off\n" in text
    assert "reward_model.reward_kwargs.sympy: give the function's arguments defaults\n" in text
    read, recipe = translated(tmp_path, DAPO.replace("{enable: true", "{enable: false"))
    assert (read["reward_funcs"], "reward_weights" in read) == (["dapo_rewards.score"], False)
    assert "no effect, since reward_model.overlong_buffer.enable is off" in recipe.read_text()
    # verl 0.5 and later, without a function: nothing but length would be learnt
    script = "main reward_model.reward_kwargs.overlong_buffer_cfg.enable=True data.seed=1"
    read, recipe = translated(tmp_path, script, name="run.sh")
    assert "reward_funcs" not in read
    assert "reward_model.reward_kwargs.overlong_buffer_cfg.enable: True. reward_funcs" in recipe.read_text()


def test_a_translated_recipe_starts_and_trains(tmp_path, monkeypatch, tiny):
    row = {"reward_model": {"ground_truth": "1"}, "data_source": "s"}
    rows = [{**row, "prompt": [{"role": "user", "content": f"{n} + 1"}]} for n in range(8)]
    Dataset.from_list(rows).to_parquet(str(tmp_path / "train.parquet"))
    (tmp_path / "dapo_rewards.py").write_text(
        "def score(data_source, solution_str, ground_truth, extra_info=None):\n    return len(solution_str) % 7 / 7\n"
    )
    text = DAPO.replace("POLICY", str(tiny)).replace("OUT", str(tmp_path / "run"))
    _, recipe = translated(tmp_path, text.replace("train.parquet", str(tmp_path / "train.parquet")))
    for name in ("set_up_logging", "keep_console"):  # they are for a whole process
        monkeypatch.setattr(f"salesrl_trl.launch.train.{name}", lambda *_: None)
    monkeypatch.chdir(tmp_path)
    given = ("--use_cpu", "true", "--per_device_eval_batch_size", "2", "--dtype", "float32", "--record", "false")
    train(recipe, [*given])
    assert json.loads((tmp_path / "run" / FINISHED_FILE).read_text())["step"] == 1


@pytest.mark.parametrize(
    ("script", "expected", "told"),
    [
        ("+data.apply_chat_template_kwargs='{enable_thinking:false}'",
         {"chat_template_kwargs": {"enable_thinking": False}}, ""),
        ("rollout.name=sglang", {"use_vllm": True}, "rollout.name: sglang. use_vllm, vLLM replaces sglang"),
        ("algorithm.rollout_correction.rollout_is=token algorithm.rollout_correction.rollout_is_threshold=0.5_5.0 "
         "algorithm.rollout_correction.rollout_rs=seq_mean_k1,token_k3 "
         "algorithm.rollout_correction.rollout_rs_threshold=0.999_1.001,0.1",
         {"vllm_importance_sampling_mode": "token_mask", "vllm_importance_sampling_clip_min": 0.5,
          "vllm_importance_sampling_clip_max": 5.0,
          "rollout_correction": {"reject": {"seq_mean_k1": [0.999, 1.001], "token_k3": 0.1}}}, ""),
        ("algorithm.rollout_correction.rollout_is=sequence algorithm.rollout_correction.rollout_is_threshold=2.0 "
         "algorithm.rollout_correction.rollout_is_batch_normalize=True",
         {"vllm_importance_sampling_mode": "sequence_truncate", "vllm_importance_sampling_clip_max": 2.0,
          "rollout_correction": {"weights": "normalized"}}, ""),
        ("algorithm.rollout_correction.bypass_mode=True", {"rollout_correction": {"weights": "bypass"}}, ""),
        ("algorithm.rollout_correction.rollout_is=null",
         {"rollout_correction": None, "vllm_importance_sampling_mode": "token_truncate"}, ""),
        ("algorithm.rollout_correction.bypass_mode=True algorithm.rollout_correction.loss_type=reinforce",
         {"rollout_correction": {"weights": "bypass"}}, "algorithm.rollout_correction.loss_type: reinforce"),
        ("trainer.total_epochs=0", {"mode": "rollouts", "num_train_epochs": None}, "trainer.total_epochs: 0. num_"),
        ("algorithm.hybrid_grpo.enable=True", {}, "algorithm.hybrid_grpo.enable: hybrid_reference_weight: the 32B"),
        ("rollout.load_format=dummy_dtensor", {"vllm_engine_kwargs": None}, "rollout.load_format: the default"),
        ("rollout.load_format=safetensors", {"vllm_engine_kwargs": {"load_format": "safetensors"}}, ""),
        ("rollout.engine_kwargs.vllm.max_logprobs=5", {"vllm_engine_kwargs": {"max_logprobs": 5}}, ""),
        ("USE_TORCH_COMPILE=true", {"torch_compile": True, "num_train_epochs": None, "vllm_mode": None}, ""),
        ("monitor: {gpu_log_freq: 10, x: 1}", {}, "#   monitor.gpu_log_freq, monitor.x: logging_steps: every log"),
        ("training: {amp: true}", {}, "#   training.amp: bf16: null"),
        ("data: {train_files: [a.json, b.json], val_files: [c.json, d.json]}",
         {"dataset": [{"path": "a.json"}, {"path": "b.json"}]}, "#   data.val_files: ['c.json'"),
    ],
)  # fmt: skip
def test_a_name_of_the_other_systems_is_converted_or_answered(tmp_path, script, expected, told):
    read, recipe = translated(tmp_path, script, name="verl.yaml" if ": {" in script else "run.sh")
    assert ({name: (read or {}).get(name) for name in expected}, told in recipe.read_text()) == (expected, True)


@pytest.mark.parametrize("text", ["a: 1\n", "[1]", "a: ]"])
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


def test_columns_are_entries_of_the_dataset_or_of_each_of_several(tmp_path):
    text = "data: {train_files: %s, prompt_key: question}"
    read, _ = translated(tmp_path, text % "a.json")
    assert read["dataset"] == {"path": "a.json", "columns": {"prompt": "question"}}
    read, recipe = translated(tmp_path, text % "[a.json, b.json]")
    assert read["dataset"] == [{"path": f"{name}.json", "columns": {"prompt": "question"}} for name in "ab"]
    assert "data.prompt_key: question" in recipe.read_text()


def test_two_machines_have_a_command_each(tmp_path):
    text = translated(tmp_path, VERL.replace("per_node: 4", "per_node: 4\n  nnodes: 2"))[1].read_text()
    machines = "--num_machines 2 --main_process_ip FIRST_MACHINE --main_process_port 29500"
    for rank in (0, 1):
        end = f"--machine_rank {rank} -m salesrl_trl.launch.train RECIPE.yaml\n"
        assert f"#   accelerate launch --num_processes 8 {machines} {end}" in text
