"""Train keyed samples on every rank. Launched with several processes:

    python -m torch.distributed.run --nproc_per_node 2 tests/invariance/train_on_ranks.py POLICY URL OUT SETTINGS STEP

SETTINGS is JSON; STEP is where a checkpoint is saved, from which training under DeepSpeed then goes on once more. Then
it trains five steps with the weights split too. Each rank writes what happened to OUT, the first one also the weights
that came of it.
"""

import json
import os
import sys
from pathlib import Path

if __name__ == "__main__":
    import support.without_vllm  # noqa: F401 - before TRL

import torch
from accelerate.state import AcceleratorState
from support.keyed import StopAt, build_keyed, course_of


def main(policy, url, out, settings, step):
    rank = int(os.environ["RANK"])
    given = {**json.loads(settings), "save_strategy": "steps", "save_steps": int(step)}

    def build():
        return build_keyed(policy, url, Path(out, "run"), **given)

    trainer = build()
    assert trainer.accelerator.num_processes == int(os.environ["WORLD_SIZE"])
    distributed = trainer.accelerator.distributed_type.value
    told = {"distributed": distributed, "whole": course_of(trainer)}
    if rank == 0:
        torch.save(trainer.accelerator.unwrap_model(trainer.model).state_dict(), Path(out, "weights.pt"))
    if distributed == "DEEPSPEED":  # without it transformers loads to accelerate's "cpu:0", which torch does not know
        told["resumed"] = course_of(build(), resume_from=Path(out, "run", f"checkpoint-{step}"))
        AcceleratorState._reset_state()
        os.environ |= {"ACCELERATE_DEEPSPEED_ZERO_STAGE": "3", "ACCELERATE_DEEPSPEED_ZERO3_INIT": "true"}
        sharded = build_keyed(policy, url, Path(out, "sharded"), **{**given, "save_strategy": "no"})
        told["sharded"] = course_of(sharded, StopAt(5))
        told["first_weights"] = [each.rooms.first_weights for each in (trainer, sharded)]
    Path(out, f"rank{rank}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main(*sys.argv[1:])
