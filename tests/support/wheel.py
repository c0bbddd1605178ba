"""The package as it is installed: a wheel of this checkout."""

import shutil
import subprocess
import zipfile
from pathlib import Path

from support.forked import COLD_PYTHON

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 60.0


def built_wheel(tree: Path) -> zipfile.ZipFile:
    """Build it in `tree`, a copy: a build leaves folders behind."""
    shutil.copytree(ROOT / "salesrl_trl", tree / "salesrl_trl", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    build = "from setuptools import build_meta; build_meta.build_wheel('.')"
    subprocess.run([COLD_PYTHON, "-c", build], cwd=tree, check=True, capture_output=True, timeout=TIMEOUT_S)
    [built] = tree.glob("*.whl")
    return zipfile.ZipFile(built)
