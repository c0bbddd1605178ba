"""The cost of a KL coefficient for each branch: step time of this trainer beside stock TRL's with one coefficient.

    .venv/bin/python -m benchmarks.kl [--shape 0.5b|7b|demo|tiny] [--updates 5] [--rounds 10] [--json FILE]

- Both trainers train the same random weights on the same completions of random tokens. Neither generates, and neither
  waits for a reward: both would only hide a difference. A step is the log-probs of policy and reference, the loss, the
  backward pass and the optimizer.
- Blocks of updates take turns: stock, branches, branches, stock. These four are a round.
- Each update is timed with the device synchronised at its end. The first update of a block is not counted.
- The figure is the median, over rounds, of the round's time with branches over its time with stock TRL.
"""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import set_seed

from benchmarks.common import Clock, build_trainer, device, ratio_line, ratios, run_in_rounds, save_model

ARMS = ("stock", "branches")


def measure(shape: str, updates: int, rounds: int) -> dict[str, Any]:
    """Step times by arm, and their ratio."""
    set_seed(0)
    seconds: dict[str, list[list[float]]] = {arm: [] for arm in ARMS}
    with tempfile.TemporaryDirectory() as scratch:
        model = save_model(shape, Path(scratch, "model"), device())
        clocks = {arm: Clock() for arm in ARMS}
        trainers = {
            arm: build_trainer(arm == "branches", shape, model, f"{scratch}/{arm}", updates, clocks[arm])
            for arm in ARMS
        }
        for trainer in trainers.values():  # once to warm up
            trainer.train()
        for _ in range(rounds):
            for times in seconds.values():
                times.append([])
            for arm in (*ARMS, *reversed(ARMS)):
                clocks[arm].seconds.clear()
                trainers[arm].train()
                seconds[arm][-1] += clocks[arm].seconds[1:]
    return {**ratios(seconds, "branches", "stock"), "seconds": seconds}


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print."""
    print(ratio_line(run_in_rounds(argv, __doc__, measure, "tiny", 5)))


if __name__ == "__main__":
    main()
