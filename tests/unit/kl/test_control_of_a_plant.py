"""The packaged law against simulated training, many times over: benchmarks/kl_plant.py has the plant."""

import functools
import math
from statistics import fmean

import pytest

from benchmarks.kl_laws import FactorLaw
from benchmarks.kl_plant import TARGETS, run
from benchmarks.kl_simulate import courses, fresh, in_band, too_high, undershoot
from salesrl_trl.kl.law import AdaptiveLaw

RUNS = 30
WINDOWS = 60


@functools.cache
def back(law):
    return courses(law, too_high, RUNS, WINDOWS)


def test_it_then_stays_and_seldom_falls_below_the_band():
    shares = [in_band(*each) for each in back(AdaptiveLaw())]
    under = fmean(undershoot(*each) > 0 for each in back(AdaptiveLaw()))
    assert fmean(shares) > 0.94
    assert min(shares) > 0.7
    assert under < 0.25
    assert fmean(shares) > fmean(in_band(*each) for each in back(FactorLaw()))


def test_a_fresh_policy_ends_in_its_band_and_with_a_fixed_coefficient_does_not():
    last = {
        law: fmean(TARGETS[branch].contains(course.true[-1]) for branch, course in courses(law, fresh, RUNS, 120))
        for law in (AdaptiveLaw(), None)
    }
    assert last[AdaptiveLaw()] > 0.95
    assert last[None] < 0.6


@pytest.mark.parametrize(
    ("given", "least"), [({"slower": 0.25}, 0.95), ({"slower": 4.0}, 0.9), ({"noisier": 2.0}, 0.8)]
)
def test_policies_it_was_not_tuned_on_are_held_too_and_not_said_to_stall(given, least):
    windows = 60 * max(1, round(given.get("slower", 1.0)))
    found = courses(AdaptiveLaw(), functools.partial(too_high, **given), 20, windows)
    share = fmean(in_band(*each) for each in found)
    said = fmean(course.noticed is not None for _, course in found)
    assert share > least
    assert said < 0.05


def test_a_drive_that_grows_over_hundreds_of_updates_does_not_carry_the_kl_past_its_band():
    """A small learning rate. The coefficient falls before the KL has risen, and must be back in time."""
    highest = []
    for seed in range(20):
        plant = fresh(seed)
        for branch in plant.branches:
            branch.drive, branch.drift = branch.drive / 30, math.log(30) / 300
        highest += [
            max(course.true[:60]) / TARGETS[name].high for name, course in run(AdaptiveLaw(), plant, 60).items()
        ]
    assert fmean(each < 1.3 for each in highest) > 0.9
