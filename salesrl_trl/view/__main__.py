"""`python -m salesrl_trl.view RUN [RUN ...] [--port PORT] [--html FILE [--most N]]`.

Serves a page on loopback until Ctrl-C, or writes one that stands alone. Owns the command line. Exit code 2, with one
message, for a folder without a record.
"""

import argparse
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from salesrl_trl.errors import ConfigError
from salesrl_trl.ground.process import make_private
from salesrl_trl.ground.shutdown import EXIT_BAD_INPUT, end_tidily
from salesrl_trl.recording.reader import DAMAGED
from salesrl_trl.view.page import MOST, data_alone, page
from salesrl_trl.view.record_index import Index
from salesrl_trl.view.viewer import Viewer

PROGRAM = "python -m salesrl_trl.view"


def main(argv: Sequence[str] | None = None) -> int:
    """Serve or write the page. Returns the exit code."""
    args = _parser().parse_args(argv)
    try:
        with closing(Index(args.runs)) as index:
            return _write(index, args.html, args.most) if args.html else _serve(index, args.port)
    except (ConfigError, OSError, OverflowError, *DAMAGED) as error:  # `OverflowError`: no such port
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT


def _serve(index: Index, port: int) -> int:
    viewer = Viewer(index, port)
    try:
        print(viewer.url)
        print("This address is for you alone: the page shows what customers said. Ctrl-C ends.", flush=True)
        viewer.serve_forever()
    except KeyboardInterrupt:  # how it is meant to end
        print()
    finally:
        viewer.server_close()
    return 0


def _write(index: Index, path: Path, most: int) -> int:
    index.refresh()
    data = data_alone(index, most)
    path.parent.mkdir(parents=True, exist_ok=True)
    make_private(path)  # as the record
    path.write_text(page(data).html, encoding="utf-8", errors="replace")
    print(f"Page: {path}\n{data['state']['sample']:,} of {data['state']['total']:,} completions are in it.")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=PROGRAM, description="What a run's completions were, and what they earned.")
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="a run's folder")
    parser.add_argument("--port", type=int, default=0, help="on 127.0.0.1; a free one by default")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page that stands alone, and end")
    parser.add_argument("--most", type=int, default=MOST, metavar="N", help=f"completions in FILE; {MOST} by default")
    return parser


if __name__ == "__main__":
    end_tidily()
    sys.exit(main())
