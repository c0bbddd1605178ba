"""Time on a GPU: events against a synchronised clock, and what measuring costs."""

import time

import pytest
import torch
from gpu.launched import figures_of

from salesrl_trl.telemetry.device import EventClock
from salesrl_trl.telemetry.timeline import Timeline

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(900)]


def multiply(matrix, times):
    for _ in range(times):
        matrix = torch.nn.functional.normalize(matrix @ matrix)
    return matrix


def test_a_phase_lasts_as_long_as_the_device_works_on_it_without_a_synchronise():
    matrix = torch.rand(4096, 4096, device="cuda")
    multiply(matrix, 3)
    torch.cuda.synchronize()
    started = time.perf_counter()
    multiply(matrix, 60)
    torch.cuda.synchronize()
    alone = time.perf_counter() - started

    timeline = Timeline(EventClock())
    timeline.starts()
    walls = []
    for _ in range(5):
        started = time.perf_counter()
        with timeline.phase("forward") as timing:
            multiply(matrix, 60)  # issued, not done
        issued = timing.cost_time
        with timeline.phase("reward_wait"):
            time.sleep(2 * alone)
        with timeline.phase("backward"):
            multiply(matrix, 60)
        timeline.step_ends()
        torch.cuda.synchronize()  # the test's own, so that its clock and the steps' agree
        walls.append(time.perf_counter() - started)
    steps = timeline.drain_steps()
    print(f"forward {alone:.4f} s by a synchronised clock, issued in {issued:.4f} s; steps {steps}, walls {walls}")
    assert issued < 0.5 * alone
    for step, wall in list(zip(steps, walls, strict=True))[1:]:
        assert sum(step.seconds.values()) == pytest.approx(step.wall, rel=1e-9)
        assert step.wall == pytest.approx(wall, rel=0.02)
        assert step.seconds["forward"] == pytest.approx(alone, rel=0.1)
        assert step.seconds["backward"] == pytest.approx(alone, rel=0.1)
        # the wait begins when the device is done with the forward pass, and the host began to wait long before
        assert step.seconds["reward_wait"] == pytest.approx(2 * alone - (alone - issued), rel=0.1)


def test_measuring_costs_at_most_a_hundredth_of_a_step_that_only_trains(tmp_path):
    """A whole step, with generation, takes three times as long or more. The ratio of steps with and without is noisier
    than what is looked for."""
    figures = figures_of("timing", tmp_path, "--updates", "4", "--rounds", "4")
    assert figures["own_s"] <= 0.01 * figures["median_s"]["without"]
