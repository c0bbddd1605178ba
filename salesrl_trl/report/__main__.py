"""`python -m salesrl_trl.report OUTPUT_DIR [--html FILE] [--text FILE] [--logging_dir DIR]`.

Reads a run's folder, finished or not, writes one HTML page and one text, and prints the text. Owns the command line
and the places of the files. Exit code 2, with one message, for a wrong folder or a missing package.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from salesrl_trl.errors import ConfigError
from salesrl_trl.ground.shutdown import end_tidily
from salesrl_trl.names import REPORT_PAGE_FILE, REPORT_TEXT_FILE
from salesrl_trl.report.page import html_page, text_page
from salesrl_trl.report.plots import draw, require_matplotlib
from salesrl_trl.report.records import read_run

PROGRAM = "python -m salesrl_trl.report"
BAD_INPUT = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Write the report.

    Args:
        argv (`Sequence[str]`, *optional*):
            Arguments; those of the process when not given.

    Returns:
        `int`: exit code, 0 or 2.
    """
    args = _parser().parse_args(argv)
    html = args.html or args.output_dir / REPORT_PAGE_FILE
    text = args.text or args.output_dir / REPORT_TEXT_FILE
    try:
        require_matplotlib()
        run = read_run(args.output_dir, args.logging_dir)
        page = text_page(run)
        _write(text, page)
        _write(html, html_page(run, draw(run)))
    except (ConfigError, OSError) as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return BAD_INPUT
    print(f"{page}\nPage: {html}\nText: {text}")
    return 0


def _write(path: Path, content: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content, encoding="utf-8")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=PROGRAM, description="One page about a run: HTML, and text for a terminal.")
    parser.add_argument("output_dir", type=Path, metavar="OUTPUT_DIR", help="the run's folder")
    parser.add_argument("--html", type=Path, metavar="FILE", help=f"defaults to OUTPUT_DIR/{REPORT_PAGE_FILE}")
    parser.add_argument("--text", type=Path, metavar="FILE", help=f"defaults to OUTPUT_DIR/{REPORT_TEXT_FILE}")
    parser.add_argument(
        "--logging_dir", type=Path, metavar="DIR", help="where the TensorBoard files are, if not below OUTPUT_DIR"
    )
    return parser


if __name__ == "__main__":
    end_tidily()
    sys.exit(main())
