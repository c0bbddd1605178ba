"""The law of the reward, by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.loopback import row

from salesrl_trl.errors import ConfigError
from salesrl_trl.judged.scoring import Case, Scoring
from salesrl_trl.types import Action, Answer, InvalidAction, Outcome, Passage, Verdict

PASSAGES = (Passage(id="a", text="", score=0.25), Passage(id="b", text="", score=0.5))
ANSWER = Answer(text="x", passages=PASSAGES, took_ms=1)
VERDICT = Verdict(candidate=0.75, reference=0.5, reason="")
OTHER = Verdict(candidate=0.25, reference=None, reason="")


def case(verdicts, reference=None):
    action = Action(fields={"rewritten_query": "price"})
    return Case(row=row(), action=action, answer=ANSWER, reference=reference, verdicts=verdicts)


def score(weights, verdicts, *, missing="none"):
    return Scoring(weights={"fairness": weights}, missing=missing).score(case(verdicts))


@pytest.mark.parametrize(
    ("weights", "verdicts", "value", "of_reference"),
    [
        ({"judge": 2.0}, {"judge": VERDICT}, 1.5, 1.0),
        # 0.8 x 0.75 + 0.2 x 0.25; the reference lies no margin above itself
        ({"judge": 0.8, "margin": 0.2}, {"judge": VERDICT}, 0.65, 0.4),
        ({"retrieval": 1.0}, {}, 0.5, 0.75),  # the best passage's, each of its own
        ({"judge": 0.5, "retrieval": 0.25, "format": 0.1}, {"judge": VERDICT}, 0.6, 0.5375),
        # the reference's tone was not judged
        ({"judge": 0.5, "judge_tone": 0.5}, {"judge": VERDICT, "judge_tone": OTHER}, 0.5, None),
    ],
)
def test_the_value_is_the_weighted_sum_and_the_reference_is_worth_what_the_same_law_gives_it(
    weights, verdicts, value, of_reference
):
    reference = Answer(text="y", passages=(Passage(id="c", text="", score=0.75),), took_ms=1)
    reward = Scoring(weights={"fairness": weights}).score(case(verdicts, reference))
    assert reward.outcome is Outcome.OK
    assert (reward.value, reward.reference_value) == (pytest.approx(value), pytest.approx(of_reference))
    alone = score(weights, verdicts)
    assert (alone.value, alone.reference_value) == (pytest.approx(value), None)


@pytest.mark.parametrize(
    ("weights", "verdicts", "value"),
    [
        # the judge is missing: (0.5 + 0.5) / 0.5 x 0.5 x 0.25
        ({"judge": 0.5, "judge_tone": 0.5}, {"judge": None, "judge_tone": OTHER}, 0.25),
        # there was no reference, so no margin: (0.8 + 0.2) / 0.8 x 0.8 x 0.25
        ({"judge": 0.8, "margin": 0.2}, {"judge": OTHER}, 0.25),
        # 3 / 2 x (1 x 0.25 + 1 x 0.5)
        ({"judge": 1.0, "judge_tone": 1.0, "retrieval": 1.0}, {"judge": None, "judge_tone": OTHER}, 1.125),
    ],
)
def test_a_missing_component_is_none_or_the_others_stand_in_for_it(weights, verdicts, value):
    left_out = score(weights, verdicts)
    assert (left_out.outcome, left_out.value) == (Outcome.INFRA, None)
    assert score(weights, verdicts, missing="reweight").value == pytest.approx(value)


@pytest.mark.parametrize("judged", ["judge", "margin", "judge_tone"])
def test_nothing_stands_in_for_every_judge(judged):
    """Else a judge that is down would be worth more than any verdict."""
    verdicts = {"judge": None, "judge_tone": None}
    assert score({judged: 0.9, "format": 0.1}, verdicts, missing="reweight").value is None


@given(st.floats(0, 1), st.floats(0.01, 5), st.floats(0.01, 5))
def test_equal_components_give_the_same_value_whichever_is_missing(each, weight, other):
    weights = {"judge": weight, "judge_tone": other}
    verdict = Verdict(candidate=each, reference=None, reason="")
    values = [
        score(weights, {name: None if name == gone else verdict for name in weights}, missing="reweight").value
        for gone in ("nothing", "judge", "judge_tone")
    ]
    assert values == pytest.approx([values[0]] * 3)


def test_an_invalid_action_has_its_own_reward_and_no_format():
    scoring = Scoring(weights={"fairness": {"judge": 1.0}}, invalid_action=-0.5)
    reward = scoring.score_invalid(InvalidAction(reason="not_json"))
    assert (reward.value, reward.reason, reward.components) == (-0.5, "not_json", {"format": 0.0})


def test_the_judgements_a_branch_needs_follow_its_weights():
    scoring = Scoring(weights={"a": {"judge": 1.0}, "b": {"margin": 1.0, "judge_tone": 1.0}, "c": {"retrieval": 1.0}})
    assert scoring.rubrics("a") == {"judge": "a"}
    assert scoring.rubrics("b") == {"judge": "b", "judge_tone": "tone"}
    assert scoring.rubrics("c") == {}
    assert scoring.judged_names == ("judge", "margin", "reference", "judge_tone")


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({}, "Expected at least one component"),
        ({"judge": 0.0}, "with a weight above 0"),
        ({"judge": float("nan")}, "with a weight above 0"),
        ({"jugde": 1.0}, "names 'jugde'"),
        ({"judge_": 1.0}, "names 'judge_'"),
    ],
)
def test_weights_that_cannot_work_are_refused(weights, message):
    with pytest.raises(ConfigError, match=message):
        Scoring(weights={"fairness": weights})
