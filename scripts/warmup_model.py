#!/usr/bin/env python3
"""Fill the caches of a recipe's start: the model in the page cache, compiled code and CUDA graphs' sizes on disk.

    python scripts/warmup_model.py --model_name_or_path DIR                         # for recipes/full.yaml
    python scripts/warmup_model.py --config recipes/fast_load.yaml --model_name_or_path DIR --use_peft true
    python scripts/warmup_model.py --model_name_or_path DIR --shapes 64x4096 16x2048

Every setting of a run is accepted. It starts as a run does and trains one step, with a reward that asks no service.
The folder `compile_cache_dir` then holds what was compiled. It may be copied to another machine with the same GPUs and
packages. Several processes: `accelerate launch scripts/warmup_model.py ...`, with one shape.
"""

from pathlib import Path

from salesrl_trl.run.launch import end_tidily

if __name__ == "__main__":
    end_tidily()
    from salesrl_trl.preflight.warming import main  # takes seconds

    main(Path(__file__).parents[1] / "recipes" / "full.yaml")
