"""The packaged judge of a policy that answers directly: rows, references, criteria, failures. All in memory."""

import json
from pathlib import Path

import pytest
from support.loopback import chat_completion
from support.virtual_time import run as in_virtual_time

from salesrl_trl import judge_reward
from salesrl_trl.errors import ConfigError
from salesrl_trl.ground.fencing import read_sections
from salesrl_trl.judged.judge import Judge
from salesrl_trl.judged.judge_reward import JudgeReward
from salesrl_trl.judged.scoring import Scoring
from salesrl_trl.names import RIGHT_DOCUMENT
from salesrl_trl.reward.figures import RewardFigures
from salesrl_trl.reward.functions import per_completion
from salesrl_trl.reward.mixed import MixedReward
from salesrl_trl.reward.reward_funcs import RewardFuncs
from salesrl_trl.types import Outcome, Reward, Verdict

SAMPLES = Path(__file__).parents[3] / "examples"
QUESTION = {"prompt": [{"role": "user", "content": "What is 2 + 3?"}]}
CRITERIA = ["says 5", {"text": "is polite", "weight": 3.0, "name": "polite"}]


@pytest.fixture
def judged(services):
    """The rewards of completions to rows: `judged(rows, texts, **settings)`."""

    def run(rows, texts, rubric=None, **settings):
        settings = {"judge_base_url": f"{services.url}/v1", "judge_model": "m", "max_attempts": 1, **settings}
        reward = judge_reward(rubric, **settings)

        async def once():
            try:
                return await reward.score_all(rows, texts)
            finally:
                await reward.aclose()

        return in_virtual_time(once()).rewards

    return run


def asked(services):
    bodies = [request.json for request in services.asked["judge"]]
    return [(body["messages"][0]["content"], read_sections(body["messages"][1]["content"]), body) for body in bodies]


def test_the_completion_itself_is_judged_by_the_rows_columns_and_nothing_else_is_asked(services, judged):
    row = {**QUESTION, "documents": ["2 + 3 is 5"], "reference": "It is 5."}
    (reward,) = judged([row], ["5"], rubric="Grade it.")
    ((rubric, sections, _),) = asked(services)
    assert (reward.value, reward.components["reference"], reward.components["margin"]) == (0.75, 0.5, 0.25)
    assert rubric.startswith("Grade it.")
    assert sections == {
        "branch": "all", "conversation": "user: What is 2 + 3?", "documents": "2 + 3 is 5",
        "candidate_answer": "5", "reference_answer": "It is 5.",
    }  # fmt: skip
    assert services.calls == {"8b": 0, "32b": 0, "judge": 1}


def test_the_chinese_sample_rubric_is_what_the_judge_reads_for_rows_without_a_branch(services, judged):
    row = {"prompt": [{"role": "user", "content": "课程能退款吗？"}], "reference": "前 5 节课内可以退还剩余学费。"}
    (reward,) = judged([row], ["前 5 节课内可以退。"], rubric_dir=str(SAMPLES / "rubrics_zh"))
    ((rubric, sections, _),) = asked(services)
    assert (reward.value, sections["conversation"]) == (0.75, "user: 课程能退款吗？")
    assert rubric.startswith((SAMPLES / "rubrics_zh/all.txt").read_text("utf-8"))


def test_of_a_prompt_with_a_picture_the_judge_sees_the_text_alone(services, judged):
    parts = [{"type": "image", "image": object()}, {"type": "text", "text": "What is 2 + 3?"}]
    turns = [{"role": "assistant", "content": None, "tool_calls": [{}]}, {"role": "user", "content": parts}]
    judged([{"prompt": turns}], ["5"])
    ((_, sections, _),) = asked(services)
    assert sections["conversation"] == "assistant: \nuser: What is 2 + 3?"


def test_each_branch_is_judged_by_its_rubric_and_a_row_of_another_is_missing(services, judged):
    services.judge_by(lambda system, user: {"candidate": float("ONE" in system), "reference": None, "reason": ""})
    rows = [{**QUESTION, "branch": name} for name in ("one", "two", "three")]
    first, second, third = judged(rows, ["5", "6", "7"], rubric={"one": "ONE", "two": "TWO"})
    assert (first.value, second.value) == (1.0, 0.0)
    (fourth,) = judged(rows[1:2], ["5"], rubric={"one": "ONE"})
    for reward in (third, fourth):
        assert (reward.outcome, reward.value, reward.reason) == (Outcome.INFRA, None, "row_not_judgeable")


