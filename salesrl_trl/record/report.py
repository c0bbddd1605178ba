"""`python -m salesrl_trl.record.report OUTPUT_DIR [--html FILE] [--text FILE] [--logging_dir DIR] [--lang en|zh]`.

Reads a run's folder, finished or not, writes one HTML page and one text, and prints the text. Imports neither torch
nor TRL. Exit code: 0; 2, with one message, for a wrong folder.
"""

import argparse
import sys
from collections.abc import Sequence

from salesrl_trl.ground.command_line import exit_code
from salesrl_trl.ground.shutdown import end_tidily
from salesrl_trl.record.view.report_page import write_report


def main(argv: Sequence[str] | None = None) -> int:
    """Write the report. Returns the exit code."""
    return exit_code("report", argv, _write)


def _write(args: argparse.Namespace) -> None:
    page, html, text = write_report(args.output_dir, args.logging_dir, args.html, args.text, args.lang)
    print(f"{page}\nPage: {html}\nText: {text}")


if __name__ == "__main__":
    end_tidily()
    sys.exit(main())
