"""From ranks' sums to the figures of a step, and sums that are kept from one log line to the next."""

import math

import pytest

from salesrl_trl import names
from salesrl_trl.telemetry import perf
from salesrl_trl.telemetry.perf import StepAggregates, perf_figures, time_figures

NAN = math.nan


def sums(phases=None, memory=(1.0, 2.0, 3.0, 4.0), **given):
    figures = {"steps": 2, "makespan": 6.0, "exposed": 5.0, "batches": 2, "flops": 4e12, "tokens": 100.0}
    figures |= {"samples": 8.0, **dict(zip(names.MEMORY, memory, strict=True)), **given}
    return dict.fromkeys(names.Phase, 0.0) | (phases or {}) | figures


def test_phases_are_means_over_ranks_and_steps_and_sum_to_the_step():
    ranks = [sums({"forward": 2.0, "reward_wait": 6.0}), sums({"forward": 6.0, "reward_wait": 2.0})]
    figures = time_figures(ranks)
    assert set(figures) == {*perf.TIMES, names.REWARD_SECONDS}
    # (2 + 6) / 2 ranks / 2 steps, and the same for the wait
    assert figures["time/forward_s"] == figures["time/reward_wait_s"] == 2.0
    assert figures["time/step_s"] == 4.0


def test_exposed_rewards_are_of_the_rank_that_waits_longest_and_hidden_ones_the_rest_of_the_longest_makespan():
    ranks = [sums(makespan=6.0, exposed=5.0), sums(makespan=10.0, exposed=4.0), sums(makespan=8.0, exposed=8.0)]
    figures = time_figures(ranks)
    # two batches: 10 / 2, of which 8 / 2 exposed
    parts = (names.REWARD_SECONDS, names.REWARD_EXPOSED, names.REWARD_HIDDEN)
    assert [figures[name] for name in parts] == [5.0, 4.0, 1.0]


def test_without_a_scored_batch_there_is_no_time_of_rewards():
    figures = time_figures([sums({"forward": 2.0}, batches=0, makespan=0.0, exposed=0.0)])
    assert names.REWARD_SECONDS not in figures  # what the batch itself reported stays
    assert math.isnan(figures[names.REWARD_EXPOSED])
    assert math.isnan(figures[names.REWARD_HIDDEN])


def test_without_a_step_every_name_is_there_and_nothing_is_made_up():
    times, throughput = time_figures([sums(steps=0)]), perf_figures([sums(steps=0, memory=(NAN, NAN, NAN, 4.0))], 1e15)
    assert set(times) == set(perf.TIMES)
    assert all(math.isnan(value) for value in times.values())
    assert set(throughput) == {*names.THROUGHPUT, *names.MEMORY}
    assert [name for name, value in throughput.items() if not math.isnan(value)] == ["memory/host_gib"]


def test_throughput_of_two_ranks():
    phases = {"forward": 1.0, "backward": 2.0, "optimizer": 0.5, "generation": 2.0, "data_loading": 0.5,
              "reward_wait": 4.0}  # fmt: skip
    figures = perf_figures([sums(phases), sums(phases)], 10e12)
    # 10 s of wall time for two steps on both ranks
    assert figures["perf/forward_s"] == 0.5
    assert figures["perf/backward_s"] == 1.0
    assert figures["perf/optimizer_s"] == 0.25
    assert figures["perf/data_loading_s"] == 0.25
    assert figures["perf/data_loading_ratio"] == 0.05
    assert figures["perf/compute_ratio"] == pytest.approx((1 + 2 + 0.5 + 2) / 10)
    assert figures["perf/tokens_per_s"] == 2 * 100 / 10
    assert figures["perf/samples_per_s"] == 2 * 8 / 10
    # 4 TFLOP in 3 s of 10 TFLOP/s, and in 10 s, however many ranks do so
    assert figures[names.MFU_MODEL] == pytest.approx(4 / 30)
    assert figures[names.MFU_STEP] == pytest.approx(4 / 100)


def test_memory_is_the_fullest_ranks_wherever_it_stands():
    ranks = [sums(memory=(NAN, NAN, NAN, 1.0)), sums(memory=(1.0, 5.0, 7.0, 2.0)), sums(memory=(2.0, 4.0, 6.0, 0.5))]
    figures = perf_figures(ranks, None)
    assert [figures[name] for name in names.MEMORY] == [2.0, 5.0, 7.0, 2.0]


def test_a_mean_weighs_by_count_and_a_maximum_is_kept_until_the_flush():
    aggregates = StepAggregates(("reward/fairness", names.STALENESS_MAX))
    for name, total, count in (("reward/fairness", 1.0, 1), ("reward/fairness", 0.5, 3), (names.STALENESS_MAX, 3, 1)):
        aggregates.add(name, total, count)
    aggregates.add(names.STALENESS_MAX, 2, 1)
    assert aggregates.flush() == {"reward/fairness": 0.375, names.STALENESS_MAX: 3}
    assert all(math.isnan(figure) for figure in aggregates.flush().values())