def test_criteria_of_a_row_are_scored_one_by_one_in_one_verdict(services, judged):
    services.verdict(json.dumps({"candidate": [1.0, 0.5], "reference": None, "reason": "5, but rude"}))
    (reward,) = judged([{**QUESTION, "criteria": CRITERIA}], ["5"])
    ((rubric, _, body),) = asked(services)
    assert reward.value == pytest.approx((1 * 1.0 + 3 * 0.5) / 4)
    assert {name: reward.components[name] for name in ("criterion_1", "polite")} == {"criterion_1": 1.0, "polite": 0.5}
    assert reward.metrics == (("rewards/judge/polite", 0.5),)
    assert "1. says 5\n2. is polite" in rubric
    assert body["response_format"]["json_schema"]["schema"]["properties"]["candidate"]["type"] == "array"


@pytest.mark.parametrize(
    ("candidate", "code"),
    [([1.0], "judge_wrong_criteria"), ([1.0, 0.5, 0.5], "judge_wrong_criteria"), (0.5, "judge_outside_schema"),
     ([1.0, 1.5], "judge_outside_schema"), ([1.0, None], "judge_outside_schema")],
)  # fmt: skip
def test_a_verdict_that_lacks_a_criterions_score_gives_no_number(services, judged, candidate, code):
    services.verdict(json.dumps({"candidate": candidate, "reference": None, "reason": ""}))
    (reward,) = judged([{**QUESTION, "criteria": CRITERIA}], ["5"])
    assert (reward.outcome, reward.value, reward.reason) == (Outcome.JUDGE_INVALID, None, code)


def test_verdicts_are_kept_by_all_that_the_judge_reads(services, judged):
    rows = [QUESTION, QUESTION, {**QUESTION, "criteria": ["says 5"]}, {**QUESTION, "reference": "5"}]
    services.functions["judge"] = lambda request: (
        200,
        chat_completion(json.dumps(
            {"candidate": [1.0] if "1. says 5" in request.json["messages"][0]["content"] else 0.5,
             "reference": 0.5 if "reference_answer" in request.json["messages"][1]["content"] else None, "reason": ""}
        )),
    )  # fmt: skip
    assert [reward.value for reward in judged(rows, ["5"] * 4)] == [0.5, 0.5, 1.0, 0.5]
    assert services.calls["judge"] == 3


def test_an_answer_that_says_nothing_is_the_policys_fault_and_costs_no_call(services, judged):
    (reward,) = judged([QUESTION], [" \n"], invalid_action_reward=-0.5)
    assert (reward.outcome, reward.value, services.calls["judge"]) == (Outcome.INVALID_ACTION, -0.5, 0)


@pytest.mark.parametrize("columns", [{"reference": 5}, {"criteria": "says 5"}, {"criteria": [{"weight": 1.0}]},
                                     {"criteria": [{"text": "a", "weight": 0}]}, {"documents": "5"}])  # fmt: skip
def test_a_row_that_the_judge_can_not_read_is_missing_without_its_text(services, judged, columns, caplog):
    (reward,) = judged([{**QUESTION, **columns}], ["5"])
    assert (reward.value, reward.reason, services.calls["judge"]) == (None, "row_not_judgeable", 0)
    assert "says 5" not in caplog.text and "can't be judged" in caplog.text


class Whole(Judge):
    async def judge(self, rubric, row, action, candidate, reference):
        return Verdict(candidate=0.75, reference=None, reason="")


def of_own_judge(row):
    reward = JudgeReward(Whole(), Scoring(weights={"all": {"judge": 1.0}}))
    return in_virtual_time(reward.score_all([row], ["5"])).rewards[0], reward.names


@pytest.mark.parametrize("columns", [{"row": "third"}, {"row": 3}, {"criteria": CRITERIA}], ids=str)
def test_to_a_judge_of_ones_own_a_column_row_may_hold_anything_and_criteria_need_not_count(columns):
    reward, _ = of_own_judge({**QUESTION, **columns})
    assert (reward.value, reward.metrics) == (0.75, ())


