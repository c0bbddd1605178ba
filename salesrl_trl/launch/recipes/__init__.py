"""The recipes that an installed package has too; `salesrl train own` takes one by its name."""

from pathlib import Path

FULL = Path(__file__).parent / "full.yaml"  # the recipe that a command takes where none is named
RECIPES = {path.stem: path for path in sorted(FULL.parent.glob("*.yaml"))}  # the packaged recipes by name
