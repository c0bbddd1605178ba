"""This package's lines are shown where nobody has set up logging."""

import re
import subprocess

import pytest
from support.forked import COLD_PYTHON


@pytest.mark.parametrize(
    ("before", "line"),
    [
        ("", r"\d\d:\d\d:\d\d step\n"),
        ("logging.basicConfig(level='INFO', format='mine: %(message)s');", "mine: step\n"),
    ],
    ids=["nothing set up", "logging of the program's own"],
)
def test_a_line_is_shown_once(before, line):
    script = (
        f"import logging; from salesrl_trl.telemetry.logs import show_lines; {before} show_lines(); show_lines();"
        "logging.getLogger('salesrl_trl.trainer').info('step')"
    )
    done = subprocess.run([COLD_PYTHON, "-c", script], capture_output=True, text=True, check=True)
    assert re.fullmatch(line, done.stderr)
