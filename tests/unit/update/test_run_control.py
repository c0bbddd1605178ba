"""Which batches count and when a run ends, without a trainer."""

from collections import Counter
from datetime import datetime
from types import SimpleNamespace

import pytest

from salesrl_trl.errors import DivergedError, RunStopped, TooFewRewardsError
from salesrl_trl.update.run_control import RunControl

NONE_MISSING: Counter[str] = Counter()


def control_of(most=3, is_reached=False, **settings):
    kept = {"min_valid_reward_fraction": 0.5, "max_skipped_generations": most, "output_dir": "runs/a"}
    control = RunControl(**kept, **settings)
    control.spending = SimpleNamespace(is_reached=lambda: is_reached)
    return control


@pytest.fixture
def control():
    return control_of()


def skip(control, times=1, is_last=False):
    for _ in range(times):
        control.record_batch(0.4, Counter({"judge_http_500": 3, "deadline": 1}))
        control.end_step(7, is_last=is_last)


@pytest.mark.parametrize(("scored", "skipped"), [(0.0, True), (0.49, True), (0.5, False), (1.0, False)])
def test_a_batch_of_which_too_little_was_scored_is_skipped(control, scored, skipped):
    told = control.record_batch(scored, Counter({"deadline": 1}))
    assert control.is_skipping is (told is not None) is skipped
    assert not skipped or told.endswith("of the completions could be scored, wanted 50% (deadline 1)")


def test_too_many_in_a_row_end_the_run_and_name_the_last_ones_failures_the_most_frequent_first(control):
    skip(control, 2)
    assert control.error is None
    skip(control)
    assert isinstance(control.error, TooFewRewardsError)
    told = str(control.error)
    assert told.startswith("3 generation batches in a row had fewer than 50% of their completions scored, since 20")
    assert "in the last one: judge_http_500 3, deadline 1." in told
    assert told.endswith("resume with --resume_from_checkpoint runs/a/checkpoint-7.")


@pytest.mark.parametrize(
    ("reasons", "is_reached", "is_refused"),
    [(["budget_spent"], True, True), (["budget_spent"], False, False), (["deadline"], True, False)],
)
def test_only_the_account_says_that_a_budget_is_spent(reasons, is_reached, is_refused):
    control = control_of(is_reached=is_reached)
    assert control.is_refused_by_budget(reasons) is is_refused
    assert not control_of().is_refused_by_budget(reasons)  # without a budget


@pytest.mark.parametrize(("skipped", "fails"), [(1, False), (2, True)])
def test_a_run_whose_services_stay_away_until_its_last_step_has_failed(skipped, fails):
    """No later batch shows that they are back. One batch may be an odd one."""
    control = control_of(6)
    skip(control, skipped - 1)
    assert control.error is None
    skip(control, is_last=True)
    assert (control.error is not None) is fails
    assert not fails or "They were the run's last ones" in str(control.error)
    assert not fails or not control.error.is_resumable  # the same command would end well, with nothing learned


def test_a_step_counts_where_any_of_its_batches_does(control):
    def step(*scored):
        for each in scored:
            control.record_batch(each, NONE_MISSING)
            control.record_micro_batch()
        return control.drain_moves()

    assert [step(0.4, 0.4), step(0.4, 0.6), step(0.4), step(0.6, 0.4), step(0.4)] == [False, True, False, True, False]


@pytest.mark.parametrize(("requested", "named"), [("SIGTERM", "SIGTERM"), (None, "a request to another rank")])
def test_a_run_that_is_asked_to_stop_says_by_what_and_when(control, requested, named):
    control.requested = requested
    control.record_urgency(2)  # the highest of all ranks
    control.stop(7, is_new=True)
    assert isinstance(control.error, RunStopped)
    assert str(control.error).startswith(f"stopped by {named} after 7 steps.")


def test_an_outage_that_lasts_too_long_ends_the_run_and_says_since_when(monkeypatch):
    control = control_of(99, max_outage_s=60)
    clock = 1_000_000.0
    monkeypatch.setattr("time.monotonic", lambda: clock)
    monkeypatch.setattr("time.time", lambda: -clock)  # the machine's clock may be set back: it counts no outage
    for seconds, urgency in ((0, 0), (30, 0), (30, 1)):
        clock += seconds
        control.record_batch(0.4, Counter({"judge_http_500": 3}))
        assert control.urgency() == urgency
    control.record_urgency(0)
    control.end_step(3, is_last=False)
    assert control.error is None
    control.record_urgency(1)  # by the clock of any rank
    control.end_step(3, is_last=False)
    told = "3 generation batches in a row had fewer than 50% of their completions scored, since "
    since = datetime.fromisoformat(str(control.error).partition(told)[2][: len("2026-11-25 01:00:00")])
    assert abs((datetime.now() - since).total_seconds() - 60) < 30  # 0 + 30 + 30 s
    assert control.error.is_resumable


def test_one_that_counts_begins_the_count_anew_and_the_next_run_has_nothing_of_the_one_before(control):
    for _ in range(3):
        skip(control, 2)
        control.record_batch(1.0, NONE_MISSING)
        control.record_urgency(1)  # of a rank that looked before the outage was over
        control.end_step(7, is_last=False)
    assert control.error is None
    control.record_micro_batch()
    skip(control, 3)
    control.requested = "SIGTERM"
    control.restart()
    assert (control.error, control.requested, control.drain_moves()) == (None, None, False)
    skip(control, 2)
    assert control.error is None


@pytest.mark.parametrize(
    "broken", [{"grad_norm": float("nan")}, {"grad_norm": float("inf"), "kl": 0.1}, {"grad_norm": 1.0, "kl": 1200.0}]
)
def test_broken_figures_end_the_run_when_they_stay(broken):
    control = control_of()
    for figures in (broken, broken, {"grad_norm": 1.0, "kl": 0.1}, {"loss": 1.0}, broken, broken):
        control.record_line(figures)
    with pytest.raises(DivergedError, match="of 3 diverged log lines in a row"):
        control.record_line(broken)
