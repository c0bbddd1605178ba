"""How often a 95 % interval holds the mean: Student's t against a bootstrap of the rows.

    .venv/bin/python -m salesrl_trl.launch.evaluate --policy DIR DIR2 --output evaluation.json
    .venv/bin/python -m benchmarks.intervals evaluation.json [--draws 4000] [--seed 0]

Takes the rewards of an evaluation's rows, and the changes between its two policies, for all that can happen. Draws
samples of some rows from them. Prints the share of samples whose interval holds the mean of all rows: 0.95 is right,
less means an interval that is too narrow.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from salesrl_trl.ground.row_statistics import CONFIDENCE, SAME, critical

ROWS = (8, 16, 32, 64)
RESAMPLED = 1000


def coverage(values: Sequence[float], rows: int, draws: int, seed: int) -> tuple[float, float]:
    """The shares of samples whose interval holds the mean: of Student's t, and of a percentile bootstrap."""
    everything, generator = np.asarray(values), np.random.default_rng(seed)
    mean, tails = everything.mean(), ((1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2)
    within_t = within_bootstrap = 0
    for sample in generator.choice(everything, (draws, rows)):
        reach = critical(rows - 1) * sample.std(ddof=1) / np.sqrt(rows)
        within_t += abs(sample.mean() - mean) <= reach + SAME
        low, high = np.quantile(generator.choice(sample, (RESAMPLED, rows)).mean(axis=1), tails)
        within_bootstrap += low - SAME <= mean <= high + SAME
    return within_t / draws, within_bootstrap / draws


def main(argv: Sequence[str] | None = None) -> None:
    """Read, draw, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("evaluation", type=Path, help="file of `python -m salesrl_trl.launch.evaluate --output`")
    parser.add_argument("--draws", type=int, default=4000, help="samples for each number of rows")
    parser.add_argument("--seed", type=int, default=0, help="of the draws")
    arguments = parser.parse_args(argv)
    rewards = [row["rewards"] for row in json.loads(arguments.evaluation.read_text(encoding="utf-8"))["rows"]]
    for mode in rewards[0]["A"]:
        scored = [each for each in rewards if all(policy[mode] is not None for policy in each.values())]
        kinds = {f"A {mode}": [each["A"][mode] for each in scored]}
        if "B" in rewards[0]:
            kinds[f"B - A {mode}"] = [each["B"][mode] - each["A"][mode] for each in scored]
        for name, values in kinds.items():
            for rows in ROWS:
                shares = coverage(values, rows, arguments.draws, arguments.seed)
                print(f"{name:14} {rows:3} rows: Student's t {shares[0]:.3f}, bootstrap {shares[1]:.3f}", flush=True)


if __name__ == "__main__":
    main()
