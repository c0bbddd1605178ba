"""Presets: overlays of a recipe, for the memory of a card or a purpose. `--preset NAME` reads one."""

from pathlib import Path

FOLDER = Path(__file__).parent
PRESETS = tuple(sorted(path.stem for path in FOLDER.glob("*.yaml")))
