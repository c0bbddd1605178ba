"""The noise of a judge: which verdicts are asked for, and the figures from their scores."""

import random
from collections import Counter

import pytest

from salesrl_trl.judged.noise import MIN_CALLS, noise_of, samples
from salesrl_trl.types import DEFAULT_FORMAT, ActionFormat

ONE, TWO = {"fairness": "fairness"}, {"fairness": "fairness", "hallucination": "hallucination"}
FIVE = {f"rubric_{at}": "fairness" for at in range(5)}


@pytest.mark.parametrize("rubrics", [ONE, FIVE])
@pytest.mark.parametrize("calls", [MIN_CALLS, 100])
@pytest.mark.parametrize("of_groups", [False, True])
def test_every_input_is_asked_for_at_least_twice_and_in_both_orders(rubrics, calls, of_groups):
    planned = samples(rubrics, DEFAULT_FORMAT, calls, of_groups=of_groups)
    times = Counter((each.answer, each.candidate_first) for call in planned for each in call)
    assert {(len(call), sum(each.candidate_first for each in call)) for call in planned if of_groups} <= {(4, 2)}
    assert calls / 2 < len(planned) <= calls
    assert len(set(times.values())) == 1 and min(times.values()) >= 2
    assert {(answer, not first) for answer, first in times} == set(times)
    assert all(len({answer for answer, _ in times if answer[:2] == group}) >= 2 for group in {a[:2] for a, _ in times})


def test_actions_have_the_fields_of_the_run():
    own = ActionFormat(fields=("filters", "question"), query="question")
    action = samples(ONE, own, 32)[0][0].action
    assert [*action.fields] == ["filters", "question"]
    assert action.query == "bookkeeping course price, payment in parts"


QUALITY = (0.9, 0.6, 0.3, 0.2)


def scored(noise=0.0, gap=0.0, quality=QUALITY, calls=6400):
    """Verdicts of a judge with a known noise, and a known preference of the answer that stands first."""
    rng, planned, known = random.Random(1), samples(TWO, DEFAULT_FORMAT, calls), {}
    for [sample] in planned:
        known.setdefault(sample.answer, quality[len(known) % len(quality)])
        yield sample, known[sample.answer] + rng.gauss(0, noise) + (gap / 2 if sample.candidate_first else -gap / 2)


@pytest.mark.parametrize(("noise", "gap"), [(0.1, 0.0), (0.0, 0.2), (0.1, -0.2)])
def test_noise_order_and_spread_are_told_apart(noise, gap):
    found = noise_of(scored(noise, gap))
    assert found.repeat_sd == pytest.approx(noise, abs=0.005)
    assert found.order_gap == pytest.approx(gap, abs=0.01)
    variance = noise**2 + gap**2 / 4
    assert found.verdict_sd == pytest.approx(variance**0.5, abs=0.005)
    assert found.spread_sd == pytest.approx(0.3162, abs=0.01)  # of 0.9, 0.6, 0.3, 0.2
    assert found.share() == pytest.approx(variance / (variance + 0.1), abs=0.01)
    assert found.share(repeats=2) == pytest.approx(noise**2 / 2 / (noise**2 / 2 + 0.1), abs=0.01)


def test_noise_is_no_spread_between_equal_answers():
    found = noise_of(scored(noise=0.1, quality=(0.5,), calls=64))  # the means of 4 verdicts differ by 0.05
    assert found.spread_sd < 0.03 and found.share() > 0.9


def test_what_too_few_verdicts_can_not_show_is_none():
    assert noise_of([]).share() is None
    (one, *_) = scored(0.1)
    alone = noise_of([one])
    assert (alone.repeat_sd, alone.order_gap, alone.spread_sd, alone.share()) == (None, None, None, None)
    constant = noise_of(scored(quality=(0.5,)))
    assert constant.spread_sd == 0 and constant.share() is None
