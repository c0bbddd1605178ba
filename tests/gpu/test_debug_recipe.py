"""The debug recipe on a GPU: vLLM with and without CUDA graphs samples from the pushed weights, and phases add up."""

import pytest
from gpu.launched import debug_recipe
from support.runs import check_times, scalars

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(900)]
STEPS = 6


@pytest.mark.parametrize("eager", ["true", "false"])
def test_the_pushed_weights_are_the_ones_sampled_from_and_the_phases_add_up(tmp_path, eager):
    debug_recipe(
        tmp_path / "run", max_steps=STEPS, max_eval_rows=16, vllm_engine_kwargs=f'{{"enforce_eager": {eager}}}',
        SALESRL_CACHE_DIR=tmp_path / "cache",
    )  # fmt: skip
    for step in check_times(tmp_path / "run", STEPS):
        print({phase: round(seconds, 4) for phase, seconds in step.items() if seconds > 1e-4})
    logged = scalars(tmp_path / "run")
    differences = logged["train/sampling/sampling_logp_difference/mean"]
    assert len(differences) == STEPS
    assert max(differences) < 0.02
    for name in ("perf/mfu_model", "perf/mfu_step", "memory/gpu_peak_gib", "memory/gpu_reserved_gib"):
        print(name, logged[f"train/{name}"])
    figures = zip(logged["train/perf/mfu_step"], logged["train/perf/mfu_model"], strict=True)
    assert all(0 < step <= model <= 1 for step, model in figures)
