"""Programs of tests as forks of one server: each test of it has a session of its own, whose server imports nothing."""

import os
import signal
import subprocess
from contextlib import ExitStack

import psutil
import pytest
from support import forked
from support.seconds import until

SESSION = "import subprocess, sys, time; from support import forked; forked.EVERYTHING = (); exec(sys.argv[1])"
HANGS = "import subprocess, time; print(subprocess.Popen(['sleep', '600']).pid, flush=True); time.sleep(600)"
CRASHES = {"import os; os.abort()": -signal.SIGABRT, "1 / 0": 1, "import sys; sys.exit(5)": 5, "pass": 0}
PROGRAM = "forked.Program(['-c', {!r}], **{})"
COMMAND = "subprocess.Popen([forked.server_folder() + '/python', '-c', {!r}], **{})"


@pytest.fixture
def session(tmp_path):
    """Starts a session with this code, where `{...}` begins a fork. Its folder is in `tmp_path`."""
    paths = os.pathsep.join((str(forked.ROOT), str(forked.ROOT / "tests")))
    variables = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": paths}
    variables.pop(forked._FOLDER, None)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with ExitStack() as started:

        def start(code):
            process = subprocess.Popen([forked.COLD_PYTHON, "-c", SESSION, code], env=variables, **pipes)
            started.enter_context(process)
            started.callback(process.kill)
            return process

        yield start
    until(lambda: not [*tmp_path.glob("forks-*")])


def is_gone(pid):
    """Whether a process has ended, reaped or not."""
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize("way", [PROGRAM, COMMAND])
def test_a_fork_ends_as_its_program_does(session, tmp_path, way):
    codes = ", ".join(way.format(crash, {"stderr": subprocess.DEVNULL}) + ".wait(30)" for crash in CRASHES)
    process = session(f"print(repr([{codes}]))")
    assert process.communicate(timeout=60)[0] == f"{[int(code) for code in CRASHES.values()]}\n"
    assert [*tmp_path.iterdir()] == []


def test_a_session_that_is_killed_leaves_no_process_and_no_folder(session, tmp_path):
    process = session(
        f"a = {PROGRAM.format(HANGS, {})}; import os; holds_stdin_of_server = os.fork()\n"
        "if holds_stdin_of_server: print(holds_stdin_of_server, flush=True)\n"
        "else: os.close(1)\n"
        "time.sleep(600)"
    )
    others = {int(process.stdout.readline()) for _ in range(2)}
    (server,) = [each for each in psutil.Process(process.pid).children() if "serve" in each.cmdline()]
    forks = {each.pid for each in server.children(recursive=True)}
    (holder,) = others - forks
    process.kill()
    try:
        until(lambda: all(map(is_gone, {server.pid, *forks})))
    finally:
        os.kill(holder, signal.SIGKILL)
    assert len(forks) == 2
    assert [*tmp_path.glob("forks-*")] == []
