"""`python -m salesrl_trl.record.view RUN [RUN ...] [--port PORT] [--html FILE [--most N]]`.

Serves a page on loopback until Ctrl-C, or writes one that stands alone. Owns the command line. Exit code 2, with one
message, for a folder without a record.
"""

import argparse
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from salesrl_trl.ground.command_line import exit_code
from salesrl_trl.ground.process import make_private
from salesrl_trl.ground.shutdown import end_tidily
from salesrl_trl.record.reader import DAMAGED
from salesrl_trl.record.view.alone import data_alone
from salesrl_trl.record.view.page import page
from salesrl_trl.record.view.record_index import Index
from salesrl_trl.record.view.viewer import Viewer


def main(argv: Sequence[str] | None = None) -> int:
    """Serve or write the page. Returns the exit code."""
    return exit_code("view", argv, _show, OverflowError, *DAMAGED)  # the first one: no such port


def _show(args: argparse.Namespace) -> None:
    with closing(Index(args.runs)) as index:
        if args.html:
            return _write(index, args.html, args.most)
        viewer = Viewer(index, args.port)
        try:
            print(viewer.url)
            print("This address is for you alone: the page shows what customers said. Ctrl-C ends.", flush=True)
            viewer.serve_forever()
        except KeyboardInterrupt:  # how it is meant to end
            print()
        finally:
            viewer.server_close()


def _write(index: Index, path: Path, most: int) -> None:
    index.refresh()
    data = data_alone(index, most)
    path.parent.mkdir(parents=True, exist_ok=True)
    make_private(path)  # as the record
    path.write_text(page(data).html, encoding="utf-8", errors="replace")
    print(f"Page: {path}\n{data['state']['sample']:,} of {data['state']['total']:,} completions are in it.")


if __name__ == "__main__":
    end_tidily()
    sys.exit(main())
