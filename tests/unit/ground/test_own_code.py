"""What the package knows about its own files: a change that they hold, and files newer than what was imported."""

import importlib.util
import json
import subprocess
import sys

import pytest

from salesrl_trl.ground import own_code, process
from salesrl_trl.launch import env


@pytest.fixture
def package(tmp_path, monkeypatch):
    folder = tmp_path / "checkout/salesrl_trl"
    folder.mkdir(parents=True)
    monkeypatch.setattr(own_code, "PACKAGE", folder)
    return folder


def git(folder, *words):
    command = ["git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=b", *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def commit(package, name):
    (package / name).write_text(name)
    git(package, "add", ".")
    git(package, "commit", "-qm", name)
    return git(package, "rev-parse", "HEAD")


@pytest.fixture(autouse=True)
def _as_in_a_process_of_its_own():
    own_code.code.cache_clear()
    yield
    own_code.code.cache_clear()


def has(name, *more):
    own_code.code.cache_clear()
    return env.main(["--has", name, *more])


def test_a_checkout_holds_its_commit_and_those_before_it_and_no_other(package, capsys):
    git(package.parent, "init", "-q")
    first, second = commit(package, "__init__.py"), commit(package, "a.py")
    assert has(first[:10]) == has(second) == 0
    assert capsys.readouterr().out.splitlines()[1] == (
        f"{second} is in the code of {package}, {own_code.__version__} (commit {second[:12]})"
    )
    git(package, "checkout", "-q", first)
    (package / "b.py").write_text("mine")
    assert has(second) == 1
    text = f"(commit {first[:12]}, changed files: 1)\n"
    assert f"{second} is NOT in the code of" in (out := capsys.readouterr().out) and out.endswith(text)
    assert has("0123456789") == 1  # nobody has such a commit here: not this code either
    assert has(second, "--seed", "1") == 2


def test_a_shallow_clone_does_not_deny_what_it_cannot_see(package, tmp_path, monkeypatch, capsys):
    git(package.parent, "init", "-q")
    first, second = commit(package, "__init__.py"), commit(package, "a.py")
    git(tmp_path, "clone", "-q", "--depth", "1", f"file://{package.parent}", "shallow")
    monkeypatch.setattr(own_code, "PACKAGE", tmp_path / "shallow/salesrl_trl")
    assert (has(second), has(first)) == (0, 2)
    assert "--unshallow" in capsys.readouterr().err


def test_an_installed_package_knows_the_commit_that_pip_noted_or_says_that_it_cannot_know(
    package, monkeypatch, capsys
):
    noted = "0123456789abcdef0123456789abcdef01234567"
    info = package.parent / f"salesrl_trl-{own_code.__version__}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: salesrl_trl\nVersion: {own_code.__version__}\n")
    monkeypatch.syspath_prepend(str(package.parent))
    assert (has(noted), f"is {own_code.__version__} (hash " in capsys.readouterr().err) == (2, True)
    (info / "direct_url.json").write_text(json.dumps({"url": "https://x", "vcs_info": {"commit_id": noted}}))
    assert has(noted) == has(noted[:7]) == 0
    own_code.code.cache_clear()
    assert (own_code.code().commit, own_code.code().changed_files) == (noted[:12], 0)
    assert has("fedcba9876") == has(noted[:3]) == 2  # before it, after it, or another's
    assert f"is {own_code.__version__} (commit {noted[:12]})" in capsys.readouterr().err


def test_a_file_newer_than_what_was_imported_is_told_once_and_not_after_a_reload(tmp_path, monkeypatch, caplog):
    file = tmp_path / "made_up.py"

    def load():
        spec = importlib.util.spec_from_file_location("salesrl_trl.made_up", file)
        monkeypatch.setitem(sys.modules, "salesrl_trl.made_up", importlib.util.module_from_spec(spec))

    def told():
        caplog.clear()
        process.warn_of_changes()
        return caplog.messages

    monkeypatch.setattr(process, "_imported", {})
    file.write_text("A = 1")
    load()
    assert told() == told() == []
    file.write_text("A = 2")
    load()  # as IPython's autoreload does
    assert told() == []
    file.write_text("A = 3")
    (line,) = told()
    assert line.startswith("salesrl_trl.made_up: the file has changed") and "Restart the kernel" in line
    assert told() == []
