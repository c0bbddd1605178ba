"""Programs of tests as forks of one server: each test of it has a session of its own, whose server imports nothing."""

import os
import signal
import subprocess
from contextlib import ExitStack

import psutil
import pytest
from support import forked
from support.seconds import is_gone, until

SESSION = "import subprocess, sys, time; from support import forked; forked.EVERYTHING = (); exec(sys.argv[1])"
HANGS = "import subprocess, time; print(subprocess.Popen(['sleep', '600']).pid, flush=True); time.sleep(600)"
PROGRAM = "forked.Program(['-c', {!r}], **{})"


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
