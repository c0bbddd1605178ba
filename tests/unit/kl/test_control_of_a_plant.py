"""The controller against simulated training, many times over.

The plant answers as training does: a branch's KL moves towards drive / beta ** p with a time constant, some steps
late; the drive drifts and wanders (a reward that is learned pulls harder or less), and what a step measures is noisy.
"""

import functools
import math
import random
from statistics import fmean

import pytest

from salesrl_trl.kl.controller import BranchController, KLControl, WindowSettings
from salesrl_trl.kl.law import ControlLaw, KLTarget

TARGETS = {
    "fairness": KLTarget(beta=0.1, low=0.02, high=0.06),
    "hallucination": KLTarget(beta=0.3, low=0.08, high=0.15),
}
STEPS = 1000
WINDOW = 5
WINDOWS = WindowSettings(update_steps=WINDOW)
SETTLING = 40  # windows: 200 steps, in which a coefficient can move by a factor of 268 up and 666 down
RUNS = 200
FEW = 50
"""Runs where a mean is compared, not the worst of all."""


class Plant:
    """One branch. Its drive starts within a factor of 4.5 of the one whose KL is the band's centre."""

    def __init__(self, target, rng):
        centre = math.sqrt(target.low * target.high)
        self.rng = rng
        self.exponent = rng.uniform(0.7, 1.0)
        self.lag = rng.uniform(5, 40)  # steps
        self.delay = rng.randrange(0, 9)  # steps
        self.trend = rng.uniform(-0.0005, 0.001)  # per step: e^1 over a run at most
        self.drive = centre * target.beta**self.exponent * math.exp(rng.uniform(-1.5, 1.5))
        self.kl = 0.0
        self.betas = [target.beta] * (self.delay + 1)

    def step(self, beta):
        self.betas.append(beta)
        self.drive *= math.exp(self.rng.gauss(self.trend, 0.01))
        self.kl += (self.drive / self.betas[-1 - self.delay] ** self.exponent - self.kl) / self.lag
        return self.kl * math.exp(self.rng.gauss(0, 0.15))


def simulate(seed, law, targets=TARGETS, drive=1.0):
    """By branch: for each window whether its mean KL lay in the band; and every coefficient."""
    rng = random.Random(seed)
    control = KLControl(targets, law, WINDOWS)
    plants = [Plant(target, rng) for target in targets.values()]
    for plant in plants:
        plant.drive *= drive
    measured, betas = [], []
    for _ in range(STEPS):
        tokens = [rng.randrange(500, 2000) for _ in plants]
        kls = [plant.step(beta) for plant, beta in zip(plants, control.betas, strict=True)]
        control.observe([(kl * count, count) for kl, count in zip(kls, tokens, strict=True)])
        measured.append(kls)
        betas.append(control.betas)
    windows = [measured[start : start + WINDOW] for start in range(0, STEPS, WINDOW)]
    in_band = {
        branch: [target.contains(fmean(step[index] for step in window)) for window in windows]
        for index, (branch, target) in enumerate(targets.items())
    }
    return in_band, betas


@functools.cache
def shares(law, seeds=RUNS):
    """Share of windows in band after settling: by run, then by branch."""
    runs = [simulate(seed, law)[0] for seed in range(seeds)]
    return [{branch: fmean(windows[SETTLING:]) for branch, windows in run.items()} for run in runs]


def test_both_branches_enter_their_bands_and_stay_there():
    kept = shares(ControlLaw())
    worst = min(share for run in kept for share in run.values())
    print(f"\nshare of windows in band after settling: worst of {RUNS} runs {worst:.3f}, mean "
          + ", ".join(f"{branch} {fmean(run[branch] for run in kept):.3f}" for branch in TARGETS))  # fmt: skip
    assert worst >= 0.9


def test_a_fixed_coefficient_does_not():
    kept = shares(None, FEW)
    held = fmean(all(share >= 0.9 for share in run.values()) for run in kept)
    print(f"\nfixed: {held:.0%} of {FEW} runs keep both branches in band")
    assert held < 0.2


def test_the_bare_law_stays_less():
    """What recentring and the trend are for: without them KL waits at an edge, where noise puts it outside."""
    bare = shares(ControlLaw(recentre=0.0, trend_windows=0.0), FEW)
    full = shares(ControlLaw())[:FEW]
    means = [fmean(share for run in kept for share in run.values()) for kept in (bare, full)]
    print(f"\nmean share in band: bare law {means[0]:.3f}, as it is {means[1]:.3f}")
    assert means[1] > means[0] + 0.01


@pytest.mark.parametrize("steps", [50, 150, 300])
def test_a_slow_first_rise_costs_little_of_the_coefficient(steps):
    """A small learning rate takes a KL to its band in hundreds of steps, with a coefficient that suits it."""
    target = TARGETS["fairness"]
    left = []
    for seed in range(50):
        rng = random.Random(seed)
        branch = BranchController("fairness", target, ControlLaw(), WINDOWS)
        for step in range(steps):
            branch.observe(target.low * step / steps * math.exp(rng.gauss(0, 0.15)), 1)
        left.append(branch.beta / target.beta)
    print(f"\n{steps} steps to the band: {min(left):.2f} to {max(left):.2f} of the coefficient left")
    assert fmean(left) > 0.6


@pytest.mark.parametrize(("drive", "bound"), [(1e6, 1), (1e-6, 0)], ids=["too strong", "too weak"])
def test_a_target_out_of_reach_leaves_the_coefficient_at_its_bound(drive, bound):
    for seed in range(20):
        _, betas = simulate(seed, ControlLaw(), drive=drive)
        for index, target in enumerate(TARGETS.values()):
            least, most = target.bounds
            assert all(least <= step[index] <= most for step in betas)
            assert betas[-1][index] == target.bounds[bound]
