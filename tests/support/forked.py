"""Programs of tests that begin with everything imported: forks of one process that has imported torch, TRL, vLLM and
the package. An import takes 16 s of CPU, a fork 0.1 s.

One server of forks serves a session of pytest. The workers of pytest-xdist are forks of it themselves. `hold` as this
file's argument keeps one for several sessions, until its standard input ends, and prints its folder.
- `Program` is `subprocess.Popen` for a Python program. Its process id is that of the fork.
- `python()` is a command that stands for `python`, in a fork `sys.executable`. It starts a fork and ends as it does.

A fork has a process group of its own, and is killed with it when nobody waits for it any more. What is about a start
itself, or is to see its parent killed, starts `COLD_PYTHON`.
"""

import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib
import json
import os
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

ROOT = Path(__file__).parents[2]
HAS_GPU = Path("/dev/nvidiactl").exists()
"""Its driver can't be used in a fork of a process that has asked for it."""
EVERYTHING = (
    "accelerate.commands.launch", "deepspeed", "torch.distributed.fsdp", "torch.distributed.run",
    "torch.utils.tensorboard", "transformers.models.qwen2.modeling_qwen2", "vllm.entrypoints.openai.api_server",
    *(() if HAS_GPU else ("vllm.model_executor.models.qwen2", "vllm.v1.worker.cpu_worker")),
    "salesrl_trl.demo.rows", "salesrl_trl.launch.train", "salesrl_trl.trainer", "support.keyed", "support.scripted",
)  # fmt: skip
COLD_PYTHON = str(Path(sys.prefix, "bin/python3"))
"""Python, which imports what it needs."""
FORGET = """
import sys
import typing
for name in [*sys.modules]:  # torch and transformers stay: their import takes seconds
    if name.split(".")[0] in ("openai", "salesrl_trl", "support", "trl", "vllm"):
        del sys.modules[name]
for forget in typing._cleanups:  # Python 3.11.2 keeps types whose parts are equal, from before
    forget()
sys.meta_path[:] = [finder for finder in sys.meta_path if "__editable__" not in repr(finder)]  # it knows the checkout
"""
"""Code with which a fork imports the package and what may bring vLLM or openai anew, as another path has them."""
_FOLDER = "FOLDER_OF_FORKS"
"""Environment variable with the folder of the session's server: its socket, and the command that stands for Python."""
NAMESPACE = "NETWORK_NAMESPACE"
"""Environment variable with the name of a fork's network namespace; the processes that it starts are in it too."""
_PATHS = (str(ROOT), str(ROOT / "tests"), str(ROOT / "scripts"))
_NUMBER = 4
"""Bytes of a process id, and of an exit status as `waitpid` gives it."""
_HANDED_ON = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
_HIGH = 500
"""Above the numbers of the file descriptors of any program here."""
_LOOK_S = 1.0
"""Seconds between two looks of the server at whether its session was killed."""
_PR_SET_PDEATHSIG = 1

_folder: list[str] = []
"""That of the server, once this process knows it."""


@contextlib.contextmanager
def killed_at_end(process):
    """A process in a group of its own. It and what it started are killed with the block."""
    with process:
        try:
            yield process
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


class Program(subprocess.Popen):
    """`python ARGUMENTS` as a fork, where the arguments come without `python`. All else as with `Popen`."""

    def _execute_child(self, args, *given):  # what Popen starts a process with, after it has made the pipes
        # executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo, creationflags, shell, six pipes, ...
        pass_fds, cwd, env = given[3:6]
        p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite = given[9:15]
        standard = [number if own == -1 else own for number, own in enumerate((p2cread, c2pwrite, errwrite))]
        descriptors = {**dict(enumerate(standard)), **{number: number for number in pass_fds}}
        self._connection, self.pid = _ask(server_folder(), args, descriptors, cwd, env)
        self._child_created = True
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)

    def kill(self):
        """As with `Popen`, and its process group: what it has started does not outlive a test's timeout."""
        if self.poll() is None:
            _kill(self.pid)

    def _internal_poll(self, *_, **__):
        if self.returncode is None and (ended := self._try_wait(os.WNOHANG))[0]:
            self._handle_exitstatus(ended[1])
        return self.returncode

    def _try_wait(self, wait_flags):
        if wait_flags & os.WNOHANG and not select.select([self._connection], [], [], 0)[0]:
            return 0, 0
        return self.pid, _status(self._connection)


def python():
    """The path of a command that stands for `python`; with a GPU, which a recipe uses, Python's own."""
    return sys.executable if HAS_GPU else str(Path(server_folder(), "python"))


