"""The stage of a preflight that loads the policy and trains it; with vLLM: tests/integration/test_exact_mode.py."""

import tempfile
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from salesrl_trl.launch.checks.outcome import Findings, StageVerdict
from salesrl_trl.launch.data.prompts import token_counter
from salesrl_trl.launch.plan import Plan
from salesrl_trl.launch.preflight.runner import BEFORE_A_RUN, examine
from salesrl_trl.launch.preflight.training import STEP_STAGE, judge_update, report_memory
from salesrl_trl.launch.settings import parse
from salesrl_trl.names import GPU_PEAK
from salesrl_trl.telemetry.device import GIB

MEMORY_STAGE = BEFORE_A_RUN[4]
PASSED, NOTED, FAILED, SKIPPED = StageVerdict
RECIPE = Path(__file__).parents[3] / "recipes/debug.yaml"
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def planned(tiny, tmp_path):
    def plan(*arguments, policy=tiny):
        given = ["--model_name_or_path", str(policy), "--prompt_template", "compact", "--use_vllm", "false"]
        given += ["--output_dir", str(tmp_path / "run"), "--max_train_rows", "12", "--max_completion_length", "8"]
        given += ["--per_device_train_batch_size", "4", "--gradient_accumulation_steps", "2", "--num_generations", "4"]
        return Plan(parse([*given, *arguments], RECIPE), in_depth=True)

    return plan


def test_steps_are_made_on_the_longest_batch_and_leave_nothing(planned, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    plan = planned(
        "--quick_eval_steps", "1", "--save_steps", "1", "--rollout_lookahead", "2", "--reward_process", "true"
    )
    settings = dict(vars(plan.config.training))
    (step,) = examine(plan, stages=(STEP_STAGE,))
    assert step.verdict is PASSED
    assert step.figures["prompt_tokens"] == max(token_counter(plan.tokenizer)(plan.train.prompts))
    assert step.figures["completion_tokens"] == 8
    assert step.figures["grad_norm"] > 0
    assert step.figures["step_s"] >= step.figures["forward_s"] + step.figures["backward_s"] > 0
    assert list(tmp_path.iterdir()) == []
    assert vars(plan.config.training) == settings  # those of the run


def test_steps_of_a_run_with_several_functions_and_tools_take_one_made_up_reward_and_call_no_tool(tmp_path):
    given = ["--use_vllm", "false", "--max_completion_length", "8", "--per_device_train_batch_size", "8"]
    given += ["--gradient_accumulation_steps", "1", "--output_dir", str(tmp_path)]
    plan = Plan(parse(given, RECIPE.with_name("search.yaml")), in_depth=True)
    (step,) = examine(plan, stages=(STEP_STAGE,))
    assert step.verdict is PASSED
    assert plan.reward.tools  # of the run


def test_nothing_is_tried_that_the_run_does_not_do(planned):
    for mode in ("rollouts", "rewards"):
        (step,) = examine(planned("--mode", mode), stages=(STEP_STAGE,))
        assert step.verdict is SKIPPED


def test_an_adapter_without_a_place_fails_before_weights_are_loaded(planned):
    plan = planned("--use_peft", "true", "--lora_target_modules", "nowhere")
    (report,) = examine(plan, stages=(MEMORY_STAGE, STEP_STAGE))
    assert report.verdict is FAILED
    assert "down_proj, gate_proj, k_proj, lm_head, o_proj, q_proj, up_proj, v_proj" in report.findings[0].text
    assert plan.policy is None


def test_weights_that_are_no_numbers_fail(planned, tiny, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(tiny)
    model.lm_head.weight.data[3] = torch.nan
    model.save_pretrained(tmp_path / "broken")
    AutoTokenizer.from_pretrained(tiny).save_pretrained(tmp_path / "broken")
    (report,) = examine(planned(policy=tmp_path / "broken"), stages=(STEP_STAGE,))
    assert report.verdict is FAILED


def test_no_room_in_a_step_fails_with_the_remedy_of_the_catalogue(planned, monkeypatch):
    full = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    monkeypatch.setattr("trl.GRPOTrainer._compute_loss", Mock(side_effect=full))
    *_, report = examine(planned(), stages=(STEP_STAGE,))
    assert report.verdict is FAILED
    assert report.findings[0].text.startswith("Out of GPU memory during training (OOM).")
    assert "--gradient_checkpointing true" in report.findings[0].remedy


@pytest.mark.parametrize(
    ("step", "settings", "verdict"),
    [
        ({"loss": 0.0}, {}, PASSED),  # `max_grad_norm: 0`
        ({"loss": 0.0, "grad_norm": float("nan")}, {}, FAILED),
        ({"loss": float("inf"), "grad_norm": 0.1}, {}, FAILED),
        ({"loss": 0.0, "grad_norm": float("inf")}, {"fp16": True}, NOTED),  # the scale is found
        ({"loss": 0.0, "grad_norm": 0.0}, {}, FAILED),
    ],
)
def test_a_step_that_moves_no_weights_is_seen(step, settings, verdict):
    findings = Findings()
    judge_update(step, SimpleNamespace(**{"fp16": False, **settings}), findings)
    assert findings.verdict is verdict
    assert all(each.remedy for each in findings.items)


@pytest.mark.parametrize(("peak", "verdict"), [(67.0, PASSED), (69.0, NOTED)])
def test_a_card_that_is_nearly_full_at_the_peak_is_noted(monkeypatch, peak, verdict):
    """Of 80 GiB, 60 are free now and PyTorch has 10: another 10 are used outside of it, and 70 could be used."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (60 * GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 10 * GIB)
    findings = Findings()
    report_memory([{GPU_PEAK: 3.0}, {GPU_PEAK: peak}], torch.device("cuda"), findings)
    assert findings.figures["left_gib"] == pytest.approx(70 - peak)
    assert findings.verdict is verdict
