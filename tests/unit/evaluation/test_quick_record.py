"""Quick evaluations: figures, line, record, the best and the front."""

import math

import pytest
from support.answers import answered

from salesrl_trl.launch.evaluation.quick import spread
from salesrl_trl.launch.evaluation.quick_record import QuickEvalHistory, QuickEvaluation, evaluation_of, measure

BRANCHES = ("fairness", "hallucination")
OTHERS = {"truncated": 0.25, "length": 30.0, "kl": 0.1, "beta": 0.05}


def evaluation(step, fairness, hallucination, reward=0.5, scored=4):
    """Four rows a branch, of which so many of fairness could be scored."""
    branches = {
        "fairness": {"rows": 4, "scored": scored, "score": fairness, **OTHERS},
        "hallucination": {"rows": 4, "scored": 4, "score": hallucination, **OTHERS},
    }
    return QuickEvaluation(step=step, reward=reward, branches=branches, seconds=1.0)


def test_figures_by_branch():
    answers = [
        answered("fairness", 0.5, tokens=10, kl=2.0, kl_tokens=10),
        answered("fairness", None, truncated=True, tokens=30, kl=6.0, kl_tokens=30),  # written, but not scored
        answered("hallucination", 0.25, truncated=True, tokens=20, kl=4.0, kl_tokens=20),
    ]
    found = evaluation_of(answers, BRANCHES, {"fairness": 0.1}, 20, 1.5)
    # KL: 8 nats over 40 tokens; 4 over 20
    assert found.branches == {
        "fairness": {"rows": 2, "scored": 1, "score": 0.5, "truncated": 0.5, "length": 20.0, "kl": 0.2, "beta": 0.1},
        "hallucination": {"rows": 1, "scored": 1, "score": 0.25, "truncated": 1.0, "length": 20.0, "kl": 0.2,
                          "beta": None},
    }  # fmt: skip
    assert found.reward == 0.375
    assert (found.step, found.seconds, found.mode) == (20, 1.5, "greedy")


def test_an_empty_branch_and_no_reference_are_no_numbers():
    found = evaluation_of([answered("fairness", 0.5)], BRANCHES, {}, 1, 0.0)
    assert found.branches["fairness"]["kl"] is None
    nothing = dict.fromkeys(("score", "truncated", "length", "kl", "beta"))
    assert found.branches["hallucination"] == {"rows": 0, "scored": 0, **nothing}


def test_a_figure_that_is_no_finite_number_is_not_measured():
    for value in (math.nan, math.inf, None):
        assert measure(lambda answers, value=value: value, [answered("fairness", 0.5)]) is None
    broken = [answered("fairness", 0.5, kl=math.inf, kl_tokens=3)]
    assert evaluation_of(broken, BRANCHES, {}, 1, 0.0).branches["fairness"]["kl"] is None


def test_the_line():
    assert evaluation(20, 0.41, 0.5).line() == (
        "[QuickEval@20] mode=greedy fairness=0.41 hallucination=0.50 truncated F=25% H=25% length F=30 H=30 "
        "KL F=0.100 H=0.100 beta F=0.05 H=0.05"
    )
    assert "fairness=n/a" in evaluation(20, None, 0.5).line()
    without_kl = evaluation(20, 0.41, 0.5)
    for measured in without_kl.branches.values():
        measured |= {"kl": None, "beta": None}
    assert without_kl.line().endswith(" length F=30 H=30")


@pytest.mark.parametrize(("by", "best"), [("reward", 10), ("worst_branch", 20), ("fairness", 20)])
def test_the_best_by_each_rule(by, best):
    history = QuickEvalHistory(None, by, 0.5)
    history.add(evaluation(10, 0.2, 0.9, reward=0.6))
    history.add(evaluation(20, 0.4, 0.5, reward=0.5))
    assert history.best.step == best


def test_only_a_better_one_is_the_best_and_an_unmeasured_one_never():
    history = QuickEvalHistory(None, "worst_branch", 0.5)
    scores = [(None, 0.9), (0.4, 0.5), (0.4, 0.5), (None, 0.9), (0.41, 0.42)]
    added = [history.add(evaluation(step, *pair)) for step, pair in enumerate(scores)]
    assert added == [False, True, False, False, True]
    assert not QuickEvalHistory(None, None, 0.5).add(evaluation(10, 0.4, 0.5))  # without a rule there is no best


def test_the_front_and_its_line():
    history = QuickEvalHistory(None, None, 0.5)
    for step, fairness, hallucination in ((10, 0.1, 0.9), (20, 0.4, 0.5), (30, 0.3, 0.5), (40, 0.9, None)):
        history.add(evaluation(step, fairness, hallucination))
    # 30 is beaten by 20; 40 can't be compared
    assert [each.step for each in history.front()] == [10, 20]
    assert history.front_line() == (
        "[Pareto@40] 2 of 4 evaluations on the front: step 10 (fairness 0.10, hallucination 0.90), "
        "step 20 (fairness 0.40, hallucination 0.50)"
    )


def test_rows_are_spread_over_branches_and_shared_evenly():
    branch_ids = [0, 0, 0, 0, 1, 1, 0, 1]
    assert spread(branch_ids, 4, 2, 1) == [0, 4, 1, 5]
    assert spread(branch_ids, 5, 2, 2) == [0, 4, 1, 5]  # a multiple of two processes
    assert spread(branch_ids, 99, 2, 1) == [0, 4, 1, 5, 2, 7, 3, 6]  # as many as there are
    assert spread([0, 0, 0], 2, 2, 1) == [0, 1]  # a branch without rows
    assert spread([0], 8, 1, 2) == []
    assert spread(branch_ids, 1, 2, 3) == [0, 4, 1]  # at least one for each process


@pytest.mark.parametrize("by", ["reward", "worst_branch", "fairness"])
def test_a_few_lucky_rows_in_an_outage_are_not_the_best(by):
    history = QuickEvalHistory(None, by, 0.5)
    assert history.add(evaluation(20, 0.4, 0.5, reward=0.4))
    assert not history.add(evaluation(40, 0.9, 0.5, reward=0.9, scored=1))
    assert not history.add(evaluation(60, None, 0.5, reward=None, scored=0))
    assert history.best.step == 20
    assert [each.step for each in history.front()] == [20]
    assert "fairness=0.90 (1 of 4 scored)" in history.evaluations[1].line()
    assert history.add(evaluation(80, 0.45, 0.5, reward=0.45, scored=2))  # half of them is enough