def done_on_vllm(program, *words, timeout=300):
    """A program with vLLM in its process, once it has ended without an error."""
    paths = os.pathsep.join((*_PATHS, os.environ.get("PYTHONPATH", "")))
    own = {"PYTHONPATH": paths, "VLLM_CPU_KVCACHE_SPACE": "1", "TORCHDYNAMO_DISABLE": "1"}
    given = {"capture_output": True, "text": True, "timeout": timeout}
    done = subprocess.run([python(), program, *map(str, words)], env={**os.environ, **own}, check=False, **given)
    assert done.returncode == 0, done.stderr[-6000:]
    return done


def server_folder():
    """The folder of the session's server, which starts if need be. It ends when the process that started it ends."""
    if not _folder and _FOLDER in os.environ:
        _folder.append(os.environ[_FOLDER])
    if not _folder:
        folder = tempfile.mkdtemp(prefix="forks-")
        command = Path(folder, "python")
        command.write_text(f"#!/bin/sh\nexec '{COLD_PYTHON}' -I -S '{__file__}' ask '{folder}' \"$@\"\n")
        command.chmod(0o755)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(f"{folder}/socket")
            listener.listen(64)
            number, paths = listener.fileno(), os.pathsep.join((*_PATHS, os.environ.get("PYTHONPATH", "")))
            server = subprocess.Popen(
                [COLD_PYTHON, __file__, "serve", folder, str(number), *EVERYTHING],
                env={**os.environ, _FOLDER: folder, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
                pass_fds=[number],
                stdin=subprocess.PIPE,
                start_new_session=True,
            )
        atexit.register(_end, server, folder)
        os.environ[_FOLDER] = folder
        _folder.append(folder)
    return _folder[0]


def _end(server, folder):
    server.stdin.close()
    server.wait()
    shutil.rmtree(folder, ignore_errors=True)


def _ask(folder, words, descriptors, cwd=None, env=None):
    """Have the server fork, with these file descriptors under these numbers. Returns a connection, over which its exit
    status comes, and the process id. The fork is killed when the connection is closed."""
    environment = {name: str(value) for name, value in (os.environ if env is None else env).items()}
    request = {"words": [*map(os.fspath, words)], "cwd": str(cwd or os.getcwd()), "numbers": [*descriptors]}
    content = json.dumps({**request, "environment": environment}).encode()
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(f"{folder}/socket")
    socket.send_fds(connection, [len(content).to_bytes(_NUMBER, sys.byteorder)], [*descriptors.values()])
    connection.sendall(content)
    if not (pid := connection.recv(_NUMBER)):  # 0 would be the process group of whoever kills the fork
        raise RuntimeError("the server of forks has ended")
    return connection, int.from_bytes(pid, sys.byteorder)


def _status(connection):
    with connection:
        status = connection.recv(_NUMBER)
    return int.from_bytes(status, sys.byteorder) if status else signal.SIGKILL


def _stand_in(folder, words):
    """Be what a fork is for the process that started this one. Every file descriptor that it gave is the fork's."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _HANDED_ON)
    handed = {}
    for number in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):  # that of the folder itself
            os.fstat(number)
            handed[number] = number
    connection, pid = _ask(folder, words, dict(sorted(handed.items())))
    for number in handed:
        os.close(number)

    def hand_on(number, _):
        with contextlib.suppress(ProcessLookupError):  # it has ended, and its exit status is on the way
            os.kill(pid, number)

    for number in _HANDED_ON:
        signal.signal(number, hand_on)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _HANDED_ON)
    status = _status(connection)
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        with contextlib.suppress(OSError):  # SIGKILL has no handler
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(os.WEXITSTATUS(status))


def _kill(pid):
    """Kill a fork that nobody has waited for, and its process group once it has one."""
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError):
            kill(pid, signal.SIGKILL)


def _serve(listener, folder):
    """Fork for each connection, and send how the fork ended. Returns in the fork: its request, its descriptors."""
    session, server = os.getppid(), os.getpid()
    ended, wakes = os.pipe()
    os.set_blocking(wakes, False)
    signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    forks = {}
    while True:
        ready, _, _ = select.select([0, listener, ended, *forks.values()], [], [], _LOOK_S)
        if 0 in ready or os.getppid() != session:  # it has ended; a child of it may hold the other end of 0
            for pid in forks:
                _kill(pid)
            shutil.rmtree(folder, ignore_errors=True)
            os._exit(0)
        for pid, connection in forks.items():
            if connection in ready:  # closed: nobody waits for it any more
                _kill(pid)
        if ended in ready:
            os.read(ended, 4096)
            while forks and (end := os.waitpid(-1, os.WNOHANG))[0]:
                pid, status = end
                with forks.pop(pid) as connection, contextlib.suppress(OSError):
                    connection.sendall(status.to_bytes(_NUMBER, sys.byteorder))
        if listener in ready:
            connection, _ = listener.accept()
            head, descriptors, _, _ = socket.recv_fds(connection, _NUMBER, 250)
            content = b""
            while len(content) < int.from_bytes(head, sys.byteorder):
                content += connection.recv(1 << 20)
            pid = os.fork()
            if not pid:
                ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
                if os.getppid() != server:
                    os._exit(1)
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for one_of_server in (listener, connection, *forks.values()):
                    one_of_server.close()
                os.close(ended)
                os.close(wakes)
                return json.loads(content), descriptors
            for number in descriptors:
                os.close(number)
            forks[pid] = connection
            connection.sendall(pid.to_bytes(_NUMBER, sys.byteorder))


def _become(request, descriptors, folder, set_by_imports):
    """The process that was asked for, before its program. Returns the program's words."""
    os.setsid()
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # also when the tests run under `nohup`
    signal.signal(signal.SIGINT, signal.default_int_handler)
    high = [fcntl.fcntl(number, fcntl.F_DUPFD, _HIGH) for number in descriptors]
    for number in descriptors:
        os.close(number)
    for number, wanted in zip(high, request["numbers"], strict=True):
        os.dup2(number, wanted)
        os.close(number)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update({**set_by_imports, **request["environment"]})
    paths = filter(None, request["environment"].get("PYTHONPATH", "").split(os.pathsep))
    sys.path[1:] = [*dict.fromkeys((*paths, *sys.path[1:]))]
    if "torch" in sys.modules:
        import torch._dynamo

        torch._dynamo.config.disable = request["environment"].get("TORCHDYNAMO_DISABLE") == "1"  # as its import has it
    if namespace := request["environment"].get(NAMESPACE):
        with open(f"/run/netns/{namespace}") as file:
            assert not ctypes.CDLL(None, use_errno=True).setns(file.fileno(), 0), os.strerror(ctypes.get_errno())
    sys.executable = f"{folder}/python"
    if registry := sys.modules.get("vllm.model_executor.models.registry"):
        registry._SUBPROCESS_COMMAND[0] = sys.executable
    return request["words"]


def _run(words):
    """Run `python WORDS`, and end as Python does, but without taking apart what is imported: 2 s of CPU."""
    main = sys.modules["__main__"] = type(sys)("__main__")
    code = 0
    try:
        while words[0] in ("-u", "-P"):
            if words.pop(0) == "-u":
                sys.stdout.reconfigure(write_through=True)
        if words[0].startswith("-m"):
            words = ["-m", words[0][2:], *words[1:]] if words[0] != "-m" else words
            sys.path[0] = os.getcwd()
            sys.argv = ["-m", *words[2:]]
            runpy._run_module_as_main(words[1])
        elif words[0] == "-c":
            sys.path[0] = ""
            sys.argv = ["-c", *words[2:]]
            exec(compile(words[1], "<string>", "exec"), main.__dict__)
        else:
            sys.path[0] = str(Path(words[0]).parent)
            sys.argv, main.__file__ = words, words[0]
            exec(compile(Path(words[0]).read_bytes(), words[0], "exec"), main.__dict__)
    except SystemExit as end:
        code = _exit_code(end)
    except BaseException as error:
        code = 1
        try:
            sys.excepthook(type(error), error, error.__traceback__)
        except SystemExit as end:
            code = _exit_code(end)
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def _exit_code(end):
    if isinstance(end.code, str):
        print(end.code, file=sys.stderr)
    return end.code if isinstance(end.code, int) else int(end.code is not None)


def _hold():
    import apart

    apart.begin()
    print(server_folder(), flush=True)
    sys.stdin.read()
    apart.end()


def _import(modules):
    from salesrl_trl.ground import own_code
    from salesrl_trl.launch import kept

    kept.remember_packages()
    own_code.code()  # hashes all files and asks git: 0.1 s of each training
    for module in modules:
        try:
            importlib.import_module(module)
        except Exception as error:  # the lowest versions of packages need not suit vLLM's server
            print(f"forks begin without {module}: {error!r}", file=sys.stderr)
    gc.collect()
    gc.freeze()


if __name__ == "__main__":
    if sys.argv[1:] == ["hold"]:
        sys.exit(_hold())
    kind, folder, *rest = sys.argv[1:]
    if kind == "serve":
        before = dict(os.environ)
        number, *modules = rest
        _import(modules)
        set_by_imports = {name: value for name, value in os.environ.items() if before.get(name) != value}
        listener = socket.socket(fileno=int(number))
        _run(_become(*_serve(listener, folder), folder, set_by_imports))
    _stand_in(folder, rest)
