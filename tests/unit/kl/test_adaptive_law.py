"""Properties of the packaged law: what holds for any KL, coefficient and course."""

import math
import random

import pytest

from benchmarks.kl_plant import TARGETS
from benchmarks.kl_simulate import out_of_reach
from salesrl_trl.kl.branched import BranchController, KLControl, WindowSettings
from salesrl_trl.kl.law import (
    ANSWER,
    FIRST_STEP,
    NOTICE,
    AdaptiveLaw,
    KLTarget,
    Window,
)

TARGET = KLTarget(beta=0.1, low=0.02, high=0.08)  # centre 0.04
OPEN = KLTarget(beta=0.1, low=0.0, high=0.08)
KLS = (-0.5, 0.0, 1e-9, 1e-3, 0.01, 0.02, 0.04, 0.05, 0.08, 0.1, 0.3, 5.0, 1e30)


def courses(number=50, windows=40):
    """Courses of a wandering KL with ragged windows, by seed: (KL, tokens) of each window."""
    for seed in range(number):
        rng = random.Random(seed)
        kl, course = TARGET.high * rng.uniform(0.05, 5), []
        for _ in range(windows):
            kl *= math.exp(rng.gauss(0, 0.3))
            course.append((kl, rng.randrange(1, 3000)))
        yield course


def after(course, law=None, target=TARGET):
    law, beta, state = law or AdaptiveLaw(), target.beta, {}
    for kl, tokens in course:
        beta, state = law.move(Window(target=target, beta=beta, kl=kl, tokens=tokens), state)
        beta = min(max(beta, target.bounds[0]), target.bounds[1])
    return beta, state


def move(kl, beta, state, tokens=1000.0, target=TARGET):
    return AdaptiveLaw().move(Window(target=target, beta=beta, kl=kl, tokens=tokens), state)[0]


def test_a_higher_kl_never_gives_a_lower_coefficient():
    for course in courses():
        beta, state = after(course)
        moves = [move(kl, beta, state) for kl in KLS]
        assert moves == sorted(moves)
        assert moves[0] < beta < moves[-1]


@pytest.mark.parametrize("target", [TARGET, OPEN], ids=["band", "band without a lower edge"])
@pytest.mark.parametrize("max_step", [1.1, 1.5, 3.0])
def test_a_step_is_bounded_whatever_the_kl(max_step, target):
    law = AdaptiveLaw(max_step=max_step)
    for course in courses(20):
        beta, state = after(course, law, target)
        for kl in KLS:
            for tokens in (1, 10**9):
                factor = law.move(Window(target=target, beta=beta, kl=kl, tokens=tokens), state)[0] / beta
                assert 1 / max_step <= factor * (1 + 1e-12)
                assert factor <= max_step * (1 + 1e-12)


def test_it_does_not_wind_up_at_a_bound():
    left = []
    for windows in (20, 40, 200):
        branch = BranchController(
            "a", KLTarget(beta=0.1, low=0.02, high=0.08, beta_max=0.2), AdaptiveLaw(), WindowSettings(update_steps=1)
        )
        for _ in range(windows):
            branch.observe(1000 * 0.5, 1000)
        assert branch.beta == 0.2
        waited = 0
        while branch.beta == 0.2:
            branch.observe(1000 * 0.03, 1000)
            waited += 1
        left.append(waited)
    assert left == [1, 1, 1]


def test_the_first_move_brings_a_rise_that_will_pass_the_band_to_its_centre():
    """One more window of this growth leads from 0.06 to 0.1, 2.5 times the centre."""
    beta, state = after([(1e-4, 1000), (0.02, 1000)])
    assert beta == 0.1
    assert move(0.06, beta, state) == pytest.approx(0.1 * 2.5 ** (1 / ANSWER))
    assert move(0.045, beta, state) == 0.1  # 0.07 lies in the band
    assert move(1.0, beta, state) == pytest.approx(0.1 * FIRST_STEP)
    _, moved_on = AdaptiveLaw().move(Window(target=TARGET, beta=beta, kl=0.06, tokens=1000.0), state)
    assert move(0.12, beta, moved_on) <= 0.2  # it is made once


def test_a_fresh_policys_coefficient_stays_while_its_kl_rises_to_the_band():
    rise = [(1e-4, 1000), (1e-3, 1000), (5e-3, 1000), (0.01, 1000)]
    assert after(rise)[0] == 0.1
    assert after([*rise, (0.009, 1000)])[0] == 0.1
    assert after([*rise, (0.009, 1000), (0.009, 1000)])[0] < 0.1


def test_a_band_out_of_reach_is_said_with_what_to_change_and_control_goes_on():
    control = KLControl(TARGETS, AdaptiveLaw(), WindowSettings(update_steps=5))
    plant = out_of_reach(0)
    while not control.branches[0].notice:
        control.observe(plant.step(control.betas))
    assert "got no closer to [0.02, 0.06]" in control.branches[0].notice
    assert "Lower `learning_rate`, raise `high`, or give the branch a `least_share`" in control.branches[0].notice
    assert control.branches[0].state_dict()["law_state"][NOTICE] == control.branches[0].notice
    said, notice = control.betas[0], control.branches[0].notice
    for _ in range(25):
        control.observe(plant.step(control.betas))
    assert control.branches[0].notice == notice  # the same text, so that it is logged once
    assert control.betas[0] >= said


def test_a_branch_that_others_hold_below_its_band_is_said_with_what_to_change():
    beta, state = after([(0.04, 1000)] * 3 + [(0.01, 1000)] * 25)
    assert beta == TARGET.bounds[0] == pytest.approx(0.001)  # a hundredth of the first one
    assert state[NOTICE].endswith("Lower `low`, or the coefficients of the other branches")
    _, state = after([(0.04, 1000)] * 3 + [(0.01 * 1.05**number, 1000) for number in range(14)])
    assert state[NOTICE] == ""  # it comes nearer


def test_a_band_that_comes_into_reach_again_is_used_again():
    """A lower rate lowers the floor. The evidence for the old floor is forgotten, and the KL returns to its band."""
    for seed in range(10):
        plant = out_of_reach(seed)
        control = KLControl(TARGETS, AdaptiveLaw(), WindowSettings(update_steps=5))
        said = set()
        while len(said) < len(TARGETS):
            control.observe(plant.step(control.betas))
            said |= {branch.branch for branch in control.branches if branch.notice}
        for branch in plant.branches:
            branch.floor = 0.0
        for _ in range(400):
            control.observe(plant.step(control.betas))
        for branch, state in zip(control.branches, plant.branches, strict=True):
            assert branch.target.contains(state.kl), (seed, branch.branch)
            assert branch.notice == ""
