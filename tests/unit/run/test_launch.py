"""The end of a launch, with a launcher that ends as accelerate's does."""

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path
from subprocess import PIPE

import psutil
import pytest
from support.forked import COLD_PYTHON

from salesrl_trl.ground.shutdown import EXIT_RESUMABLE
from salesrl_trl.launch import signals
from salesrl_trl.launch.process import FOLDER, LAST_WORDS

ROOT = Path(__file__).parents[3]
LAUNCHER = """
import subprocess, sys
children = [subprocess.Popen([sys.executable, "-c", child]) for child in sys.argv[1:]]
for child in children:
    child.wait()
if children[0].returncode:
    raise subprocess.CalledProcessError(children[0].returncode, "recipe")
"""
SPEAKS = """
import time
from salesrl_trl.launch.process import Words, begin_run, speak
begin_run()
time.sleep({delay})
speak(Words({text!r}, {code}, follows={follows}))
raise SystemExit({code})
"""


def speaks(text, code=3, *, follows=False, delay=0.0):
    return SPEAKS.format(text=text, code=code, follows=follows, delay=delay)


@pytest.fixture
def launch(tmp_path):
    """Runs the launcher with these processes, until their outputs are closed."""
    (tmp_path / "accelerate").write_text(LAUNCHER)

    def launched(*children, **environment):
        command = [COLD_PYTHON, str(tmp_path / "accelerate"), *children]
        variables = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path), **environment}
        return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=60, check=False)

    return launched


def test_the_words_come_again_after_the_launcher_s_traceback(launch, tmp_path):
    done = launch(speaks("Error: why"))
    assert done.returncode == 1
    assert done.stderr.startswith("\nError: why\nTraceback")
    assert done.stderr.endswith("returned non-zero exit status 3.\n\nError: why\n")
    assert not list(tmp_path.glob("salesrl_trl-*"))


def test_of_several_processes_the_first_cause_is_said_and_its_code_left(launch, tmp_path):
    done = launch(
        speaks("Error: lost a partner", 1, follows=True),
        speaks("Error: why", 75, delay=0.5),
        speaks("Error: too late", 1, delay=1.5),
        **{FOLDER: str(tmp_path / "launch")},
    )
    assert "too late" not in done.stderr
    assert done.stderr.endswith("\n\nError: why\n")
    assert (tmp_path / "launch/first").read_text() == "75\nError: why\n"


ENDS = """
import os, signal
from pathlib import Path
from salesrl_trl.launch.process import begin_run, keep_log
begin_run()
keep_log(Path({log!r}))
with open({log!r}, "a") as log:
    os.dup2(log.fileno(), 2)
    log.write({line!r})
os.kill(os.getpid(), {number})
"""


@pytest.mark.parametrize(
    ("number", "line", "title"),
    [
        (signal.SIGABRT, "Watchdog caught collective operation timeout: WorkNCCL(", "Processes timed out"),
        (signal.SIGKILL, "", "Out of host memory (OOM)"),
    ],
)
def test_a_run_that_a_signal_ended_is_explained_from_its_own_part_of_the_log(launch, tmp_path, number, line, title):
    log = tmp_path / "run.log"
    log.write_text("Fatal Python error: Segmentation fault\n")  # of an earlier run
    done = launch(ENDS.format(log=str(log), line=line, number=int(number)), **{FOLDER: str(tmp_path / "launch")})
    lines = done.stderr.strip().splitlines()
    assert f"The run was ended by {number.name}." in lines
    assert any(each.startswith(title) for each in lines) and lines[-1] == f"{log} is the run's log."
    assert (tmp_path / "launch/first").read_text() == (tmp_path / LAST_WORDS).read_text()
    assert (tmp_path / LAST_WORDS).read_text().startswith(f"{128 + number}\nThe run was ended")


def test_a_launch_of_another_program_ends_as_ever(launch):
    done = launch("raise SystemExit(3)")
    assert done.returncode == 1
    assert "CalledProcessError" in done.stderr.splitlines()[-1]


RUNS = """
import sys, time
from salesrl_trl.launch.process import begin_run
begin_run()
print("runs", flush=True)
while True:
    time.sleep(0.1)
"""


@pytest.fixture
def begun(tmp_path):
    """Starts a launcher whose run waits for a signal."""
    (tmp_path / "accelerate").write_text(LAUNCHER)

    @contextlib.contextmanager
    def begun(*before, run=RUNS):
        command = [*before, COLD_PYTHON, str(tmp_path / "accelerate"), run]
        variables = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path), FOLDER: str(tmp_path / "launch")}
        process = subprocess.Popen(command, env=variables, stdout=PIPE, stderr=PIPE, text=True, start_new_session=True)
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
@pytest.mark.parametrize(
    ("number", "reached"),
    [
        (signal.SIGINT, "both"),
        (signal.SIGTERM, "launcher"),
        (signal.SIGTERM, "run"),
        (signal.SIGUSR1, "run"),
        (signal.SIGHUP, "both"),
    ],
)
def test_a_signal_ends_a_launch_as_one_that_can_go_on(begun, tmp_path, number, reached):
    with begun() as (launcher, run):
        if reached == "both":
            os.killpg(launcher.pid, number)
        else:
            os.kill({"launcher": launcher.pid, "run": run.pid}[reached], number)
        told = launcher.communicate(timeout=10)[1]
        assert not run.is_running() or run.status() == psutil.STATUS_ZOMBIE  # whoever takes orphans may be slow
    assert told.endswith("before the run began. The same command starts it again.\n")
    assert "Traceback" not in told.partition("before the run began")[0].rpartition("stopped by")[2]
    assert (tmp_path / "launch/first").read_text().startswith(f"{EXIT_RESUMABLE}\nstopped by ")


def test_a_run_ends_when_its_launcher_is_killed(begun):
    with begun() as (launcher, run):
        launcher.kill()
        assert run.wait(timeout=10) in (EXIT_RESUMABLE, None)
        assert "stopped by SIGTERM before the run began" in launcher.communicate(timeout=10)[1]


def test_a_second_ctrl_c_quits_at_once(begun, tmp_path):
    swallows = RUNS.replace("    time.sleep(0.1)", "    try: time.sleep(0.1)\n    except KeyboardInterrupt: print(1)")
    with begun(run=swallows) as (launcher, run):
        for _ in range(2):
            time.sleep(0.3)
            run.send_signal(signal.SIGINT)
        assert signals.AT_ONCE in launcher.communicate(timeout=10)[1]
    assert (tmp_path / "launch/first").read_text().startswith("130\n")


def test_a_hang_up_that_is_ignored_ends_nothing(begun):
    with begun("nohup") as (launcher, run):
        os.killpg(launcher.pid, signal.SIGHUP)
        time.sleep(0.5)
        assert launcher.poll() is None
        assert run.is_running()
