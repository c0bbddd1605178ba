"""Builds an arm's environment from the package index: `python -m benchmarks.peers.environment ARM FOLDER`.

Needs Python 3.12 and the standard library. `environments/ARM.txt` pins what was resolved together. Stock TRL, this
package and TRL's AsyncGRPO run in this package's own environment, which `scripts/install.sh` makes.
"""

import subprocess
import sys
import venv
from pathlib import Path

LISTS = Path(__file__).parent / "environments"


def main(arm: str, folder: Path) -> None:
    """Build it.

    Raises:
        `SystemExit`: no such arm.
    """
    pins = LISTS / f"{arm}.txt"
    if not pins.is_file():
        sys.exit(f"no list for {arm!r}: one of {sorted(path.stem for path in LISTS.glob('*.txt'))}")
    venv.create(folder, with_pip=True)
    subprocess.run([folder / "bin" / "python", "-m", "pip", "install", "-r", pins], check=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
