"""What an alarm of the judge's meter does, without judges: `tests/integration/test_judge_meter.py` has those."""

import random
from types import SimpleNamespace

import pytest
from accelerate import PartialState

from salesrl_trl.data.branches import Branches
from salesrl_trl.judged.meter import Written
from salesrl_trl.judged.meter_part import JudgeMeter
from salesrl_trl.reward.scorer import MeterSettings


@pytest.mark.parametrize(
    ("on_alarm", "since", "modes"),
    [
        ("warn", None, set()),
        ("stop", None, set()),
        ("second_judge", None, {"eval"}),  # evaluations have one judge in all of a run
        ("second_judge", 7, {"eval", "train"}),
        ("warn", 7, set()),  # resumed with another setting
    ],
)
def test_batches_that_begin_are_of_the_second_judge(on_alarm, since, modes):
    meter, loop = connected(on_alarm)
    meter.load_state_dict({} if since is None else {"second_since": since})
    assert loop.by_second == modes
    meter.load_state_dict({})  # another run, from its beginning
    assert loop.by_second == modes - {"train"}


def test_judges_whose_scores_are_unrelated_are_said_once(caplog):
    meter, _ = connected("warn")
    lot = random.Random(0)
    for _ in range(60):
        written = {place: Written(text="w", branch="all", group=0, score=lot.random()) for place in range(8)}
        asked = meter._plan([(written, {})], 8).asked
        meter._meter.add_scores({number: lot.random() for number in asked})
    assert ["in all, the two judges' scores" in record.message for record in caplog.records] == [True]


def connected(on_alarm):
    PartialState(cpu=True)  # for its logger
    reward = SimpleNamespace(names=SimpleNamespace(meter=MeterSettings(on_alarm=on_alarm, share=0.9)))
    loop = SimpleNamespace(give_up=lambda batches: None, reward=reward)
    branches, args = Branches(("all",)), SimpleNamespace(num_generations=2)
    meter = JudgeMeter()
    meter.connect(SimpleNamespace(reward_loop=loop, branches=branches, args=args))
    return meter, loop
