"""One call for the completions of a prompt: who is in it, when it is made, and what becomes of those outside."""

import asyncio
from functools import partial

import pytest

from salesrl_trl import judge_reward
from salesrl_trl.ground.fencing import read_sections
from salesrl_trl.judged.judge import Judge
from salesrl_trl.judged.judge_reward import JudgeReward
from salesrl_trl.judged.scoring import Added, RewardStage, Scoring
from salesrl_trl.names import JUDGED_SINGLY
from salesrl_trl.reward.batch import RewardBatch, wait_for
from salesrl_trl.reward.figures import RewardFigures
from salesrl_trl.reward.scorer import Per
from salesrl_trl.types import Outcome, Verdict

ROW = {"prompt": [{"role": "user", "content": "What is 2 + 3?"}]}
TEXTS = [f"0.{number}" for number in range(1, 9)]
"""Each is its own score."""


def shown(request):
    """What stands in a request for a verdict, in its order: the names and texts of candidates and reference."""
    sections = read_sections(request.json["messages"][1]["content"])
    return {name: text for name, text in sections.items() if name.startswith(("candidate_", "reference_"))}


def by_text(system, user):
    answers = {name: text for name, text in read_sections(user).items() if name.startswith("candidate_")}
    reference = 0.5 if "reference_answer" in read_sections(user) else None
    if "candidate_answer" in answers:
        return {"candidate": float(answers["candidate_answer"]), "reference": reference, "reason": ""}
    named = [{"name": name.removeprefix("candidate_"), "score": float(text)} for name, text in answers.items()]
    return {"candidates": named, "reference": reference, "reason": ""}


@pytest.fixture
def reward(services):
    services.judge_by(by_text)

    def build(**settings):
        url = {} if "judge_providers" in settings else {"judge_base_url": f"{services.url}/v1", "judge_model": "m"}
        return judge_reward("Grade.", judge_mode="group", max_attempts=1, **url, **settings)

    return build


async def scored(reward, rows, texts, group=8):
    try:
        return await reward.score_all(rows, texts, group=group)
    finally:
        await reward.aclose()


async def test_a_group_is_judged_in_two_orders_by_names_that_no_other_request_has(services, reward):
    result = await scored(reward(), [{**ROW, "reference": "five"}] * 8, TEXTS)
    assert result.values == pytest.approx([float(text) for text in TEXTS])
    assert [each.components["margin"] for each in result.rewards] == pytest.approx([v - 0.5 for v in result.values])
    first, second = map(shown, services.asked["judge"])
    assert [*first.values()] == [*second.values()][::-1] and sorted(first.values()) == sorted([*TEXTS, "five"])
    assert first.keys() & second.keys() == {"reference_answer"}
    assert (len(result.report.records), result.report.judged_singly) == (16, 0)


async def test_each_completions_record_has_its_own_score_and_the_calls_of_its_group(services, reward):
    recording = reward()
    recording.records = True
    batch = RewardBatch(recording, [ROW] * 8, group=8)
    batch.start_all(TEXTS)
    await wait_for([batch], partial(batch.has_settled, [range(8)]))
    await recording.aclose()
    records = [stages.completion_record for stages in batch.stages]
    assert [record.verdicts["judge"].candidate for record in records] == pytest.approx([float(t) for t in TEXTS])
    assert {(len(record.calls), record.calls[0].time) for record in records} == {(2, records[0].calls[0].time)}


async def test_only_answers_that_can_be_judged_are_in_the_call_and_equal_ones_once(services, reward):
    result = await scored(reward(), [ROW] * 8, ["0.1", " ", "0.2", "0.1", "", "0.3", "0.1", " "])
    assert {*shown(services.asked["judge"][0]).values()} == {"0.1", "0.2", "0.3"}
    assert result.values == pytest.approx([0.1, 0.0, 0.2, 0.1, 0.0, 0.3, 0.1, 0.0])
    assert services.calls["judge"] == 2


