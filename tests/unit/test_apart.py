"""No test touches what outlives it: `support.apart` refuses that."""

import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from support import apart

RUNS = apart.ROOT / "runs"


@pytest.mark.parametrize(
    "touch",
    [
        lambda: (RUNS / "debug/run.log").read_text(),
        lambda: sqlite3.connect(RUNS / "debug/rank-0.sqlite"),
        lambda: os.scandir(os.fsencode(RUNS)),
        lambda: os.replace(__file__, RUNS / "moved.py"),
        lambda: Path(os.environ["HOME_BEFORE_TESTS"], ".triton").mkdir(),
        lambda: subprocess.run([sys.executable, "-c", ""], cwd=apart.ROOT / "tests", check=False),
    ],
)
def test_what_outlives_a_test_is_refused_and_the_test_fails_although_its_code_handles_the_error(touch):
    with pytest.raises(apart.Touched):
        touch()
    with pytest.raises(AssertionError, match=r"Tests use `tmp_path`"):
        apart.check()
    apart.check()  # the next test is another one


def test_neither_the_working_folder_nor_the_home_folder_of_a_child_is_the_user_s_own():
    find = "import os, pathlib; print(os.getcwd(), pathlib.Path.home(), sep='\\n')"
    shown = subprocess.run([sys.executable, "-c", find], capture_output=True, text=True, check=True).stdout
    working, home = map(Path, shown.splitlines())
    assert not working.is_relative_to(apart.ROOT)
    assert home != Path(os.environ["HOME_BEFORE_TESTS"])
