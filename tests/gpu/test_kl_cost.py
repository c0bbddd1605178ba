"""The branches' KL beside stock TRL's one coefficient, on a GPU: what a step costs."""

import pytest
from gpu.launched import figures_of

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(900)]


def test_a_step_costs_at_most_a_hundredth_more(tmp_path):
    assert figures_of("kl", tmp_path)["ratio"] <= 1.01
