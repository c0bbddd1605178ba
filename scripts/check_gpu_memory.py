#!/usr/bin/env python3
"""The memory of a run on a card, by parts, before a model is loaded, and settings that take less.

    .venv/bin/python scripts/check_gpu_memory.py --model_name_or_path Qwen/Qwen2.5-7B-Instruct --card 80gb
    .venv/bin/python scripts/check_gpu_memory.py --config recipes/full.yaml --use_peft true --preset 40gb --card 40gb
    .venv/bin/python scripts/check_gpu_memory.py --model_name_or_path DIR --card 80gb --sharding zero2 --processes 8

Takes every setting of a recipe; default: recipes/full.yaml. Without --card it reads the card of this machine, and says
what is in use now and by which processes. `80gb` is 80e9 bytes, the least that cards of this name have.

Exit code: 0 it fits; 2 bad input; 3 it does not fit.
"""

import sys

from salesrl_trl.ground.shutdown import end_tidily

if __name__ == "__main__":
    end_tidily()
    from salesrl_trl.preflight.gpu_memory import main  # takes seconds

    sys.exit(main(__doc__))
