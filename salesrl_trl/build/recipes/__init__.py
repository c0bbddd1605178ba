"""The recipe that a command takes where none is named. It lies in the package, so that an installed one has it too.

Owns the file beside this module. recipes/full.yaml of a checkout is a link to it.
"""

from pathlib import Path

FULL = Path(__file__).parent / "full.yaml"
