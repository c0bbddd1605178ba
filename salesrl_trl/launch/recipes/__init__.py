"""The built-in recipes of an installed package, selected by name: `salesrl train own`."""

from pathlib import Path

FULL = Path(__file__).parent / "full.yaml"  # the default recipe of commands
RECIPES = {path.stem: path for path in sorted(FULL.parent.glob("*.yaml"))}  # the built-in recipes by name
