"""`python -m salesrl_trl.record.view RUN [RUN ...] [--port PORT]`.

Serves a page on loopback until Ctrl-C. Exit code: 2, with one message, for a folder without a record.
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
    return exit_code("view", argv, _serve, OverflowError)  # raised for an invalid port


def _serve(args: argparse.Namespace) -> None:
    with closing(Index(args.runs)) as index:
        viewer = Viewer(index, args.port)
        try:
            print(viewer.url)
            print("Keep this address private: the page shows customers' texts. Press Ctrl-C to stop.", flush=True)
            viewer.serve_forever()
        except KeyboardInterrupt:  # the regular end
            print()
        finally:
            viewer.server_close()


if __name__ == "__main__":
    end_tidily()
    sys.exit(main())
