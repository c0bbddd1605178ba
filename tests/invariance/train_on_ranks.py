"""Train keyed samples on every rank. Launched with several processes:

    python -m torch.distributed.run --nproc_per_node 2 tests/invariance/train_on_ranks.py POLICY URL OUT SETTINGS STEP

SETTINGS is JSON; STEP is where a checkpoint is saved, from which training then goes on once more. Without DeepSpeed
the last rank is asked to stop on the way, and both go on from there. With it they train five steps with the weights
split too. Each rank writes what happened to OUT, the first one also the weights that came of it.
"""

import json
import os
import shutil
import sys
from pathlib import Path

import torch
from accelerate.state import AcceleratorState
from support.keyed import StopAt, build_keyed, course_of
from transformers import TrainerCallback

from salesrl_trl.errors import RunStopped


class AskedToStop(TrainerCallback):
    """In the middle of a step, this rank is asked to stop."""

    def __init__(self, trainer, step, is_asked):
        self.trainer, self.step, self.is_asked = trainer, step, is_asked

    def on_substep_end(self, args, state, control, **_):
        if self.is_asked and state.global_step == self.step:
            self.trainer.request_stop("SIGTERM")


def main(policy, url, out, settings, step):
    rank = int(os.environ["RANK"])
    given = {**json.loads(settings), "save_strategy": "steps", "save_steps": int(step)}

    def build():
        return build_keyed(policy, url, Path(out, "run"), **given)

    trainer = build()
    assert trainer.accelerator.num_processes == int(os.environ["WORLD_SIZE"])
    distributed = trainer.accelerator.distributed_type.value
    told = {"distributed": distributed, "whole": course_of(trainer)}
    assert trainer.components.passes.prompts.is_on
    if rank == 0:
        torch.save(trainer.accelerator.unwrap_model(trainer.model).state_dict(), Path(out, "weights.pt"))
    checkpoint = Path(out, "run", f"checkpoint-{step}")
    if distributed != "DEEPSPEED":
        for other in checkpoint.parent.glob("checkpoint-*"):
            if rank == 0 and other != checkpoint:
                shutil.rmtree(other)
        asked = build()
        try:
            course_of(asked, AskedToStop(asked, int(step) + 4, rank == 1), resume_from=checkpoint)
        except RunStopped as error:
            told["stopped"] = str(error)
        told["resumed"] = course_of(build(), resume_from="auto")
    else:
        told["resumed"] = course_of(build(), resume_from=checkpoint)
        AcceleratorState._reset_state()
        os.environ |= {"ACCELERATE_DEEPSPEED_ZERO_STAGE": "3", "ACCELERATE_DEEPSPEED_ZERO3_INIT": "true"}
        sharded = build_keyed(policy, url, Path(out, "sharded"), **{**given, "save_strategy": "no"})
        told["sharded"] = course_of(sharded, StopAt(5))
        assert sharded.components.passes.prompts.is_on
        told["first_weights"] = [each.components.policy.first_weights for each in (trainer, sharded)]
    Path(out, f"rank{rank}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main(*sys.argv[1:])
