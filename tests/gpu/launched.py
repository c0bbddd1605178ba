"""The debug recipe and benches as a user launches them."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def debug_recipe(output_dir, **given):
    """Launch it with these settings; environment variables are in capitals."""
    settings = {name: value for name, value in given.items() if not name.isupper()}
    environment = {name: str(value) for name, value in given.items() if name.isupper()}
    command = [sys.executable, "-m", "accelerate.commands.launch"]
    command += ["--config_file", f"{ROOT}/accelerate_configs/debug.yaml", f"{ROOT}/recipes/debug.py"]
    command += [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    command += ["--output_dir", str(output_dir)]
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]


def figures_of(bench, folder, *words, **environment):
    """What a bench writes as JSON."""
    command = [sys.executable, "-m", f"benchmarks.{bench}", *words, "--json", str(folder / "figures.json")]
    subprocess.run(command, env={**os.environ, **environment}, check=True)
    return json.loads((folder / "figures.json").read_text())
