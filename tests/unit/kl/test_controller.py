"""The controller by hand, window by window, under a law whose steps are known."""

import json
import math

import pytest

from benchmarks.kl_laws import FactorLaw
from salesrl_trl.errors import ConfigError
from salesrl_trl.kl.branched import BranchController, KLControl, WindowSettings
from salesrl_trl.kl.law import FAR, LEAST_BETA, AdaptiveLaw, KLTarget

BARE = {"recentre": 0.0, "trend_windows": 0.0}
TARGET = KLTarget(beta=0.1, low=0.02, high=0.08)  # centre sqrt(0.02 * 0.08) = 0.04, half-width ln(2)


EVERY_STEP = WindowSettings(update_steps=1)


def controller(target=TARGET, update_steps=1, cooldown_steps=0, **law):
    windows = WindowSettings(update_steps=update_steps, cooldown_steps=cooldown_steps)
    return BranchController("fairness", target, FactorLaw(**{**BARE, **law}), windows)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"low": 0.06, "high": 0.02}, "less than `high`"),
        ({"low": -0.01, "high": 0.02}, "`low` is -0.01. Expected a number of 0 or more"),
        ({"low": 0.02}, "both `low` and `high`"),
        ({"low": 0.02, "high": math.nan}, "`high` is nan"),
        ({"beta": True}, "`beta` is True"),
        ({"beta_min": 1.0, "beta_max": 0.5}, "Expected `beta_min` to be at most `beta_max`"),
        ({"beta_min": 0.2}, "Expected it between `beta_min` 0.2 and `beta_max` 10"),
        ({"beta": "1e-3"}, "write 1.0e-3"),
        ({"beta_max": 0.5}, "A coefficient without a band never changes"),
        ({"low": 0.02, "high": 0.06, "least_share": 0.0}, "`least_share` is 0.0. Expected more than 0, up to 1"),
        ({"beta": 0.0, "low": 0.02, "high": 0.06}, "no factor can raise"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_a_target_that_cannot_work_is_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        KLTarget(**{"beta": 0.1, **settings})


@pytest.mark.parametrize(
    ("made_by", "named"),
    [
        (lambda: WindowSettings(update_steps=0), "`branch_kl.settings.update_steps`"),
        (lambda: WindowSettings(cooldown_steps=-1), "`law_settings.cooldown_steps`"),
        (lambda: AdaptiveLaw(max_step=math.nan), "`max_step` of `law_settings`"),
    ],
)
def test_a_law_that_cannot_work_is_refused_by_its_setting(made_by, named):
    with pytest.raises(ConfigError, match=named):
        made_by()


@pytest.mark.parametrize(
    ("kl", "distance"),
    [
        (0.04, 0.0),
        (0.02, -1.0),
        (0.16, 2.0),  # ln(0.16 / 0.04) / ln 2
        (0.0, -FAR),
        (-0.5, -FAR),  # k1 and sampling noise can go below 0
        (1e30, FAR),
    ],
)
def test_distance_counts_half_widths_from_the_geometric_centre(kl, distance):
    assert TARGET.distance(kl) == pytest.approx(distance, abs=1e-12)


def test_a_negative_estimate_lies_in_a_band_without_a_lower_edge():
    branch = controller(KLTarget(beta=0.1, low=0.0, high=0.1))
    assert not branch.observe(-1e-6, 1)
    assert branch.share_in_band == 1.0


def test_a_window_is_the_token_mean_over_its_steps():
    branch = controller(update_steps=3)
    branch.observe(0.0, 900)
    branch.observe(0.0, 0)  # a step without tokens is a step
    assert branch.beta == 0.1
    move = branch.observe(100.0, 100)  # 100 / 1000 = 0.1; the mean of the steps' means would be 0.5
    assert move == "fairness: KL 0.1000 outside [0.02, 0.08], beta 0.1 -> 0.115"
    assert branch.beta == pytest.approx(0.115)


def test_the_noise_of_a_kl_near_0_does_not_stretch_the_windows_after_its_rise():
    """A log-ratio's variance grows with the KL: divided by its square, that of a fresh policy has no bound."""
    branch = controller(update_steps=5)
    fresh = [0.004, -0.003, 0.001, -0.002, 0.0001] * 2
    risen = [0.2, 0.16, 0.19, 0.15, 0.18]
    moves = [bool(branch.observe(300 * kl, 300)) for kl in [*fresh, *risen]]
    assert [place for place, moved in enumerate(moves) if moved] == [4, 9, 14]


def test_one_step_that_is_far_off_does_not_stretch_the_windows_after_it():
    branch = controller(update_steps=5)
    kls = [0.2, 0.16, 0.19, 0.15, 0.18] * 10
    kls[12] = 20.0
    moves = [bool(branch.observe(300 * kl, 300)) for kl in kls]
    assert [place for place, moved in enumerate(moves) if moved] == list(range(4, 50, 5))


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_what_is_not_finite_is_no_measurement(broken):
    branch = controller(update_steps=2)
    branch.observe(broken, 10)
    move = branch.observe(0.5, 5)  # 0.1: the broken step left nothing in the window
    assert "KL 0.1000 outside" in move
    assert branch.share_in_band == 0.0


def test_steps_of_the_cool_down_belong_to_no_window():
    branch = controller(update_steps=2, cooldown_steps=3)
    branch.observe(0.09, 1)
    assert branch.observe(0.09, 1) and branch.asked == pytest.approx(0.115)
    assert [branch.observe(9.0, 1) for _ in range(3)] == [""] * 3
    branch.observe(0.05, 1)
    assert not branch.observe(0.05, 1)  # inside: the 9.0 of the cool-down would have raised it
    assert branch.beta == pytest.approx(0.115)


def test_a_coefficient_stays_within_its_bounds():
    branch = controller(KLTarget(beta=0.1, low=0.02, high=0.08, beta_min=0.09, beta_max=0.12))
    assert branch.observe(1.0, 1) and branch.asked == pytest.approx(0.115)
    assert branch.observe(1.0, 1) and branch.asked == 0.12
    assert not branch.observe(1.0, 1)  # at its bound it does not move
    for _ in range(5):
        branch.observe(1e-5, 1)
    assert branch.beta == 0.09


def test_without_a_least_coefficient_one_that_fell_for_long_comes_back():
    """From 1e-9 to 0.1 a factor of 1e8 is missing, which is 27 doublings."""
    target = KLTarget(beta=0.1, low=0.02, high=0.08, beta_min=0.0)
    branch = BranchController("fairness", target, AdaptiveLaw(), EVERY_STEP)
    branch.observe(0.04, 1)  # a fresh policy's first rise is over
    for _ in range(3000):
        branch.observe(1e-9, 1)
    assert branch.beta == LEAST_BETA
    for _ in range(30):
        branch.observe(1.0, 1)
    assert branch.beta > 0.1


def test_beyond_its_bound_a_coefficient_becomes_a_smaller_share_of_the_rewards():
    target = KLTarget(beta=0.1, low=0.02, high=0.08, beta_max=0.11, least_share=0.9)
    branch = controller(target)
    assert branch.observe(1.0, 1) and branch.asked == pytest.approx(0.115)  # what is asked for
    assert (branch.beta, branch.share) == (0.11, pytest.approx(0.11 / 0.115))
    assert branch.observe(1.0, 1) and branch.asked == pytest.approx(0.11 / 0.9)
    assert not branch.observe(1.0, 1)
    assert (branch.beta, branch.share) == (0.11, pytest.approx(0.9))
    resumed = controller(target)
    resumed.load_state_dict(json.loads(json.dumps(branch.state_dict())))
    assert (resumed.beta, resumed.share) == (branch.beta, branch.share)
    without = controller(KLTarget(beta=0.1, low=0.02, high=0.08, beta_max=0.11))
    without.load_state_dict(branch.state_dict())
    assert (without.beta, without.share) == (0.11, 1.0)
    branch.observe(1e-3, 1)
    assert (branch.beta, branch.share) == (pytest.approx(0.11 / 0.9 * 0.85), 1.0)


def test_without_a_law_or_a_band_a_coefficient_stays_and_the_band_is_watched():
    watched = BranchController("fairness", TARGET, None, EVERY_STEP)
    for kl in (0.05, 9.0, 0.05, 0.05):
        assert not watched.observe(kl, 1)
    assert (watched.beta, watched.share_in_band) == (0.1, 0.75)
    free = BranchController("fairness", KLTarget(beta=0.1), FactorLaw(), EVERY_STEP)
    assert not free.observe(9.0, 1)
    assert free.beta == 0.1
    assert math.isnan(free.share_in_band)


@pytest.mark.parametrize("interrupted_at", range(0, 12, 3))
def test_a_controller_goes_on_from_its_saved_state_as_if_nothing_had_happened(interrupted_at):
    steps = [(0.3, 3), (0.1, 2), (0.0, 0), (5.0, 10), (4.0, 7), (0.2, 1), (0.01, 9), (0.3, 5)]
    steps += [(0.02, 1), (1, 9), (2, 3)]
    law = {"update_steps": 2, "cooldown_steps": 1, "recentre": 0.5, "trend_windows": 2.0}
    whole, first = controller(**law), controller(**law)
    told = [whole.observe(*step) for step in steps]
    before = [first.observe(*step) for step in steps[:interrupted_at]]
    resumed = controller(**law)
    resumed.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert before + [resumed.observe(*step) for step in steps[interrupted_at:]] == told
    assert resumed.state_dict() == whole.state_dict()
    assert any(told)


def test_saved_coefficients_meet_the_settings_of_the_run_that_goes_on():
    high = KLControl({"a": KLTarget(beta=5.0, low=0.1, high=0.2)}, FactorLaw(), WindowSettings())
    narrowed = KLControl({"a": KLTarget(beta=0.1, low=0.1, high=0.2, beta_max=1.0)}, FactorLaw(), WindowSettings())
    narrowed.load_state_dict(high.state_dict())
    assert narrowed.betas == [1.0]
    fixed = KLControl({"a": KLTarget(beta=0.1, low=0.1, high=0.2)}, None, WindowSettings())
    fixed.load_state_dict(high.state_dict())
    assert fixed.betas == [0.1]
    other = KLControl({"b": KLTarget(beta=0.1, low=0.1, high=0.2)}, FactorLaw(), WindowSettings())
    other.load_state_dict(high.state_dict())
    assert other.betas == [0.1]
