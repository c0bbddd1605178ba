"""The judge's meter on every rank. Started with several processes: POLICY OUT.

The judge likes a word that more and more completions have, and the second judge does not. Each rank writes to OUT
what was asked for the meter there, and of each batch whether the second judge scored it.
"""

import json
import os
import random
import sys
from pathlib import Path

from support.scripted import build_trainer, default_rows, steps_of

from salesrl_trl.names import BY_SECOND_JUDGE, JUDGE_ALARMS
from salesrl_trl.reward.scorer import METER, MeterSettings, RewardNames, Scorer
from salesrl_trl.types import Outcome, Reward

BATCH, STEPS, ONSET = 8, 45, 25  # completions of each rank


class Liking(Scorer):
    """The first judge, and for the meter the second one."""

    def __init__(self):
        super().__init__()
        self.asked = 0  # for the meter
        self.judges = {}  # by batch: whether the second one scored its completions

    @property
    def names(self):
        meter = MeterSettings(share=0.25, on_alarm="second_judge")
        return RewardNames(functions={"liking": "liking"}, components=("judge",), meter=meter)

    async def score(self, sample, stages):
        is_asked = METER in sample.row
        self.asked += is_asked
        if not is_asked:
            self.judges.setdefault(sample.batch, set()).add(sample.by_second)
        lot = random.Random(f"{sample.text} {is_asked}")
        score = random.Random(sample.text).choice((0.2, 0.4)) + lot.uniform(-0.08, 0.08) + 0.1
        score += 0.4 * (not is_asked and not sample.by_second and sample.text.endswith("online"))
        return Reward(outcome=Outcome.OK, value=score, components={"judge": score})


def main(policy, out):
    rank, reward = os.environ["RANK"], Liking()
    lot = random.Random(rank)
    words = [" online" * (lot.random() < min(max((at // BATCH - ONSET) / 10, 0), 0.8)) for at in range(BATCH * STEPS)]
    texts = tuple(f"course {rank} {at}{word}" for at, word in enumerate(words))
    trainer = build_trainer(
        policy, reward, texts, default_rows(), Path(out, "run"), max_steps=STEPS, num_generations=8,
        per_device_train_batch_size=BATCH, ddp_backend="gloo",
    )  # fmt: skip
    trainer.train()
    trainer.finish()
    told = {
        "second": reward.asked,
        "judges": [sorted(judges) for judges in reward.judges.values()],
        "logged": [[entry[JUDGE_ALARMS], entry[BY_SECOND_JUDGE]] for entry in steps_of(trainer)],
        "tags": [sorted(name for name in entry if name.startswith(METER)) for entry in steps_of(trainer)],
    }
    Path(out, f"rank{rank}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main(*sys.argv[1:])
