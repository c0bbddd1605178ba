"""Programs of tests that begin with everything imported: forks of one process that has imported torch, TRL and the
package, without vLLM. An import takes 10 s of CPU, a fork 0.1 s.

`support.ranks`, tests of signals and of processes that are killed start their programs with `Program`. What is about a
start itself, such as recipes and commands, starts Python.
"""

import atexit
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

ROOT = Path(__file__).parents[2]
_PATHS = (str(ROOT), str(ROOT / "tests"), str(ROOT / "scripts"))
_STATUS = 4
"""Bytes of an exit status, as `waitpid` gives it."""

_server: list[socket.socket | subprocess.Popen] = []
"""The way to it and its process, once the first program has started."""


class Program(subprocess.Popen):
    """`python PROGRAM ARGUMENTS`, with the program's path and its arguments, as a fork. All else as with `Popen`."""

    def _execute_child(self, args, *given):  # what Popen starts a process with, after it has made the pipes
        # executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo, creationflags, shell, six pipes, ...
        cwd, env = given[4:6]
        p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite = given[9:15]
        start_new_session = given[20]
        self._status, status = os.pipe()
        environment = {name: str(value) for name, value in (os.environ if env is None else env).items()}
        request = {"args": [str(arg) for arg in args], "cwd": str(cwd or os.getcwd()), "env": environment}
        request["start_new_session"] = bool(start_new_session)
        standard = [number if own == -1 else own for number, own in enumerate((p2cread, c2pwrite, errwrite))]
        self.pid = _ask(request, [*standard, status])
        self._child_created = True
        os.close(status)
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)

    def _internal_poll(self, *_, **__):
        if self.returncode is None and (found := self._try_wait(os.WNOHANG))[0]:
            self._handle_exitstatus(found[1])
        return self.returncode

    def _try_wait(self, wait_flags):
        if wait_flags & os.WNOHANG and not select.select([self._status], [], [], 0)[0]:
            return 0, 0
        status = os.read(self._status, _STATUS)
        os.close(self._status)
        return self.pid, int.from_bytes(status, sys.byteorder) if status else signal.SIGKILL


def _ask(request, descriptors):
    """Have the server fork. Returns the child's process id."""
    if not _server:
        control, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        paths = os.pathsep.join((*_PATHS, os.environ.get("PYTHONPATH", "")))
        process = subprocess.Popen(  # it ends when this process has ended
            [sys.executable, __file__, str(other.fileno())],
            pass_fds=[other.fileno()],
            env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        other.close()
        _server.extend((control, process))
        atexit.register(_end)
    control = _server[0]
    words = json.dumps(request).encode()
    socket.send_fds(control, [len(words).to_bytes(_STATUS, sys.byteorder)], descriptors)
    control.sendall(words)
    return int.from_bytes(control.recv(_STATUS), sys.byteorder)


def _end():
    control, process = _server
    control.close()
    process.wait()


def _serve(control):
    """Fork for each request, and write to its descriptor how the child ended. Returns in the child: its request."""
    ended, wakes = os.pipe()
    os.set_blocking(wakes, False)
    signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    statuses = {}
    while True:
        ready, _, _ = select.select([control, ended], [], [])
        if ended in ready:
            os.read(ended, 4096)
            while statuses and (found := os.waitpid(-1, os.WNOHANG))[0]:
                pid, status = found
                os.write(statuses[pid], status.to_bytes(_STATUS, sys.byteorder))
                os.close(statuses.pop(pid))
        if control in ready:
            head, descriptors, _, _ = socket.recv_fds(control, _STATUS, 4)
            if not head:
                os._exit(0)
            words = b""
            while len(words) < int.from_bytes(head, sys.byteorder):
                words += control.recv(1 << 20)
            pid = os.fork()
            if not pid:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for number in (control.fileno(), ended, wakes, *statuses.values()):
                    os.close(number)
                control.detach()
                for number, descriptor in enumerate(descriptors[:3]):
                    os.dup2(descriptor, number)
                for descriptor in descriptors:
                    os.close(descriptor)
                return json.loads(words)
            statuses[pid] = descriptors.pop()
            for descriptor in descriptors:
                os.close(descriptor)
            control.sendall(pid.to_bytes(_STATUS, sys.byteorder))


def _run(program):
    """Run it as `__main__`, and end as Python does, but without taking apart what is imported: 2 s of CPU."""
    code = 0
    try:
        runpy.run_path(program, run_name="__main__")
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _become(request):
    """The program that was asked for, as `python PROGRAM ARGUMENTS` begins it."""
    if request["start_new_session"]:
        os.setsid()
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # also when the tests run under `nohup`
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    sys.argv = request["args"]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    return sys.argv[0]


if __name__ == "__main__":
    import support.without_vllm  # noqa: F401, I001 - before TRL
    import torch.distributed.fsdp  # noqa: F401
    from transformers.models.qwen2 import modeling_qwen2  # noqa: F401

    from salesrl_trl import train, trainer  # noqa: F401
    from support import keyed, scripted  # noqa: F401

    control = socket.socket(fileno=int(sys.argv[1]))
    _run(_become(_serve(control)))
