"""The numbers, and the advice at its thresholds."""

import pytest

from salesrl_trl.record.view import run_figures as figures
from salesrl_trl.record.view.run_figures import advice
from salesrl_trl.record.view.run_folder import read_run
from salesrl_trl.record.view.wording import percent, seconds


def run_of(run_folder, steps):
    run_folder.events(steps)
    return read_run(run_folder.path)


def test_phases_are_shares_of_all_steps_also_where_one_was_not_in_every_step(run_folder):
    run = run_of(run_folder, {
        1: {"time/step_s": 2.0, "time/forward_s": 1.0},
        2: {"time/step_s": 6.0, "time/forward_s": 3.0, "time/checkpoint_s": 2.0},
    })  # fmt: skip
    # forward 4 s and checkpoint 2 s of 8 s; per step 2 s and 1 s.
    assert [(each.name, each.share, each.seconds) for each in figures.phases(run)] == [
        ("forward", 0.5, 2.0),
        ("checkpoint", 0.25, 1.0),
    ]


def test_failures_are_what_was_counted_since_the_last_line_and_skips_are_a_mean_per_step(run_folder):
    run = run_of(run_folder, {
        5: {"failures/reason/a": 3.0, "failures/skipped_update": 0.2},
        10: {"failures/reason/a": 0.0, "failures/reason/b": 4.0, "failures/skipped_update": 0.0},
        15: {"failures/reason/a": 0.0, "failures/reason/c": 0.0, "failures/skipped_update": 0.4},
    })  # fmt: skip
    assert figures.failures(run) == {"b": 4.0, "a": 3.0}
    # Every 5 steps: 5 x (0.2 + 0 + 0.4).
    assert figures.skipped_updates(run) == pytest.approx(3.0)


def test_stages_of_the_user_stand_behind_the_packages_own(run_folder):
    run = run_of(run_folder, {
        1: {"time/slowest_brevity_s": 2.0, "time/brevity_p95_s": 1.0, "time/slowest_judge_s": 4.0, "time/step_s": 9.0},
    })  # fmt: skip
    assert [(each.name, each.p95, each.slowest) for each in figures.stages(run)] == [
        ("judge", None, 4.0),
        ("brevity", 1.0, 2.0),
    ]


def test_the_share_in_band_is_of_the_steps_and_else_the_runs_own_last_figure(run_folder):
    run = run_of(run_folder, {
        1: {"kl/a_in_band": 1.0, "kl/a_share_in_band": 1.0, "kl/b_share_in_band": 0.9, "kl/c": 1.0, "beta/c": 0.0},
        2: {"kl/a_in_band": 0.0, "kl/a_share_in_band": 0.5, "kl/b_share_in_band": 0.7},
    })  # fmt: skip
    assert figures.share_in_band(run, "a") == 0.5
    assert figures.share_in_band(run, "b") == pytest.approx(0.7)
    assert figures.share_in_band(run, "c") is None


def test_the_best_evaluation_is_the_last_marked_and_else_the_highest(run_folder):
    run_folder.quick_evals(
        {"step": 1, "mode": "greedy", "reward": 0.9, "best": False},
        {"step": 2, "mode": "greedy", "reward": 0.1, "best": True},
        {"step": 3, "mode": "greedy", "reward": 0.2, "best": True},
        {"step": 4, "mode": "greedy", "reward": None},
    )
    evals = run_of(run_folder, {1: {"reward": 0.1}}).quick_evals
    assert figures.best_eval(evals).step == 3
    assert figures.best_eval([evals[0], evals[3]]).step == 1
    assert figures.best_eval([evals[3]]) is None


@pytest.mark.parametrize(
    ("value", "words"),
    [(None, "n/a"), (0.0, "0 s"), (0.0805, "80.5 ms"), (0.25, "0.25 s"), (9.999, "10.0 s"), (99.97, "1 min 40 s"),
     (3599.6, "1 h 0 min"), (7800.0, "2 h 10 min")],
)  # fmt: skip
def test_seconds_in_words(value, words):
    assert seconds(value) == words


@pytest.mark.parametrize(("value", "words"), [(None, "n/a"), (0.0, "0 %"), (0.004, "0.4 %"), (0.62, "62 %")])
def test_percent_in_words(value, words):
    assert percent(value) == words


