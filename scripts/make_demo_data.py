#!/usr/bin/env python3
"""Writes the built-in demo data: a bilingual knowledge base, conversations, and drafts of annotators.

    .venv/bin/python scripts/make_demo_data.py [--out FOLDER]

The same texts in `demo_content/` give the same bytes. `tests/unit/data/test_demo_data.py` says what must hold of the
data: run it after every change of a text. The drafts of the training rows are a file of their own, in the order of the
rows. `protected_terms.json` is not made here: edit it by hand.
"""

import argparse
import json
import random
from pathlib import Path
from typing import Any

from demo_content.conversations import build_split
from demo_content.knowledge import build_knowledge

from salesrl_trl.ground.shutdown import end_tidily

SEED = 20240611
TRAIN_ROWS = 960
HELD_OUT_ROWS = 160
DEFAULT_OUT = Path(__file__).resolve().parents[1] / "salesrl_trl" / "demo" / "rows"


def main() -> None:
    """Write the demo data to a folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT, help="folder to write to")
    out: Path = parser.parse_args().out
    rng, used = random.Random(SEED), set[str]()
    train = build_split("train", TRAIN_ROWS, used, 0, rng)
    files: dict[str, list[dict[str, Any]]] = {
        "knowledge.jsonl": build_knowledge(),
        "train.jsonl": [{key: value for key, value in row.items() if key != "draft_actions"} for row in train],
        "drafts.jsonl": [{"id": row["id"], "draft_actions": row["draft_actions"]} for row in train],
        "heldout.jsonl": build_split("heldout", HELD_OUT_ROWS, used, TRAIN_ROWS, rng),
    }
    out.mkdir(parents=True, exist_ok=True)
    for name, rows in files.items():
        content = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
        (out / name).write_bytes(content)
        print(f"{name}: {len(rows)} lines, {len(content)} bytes")


if __name__ == "__main__":
    end_tidily()
    main()