def test_an_answer_for_which_nothing_was_searched_has_no_part_and_no_figure_of_a_search():
    reward, names = of_own_judge({**QUESTION, "documents": ["2 + 3 is 5"]})
    assert reward.components == {"judge": 0.75, "reference": None, "margin": None}
    figures = RewardFigures(["all"], names)
    assert figures.column(figures.encode([reward], [0]), RIGHT_DOCUMENT).isnan().all()


def test_a_margin_without_a_column_of_references_is_told_before_training():
    weights = {"all": {"judge": 1.0, "margin": 1.0}}
    margin = judge_reward(judge="seams.own_reward.ByLength", branch_reward_weights=weights)
    with pytest.raises(
        ConfigError, match=r"'judge', which scores a completion, requires 'reference'\. .* Add the column"
    ):
        RewardFuncs.of(margin, None, None).check(["prompt"], 2, 4)
    RewardFuncs.of(margin, None, None).check(["prompt", "reference"], 2, 4)
    RewardFuncs.of(judge_reward(judge="seams.own_reward.ByLength"), None, None).check(["prompt"], 2, 4)


@pytest.mark.parametrize("records", [False, True])
def test_for_a_trainer_that_records_what_the_judge_says_is_kept(records):
    judge = JudgeReward(Whole(), Scoring(weights={"all": {"judge": 1.0}}))
    loop = RewardFuncs.of(judge, None, None, records=records).reward_loop
    batch = loop.begin([QUESTION])
    loop.result(batch, ["5"])
    loop.close()
    kept = batch.stages[0].completion_record
    assert ([*kept.verdicts] if kept else []) == (["judge"] if records else [])


def test_by_a_further_rubric_of_its_file_the_answer_is_scored_as_a_whole(services, judged, tmp_path):
    services.judge_by(
        lambda system, user: {"candidate": 0.25 if "style" in system else [1.0, 1.0], "reference": None, "reason": ""}
    )
    weights = {"branch_reward_weights": {"all": {"judge": 0.5, "judge_style": 0.5}}}
    rows = [{**QUESTION, "criteria": CRITERIA}]
    with pytest.raises(ConfigError, match=r"style\.txt"):
        judged(rows, ["5"], "Grade it.", **weights)
    (tmp_path / "style.txt").write_text("Grade its style.")
    (reward,) = judged(rows, ["5"], "Grade it.", rubric_dir=str(tmp_path), **weights)
    assert (reward.value, reward.components["judge_style"]) == (0.625, 0.25)
    assert sorted(rubric.split(".")[0] for rubric, _, _ in asked(services)) == ["Grade it", "Grade its style"]


def test_parts_of_another_function_are_not_taken_for_the_judges_and_a_second_judge_is_refused():
    @per_completion
    async def other(completion):  # a thread takes real time
        return Reward.scored(0.5, judge=0.1)

    own = JudgeReward(Whole(), Scoring(weights={"all": {"judge": 1.0}}))
    (reward,) = in_virtual_time(MixedReward([own, other], [1.0, 1.0]).score_all([QUESTION], ["5"])).rewards
    assert (reward.components["judge"], reward.components["other/judge"]) == (0.75, 0.1)
    with pytest.raises(ConfigError, match="are named judge, margin"):
        MixedReward([own, own], [1.0, 1.0])
    other.__name__ = "judge"  # its words would take the place of the packaged judge's in the record
    with pytest.raises(ConfigError, match="are named judge"):
        MixedReward([own, other], [1.0, 1.0])
    MixedReward([other, other], [1.0, 1.0])


def test_it_needs_a_judge_and_a_folder_for_a_limit(tmp_path):
    with pytest.raises(ConfigError, match="lacks `judge_providers`"):
        judge_reward("Grade it.")
    with pytest.raises(ConfigError, match="`output_dir`"):
        judge_reward(judge_base_url="http://localhost:1/v1", max_calls=5)
    assert judge_reward(judge_base_url="http://localhost:1/v1", max_calls=5, output_dir=str(tmp_path)).budget
