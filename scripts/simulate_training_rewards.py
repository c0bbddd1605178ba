#!/usr/bin/env python3
"""The load of a training run on a RAG service and a judge, without a model: the short way into a preflight.

    .venv/bin/python scripts/simulate_training_rewards.py --config recipes/full.yaml --rag.base_url http://...:8801
    .venv/bin/python scripts/simulate_training_rewards.py --load 2 --num_generations 24 --json

Takes the recipe and all settings of a training line. `--load N` is the number of batches. Without addresses it starts
the embedded services. Every run asks anew, and keeps nothing. Prints no text of rows or completions.

Exit code: 0 enough completions of every step got a reward; 2 bad input, too few did, or the services failed.
See docs/how-to/preflight.md.
"""

import sys

from salesrl_trl.launch.preflight.__main__ import main
from salesrl_trl.launch.process import end_tidily

if __name__ == "__main__":
    end_tidily()
    sys.exit(main(["--stage", "judge", "--calls", "0", "--load", "5", *sys.argv[1:]]))