async def test_one_answer_alone_is_a_single_call(services, reward):
    assert (await scored(reward(), [ROW] * 4, ["0.1", " ", "0.1", "\n"], group=4)).values == [0.1, 0.0, 0.1, 0.0]
    assert (await scored(reward(), [ROW] * 2, ["0.4", "0.6"], group=1)).values == [0.4, 0.6]
    assert [[*shown(request)] for request in services.asked["judge"]] == [["candidate_answer"]] * 3


async def test_answers_to_other_rows_or_beside_another_reference_are_in_another_call(services, reward):
    rows = [{**ROW, "reference": "five" if place % 2 else "5"} for place in range(8)]
    assert (await scored(reward(), rows, TEXTS)).values == pytest.approx([float(text) for text in TEXTS])
    assert [len(shown(request)) for request in services.asked["judge"]] == [5] * 4


async def test_after_a_failed_call_each_is_judged_alone_and_counted(services, reward):
    def respond(request):
        said = by_text("", request.json["messages"][1]["content"])
        return (500, {}) if "candidates" in said else answer(request)

    answer, services.functions["judge"] = services.functions["judge"], respond
    result = await scored(reward(), [ROW] * 8, TEXTS)
    assert result.values == pytest.approx([float(text) for text in TEXTS])
    assert (services.calls["judge"], result.report.judged_singly) == (2 + 8, 8)
    figures = RewardFigures(("all",), reward().names)
    assert JUDGED_SINGLY in figures.names()
    assert figures.encode_report(result.report)[0].tolist()[-1] == 8.0
    assert JUDGED_SINGLY not in RewardFigures(("all",), judge_reward(judge_base_url="http://j/v1").names).names()


def test_a_group_is_kept_as_a_whole(services, reward, tmp_path):
    own = {"output_dir": str(tmp_path)}
    asyncio.run(scored(reward(**own), [ROW] * 8, TEXTS))
    again = asyncio.run(scored(reward(**own), [ROW] * 8, TEXTS[::-1]))
    assert again.values == pytest.approx([float(text) for text in TEXTS[::-1]]) and services.calls["judge"] == 2
    asyncio.run(scored(reward(**own), [ROW] * 8, [*TEXTS[:7], "0.9"]))
    assert services.calls["judge"] == 4  # beside another answer each may have another score
    asyncio.run(scored(reward(**own, judge_orders=3), [ROW] * 8, TEXTS))
    assert services.calls["judge"] == 7


def test_at_a_limit_of_calls_nobody_of_the_group_has_a_number(services, reward, tmp_path):
    result = asyncio.run(scored(reward(output_dir=str(tmp_path), max_calls=1), [ROW] * 8, TEXTS))
    assert {(each.value, each.reason) for each in result.rewards} == {(None, "budget_spent")}
    assert services.calls["judge"] == 1


async def test_a_group_of_a_batch_of_the_second_judge_is_its_alone_and_its_verdicts_are_not_taken_for_the_others(
    services, reward
):
    providers = [{"name": name, "base_url": f"{services.url}/v1", "model": name} for name in ("own", "other")]
    metered = reward(judge_providers=providers, judge_meter={"second": "other", "on_alarm": "second_judge"})
    assert metered.names.required == (("judge_own",), ("judge_other",))
    for by_second in (False, True):
        batch = RewardBatch(metered, [ROW] * 8, group=8)
        batch.by_second = by_second
        batch.start_all(TEXTS)
        await wait_for([batch], partial(batch.has_settled, [range(8)]))
        # A completion of another text, in the place of the last one, is of the same judge.
        batch.start(7, "0.9")
        await wait_for([batch], partial(batch.has_settled, [range(8)]))
    taken = RewardBatch(metered, [ROW] * 8, group=8)
    taken.take([(batch, range(8))], [(0.0, 0.0)])
    taken.start(7, "0.95")
    await wait_for([taken], partial(taken.has_settled, [range(8)]))
    await metered.aclose()
    assert [request.json["model"] for request in services.asked["judge"]] == ["own"] * 4 + ["other"] * 6


