"""A recorded run and its replay on every rank. Started with several processes: POLICY OUT.

Each completion has a random number for its reward, another one on each rank, and completions repeat. Each rank writes
to OUT what the runs earned, and whether they ended with the same weights.
"""

import json
import os
import random
import sys
from pathlib import Path

import torch
from support.scripted import build_trainer, default_rows

from salesrl_trl.parts.recorder import RecorderPart
from salesrl_trl.recording.schema import record_file
from salesrl_trl.recording.writer import Recorder
from salesrl_trl.reward.functions import per_completion
from salesrl_trl.reward.replay import ReplayReward


def main(policy, out):
    rank = int(os.environ["RANK"])
    numbers = random.Random(rank)

    @per_completion
    def chance(prompt, completion):
        return numbers.random()

    def train(name, reward):
        recorder = Recorder(record_file(Path(out, name), rank), meta={"run": name})
        trainer = build_trainer(
            policy, reward, ("one", "two", "one"), default_rows(), Path(out, name), max_steps=4, ddp_backend="gloo",
            parts=[RecorderPart(recorder)], kl_law="fixed",
        )  # fmt: skip
        trainer.train()
        trainer.finish()
        weights = torch.cat([each.detach().flatten() for each in trainer.model.parameters()])
        return weights, [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]

    first, earned = train("first", chance)
    again, earned_again = train("again", ReplayReward(chance, Path(out, "first"), "fail", rank=rank))
    told = {"earned": earned, "again": earned_again, "same_weights": torch.equal(first, again)}
    Path(out, f"rank{rank}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main(*sys.argv[1:])
