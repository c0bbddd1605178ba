"""A judge that scores a group in one call trains as one that scores each completion: on one rank, and on two with the
reward in a process of its own."""

import json

import pytest
from support.keyed import UNSCORABLE, check_same_course, text_of
from support.loopback import action
from support.ranks import ROOT, of_one_machine, run_ranks

from salesrl_trl.names import JUDGED_SINGLY, usage_of

COMMON = {"max_steps": 6, "hybrid_reference_weight": 0.3}
ONE_RANK = {**COMMON, "per_device_train_batch_size": 8}
LAUNCH_LIMIT_S = 240


def with_an_unscorable_one(prompt, step, place):
    return action(query=UNSCORABLE) if step == 2 and place == 1 else text_of(prompt, step, place)


def of_steps(course, name):
    return [entry[name] for entry in course["steps"]]


def test_the_same_course_and_after_a_failed_call_only_what_can_not_be_scored_is_missing(train):
    singly = train(**ONE_RANK, text_of=with_an_unscorable_one)
    together = train(**ONE_RANK, text_of=with_an_unscorable_one, judging={"orders": 2})
    for entry in together["steps"]:
        lone = entry.pop(JUDGED_SINGLY)
        assert (lone > 0) == (entry["step"] == 3)
    assert of_steps(singly, "outcome/judge_invalid")[2] == of_steps(together, "outcome/judge_invalid")[2] == 0.25
    check_same_course(singly, together)
    verdicts = usage_of("judge", "verdicts")
    assert sum(of_steps(together, verdicts)) < sum(of_steps(singly, verdicts))


@pytest.mark.slow
def test_the_same_course_on_two_ranks_with_the_reward_in_a_process(train, tiny_policy, services_url, tmp_path):
    singly = train(**ONE_RANK)
    given = json.dumps({**COMMON, "per_device_train_batch_size": 4, "ddp_backend": "gloo"})
    program = (ROOT / "tests/invariance/groups_on_ranks.py", tiny_policy, services_url, tmp_path, given)
    for rank in run_ranks(of_one_machine(), program, tmp_path, LAUNCH_LIMIT_S):
        assert [entry.pop(JUDGED_SINGLY) for entry in rank["steps"]] == [0.0] * 6
        check_same_course(singly, rank)
