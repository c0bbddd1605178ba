"""The packaged law against simulated training, many times over: benchmarks/kl_plant.py has the plant."""

import functools
import math
import random
from statistics import fmean, median

import pytest

from benchmarks.kl_laws import FactorLaw, ZieglerLaw
from benchmarks.kl_plant import TARGETS, Branch, Plant, run
from benchmarks.kl_simulate import courses, fresh, in_band, main, out_of_reach, too_high, undershoot, until_back
from salesrl_trl.kl.controller import BranchController, WindowSettings
from salesrl_trl.kl.law import AdaptiveLaw, KLTarget

RUNS = 60
WINDOWS = 60
MEASURED = {"floor": 0.087, "drive": 0.0213}
"""Of kl_plant's docstring."""


@functools.cache
def back(law):
    return courses(law, too_high, RUNS, WINDOWS)


def of_measured(law, beta, low, high, windows, **given):
    targets = {branch: KLTarget(beta=beta, low=low, high=high) for branch in TARGETS}
    plant = Plant([Branch(**MEASURED, **given) for _ in targets], random.Random(1))
    return run(law, plant, windows, targets)["fairness"]


def test_the_plant_does_what_was_seen_for_real_under_the_law_of_then():
    held = of_measured(FactorLaw(), 0.1, 0.02, 0.06, 30, kl=0.17)
    assert 0.09 < held.true[-1] < 0.13  # 0.11 after 150 updates
    assert 1 < held.betas[-1] < 6  # 1.75
    too_far = of_measured(FactorLaw(), 0.03, 0.15, 0.3, 30)
    assert max(too_far.true) > 0.5
    assert too_far.true[20] > 0.2  # it comes back slowly
    assert of_measured(None, 0.03, 0.15, 0.3, 30).true[-1] == pytest.approx(0.8, rel=0.2)
    assert 0.2 < of_measured(None, 0.1, 0.1, 0.2, 32).true[-1] < 0.4  # 0.3


def test_a_kl_that_is_too_high_comes_back_sooner_than_under_the_laws_before_it():
    times = {
        law: median(until_back(*each) for each in back(law)) for law in (AdaptiveLaw(), FactorLaw(), ZieglerLaw())
    }
    print("\n" + ", ".join(f"{type(law).__name__} {windows:g} windows" for law, windows in times.items()))
    packaged, *others = times.values()
    assert packaged < min(others)


def test_it_then_stays_and_seldom_falls_below_the_band():
    shares = [in_band(*each) for each in back(AdaptiveLaw())]
    under = fmean(undershoot(*each) > 0 for each in back(AdaptiveLaw()))
    print(f"\nin band {fmean(shares):.3f}, worst {min(shares):.3f}; below it in {under:.3f} of the runs")
    assert fmean(shares) > 0.96
    assert min(shares) > 0.7
    assert under < 0.1
    assert fmean(shares) > fmean(in_band(*each) for each in back(FactorLaw()))


def test_a_fresh_policy_ends_in_its_band_and_with_a_fixed_coefficient_does_not():
    last = {
        law: fmean(TARGETS[branch].contains(course.true[-1]) for branch, course in courses(law, fresh, RUNS, 120))
        for law in (AdaptiveLaw(), None)
    }
    print(f"\nin band after 120 windows: {last}")
    assert last[AdaptiveLaw()] > 0.95
    assert last[None] < 0.6


@pytest.mark.parametrize("slower", [0.3, 2.0])
def test_a_policy_that_answers_faster_or_slower_is_held_too(slower):
    def plant(seed):
        made = too_high(seed)
        for branch in made.branches:
            branch.rise, branch.back = branch.rise * slower, branch.back * slower
        return made

    shares = [in_band(*each) for each in courses(AdaptiveLaw(), plant, 30, 90)]
    print(f"\n{slower} x the time: {fmean(shares):.3f} in band")
    assert fmean(shares) > 0.9


@pytest.mark.parametrize("steps", [50, 150, 300])
def test_a_slow_first_rise_costs_little_of_the_coefficient(steps):
    """A small learning rate takes a KL to its band in hundreds of steps, with a coefficient that suits it."""
    target = TARGETS["fairness"]
    left = []
    for seed in range(50):
        rng = random.Random(seed)
        branch = BranchController("fairness", target, AdaptiveLaw(), WindowSettings(update_steps=5))
        for step in range(steps):
            branch.observe(target.low * step / steps * math.exp(rng.gauss(0, 0.15)), 1)
        left.append(branch.beta / target.beta)
    print(f"\n{steps} steps to the band: {min(left):.2f} to {max(left):.2f} of the coefficient left")
    assert fmean(left) > 0.6


@pytest.mark.parametrize("drive", [1e6, 1e-6], ids=["too strong", "too weak"])
def test_a_drive_out_of_reach_is_said_or_leaves_the_coefficient_at_its_lower_bound(drive):
    for seed in range(20):
        plant = fresh(seed)
        for branch in plant.branches:
            branch.drive *= drive
        for name, course in run(AdaptiveLaw(), plant, 120).items():
            least, most = TARGETS[name].bounds
            assert all(least <= beta <= most for beta in course.betas)
            if drive < 1:
                assert course.betas[-1] == least
            else:
                assert course.betas[-1] > 10 * course.betas[0]
                assert course.noticed is not None


def test_a_seed_gives_the_same_run():
    first, second = (run(AdaptiveLaw(), out_of_reach(5), 30) for _ in range(2))
    assert first == second
    assert first != run(AdaptiveLaw(), out_of_reach(6), 30)


def test_the_bench_prints_a_table_of_all_laws(capsys):
    main(["--runs", "2", "--windows", "12"])
    title, _, *rows = (line for line in capsys.readouterr().out.splitlines() if line.startswith("|"))
    assert [row.count("|") for row in rows] == [title.count("|")] * 5
    assert rows[-1].startswith("| packaged")