CALM = {
    "time/step_s": 10.0, "time/reward_wait_s": 2.99, "time/data_loading_s": 0.49, "time/unaccounted_s": 0.19,
    "kl/a": 0.1, "kl/a_in_band": 0.5, "beta/a": 0.1, "outcome/ok": 0.902, "outcome/invalid_action": 0.049,
    "outcome/infra": 0.049, "failures/reason/judge_empty": 1.0, "failures/reason/not_json": 1.0,
    "failures/skipped_update": 0.0,
}  # fmt: skip
"""Each figure just below where something is said: 30 %, 5 %, 2 %, half of the steps, 5 % failed by each."""


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"time/reward_wait_s": 6.2, "time/judge_p95_s": 4.1, "time/rag_8b_p95_s": 1.0},
         "Training waits for rewards during 62 % of the step. The slowest stage is judge (p95 4.10 s)"),
        ({"time/data_loading_s": 0.6}, "Data loading takes 6.0 % of the step"),
        ({"time/unaccounted_s": 0.3}, "3.0 % of the step belongs to no phase"),
        ({"kl/a_in_band": 0.25}, "The KL lay outside its band for most of the run: a (in band 25 %)"),
        # of services 4 times, 3 of them by a time-out; the policy's many failures say nothing of them
        ({"outcome/infra": 0.1, "failures/reason/rag_8b_timeout": 3.0, "failures/reason/not_json": 90.0},
         "10 % of the completions could not be scored because a service failed, mostly rag_8b_timeout (75 % "
         "of these). That is no fault of the policy"),
        ({"outcome/infra": 0.04, "outcome/judge_invalid": 0.02},
         "6.0 % of the completions could not be scored because a service failed, mostly judge_empty (100 % "
         "of these)."),
        # half of the reasons are no service's, so half of the share is
        ({"outcome/infra": 0.14, "failures/reason/raised_KeyError": 0.5, "failures/reason/my_own_code": 0.5},
         "7.0 % of the completions could not be scored because a service failed, mostly judge_empty (100 % of these). "
         "That is no fault of the policy: look at that service (docs/SERVICES.md). 7.0 % of the completions could not "
         "be scored, mostly my_own_code (50 % of these)."),
        ({"outcome/invalid_action": 0.1, "failures/reason/empty_query": 3.0, "failures/reason/judge_empty": 90.0},
         "10 % of the completions were no valid action, mostly empty_query (75 % of these). That is the policy's"),
        ({"failures/skipped_update": 1.0}, "1 update was skipped"),
    ],
    ids=["exposed", "loading", "unaccounted", "band", "services", "judge", "others", "policy", "skipped"],
)  # fmt: skip
def test_advice_begins_beyond_its_threshold(run_folder, changed, words):
    run_folder.events({1: CALM})
    assert advice(read_run(run_folder.path)) == ()
    run_folder.events({1: {**CALM, **changed}}, started_s=1_800_000_000.0)
    (sentence,) = advice(read_run(run_folder.path))
    assert sentence.startswith(words)


@pytest.mark.parametrize(
    ("kl", "inside", "is_told"),
    [
        ([0.0, 0.01, 0.03, 0.06, 0.09], [0, 0, 0, 0, 0], False),  # it rises still
        ([0.0, 0.02, 0.04, 0.06, 0.08, 0.15, 0.2], [0, 0, 0, 0, 0, 1, 1], False),  # it rose, and is there
        ([0.0, 1e-5, 2e-4, -1e-4], [0, 0, 0, 0], False),  # it has just begun
        ([0.0, 0.03] + 20 * [0.05], 22 * [0], True),  # it rises no more
        ([0.0, 0.2, 0.5, 0.5, 0.5], [0, 1, 0, 0, 0], True),  # it left the band
    ],
)
def test_a_kl_on_its_way_up_to_its_band_is_no_fault(run_folder, kl, inside, is_told):
    edges = {"kl/a_low": 0.1, "kl/a_high": 0.3}
    run_folder.events({
        step: {**CALM, **edges, "kl/a": value, "kl/a_in_band": float(is_in)}
        for step, (value, is_in) in enumerate(zip(kl, inside, strict=True), start=1)
    })  # fmt: skip
    assert any("outside its band" in sentence for sentence in advice(read_run(run_folder.path))) == is_told


def test_advice_is_five_sentences_at_most_and_the_costly_ones_stay(run_folder):
    run = run_of(run_folder, {
        1: {"time/step_s": 10.0, "time/reward_wait_s": 6.0, "time/data_loading_s": 1.0, "time/unaccounted_s": 1.0,
            "kl/a": 1.0, "kl/a_in_band": 0.0, "beta/a": 0.1, "outcome/ok": 0.5, "outcome/infra": 0.5,
            "failures/reason/judge_empty": 1.0, "failures/skipped_update": 1.0}
    })  # fmt: skip
    told = advice(run)
    assert len(told) == 5
    assert told[0].startswith("1 update was skipped")
    assert not any("belongs to no phase" in sentence for sentence in told)


def test_a_rate_over_the_run_counts_each_step_by_its_length(run_folder):
    # 9 s at 10 a second and 1 s at 100 a second: 190 in 10 s, where the mean of the two rates would say 55
    run_folder.events({1: {"perf/samples_per_s": 10.0, "time/step_s": 9.0},
                       2: {"perf/samples_per_s": 100.0, "time/step_s": 1.0}})  # fmt: skip
    run = read_run(run_folder.path)
    assert figures.rate(run, "perf/samples_per_s") == pytest.approx(19.0)
    assert figures.rate(run, "perf/samples_per_s", "time/forward_s") == pytest.approx(55.0)  # no times: their mean
    assert figures.rate(run, "perf/tokens_per_s") is None


def test_a_tools_seconds_are_those_of_a_call_over_all_steps(run_folder):
    run = run_of(run_folder, {
        1: {"tools/look/calls": 30.0, "tools/look/failures": 2.0, "tools/look/errors": 0.0, "tools/look/seconds": 1.0},
        2: {"tools/look/calls": 10.0, "tools/look/failures": 0.0, "tools/look/errors": 1.0, "tools/look/seconds": 3.0,
            "tools/call_frequency": 2.0},
        3: {"tools/look/calls": 0.0, "tools/look/failures": 0.0, "tools/look/errors": 0.0, "tools/look/seconds": 0.0},
    })  # fmt: skip
    # 40 calls in 3 batches; 30 of 1 s and 10 of 3 s
    [row] = figures.tools(run)
    assert row == ("look", pytest.approx([40 / 3, 2 / 3, 1 / 3]), pytest.approx(1.5))
    assert figures.source_of("tool_look_http_503") == figures.SERVICES
