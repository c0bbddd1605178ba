#!/usr/bin/env python3
"""The load of a training run on a RAG service and a judge, without a model or a GPU.

    .venv/bin/python scripts/simulate_training_rewards.py --config recipes/full.yaml --rag_base_url http://...:8801
    .venv/bin/python scripts/simulate_training_rewards.py --steps 2 --variants clean,very_long,injection --json

Takes the recipe and all settings of a training line; of the training settings, `seed`, `num_generations`, `branches`
and `min_valid_reward_fraction` count. Without addresses it starts the embedded services. Every run asks anew, and
keeps nothing. Prints no text of rows or completions without --show_text, and never a key.

Exit code: 0 enough completions of every step got a reward; 2 bad input; 3 too few did, or the services failed; 130
interrupted. docs/SERVICES.md says more.
"""

import sys

from salesrl_trl.ground.command_line import parser_of
from salesrl_trl.ground.shutdown import end_tidily
from salesrl_trl.launch.settings_help import answer_help

if __name__ == "__main__":
    end_tidily()
    answer_help(sys.argv[1:], own=parser_of("simulate").format_help())
    from salesrl_trl.launch.preflight.simulation import main

    sys.exit(main())
