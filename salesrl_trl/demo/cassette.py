"""The packaged record of the demo's services: what they said of some completions of every row.

Owns the name and the place of the file. `scripts/make_demo_cassette.py` makes it.
"""

from importlib.resources import files
from pathlib import Path

CASSETTE = "demo"
"""Its name, as `replay` has it."""
FILE = Path(str(files("salesrl_trl.demo") / "cassette.sqlite.gz"))
"""A record without prompts, answers, verdicts and calls, which a replay does not need."""
