"""The recipes as a user launches them, with real vLLM, on whatever this machine has; the CPU in CI."""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest
import torch
import yaml
from support.forked import HAS_GPU, python
from support.runs import check_times, scalars, spans

from salesrl_trl.demo.packaged import ARITHMETIC_POLICY
from salesrl_trl.names import (
    LEFT_OUT,
    MACHINE,
    MEMORY,
    RUN_FILE,
    SETTINGS_FILE,
    STALENESS,
    STALENESS_MAX,
    THROUGHPUT,
    Phase,
)
from salesrl_trl.reward.figures import RewardFigures
from salesrl_trl.telemetry import perf

ROOT = Path(__file__).parents[2]
NOTHING_IS_COMPILED = {} if HAS_GPU else {"TORCHDYNAMO_DISABLE": "1"}
"""On a CPU, compiling vLLM's sampling takes longer than a run."""
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def launch(recipe, *arguments, configured=True, succeeds=True, **environment):
    """Launch it; its processes are forks of one that has imported everything."""
    command = [python(), "-m", "accelerate.commands.launch"]
    command += ["--config_file", f"{ROOT}/accelerate_configs/{recipe}.yaml"] if configured else []
    command += [f"{ROOT}/recipes/{recipe}.py", *arguments]
    done = subprocess.run(
        command,
        env={**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode == 0) == succeeds, done.stderr[-4000:]
    return done.stderr


def check_run(output_dir, steps, lookahead=0):
    logged = scalars(output_dir)
    differences = logged["train/sampling/sampling_logp_difference/mean"]
    assert len(differences) == steps
    assert max(differences) < 0.02  # nats; noise between two implementations, far from that of other weights
    for name in RewardFigures(["fairness", "hallucination"]).names():
        assert f"train/{name}" in logged or "reward/" in name or "reference/" in name  # an empty branch logs nothing
    for name in (*perf.TIMES, *THROUGHPUT, *MEMORY, *MACHINE):
        assert f"train/{name}" in logged or (not torch.cuda.is_available() and ("mfu" in name or "gpu" in name))
    phases = check_times(output_dir, steps)
    for phase in (Phase.DATA_LOADING, Phase.GENERATION, Phase.REFERENCE_LOGPROBS,
                  Phase.REWARD_WAIT, Phase.ADVANTAGES, Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER):  # fmt: skip
        last = steps - lookahead if phase == Phase.GENERATION else steps  # the last steps' completions are there
        assert all(step[phase] > 0 for step in phases[:last]), phase
    assert not any(step[Phase.OLD_LOGPROBS] for step in phases[1:])  # the pass that trains gives them
    assert yaml.safe_load((output_dir / SETTINGS_FILE).read_text())["max_steps"] == steps
    assert json.loads((output_dir / RUN_FILE).read_text())["command"][0].endswith(".py")
    assert (output_dir / "model.safetensors").is_file() or (output_dir / "pytorch_model.bin").is_file()


def test_the_debug_recipe_starts_from_nothing_but_this_checkout_trains_and_evaluates(tmp_path):
    """Without a model, and without a cache of the hub."""
    (tmp_path / "home").mkdir()
    told = launch(
        "debug",
        *("--max_steps", "3", "--max_eval_rows", "8"),
        *("--per_device_train_batch_size", "16", "--output_dir", str(tmp_path / "run")),
        *("--quick_eval_steps", "2", "--quick_eval_rows", "4", "--held_out_examples", "1"),
        HOME=str(tmp_path / "home"),
        XDG_CACHE_HOME=str(tmp_path / "home"),
        VLLM_CACHE_ROOT=os.environ.get("VLLM_CACHE_ROOT", str(Path.home() / ".cache/vllm")),  # what it knows of models
        **NOTHING_IS_COMPILED,
    )
    check_run(tmp_path / "run", steps=3)
    assert "[Run] policy       the built-in small policy (your own: --model_name_or_path NAME)" in told
    kept = (tmp_path / "run/run.log").read_text()
    assert set(told[told.index("[Run]") :].splitlines()[1:]) <= set(kept.splitlines())
    assert "[Step 3/3] reward fairness=" in told
    assert " right_document=" in told  # of the held-out rows, before and after
    assert re.search(r"held-out example 1: customer: .+\n.*    before reward=\d", told)
    assert "[QuickEval@2] mode=greedy fairness=" in told
    assert (tmp_path / "run/best/model.safetensors").is_file()
    names = {span["name"] for span in spans(tmp_path / "run")[0, "phases"]}
    assert {"policy", "engine", "warm_up", *Phase} - {"unaccounted"} <= names
    report = [python(), "-m", "salesrl_trl.record.report", str(tmp_path / "run")]
    subprocess.run(report, capture_output=True, text=True, check=True)
    assert '"figures"' in (tmp_path / "run/report.html").read_text()
    assert [entry["step"] for entry in json.loads((tmp_path / "run" / "held_out.json").read_text())] == [0, 3]


def test_own_rows_and_a_function_in_the_working_folder_are_all_that_the_own_recipe_takes(tmp_path, monkeypatch):
    """As README has it. The packaged policy of sums stands for a model of the hub."""
    monkeypatch.chdir(tmp_path)
    rows = [
        {"prompt": [{"role": "user", "content": f"What is {a} + {b}?"}], "answer": str(a + b)}
        for a in range(5, 17)
        for b in range(20, 32)
    ]
    Path("rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    Path("my_rewards.py").write_text(
        "def right(completions, answer, **kwargs):\n"
        "    said = [completion[0]['content'].strip() for completion in completions]\n"
        "    return [float(text == expected) for text, expected in zip(said, answer)]\n"
    )
    told = launch(
        "own",
        *("--model_name_or_path", str(ARITHMETIC_POLICY), "--dataset", "rows.jsonl"),
        *("--reward_funcs", "my_rewards.right", "--max_steps", "2", "--output_dir", "run"),
        *("--vllm_max_model_length", "64", "--max_completion_length", "8"),
        configured=False,
        **NOTHING_IS_COMPILED,
    )
    assert "10% of the rows of rows.jsonl are held out" in told
    assert "[Run] prompt       of the rows " in told
    assert not re.search(r"judge|RAG|fairness|sales assistant", told[told.index("[Run]") :])
    before, after = re.findall(r"held-out (?:before|after) +\(step \d\): reward=([\d.]+)", told)
    assert 0.2 < float(before) < 0.8  # about half are right, as it was taught: so the prompt is as it was
    assert float(after) > 0.2


def test_the_search_recipe_s_policy_searches_before_it_answers_and_its_figures_are_of_its_conversations(tmp_path):
    told = launch(
        "search",
        *("--max_steps", "3", "--max_eval_rows", "24", "--quick_eval_steps", "2", "--quick_eval_rows", "8"),
        *("--per_device_train_batch_size", "8", "--gradient_accumulation_steps", "2"),
        *("--output_dir", str(tmp_path / "run")),
        configured=False,
        **NOTHING_IS_COMPILED,
    )
    logged = scalars(tmp_path / "run")
    assert min(logged["train/tools/search/calls"]) > 0
    assert max(logged["train/tools/search/failures"]) == 0
    assert (
        max(logged["train/sampling/sampling_logp_difference/mean"]) < 0.02
    )  # tokens of tools' results count for none
    figures = json.loads((tmp_path / "run/held_out.json").read_text())[-1]  # before training it finds next to nothing
    assert 0 < figures["searches"] < 3
    assert 0 < figures["found"] < 1
    assert figures["reward"] == pytest.approx(figures["judge"] - 0.05 * figures["searches"], abs=1e-4)
    assert re.search(r"\[QuickEval@2\] mode=greedy all=.* searches A=\d\.\d\d found A=", told)


def test_the_full_recipe_trains_with_deepspeed_in_two_processes(policy_path, tmp_path):
    if torch.cuda.device_count() == 1:
        pytest.skip("two processes on one GPU are not what the recipe is for")
    told = launch(
        "full",
        *("--model_name_or_path", str(policy_path), "--prompt_template", "compact", "--max_steps", "4"),
        *("--per_device_train_batch_size", "4", "--gradient_accumulation_steps", "2", "--num_generations", "4"),
        *("--vllm_max_model_length", "256", "--max_completion_length", "48", "--output_dir", str(tmp_path / "run")),
        *("--vllm_engine_kwargs", '{"enforce_eager": true}'),
        *("--max_eval_rows", "8", "--per_device_eval_batch_size", "4", "--save_steps", "2"),
        *("--quick_eval_steps", "2", "--quick_eval_rows", "4", "--trace_steps", "1:2"),
        **NOTHING_IS_COMPILED,
    )
    check_run(tmp_path / "run", steps=4, lookahead=2)
    logged = scalars(tmp_path / "run")
    assert logged[f"train/{STALENESS}"] == logged[f"train/{STALENESS_MAX}"] == [0, 1, 2, 2]
    assert logged[f"train/{LEFT_OUT}"] == [0, 0, 0, 0]
    assert told.count("[Step 2/4]") == 1  # the main process alone speaks
    assert told.count("[Weights] vLLM samples from the weights being trained") == 1
    assert (tmp_path / "run" / "checkpoint-2").is_dir()
    assert told.count("[QuickEval@2]") == 1
    assert (tmp_path / "run" / "best").is_dir()
    tracks = spans(tmp_path / "run")
    for rank in range(2):
        # DeepSpeed's optimizer steps inside `backward`
        inside = [
            (each, outer)
            for each in tracks[rank, "phases"]
            for outer in tracks[rank, "phases"]
            if (each["name"], outer["name"]) == ("optimizer", "backward")
            and outer["ts"] <= each["ts"] <= outer["ts"] + outer["dur"]
        ]
        assert len(inside) >= 2
        # both ranks' clocks lie on one scale: a step begins when it does on the other one
        for mine, others in zip(tracks[rank, "steps"], tracks[1 - rank, "steps"], strict=True):
            assert abs(mine["ts"] - others["ts"]) < 1e6


def test_the_fast_load_recipe_without_an_accelerate_configuration_saves_and_stops_when_its_services_die(
    policy_path, tmp_path, httpserver
):
    httpserver.expect_request("/healthz").respond_with_data("ok")
    httpserver.expect_request("/v1/rag/8b", method="POST").respond_with_data("", status=500)
    httpserver.expect_request("/v1/rag/32b", method="POST").respond_with_data("", status=500)
    told = launch(
        "fast_load",
        *("--model_name_or_path", str(policy_path), "--prompt_template", "compact", "--vllm_max_model_length", "256"),
        *("--max_completion_length", "48", "--max_steps", "6", "--max_skipped_generations", "2"),
        *("--rag_base_url", httpserver.url_for("").rstrip("/"), "--max_attempts", "1"),
        *("--warm_up_services", "false", "--outage_patience_s", "0"),  # it is to die on the way
        *("--min_valid_reward_fraction", "1.0"),  # an invalid action is scored
        *("--output_dir", str(tmp_path / "run")),
        configured=False,
        succeeds=False,
        **NOTHING_IS_COMPILED,
    )
    # dummy weights in vLLM, until the trainer's are pushed
    assert told.count("[Weights] vLLM samples from the weights being trained") == 1
    assert "TooFewRewardsError: 2 generation batches in a row" in told
    assert "rag_8b_http_500" in told
    assert "The RAG service isn't responding. " in told
    (checkpoint,) = (tmp_path / "run").glob("checkpoint-*")
    assert (checkpoint / "trainer_state.json").is_file()
