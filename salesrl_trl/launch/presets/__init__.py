"""Presets: recipe overlays for a GPU's memory or a purpose, selected by `--preset NAME`."""

from pathlib import Path

FOLDER = Path(__file__).parent
PRESETS = tuple(sorted(path.stem for path in FOLDER.glob("*.yaml")))
