"""What an alarm of the judge's meter does, without judges: `tests/integration/test_judge_meter.py` has those."""

from types import SimpleNamespace

import pytest
from accelerate import PartialState

from salesrl_trl.data.branches import Branches
from salesrl_trl.errors import ConfigError
from salesrl_trl.judged.meter_part import JudgeMeter
from salesrl_trl.launch.reward_config import RewardConfig
from salesrl_trl.reward.scorer import MeterSettings

JUDGES = [{"name": name, "base_url": "http://j/v1", "model": "m"} for name in ("first", "other")]
METER = {"second": "other", "on_alarm": "second_judge"}


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
    PartialState(cpu=True)  # for its logger
    reward = SimpleNamespace(names=SimpleNamespace(meter=MeterSettings(on_alarm=on_alarm)))
    loop = SimpleNamespace(give_up=lambda batches: None, reward=reward)
    branches, args = Branches(("all",)), SimpleNamespace(num_generations=2)
    meter = JudgeMeter()
    meter.connect(SimpleNamespace(reward_loop=loop, branches=branches, args=args))
    meter.load_state_dict({} if since is None else {"second_since": since})
    assert loop.by_second == modes
    meter.load_state_dict({})  # another run, from its beginning
    assert loop.by_second == modes - {"train"}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"judge_providers": JUDGES, "judge_meter": {"on_alarm": "second_judge"}}, "second"),
        ({"judge_providers": JUDGES[:1], "judge_meter": METER}, "Expected one of them"),
        ({"judge_providers": JUDGES[1:], "judge_meter": METER}, "another one with a weight"),
        ({"judge_providers": JUDGES, "judge_meter": METER, "reward_funcs": ["my.function"]}, "no judge is asked"),
        ({"judge_providers": JUDGES, "judge_meter": METER, "replay": "runs/first"}, "nobody can ask a record"),
        ({"judge_providers": JUDGES, "judge_meter": {**METER, "on_alarm": "second"}}, "second_judge"),
    ],
    ids=["no second", "unknown second", "no first", "own functions", "a record", "unknown action"],
)
def test_it_is_refused_where_it_cannot_work(settings, words):
    with pytest.raises(ConfigError, match=words):
        RewardConfig(**settings)
