"""The lines at the start of a run, and the file that keeps the lines of the console."""

import subprocess
import sys
from pathlib import Path

import pytest

from salesrl_trl.launch.banner import banner
from salesrl_trl.launch.settings import parse
from salesrl_trl.types import SalesRow

ROOT = Path(__file__).parents[3]
ROW = SalesRow(row_id="r", branch="fairness", prompt="Hello")


@pytest.mark.parametrize(
    ("recipe", "arguments", "expected"),
    [
        (
            "full",
            [],
            [
                "the built-in small policy (your own: --model_name_or_path NAME)",
                # 8 a micro-batch x 8 accumulated = 64 completions, of 8 for each prompt
                "8 prompts x 8 completions = 64 completions (8 a micro-batch x 8 accumulated); 30 steps",
                "up to 64 new tokens in 320 with the prompt",
                "generated up to 2 steps ahead",
                "fairness: coefficient 0.05, KL band 0.1 to 0.3 nats per token",
                "built-in, compact (your own: --prompt_template FILE); rubrics: built-in",
                "embedded, made for the demo (your own: --judge_providers.base_url",
                "prompt_template, vllm_max_model_length",
                "TRL's default bf16 is slow on this device",
            ],
        ),
        (
            "full",
            ["--model_name_or_path", "POLICY", "--use_peft", "true", "--lora_r", "8", "--branch_kl", "{}",
             "--rag_base_url", "http://127.0.0.1:1", "--judge_base_url", "http://127.0.0.1:2/v1"],
            [
                "RAG service  http://127.0.0.1:1",
                "salesrl-judge at http://127.0.0.1:2/v1",
                "POLICY, ",
                "trained: LoRA of rank 8",
                "up to 512 new tokens in 4096 with the prompt",
                "fairness: no KL",
                "500 steps, learning rate 1e-06",
            ],
        ),
    ],
    ids=["as it stands", "own policy with LoRA and services"],
)  # fmt: skip
def test_it_says_what_the_run_consists_of(recipe, arguments, expected, tiny, tmp_path, monkeypatch):
    monkeypatch.setattr("salesrl_trl.launch.settings.RunConfig.policy_path", str(tiny))
    arguments = [str(tiny) if argument == "POLICY" else argument for argument in arguments]
    config = parse([*arguments, "--use_cpu", "--output_dir", str(tmp_path)], ROOT / f"recipes/{recipe}.yaml")
    notes = [*config.notes, *config.training.machine_notes]
    text = "\n".join(banner(config, ([ROW] * 320, [ROW] * 12), notes))
    for part in expected:
        assert part.replace("POLICY", str(tiny)) in text
    assert "320 of demo to train on, 12 held out" in text
    assert "<|im_end|> (2)" in text


@pytest.mark.parametrize("spelled", ["--model_name_or_path", "--model-name-or-path"])
def test_a_named_model_is_trained_by_its_own_settings(spelled, tmp_path):
    config = parse([spelled, "NAME", "--output_dir", str(tmp_path)], ROOT / "recipes/full.yaml")
    assert (config.training.learning_rate, config.data.prompt_template, config.notes) == (1e-6, "instruct", [])


def test_a_recipe_may_leave_to_its_default_what_it_sets_for_the_small_policy(tmp_path):
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(
        "prompt_template: instruct\nsmall_policy: {prompt_template: compact, max_steps: 3}\n"
        f"output_dir: {tmp_path}\n"
    )
    assert parse([], recipe).notes[0].endswith("prompt_template, max_steps")


def test_a_child_s_and_an_error_s_last_words_are_kept(tmp_path):
    script = (
        "import subprocess, sys; from pathlib import Path; from salesrl_trl.launch.console import keep_console;"
        "keep_console(Path(sys.argv[1])); print('out'); subprocess.run(['sh', '-c', 'echo child >&2']); 1 / 0"
    )
    kept = tmp_path / "run.log"
    done = subprocess.run([sys.executable, "-c", script, str(kept)], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stdout == "out\n"
    assert done.stderr.startswith("child\nTraceback") and done.stderr.endswith("ZeroDivisionError: division by zero\n")
    assert sorted(kept.read_text().splitlines()) == sorted((done.stdout + done.stderr).splitlines())


def test_the_log_goes_on_when_the_console_has_ended(tmp_path: Path) -> None:
    script = (
        "import os, sys; from pathlib import Path; from salesrl_trl.launch.console import keep_console;"
        "keep_console(Path(sys.argv[1])); os.write(1, b'first\\n'); sys.stdin.readline();"
        "os.write(1, b'second\\n'); os.write(2, b'third\\n'); os.write(1, b'last\\n')"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "run.log")]
    run = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert run.stdin and run.stdout and run.stdout.readline() == b"first\n"
    run.stdout.close()  # both streams write to this pipe
    run.stdin.close()
    assert run.wait(60) == 0
    # stdout and stderr go through two processes, so that only the order within one is known
    assert sorted((tmp_path / "run.log").read_text().split()) == ["first", "last", "second", "third"]
