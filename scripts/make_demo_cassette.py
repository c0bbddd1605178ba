#!/usr/bin/env python3
"""Makes the built-in record of the demo's services, which `--replay demo` takes its rewards from.

    .venv/bin/python scripts/make_demo_cassette.py             # about 5 minutes on two CPU cores
    .venv/bin/python scripts/make_demo_cassette.py RUN [RUN ...]

Without runs it makes three, with the services: the debug recipe, and completions of every row by the policy before it
and after it. Of each row a few completions are kept: those whose rewards differ most, and of equal rewards the
frequent texts. What a replay does not need is left out: prompts, answers, verdicts, calls and seconds. Run it after
every change of the demo: its rows, its documents, its judge, its policy. `tests/integration/test_record.py` says when
rows, documents or the prompt have changed.
"""

import argparse
import gzip
import hashlib
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence
from contextlib import closing
from itertools import islice
from pathlib import Path

from salesrl_trl.demo.packaged import FILE
from salesrl_trl.ground.shutdown import end_tidily
from salesrl_trl.record.reader import Recorded, as_json, recorded
from salesrl_trl.record.writer import add_text, insert, opened

ROOT = Path(__file__).resolve().parents[1]
KEPT = 4
"""Completions of a row."""
EVERY_ROW = (
    *("--mode", "rollouts", "--per_device_train_batch_size", "192", "--max_steps", "40"),
    *("--quick_eval_steps", "0", "--held_out_eval", "false"),
)
"""Settings of one pass over the demo's 960 rows."""
NAMES = ("step", "mode", "row", "branch", "text", "digest", "outcome", "reason", "reward", "reference_reward")
"""Columns that are kept as they are."""


def main() -> None:
    """Write the cassette."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="*", type=Path, help="recorded runs of the demo; default: new ones")
    parser.add_argument("--out", type=Path, default=FILE, help="file to write")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        runs = given.runs or made_runs(Path(folder))
        completions = [each for run in runs for each in recorded(run) if each.reward is not None]
        kept = chosen(completions)
        given.out.write_bytes(packed(kept, Path(folder) / "cassette.sqlite"))
    print(f"{given.out}: {len(kept)} of {len(completions)} completions, {given.out.stat().st_size} bytes")


def made_runs(folder: Path) -> list[Path]:
    """The debug recipe, and the policies before and after it on every row."""
    runs: dict[str, tuple[str, ...]] = {
        "trained": (),
        "before": EVERY_ROW,
        "after": (*EVERY_ROW, "--model_name_or_path", str(folder / "trained")),
    }
    for name, settings in runs.items():
        command = [sys.executable, "recipes/debug.py", *settings, "--output_dir", str(folder / name)]
        subprocess.run(command, cwd=ROOT, check=True)
    return [folder / name for name in runs]


def chosen(completions: Sequence[Recorded]) -> list[Recorded]:
    """Of each row `KEPT` completions with different texts."""
    times = Counter(each.digest for each in completions)
    rows: dict[str, dict[bytes, Recorded]] = defaultdict(dict)
    for each in sorted(completions, key=lambda each: (-times[each.digest], each.text)):
        rows[each.row].setdefault(each.digest, each)
    return [each for _, found in sorted(rows.items()) for each in islice(spread(found.values()), KEPT)]


def spread(completions: Collection[Recorded]) -> Iterator[Recorded]:
    """Lowest reward, highest, next to the lowest, ... and then the same again with other texts."""
    by_reward: dict[float | None, list[Recorded]] = defaultdict(list)
    for each in completions:
        by_reward[each.reward].append(each)
    levels = [by_reward[reward] for reward in sorted(by_reward, key=lambda reward: reward or 0.0)]
    order = [level for pair in zip(levels, reversed(levels), strict=True) for level in pair][: len(levels)]
    while any(order):
        yield from [level.pop(0) for level in order if level]


def documents() -> str:
    """A hash of the demo's documents."""
    return hashlib.sha256((ROOT / "salesrl_trl" / "demo" / "rows" / "knowledge.jsonl").read_bytes()).hexdigest()


def packed(completions: Sequence[Recorded], path: Path) -> bytes:
    """The record of these completions, compressed."""
    with closing(opened(path, {"documents": documents()})) as file:
        with file:
            left_out = add_text(file, as_json("left out"))
            for place, each in enumerate(completions):
                values = {name: getattr(each, name) for name in NAMES} | {
                    "batch": 0, "place": place, "prompt_group": 0, "prompt": left_out, "parts": as_json(each.parts),
                    "functions": "{}", "seconds": "{}", "staleness": 0, "time": 0.0,
                }  # fmt: skip
                insert(file, "completions", values)
        file.execute("PRAGMA journal_mode = DELETE")  # without files beside it
        file.execute("VACUUM")
    return gzip.compress(path.read_bytes(), mtime=0)


if __name__ == "__main__":
    end_tidily()
    main()
