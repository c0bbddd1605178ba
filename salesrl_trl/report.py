"""`python -m salesrl_trl.report OUTPUT_DIR [--html FILE] [--text FILE] [--logging_dir DIR] [--lang en|zh]`.

Reads a run's folder, finished or not, writes one HTML page and one text, and prints the text. Imports neither torch
nor TRL. Exit code: 0; 2, with one message, for a wrong folder.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from salesrl_trl.errors import ConfigError
from salesrl_trl.ground.shutdown import EXIT_BAD_INPUT, end_tidily
from salesrl_trl.names import REPORT_PAGE_FILE, REPORT_TEXT_FILE
from salesrl_trl.view.report_page import write_report
from salesrl_trl.view.wording import LANGUAGES

PROGRAM = "python -m salesrl_trl.report"


def main(argv: Sequence[str] | None = None) -> int:
    """Write the report. Returns the exit code."""
    args = _parser().parse_args(argv)
    try:
        page, html, text = write_report(args.output_dir, args.logging_dir, args.html, args.text, args.lang)
    except (ConfigError, OSError) as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT
    print(f"{page}\nPage: {html}\nText: {text}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=PROGRAM, description="One page about a run: HTML, and text for a terminal.")
    parser.add_argument("output_dir", type=Path, metavar="OUTPUT_DIR", help="the run's folder")
    parser.add_argument("--html", type=Path, metavar="FILE", help=f"defaults to OUTPUT_DIR/{REPORT_PAGE_FILE}")
    parser.add_argument("--text", type=Path, metavar="FILE", help=f"defaults to OUTPUT_DIR/{REPORT_TEXT_FILE}")
    parser.add_argument("--lang", choices=LANGUAGES, default="en", help="of the page; en by default")
    parser.add_argument(
        "--logging_dir", type=Path, metavar="DIR", help="where the TensorBoard files are, if not below OUTPUT_DIR"
    )
    return parser


if __name__ == "__main__":
    end_tidily()
    sys.exit(main())
