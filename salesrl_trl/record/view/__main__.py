"""`python -m salesrl_trl.record.view RUN [RUN ...] [--port PORT]`.

Serves a page on loopback until Ctrl-C. Exit code 2, with one message, for a folder without a record.
"""

import argparse
import sys
from collections.abc import Sequence
from contextlib import closing

from salesrl_trl.ground.command_line import exit_code
from salesrl_trl.ground.shutdown import end_tidily
from salesrl_trl.record.view.record_index import Index
from salesrl_trl.record.view.viewer import Viewer


def main(argv: Sequence[str] | None = None) -> int:
    """Serve the page. Returns the exit code."""
    return exit_code("view", argv, _serve, OverflowError)  # which means: no such port


def _serve(args: argparse.Namespace) -> None:
    with closing(Index(args.runs)) as index:
        viewer = Viewer(index, args.port)
        try:
            print(viewer.url)
            print("This address is for you alone: the page shows what customers said. Ctrl-C ends.", flush=True)
            viewer.serve_forever()
        except KeyboardInterrupt:  # how it is meant to end
            print()
        finally:
            viewer.server_close()


if __name__ == "__main__":
    end_tidily()
    sys.exit(main())
