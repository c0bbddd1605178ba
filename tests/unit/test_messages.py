"""What a start refuses says what tests/support/messages.toml has."""

import re
import shlex
import sys
import tomllib
from pathlib import Path

import pytest

from salesrl_trl.demo.packaged import PACKAGED
from salesrl_trl.errors import SalesRLError
from salesrl_trl.launch.preflight.runner import prepare
from salesrl_trl.launch.settings import parse

ROOT = Path(__file__).parents[2]
TABLE = tomllib.loads((ROOT / "tests/support/messages.toml").read_text("utf-8"))
REFUSED = [(recipe, *entry) for recipe in ("debug", "full") for entry in TABLE[recipe].items()]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The working folder, with the table's files."""
    for name, text in TABLE["files"].items():
        lines = [text.replace("#", str(number)) for number in range(9 if "#" in text else 1)]
        (tmp_path / name).write_text("\n".join(lines), "utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield tmp_path
    sys.modules.pop("mine", None)


@pytest.mark.parametrize(("recipe", "arguments", "said"), REFUSED, ids=[each[1] for each in REFUSED])
def test_what_is_refused_is_told(folder, recipe, arguments, said):
    words = shlex.split(arguments.replace("DIR", str(folder)).replace("SMALL", str(PACKAGED)))
    with pytest.raises(SalesRLError) as refused:
        prepare(parse(["--output_dir", "run", *words], ROOT / f"recipes/{recipe}.yaml"))
    assert re.search(said, f"{type(refused.value).__name__}: {refused.value}", flags=re.DOTALL)
