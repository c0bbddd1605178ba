"""Ctrl-C in a command's imports, and an output that can't be written, end it with a line and no traceback."""

import subprocess
from pathlib import Path

import pytest
from support.forked import COLD_PYTHON, python

from salesrl_trl.ground.process import child_environment

ROOT = Path(__file__).parents[3]
SLOW = ("accelerate", "datasets", "numpy", "torch", "transformers", "trl")
ADDRESS = ("--base-url", "http://127.0.0.1:9")


def ended(*command, folder=None, with_python=COLD_PYTHON, **options):
    environment = child_environment()
    if folder is not None:
        environment["PYTHONPATH"] = f"{folder}:{environment['PYTHONPATH']}"
    command = [with_python, *command]
    options = {"stdout": subprocess.PIPE, **options}
    return subprocess.run(command, env=environment, stderr=subprocess.PIPE, text=True, **options)


RAISED, WRAPPED = "signal.raise_signal(signal.SIGINT)", "raise ImportError('KeyboardInterrupt: ')"
"""Ctrl-C, and what a library makes of it."""


@pytest.mark.usefixtures("heeds_signals")
@pytest.mark.parametrize(
    ("command", "error"),
    [
        ((f"{ROOT}/recipes/debug.py",), WRAPPED),
        (("-m", "salesrl_trl.launch.preflight"), RAISED),
        *(((f"{ROOT}/scripts/{name}.py",), RAISED) for name in (
            "warmup_model", "check_gpu_memory", "simulate_training_rewards", "test_components",
            "create_tiny_dataset",
        )),
    ],
    ids=lambda each: " ".join(each) if isinstance(each, tuple) else "",
)  # fmt: skip
def test_ctrl_c_during_the_imports_is_one_line_and_130(command, error, tmp_path):
    for name in SLOW:
        (tmp_path / f"{name}.py").write_text(f"import signal\n{error}\n")
    end = ended(*command, folder=tmp_path)
    assert (end.returncode, end.stderr, end.stdout) == (130, "\ninterrupted by Ctrl-C\n", "")


@pytest.mark.usefixtures("heeds_signals")
@pytest.mark.parametrize(("number", "named"), [("SIGINT", "Ctrl-C"), ("SIGTERM", "SIGTERM"), ("SIGHUP", "SIGHUP")])
def test_a_signal_during_the_imports_of_a_recipe_is_one_line_and_75(number, named, tmp_path):
    for name in SLOW:
        (tmp_path / f"{name}.py").write_text(f"import signal\nsignal.raise_signal(signal.{number})\n")
    end = ended(f"{ROOT}/recipes/debug.py", folder=tmp_path)
    told = f"\nstopped by {named} before the run began. The same command starts it again.\n"
    assert (end.returncode, end.stderr, end.stdout) == (75, told, "")


@pytest.mark.parametrize(
    "command",
    [
        ("-m", "salesrl_trl.launch.env"),
        ("-u", "-m", "salesrl_trl.launch.env"),
        ("-m", "salesrl_trl.launch.preflight", "--calls", "x"),
        (f"{ROOT}/scripts/test_rag_endpoints.py", *ADDRESS),
    ],
    ids=" ".join,
)
def test_an_output_without_room_is_one_line_and_2(command):
    with open("/dev/full", "w") as full:
        # what imports all of TRL is a fork
        with_python = python() if "salesrl_trl.launch.preflight" in command else COLD_PYTHON
        end = ended(*command, with_python=with_python, stdout=full)
    assert end.returncode == 2
    assert end.stderr.strip().startswith("the output can't be written (No space left on device)")
    assert len(end.stderr.strip().splitlines()) == 1
