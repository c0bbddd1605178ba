"""Writes the packaged demo data: a bilingual knowledge base, conversations with drafts, and protected terms.

The script is deterministic: the same code writes the same bytes. It checks every invariant before it writes.
The drafts of the train rows are a file of their own, in the order of the train rows, so that each file stays below one
mebibyte.
"""

import argparse
import json
import random
import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from demo_content import checks, protected
from demo_content.conversations import Novelty, build_split
from demo_content.knowledge import build_knowledge

SEED = 20240611
TRAIN_ROWS = 960
HELD_OUT_ROWS = 160
MAX_BYTES = 1024 * 1024
DEFAULT_OUT = Path(__file__).resolve().parent.parent / "salesrl_trl" / "data" / "demo"


def _lines(rows: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def _conversation_files(train: list[dict[str, Any]], held_out: list[dict[str, Any]]) -> dict[str, bytes]:
    rows = [{key: value for key, value in row.items() if key != "draft_actions"} for row in train]
    drafts = [{"id": row["id"], "draft_actions": row["draft_actions"]} for row in train]
    return {"train.jsonl": _lines(rows), "drafts.jsonl": _lines(drafts), "heldout.jsonl": _lines(held_out)}


def vocabulary(rows: list[dict[str, Any]]) -> tuple[int, int]:
    """Count distinct Chinese characters and English words in conversations and actions."""
    text = json.dumps(
        [[row["conversation"], row["careful_action"], row.get("draft_actions")] for row in rows], ensure_ascii=False
    )
    return len(set(re.findall(r"[\u4e00-\u9fff]", text))), len(set(re.findall(r"[a-z]+", text.lower())))


def build_files() -> tuple[dict[str, bytes], str]:
    """Build and check all files; return their bytes by name, and a one-line summary."""
    rng = random.Random(SEED)
    novelty = Novelty()
    documents = build_knowledge()
    train = build_split("train", TRAIN_ROWS, novelty, 0, rng)
    held_out = build_split("heldout", HELD_OUT_ROWS, novelty, TRAIN_ROWS, rng)
    checks.check_phrases()
    checks.check_knowledge(documents)
    checks.check_conversations(train, held_out, documents)
    files = {"knowledge.jsonl": _lines(documents), **_conversation_files(train, held_out)}
    terms = json.dumps(protected.as_json(), ensure_ascii=False, indent=1) + "\n"
    files["protected_terms.json"] = terms.encode()
    for name, content in files.items():
        if len(content) >= MAX_BYTES:
            raise checks.DemoDataError(f"{name} has {len(content)} bytes")
    characters, words = vocabulary(train + held_out)
    summary = (
        f"{len(documents)} documents, {len(train)} train and {len(held_out)} held-out rows; "
        f"conversations and actions use {characters} Chinese characters and {words} English words"
    )
    return files, summary


def main() -> None:
    """Write the demo data to the chosen folder."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT, help="folder to write to")
    out: Path = parser.parse_args().out
    files, summary = build_files()
    out.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (out / name).write_bytes(content)
        print(f"{name}: {len(content)} bytes")
    print(summary)


if __name__ == "__main__":
    main()
