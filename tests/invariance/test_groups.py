"""A judge that scores a group in one call trains as one that scores each completion."""

from support.keyed import UNSCORABLE, check_same_course, text_of
from support.loopback import action

from salesrl_trl.names import JUDGED_SINGLY, usage_of


def with_an_unscorable_one(prompt, step, place):
    return action(query=UNSCORABLE) if step == 2 and place == 1 else text_of(prompt, step, place)


GIVEN = {"max_steps": 6, "hybrid_reference_weight": 0.3, "text_of": with_an_unscorable_one}


def of_steps(course, name):
    return [entry[name] for entry in course["steps"]]


def test_the_same_course_and_after_a_failed_call_only_what_can_not_be_scored_is_missing(train):
    singly = train(**GIVEN)
    together = train(**GIVEN, judging={"orders": 2})
    for entry in together["steps"]:
        lone = entry.pop(JUDGED_SINGLY)
        assert (lone > 0) == (entry["step"] == 3)
    assert of_steps(singly, "outcome/judge_invalid")[2] == of_steps(together, "outcome/judge_invalid")[2] == 0.25
    check_same_course(singly, together)
    verdicts = usage_of("judge", "verdicts")
    assert sum(of_steps(together, verdicts)) < sum(of_steps(singly, verdicts))
