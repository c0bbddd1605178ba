"""`python -m salesrl_trl.rejudge RUN [--output FOLDER] [--json] [--SETTING VALUE ...]`.

Judges a recorded run again, and says how much rewards and advantages would have changed. Owns the command line. The
parts are in `rejudge`.

Exit code: 0; 2 for wrong input; 3 if a service did not work; 130 after Ctrl-C.
"""

import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Rejudge and print. Returns the exit code."""
    from salesrl_trl.rejudge.command import main as rejudge  # takes a second

    return rejudge(argv)


if __name__ == "__main__":
    from salesrl_trl.run.launch import begin_run

    begin_run()  # a signal ends it as Ctrl-C does
    sys.exit(main())