class Hanging(RewardStage):
    name = "hanging"

    async def run(self, case):
        if case.answer.text == "0.8":
            await asyncio.sleep(60)
        return Added()


class Comparing(Judge):
    orders = 2

    def __init__(self):
        self.asked = []

    async def judge(self, rubric, row, action, candidate, reference):
        self.asked.append([candidate.text])
        return Verdict(candidate=float(candidate.text), reference=None, reason="")

    async def judge_group(self, rubric, row, candidates, reference):
        texts = [answer.text for _, answer in candidates]
        self.asked.append(sorted(texts))
        said = [Verdict(candidate=float(text), reference=None, reason="") for text in texts]
        return said[1:] if "0.11" in texts else said


def own_reward(deadline_s=10.0, stages=()):
    judge = Comparing()
    return judge, JudgeReward(judge, Scoring(weights={"all": {"judge": 1.0}}), deadline_s=deadline_s, stages=stages)


async def test_a_judge_of_ones_own_compares_and_what_it_leaves_out_gives_no_number_to_anybody():
    judge, reward = own_reward()
    assert (await scored(reward, [ROW] * 8, TEXTS)).values == [float(text) for text in TEXTS]
    assert judge.asked == [TEXTS]
    judge.asked.clear()
    assert (await scored(reward, [ROW] * 8, ["0.11", *TEXTS[1:]])).values == [0.11, *map(float, TEXTS[1:])]
    assert sorted(map(len, judge.asked)) == [1] * 8 + [8]  # seven verdicts on eight are none
    assert reward.names.together is Per.GROUP


async def test_where_a_judge_of_ones_own_hangs_over_a_group_each_is_judged_alone(monkeypatch):
    judge, reward = own_reward(deadline_s=2.0)
    monkeypatch.setattr(judge, "judge_group", lambda *_: asyncio.sleep(60))
    result = await scored(reward, [ROW] * 8, TEXTS)
    assert result.values == [float(text) for text in TEXTS] and result.report.judged_singly == 8


async def test_the_call_waits_for_the_last_completion_and_not_for_one_that_failed():
    judge, reward = own_reward()
    batch = RewardBatch(reward, [ROW] * 16, group=8)
    for place in range(15):
        batch.start(place, TEXTS[place % 8], failed="tool_down" if place == 3 else None)
    await wait_for([batch], partial(batch.has_settled, [range(8)]))
    assert judge.asked == [[*TEXTS[:3], *TEXTS[4:]]]
    batch.start(15, TEXTS[7])
    await wait_for([batch], partial(batch.has_settled, [range(16)]))
    assert judge.asked[-1] == TEXTS
    rewards = batch.result().rewards
    assert (rewards[3].value, rewards[3].outcome, rewards[3].reason) == (None, Outcome.INFRA, "tool_down")
    assert all(reward.value == float(TEXTS[place % 8]) for place, reward in enumerate(rewards) if place != 3)


async def test_a_completion_that_is_late_costs_itself_alone():
    _, reward = own_reward(deadline_s=1.0, stages=[Hanging()])
    rewards = (await scored(reward, [ROW] * 8, TEXTS)).rewards
    assert [each.value for each in rewards[:7]] == [float(text) for text in TEXTS[:7]]
    assert (rewards[7].value, rewards[7].reason) == (None, "deadline")


async def test_a_group_that_begins_again_is_judged_by_its_new_texts():
    judge, reward = own_reward()
    batch = RewardBatch(reward, [ROW] * 8, group=8)
    batch.start(0, " ")
    for place in range(1, 7):
        batch.start(place, TEXTS[place])
    await asyncio.sleep(0.05)
    batch.start(0, "0.15")  # the one that was left out before
    await asyncio.sleep(0.05)
    batch.start(7, TEXTS[7])
    await wait_for([batch], partial(batch.has_settled, [range(8)]))
    assert batch.result().values == [0.15, *map(float, TEXTS[1:])]
    assert judge.asked == [["0.15", *TEXTS[1:]]]
