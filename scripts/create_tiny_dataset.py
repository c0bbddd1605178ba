#!/usr/bin/env python3
r"""Cut a small dataset out of a large one for smoke tests: its first rows, or a seeded sample, optionally by branch.

    .venv/bin/python scripts/create_tiny_dataset.py --source conversations.jsonl --rows 64 --out tiny.jsonl
    .venv/bin/python scripts/create_tiny_dataset.py --source demo --rows 64 --by_branch --seed 0 --out tiny.parquet
    .venv/bin/python scripts/create_tiny_dataset.py --source qa_data.json --dataset_format halueval --rows 500 \
      --out rows.jsonl --knowledge_out documents.jsonl

Reads every source that `dataset` accepts: `demo`, a .jsonl, .json or .parquet file, a dataset on the hub. Writes
.jsonl or .parquet, depending on the suffix of --out, with all columns. Rows in other formats or columns are
converted to this package's. The order of rows is kept. Deterministic for the same arguments.

Exit code: 0 written; 2 wrong usage or an invalid row.
"""

from salesrl_trl.ground.shutdown import end_tidily

if __name__ == "__main__":
    end_tidily()  # before the imports that take seconds

import argparse
import json
import random
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from datasets import Dataset

from salesrl_trl.data.files import Record
from salesrl_trl.data.rows import check_columns, parse_row
from salesrl_trl.errors import ConfigError, DataError
from salesrl_trl.launch.data.formats import FORMATS, ROWS, digest
from salesrl_trl.launch.data.sources import load_records
from salesrl_trl.launch.data_config import DataConfig
from salesrl_trl.launch.evaluation.quick import spread

EXIT_USAGE = 2
ENDINGS = (".jsonl", ".parquet")


def main(arguments: Sequence[str] | None = None) -> int:
    options = parsed(arguments)
    try:
        config = DataConfig(dataset={"format": options.dataset_format, "columns": options.columns}).sources[0]
        loaded = load_records(options.source, options.split, config.form())
        records, name = [row.record for row in loaded.rows], loaded.name
        check_columns(records[0].keys() if records else (), name)
        branches = [str(record.get("branch")) for record in records]
        known = [branch for record in records if isinstance(branch := record.get("branch"), str)]
        places = chosen(branches, options.rows, options.by_branch, options.seed)
        placed = [loaded.rows[at] for at in places]
        rows = [parse_row(row.record, row.position, sorted(set(known)), name, row.line) for row in placed]
        write(options.out, [records[place] for place in places])
        if options.knowledge_out is not None:
            texts = dict.fromkeys(text for row in rows for text in row.documents)
            write(options.knowledge_out, [{"id": digest({"text": text}), "text": text} for text in texts])
    except (ConfigError, DataError, OSError) as error:
        print(f"create_tiny_dataset: {error}", file=sys.stderr)
        return EXIT_USAGE
    counts = ", ".join(
        f"{count} of {branch}" for branch, count in sorted(Counter(branches[p] for p in places).items())
    )
    print(f"{len(places)} of {len(records)} rows of {name} ({counts}) are in {options.out}")
    if loaded.note:
        print(loaded.note)
    return 0


def chosen(branches: Sequence[str], rows: int, by_branch: bool, seed: int | None) -> list[int]:
    """Places of the rows to keep, in order.

    Args:
        branches (`Sequence[str]`):
            The branch of each row.
        rows (`int`):
            Number of rows.
        by_branch (`bool`):
            Equally many rows of each branch, as far as there are so many.
        seed (`int`, *optional*):
            Draws the rows. Without it, the first ones are taken.
    """
    order = list(range(len(branches)))
    if seed is not None:
        random.Random(seed).shuffle(order)
    if by_branch:
        names = sorted(set(branches))
        order = [order[at] for at in spread([names.index(branches[place]) for place in order], rows, len(names), 1)]
    return sorted(order[:rows])


def write(path: Path, records: Sequence[Record]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        Dataset.from_list(list(records)).to_parquet(path)
        return
    lines = (json.dumps(record, ensure_ascii=False, default=str) for record in records)  # a column may hold dates
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--source", required=True, help="`demo`, a local file, or a dataset on the hub")
    parser.add_argument("--split", default="train", help="split of the demo or of a dataset on the hub")
    parser.add_argument(
        "--dataset_format", default=ROWS, help=f"{', '.join((ROWS, *FORMATS))}, or a class's dotted path"
    )
    parser.add_argument("--columns", help="columns of the fields of a row, as JSON")
    parser.add_argument("--out", type=Path, required=True, help="the file to write: .jsonl or .parquet")
    parser.add_argument("--rows", type=int, default=64, help="number of rows; default: 64")
    parser.add_argument("--by_branch", action="store_true", help="equally many rows of each branch")
    parser.add_argument("--seed", type=int, help="draw the rows by this seed; default: the first ones")
    parser.add_argument(
        "--knowledge_out", type=Path, help="also write the rows' documents: a `knowledge_file`, .jsonl"
    )
    options = parser.parse_args(arguments)
    if options.rows < 1:
        parser.error(f"--rows is {options.rows}, expected at least 1")
    if options.out.suffix not in ENDINGS:
        parser.error(f"--out is {options.out}, expected a name that ends with {' or '.join(ENDINGS)}")
    if options.knowledge_out is not None and options.knowledge_out.suffix != ".jsonl":
        parser.error(f"--knowledge_out is {options.knowledge_out}, expected a name that ends with .jsonl")
    for name in ("out", "knowledge_out"):
        path = getattr(options, name)
        if path is not None and path.exists():
            parser.error(f"--{name} is {path}, which is there already; name another file, or delete it")
    return options


if __name__ == "__main__":
    sys.exit(main())
