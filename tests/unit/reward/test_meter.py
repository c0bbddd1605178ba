"""The statistics of the judge's meter on simulated policies: what it finds, how soon, and what it leaves alone."""

import math
import random

import pytest

from benchmarks.meter import KINDS, WORLDS, simulate
from salesrl_trl.judged.meter import Alarm, Meter, Rise, Written
from salesrl_trl.reward.scorer import MeterSettings

STEPS, BATCH, SHARE = 400, 64, 0.02


@pytest.mark.parametrize("kind", KINDS)
def test_a_planted_taste_is_found_within_20_steps_of_its_onset_by_its_name(kind):
    alarms, onset, calls = simulate(1, 150, kind=kind, batch=BATCH, share=SHARE)
    if kind == "word":
        alarm = next(alarm for _, alarm in alarms)
        assert "online" in alarm.what[1] and "online" in alarm.example
        assert alarm.rise.worth > 0.2  # the judge gives 0.4; scores end at 1, which takes some of it
        assert alarm.confirmed < 0.1
    assert onset - 5 <= alarms[0][0] <= onset + 20  # at the onset 1 of 8 completions has it: it may be seen before
    assert calls <= SHARE * 150 * BATCH


@pytest.mark.parametrize("world", ["a noisier second judge", "longer is better, and learned"])
def test_an_honest_judge_raises_no_alarm_in_400_steps(world):
    alarms, _, calls = simulate(1000, STEPS, batch=BATCH, share=SHARE, **WORLDS[world])
    assert alarms == []
    assert 0 < calls <= SHARE * STEPS * BATCH


def test_verdicts_that_failed_are_no_numbers():
    meter, lot = Meter(MeterSettings(share=0.5)), random.Random(1)
    for _ in range(40):
        written = [Written(text=f"w{place}", branch="all", group=0, score=lot.random()) for place in range(8)]
        asked = meter.add(written, 8)
        assert asked
        meter.add_scores(dict.fromkeys(asked, None))
    assert math.isnan(meter.agreement("all"))
    assert meter.alarms == []


def test_the_agreement_is_that_of_the_completions_of_a_branch():
    meter, lot = Meter(MeterSettings(share=0.9)), random.Random(1)
    seconds = {"liked": lambda score: score, "turned": lambda score: 1 - score}
    for _ in range(20):
        scores = [(branch, lot.random()) for branch in seconds for _ in range(8)]
        written = [Written(text="w", branch=branch, group=0, score=score) for branch, score in scores]
        asked = meter.add(written, len(written)).items()
        meter.add_scores({number: seconds[scores[place][0]](scores[place][1]) for number, place in asked})
    assert meter.agreement("liked") == pytest.approx(1.0) and meter.agreement("turned") == pytest.approx(-1.0)
    assert [meter.is_unrelated(branch) for branch in seconds] == [False, True]


def test_a_phrase_that_may_quote_a_customer_is_shown_only_if_it_may_be():
    alarm = Alarm(what=("phrase", "jane doe"), rise=Rise(0.1, 0.5, 0.2), confirmed=0.0, example="I am jane")
    assert "jane" not in alarm.described(with_text=False)
    assert "jane doe" in alarm.described(with_text=True) and "I am jane" in alarm.described(with_text=True)
