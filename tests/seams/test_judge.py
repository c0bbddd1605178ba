"""A judge of another kind from outside the package: one class, as an object or by its dotted path in the settings."""

import pytest
from seams.own_reward import LONG, Brevity, ByLength, Deaf
from support.loopback import ACTION, ANSWER, action, build_reward, row

from salesrl_trl.errors import ConfigError
from salesrl_trl.launch.assembly import build_reward as build_from_settings
from salesrl_trl.launch.checks.reward import check_stand_ins, prepare_reward
from salesrl_trl.launch.services_plan import NOWHERE, addresses
from salesrl_trl.reward.reward_loop import RewardLoop
from salesrl_trl.types import Outcome

BRANCHES = ("fairness", "of_my_own")
SCORE = len(ANSWER["answer"]) / LONG


def test_a_judge_scores_in_place_of_the_services(services, anywhere):
    reward = build_reward(services.url, [row()], judge=ByLength(), weights={"fairness": {"judge": 2.0, "margin": 1.0}})
    services.answers["32b"] = [(200, {**ANSWER, "answer": "It is dear."}, {}, 0)]
    result = anywhere(reward, [ACTION])
    (scored,) = result.rewards
    other = len("It is dear.") / LONG
    assert scored.value == pytest.approx(2 * SCORE + SCORE - other)
    assert scored.components["reference"] == pytest.approx(other)
    assert services.calls["judge"] == 0
    assert set(result.report.traffic) == {"rag_8b", "rag_32b"}
    assert result.report.judge_seconds > 0
    services.set("8b", {**ANSWER, "answer": "It costs six thousand yuan altogether."})  # it can not judge this
    (missing,) = anywhere(reward, [action("b")]).rewards
    assert (missing.outcome, missing.reason) == (Outcome.JUDGE_INVALID, "judge_six_words")


def test_settings_name_it_by_its_dotted_path_and_need_no_address_no_key_and_no_rubric(
    services, settings, result_of, tmp_path
):
    config = settings(judge="seams.own_reward.ByLength")
    assert check_stand_ins(config, BRANCHES, None) == []
    parts = prepare_reward(config, BRANCHES)  # whose second branch has no rubric
    with addresses(config) as (rag_base_url, judge_base_url):
        reward = build_from_settings(config, parts, [row()], rag_base_url, judge_base_url, output_dir=tmp_path)
        assert result_of(reward, [ACTION, action("b")]).values == [pytest.approx(SCORE)] * 2
    assert judge_base_url == NOWHERE
    assert services.calls["judge"] == 0


def test_an_object_that_is_no_judge_is_refused(services):
    with pytest.raises(ConfigError, match="Expected a `Judge`"):
        build_reward(services.url, [row()], judge=Brevity())


def test_the_warm_up_asks_it_once_and_a_run_that_it_can_not_serve_ends_there(services):
    for judge, usable in ((ByLength(), True), (Deaf(), False)):
        loop = RewardLoop(build_reward(services.url, [row()], judge=judge))
        found = loop.warm_up()
        assert isinstance(found["judge"], float) is usable
        errors = loop.reward.names.unusable(found)
        assert [error.code for error in errors] == ([] if usable else ["judge_deaf"])
        assert usable or "seams.own_reward.Deaf" in str(errors[0])  # where it is
        loop.close()
    assert services.calls["judge"] == 0
