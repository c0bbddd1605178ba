"""The end of a launch, with launchers that end as accelerate and torchrun do."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from salesrl_trl.ground.shutdown import EXIT_RESUMABLE
from salesrl_trl.run import signals
from salesrl_trl.run.launcher import FOLDER, Words, _end, speak

ROOT = Path(__file__).parents[3]
HOOK = ROOT / "scripts/salesrl_trl_launch.pth"

LAUNCHER = """
import subprocess, sys
children = [subprocess.Popen([sys.executable, "-c", each]) for each in sys.argv[1:]]
for child in children:
    child.wait()
if children[0].returncode:
    raise subprocess.CalledProcessError(children[0].returncode, "recipe")
"""
SPEAKS = """
import time
from salesrl_trl.run.launcher import Words, speak
time.sleep({delay})
speak(Words({text!r}, {code}, follows={follows}))
raise SystemExit({code})
"""


def speaks(text, code=3, *, follows=False, delay=0.0):
    return SPEAKS.format(text=text, code=code, follows=follows, delay=delay)


@pytest.fixture
def launch(tmp_path):
    """Runs the launcher with these processes; with the `.pth` file of an installed package, or without any (-S)."""
    (tmp_path / "accelerate").write_text(LAUNCHER)
    (tmp_path / "hook").mkdir()
    (tmp_path / "hook/sitecustomize.py").write_text(HOOK.read_text())

    def launched(*children, installed):
        path = f"{ROOT}{os.pathsep}{tmp_path / 'hook'}" if installed else str(ROOT)
        return subprocess.run(
            [sys.executable, *([] if installed else ["-S"]), str(tmp_path / "accelerate"), *children],
            env={**os.environ, "PYTHONPATH": path, "TMPDIR": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    return launched


def test_an_installed_launch_ends_with_the_words_and_the_code_of_the_run(launch, tmp_path):
    done = launch(speaks("Error: why\nwhat to do"), installed=True)
    assert (done.returncode, done.stderr) == (3, "\nError: why\nwhat to do\n")
    assert not list(tmp_path.glob("salesrl_trl-*"))


def test_without_an_install_the_words_come_again_after_the_launcher_s_traceback(launch, tmp_path):
    done = launch(speaks("Error: why"), installed=False)
    assert done.returncode == 1
    assert done.stderr.startswith("\nError: why\nTraceback")
    assert done.stderr.endswith("returned non-zero exit status 3.\n\nError: why\n")
    assert not list(tmp_path.glob("salesrl_trl-*"))


@pytest.mark.parametrize("installed", [True, False])
def test_of_several_processes_the_first_cause_is_said(launch, installed):
    done = launch(
        speaks("Error: lost a partner", follows=True),
        speaks("Error: why", delay=0.1),
        speaks("Error: too late", delay=0.3),
        installed=installed,
    )
    assert "too late" not in done.stderr
    assert installed or done.stderr.endswith("\n\nError: why\n")


def test_torch_s_error_of_several_processes_names_the_exit_code(tmp_path, capsys):
    error = ChildFailedError("recipe", {1: ProcessFailure(1, 7, 3, ""), 0: ProcessFailure(0, 6, -15, "")})
    os.environ[FOLDER] = str(tmp_path / "words")
    try:
        speak(Words("Error: why", 3))
    finally:
        del os.environ[FOLDER]
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        _end(tmp_path / "words", sys.__excepthook__, type(error), error, None)
    assert ended.value.code == 3
    assert capsys.readouterr().err == "\nError: why\n"


def test_a_run_that_a_signal_ended_is_explained_from_its_log(launch, tmp_path):
    log = tmp_path / "run.log"
    log.write_text("[rank0]: [Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=9")
    dies = "import os; from pathlib import Path; from salesrl_trl.run.launcher import keep_log; keep_log(Path({!r}));"
    done = launch(dies.format(str(log)) + "os.abort()", installed=True)
    assert done.returncode == 128 + signal.SIGABRT
    lines = done.stderr.strip().splitlines()
    assert lines[0] == "The run was ended by SIGABRT."
    assert lines[-1].startswith("More: docs/TROUBLESHOOTING.md#processes-waited-too-long-for-each-other.")


@pytest.mark.parametrize("child", ["1 / 0", "raise SystemExit(3)"])
def test_a_launch_of_another_program_ends_as_ever(launch, child):
    done = launch(child, installed=True)
    assert done.returncode == 1
    assert "CalledProcessError" in done.stderr


RUNS = """
import sys, time
from salesrl_trl.run.launcher import begin_run
begin_run()
print("runs", flush=True)
while True:
    time.sleep(0.1)
"""


@pytest.fixture
def begun(tmp_path):
    """Starts a launcher whose run waits for a signal."""
    (tmp_path / "accelerate").write_text(LAUNCHER)
    (tmp_path / "sitecustomize.py").write_text(HOOK.read_text())

    @contextlib.contextmanager
    def begun(*before, run=RUNS):
        path = f"{ROOT}{os.pathsep}{tmp_path}"
        process = subprocess.Popen(
            [*before, sys.executable, str(tmp_path / "accelerate"), run],
            env={**os.environ, "PYTHONPATH": path, "TMPDIR": str(tmp_path)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            assert process.stdout.readline() == "runs\n"
            [child] = psutil.Process(process.pid).children()
            yield process, child
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate(timeout=10)

    return begun


@pytest.mark.usefixtures("heeds_signals")
@pytest.mark.parametrize("number", signals.CAUGHT)
@pytest.mark.parametrize("reached", ["launcher", "run", "both"])
def test_a_signal_ends_a_launch_as_one_that_can_go_on(begun, number, reached):
    with begun() as (launcher, run):
        if reached == "both":
            os.killpg(launcher.pid, number)
        else:
            os.kill({"launcher": launcher.pid, "run": run.pid}[reached], number)
        told = launcher.communicate(timeout=10)[1]
        assert not run.is_running()
    assert launcher.returncode == EXIT_RESUMABLE
    assert "before the run began. The same command starts it again." in told
    assert "Traceback" not in told


def test_a_run_ends_when_its_launcher_is_killed(begun):
    with begun() as (launcher, run):
        launcher.kill()
        assert run.wait(timeout=10) in (EXIT_RESUMABLE, None)
        assert "stopped by SIGTERM before the run began" in launcher.communicate(timeout=10)[1]


def test_a_second_ctrl_c_quits_at_once(begun):
    swallows = RUNS.replace("    time.sleep(0.1)", "    try: time.sleep(0.1)\n    except KeyboardInterrupt: print(1)")
    with begun(run=swallows) as (launcher, run):
        for _ in range(2):
            time.sleep(0.3)
            run.send_signal(signal.SIGINT)
        assert signals.AT_ONCE in launcher.communicate(timeout=10)[1]
    assert launcher.returncode == 130


def test_a_hang_up_that_is_ignored_ends_nothing(begun):
    with begun("nohup") as (launcher, run):
        os.killpg(launcher.pid, signal.SIGHUP)
        time.sleep(0.5)
        assert launcher.poll() is None
        assert run.is_running()
