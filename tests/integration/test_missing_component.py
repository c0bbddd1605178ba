"""What a judge that fails for one completion of a group does to its advantage, through the trainer."""

import pytest
import torch
from support.loopback import VERDICT, action
from support.scripted import build_upstream_trainer

from salesrl_trl.ground.fencing import read_sections

EQUAL = tuple(action(query=f"course {index}") for index in range(8))
TWO_JUDGES = {"fairness": {"judge": 0.5, "judge_hallucination": 0.5}, "hallucination": {"judge": 1.0}}
ONE_GROUP = {"max_steps": 1, "num_generations": 8, "per_device_train_batch_size": 8}
FAILS = 7
"""The completion whose second judge fails; in a spread group it is the best one."""


def advantages(trainer):
    trainer.train()
    return torch.tensor(list(trainer._logs["advantages"]))


def index_of(user):
    return next(i for i in range(8) if f"course {i}" in read_sections(user)["action"])


def judge_by(score):
    """Both judges give a completion the same score; the second has none for the last completion."""

    def judge(system, user):
        index = index_of(user)
        second = "grounding" in system
        return 500 if second and index == FAILS else {**VERDICT, "candidate": score(index)}

    return judge


@pytest.fixture
def ours(scripted_trainer, services):
    def run(score, missing):
        services.judge_by(judge_by(score))
        chain = {"weights": TWO_JUDGES, "missing": missing}
        trainer = scripted_trainer(texts=EQUAL, chain=chain, min_valid_reward_fraction=0.25, **ONE_GROUP)
        trainer.train_dataset = trainer.train_dataset.select([0])
        return advantages(trainer)

    return run


@pytest.fixture
def upstream(tiny, tmp_path):
    """The same with TRL alone: a reward function for each judge, `None` where it failed."""

    def run(score):
        def first(completions, **_):
            return [0.5 * score(index) for index in range(8)]

        def second(completions, **_):
            return [None if index == FAILS else 0.5 * score(index) for index in range(8)]

        return advantages(build_upstream_trainer(tiny, [first, second], EQUAL, tmp_path / "upstream", **ONE_GROUP))

    return run


def equal(index):
    return 0.75


def spread(index):
    return 0.1 * (index + 1)


@pytest.mark.parametrize("missing", ["none", "reweight"])
def test_among_equal_answers_the_one_without_a_judge_has_no_advantage(ours, missing):
    values = ours(equal, missing)
    print(
        f"8 equal answers, one judge of two missing for the last ({missing}): {[round(x, 6) for x in values.tolist()]}"
    )
    assert values.abs().max() < 1e-6


def test_trls_own_sum_makes_it_by_far_the_worst(upstream):
    values = upstream(equal)
    print(f"the same in TRL alone: {[round(x, 3) for x in values.tolist()]}")
    assert values[FAILS] == pytest.approx(-2.47, abs=0.01)


def test_the_best_of_a_spread_group_stays_the_best_when_its_judge_is_missing(ours, upstream):
    values = ours(spread, "reweight")
    print(
        f"8 spread answers, the best one's second judge missing (reweight): {[round(x, 3) for x in values.tolist()]}"
    )
    print(f"the same in TRL alone: {[round(x, 3) for x in upstream(spread).tolist()]}")
    # scores 0.1 ... 0.8: mean 0.45, standard deviation sqrt(0.06) = 0.245, so (0.8 - 0.45) / 0.245 = 1.43
    assert values[FAILS] == pytest.approx(1.43, abs=0.01)
    assert values.argmax() == FAILS


def test_left_out_it_pulls_nobody(ours):
    values = ours(spread, "none")
    # of 0.1 ... 0.7 alone: mean 0.4, so the fourth is in the middle and the last, left out, has no advantage
    assert values[FAILS].abs() < 1e-6
    assert values[3].abs() < 1e-4
    assert values[6] > 0 > values[0]
