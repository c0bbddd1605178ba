"""A run's record as the reward of another run, and what a reward notes for the record."""

import asyncio
import json
import sqlite3
import time
from contextlib import closing
from dataclasses import replace
from functools import partial

import pytest
from PIL import Image
from support.loopback import ACTION, BAD, Services, action, build_reward, chat_completion, row

from salesrl_trl.errors import ConfigError
from salesrl_trl.record.reader import record_file, row_of
from salesrl_trl.record.replay import NOT_RECORDED, ReplayReward, recorded_name
from salesrl_trl.record.writer import Batch, Entry, Recorder
from salesrl_trl.reward.batch import Origin, RewardBatch, Sample, wait_for
from salesrl_trl.reward.functions import per_completion
from salesrl_trl.reward.mixed import MixedReward
from salesrl_trl.reward.remote import RemoteReward
from salesrl_trl.reward.stage_times import StageTimes
from salesrl_trl.types import Outcome, Reward

PROMPTS = {0: "first", 1: "second"}
EXAMPLES = [{"row": number, "id": f"r{number + 1}", "prompt": prompt} for number, prompt in PROMPTS.items()]


@pytest.fixture
def rows():
    return [row("r1"), row("r2", "hallucination")]


def record(folder, scored, names=("r1", "r2"), rank=0, after=None, **given):
    """A record in which (row, text) earned these rewards, in this order."""
    entries = [
        Entry(
            row=names[number], branch="fairness", prompt=PROMPTS[number], text=text, tokens=None, place=place,
            prompt_group=place, reward=reward, record=notes,
        )
        for place, (number, text, reward, notes) in enumerate(scored)
    ]  # fmt: skip
    batch = {"step": 1, "mode": "train", "number": 0, **given}
    recorder = Recorder(record_file(folder, rank), after=after)
    recorder.record(Batch(**batch, entries=entries))
    recorder.close()
    return folder


def score(reward, texts):
    async def once():
        try:
            batch = RewardBatch(reward, [EXAMPLES[number] for number, _ in texts])
            batch.start_all([text for _, text in texts])
            await wait_for([batch], partial(batch.has_settled, [range(len(texts))]))
            result = batch.result(await reward.drain())
            return list(result.rewards), [stages.completion_record for stages in batch.stages], result.report
        finally:
            await reward.aclose()

    return asyncio.run(once())


def recorded_run(services, rows, folder, texts, **given):
    rewards, records, _ = score(build_reward(services.url, rows, records=True, **given), texts)
    entries = [(*text, reward, notes) for text, reward, notes in zip(texts, rewards, records, strict=True)]
    return record(folder, entries), rewards


def replayed(run, rows, texts, on_miss="fail", url="http://nobody.invalid", **given):
    return score(ReplayReward(build_reward(url, rows), run, on_miss, **given), texts)[0]


def plain(reward):
    return reward.outcome, reward.value, reward.reason, dict(reward.components), reward.reference_value


def test_a_replay_earns_the_same_without_a_service_failures_too(services, rows, tmp_path):
    texts = [(0, ACTION), (0, BAD), (0, action("refund")), (1, ACTION), (1, action("late"))]

    def answer(request):
        return (503, "busy") if request.json["rewritten_query"] == "refund" else services.answers["8b"][0]

    services.functions["8b"] = answer
    run, rewards = recorded_run(services, rows, tmp_path, texts)
    assert {each.outcome for each in rewards} == {Outcome.OK, Outcome.INVALID_ACTION, Outcome.INFRA}
    services.functions.clear()
    asked = services.calls
    assert [*map(plain, replayed(run, rows, texts))] == [*map(plain, rewards)]
    assert services.calls == asked


def test_the_same_text_again_earns_what_it_earned_then(services, rows, tmp_path):
    scored = [(0, "same", Reward(outcome=Outcome.INVALID_ACTION, value=0.0, reason=each), None) for each in "ab"]
    run = record(tmp_path, scored)
    found = replayed(run, rows, [(0, "same")] * 3)
    assert [each.reason for each in found] == ["a", "b", "b"]


def test_what_is_not_recorded_fails_or_is_the_nearest_or_is_asked_for(services, rows, tmp_path, caplog):
    caplog.set_level("INFO", logger="salesrl_trl")
    known, close, strange = action("Python price"), action("Python prices"), action("refund of a voucher")
    services.verdict(json.dumps({"candidate": 0.25, "reference": 0.5, "reason": "so so"}))
    run, rewards = recorded_run(services, rows, tmp_path, [(0, known), (0, strange)])
    asked = services.calls
    [failed] = replayed(run, rows, [(0, close)])
    assert (failed.value, failed.reason) == (None, NOT_RECORDED)
    [nearest, other_row] = replayed(run, rows, [(0, close), (1, close)], "nearest")
    assert plain(nearest) == plain(rewards[0])
    assert (other_row.value, other_row.reason) == (None, NOT_RECORDED)
    assert services.calls == asked
    services.verdict(json.dumps({"candidate": 0.75, "reference": 0.5, "reason": "fine"}))
    [live, kept] = replayed(run, rows, [(0, close), (0, known)], "live", services.url)
    assert (live.value, kept.value) == (0.75, 0.25)


def test_delays_are_those_of_the_run(services, rows, tmp_path):
    services.set("8b", services.answers["8b"][0][1], delay_s=0.3)
    run, _ = recorded_run(services, rows, tmp_path, [(0, ACTION)])
    seconds = []
    for delays in (False, True):
        began = time.perf_counter()
        replayed(run, rows, [(0, ACTION)], delays=delays)
        seconds.append(time.perf_counter() - began)
    assert seconds[1] >= 0.3 > seconds[0]


@per_completion
def own(prompt, completion):
    raise AssertionError("it was asked")


def looked_up(reward, text="same", place=0, mode="train", step=0, **columns):
    """The number of a completion of this place, sampled after so many steps."""
    example = {"prompt": PROMPTS[0], **columns}
    origin = Origin(rows=[example] * (place + 1), mode=mode, step=step)
    sample = Sample(row={**example, "more": object()}, completion=text, place=place, origin=origin)
    return asyncio.run(reward.score(sample, StageTimes("x"))).value


def test_each_process_gets_what_it_recorded_for_the_same_place_of_the_same_step(tmp_path):
    """One text everywhere. The order of look-ups does not count, so that a replay may be stopped and go on."""
    name = row_of(PROMPTS[0])
    expected = {}
    for rank in range(2):
        for step in range(2):
            values = [rank + step / 10 + place / 100 for place in range(2)]
            expected |= {(rank, step, place): value for place, value in enumerate(values)}
            scored = [(0, "same", Reward.scored(each), None) for each in values]
            record(tmp_path, scored, (name,), rank, after=step, step=step + 1)
    for rank, step, place in [*expected][::-1]:
        reward = ReplayReward(own, tmp_path, "fail", rank=rank)
        assert looked_up(reward, place=place, step=step) == expected[rank, step, place]
    # what was not recorded there stands for it all the same, from the first on
    assert looked_up(ReplayReward(own, tmp_path, "fail"), step=7) == expected[0, 0, 0]
    assert looked_up(ReplayReward(own, tmp_path, "fail"), mode="eval") == expected[0, 0, 0]


def test_several_batches_of_a_step_are_taken_in_their_order(tmp_path):
    entries = [(0, "same", Reward.scored(value), None) for value in (0.25, 0.5)]
    record(tmp_path, entries, (row_of(PROMPTS[0]),))
    with closing(sqlite3.connect(record_file(tmp_path, 0))) as file, file:
        file.execute("UPDATE completions SET place = 0")
    reward = ReplayReward(own, tmp_path, "fail")
    assert [looked_up(reward) for _ in range(3)] == [0.25, 0.5, 0.25]  # a third one was not recorded


def test_equal_prompts_of_rows_with_other_columns_or_pictures_are_other_rows(tmp_path):
    red, blue = (Image.new("RGB", (4, 4), color) for color in ("red", "blue"))
    kinds = [{"answer": "A"}, {"answer": "B"}, {"images": [red]}, {"images": [blue]}]
    for number, columns in enumerate(kinds):
        name = recorded_name({"prompt": PROMPTS[0], **columns})
        run = record(tmp_path / str(number), [(0, "same", Reward.scored(0.75), None)], (name,))
        found = [looked_up(ReplayReward(own, run, "fail"), step=9, **each) for each in kinds]
        assert found == [0.75 if each == columns else None for each in kinds]


def test_numbers_of_other_reward_functions_are_refused(tmp_path):
    """Else the one recorded number would count once for each of this run's functions."""
    both = MixedReward([own, per_completion(lambda prompt, completion: 0.0)], [1.0, 1.0])
    alone = record(tmp_path / "alone", [(0, "same", Reward.scored(0.5), None)])
    with pytest.raises(ConfigError, match="values of one reward function"):
        ReplayReward(both, alone, "fail")
    numbers = dict.fromkeys(both.names.functions, 0.5)
    together = record(tmp_path / "both", [(0, "same", replace(Reward.scored(1.0), by_function=numbers), None)])
    with pytest.raises(ConfigError, match="Use the functions of the recorded run"):
        ReplayReward(own, together, "fail")
    ReplayReward(both, together, "fail")


def test_a_trail_from_a_process_has_every_answer_verdict_and_call_and_no_key(httpserver, rows, tmp_path):
    services = Services(httpserver)
    services.answers["8b"].insert(0, (503, "busy", {}, 0))
    own = build_reward(services.url, rows, records=True, attempts=2)
    rewards, [notes, other], _ = score(RemoteReward(own), [(0, ACTION), (1, BAD)])
    assert notes.action == json.loads(ACTION)
    assert notes.answer["text"] == notes.reference["text"] == "It costs 5980 yuan."
    judged = notes.verdicts["judge"]
    assert (judged.candidate, judged.reference, judged.reason, judged.provider) == (0.75, 0.5, "fine", "judge")
    assert sorted((each.service, each.failure) for each in notes.calls) == [
        ("judge", ""), ("rag_32b", ""), ("rag_8b", ""), ("rag_8b", "rag_8b_http_503"),
    ]  # fmt: skip
    [first] = [each for each in notes.calls if each.failure]
    assert json.loads(first.request)["rewritten_query"] == "Python price"
    assert not other.calls
    record(tmp_path, [(0, ACTION, rewards[0], notes)])
    content = b"".join(path.read_bytes() for path in (tmp_path / "record").iterdir())
    assert b"secret" not in content
    with closing(sqlite3.connect(record_file(tmp_path, 0))) as file:
        assert "secret" not in "\n".join(file.iterdump())


def test_a_hedge_belongs_to_the_completion_it_was_sent_for(services, rows):
    """Hedges are sent by one look-out for all calls."""
    slow = action("slow")

    def answer(request):
        late = request.json["rewritten_query"] == "slow" and len(services.asked["8b"]) <= 41
        return (*services.answers["8b"][0][:3], 1.0 if late else 0.0)

    services.functions["8b"] = answer
    limits = {"max_concurrency": 64, "hedge_fraction": 1.0, "initial_concurrency": 64}
    texts = [(0, action(f"q{number}")) for number in range(40)] + [(0, slow)]
    _, records, report = score(build_reward(services.url, rows, records=True, limits=limits), texts)
    assert report.traffic["rag_8b"]["hedges"] > 0
    for (_, text), notes in zip(texts, records, strict=True):
        asked = [json.loads(each.request) for each in notes.calls if each.service == "rag_8b"]
        assert {each["rewritten_query"] for each in asked} == {json.loads(text)["rewritten_query"]}
    assert len([each for each in records[-1].calls if each.service == "rag_8b"]) > 1


async def test_calls_for_references_ahead_belong_to_no_completion(services, rows, real_time):
    reward = build_reward(services.url, rows, records=True)
    await reward.prepare(EXAMPLES[:1])
    result = await reward.score_all(EXAMPLES[:1], [ACTION])
    await reward.aclose()
    assert [each.service for each in result.report.calls] == ["rag_32b"]


def test_a_verdict_of_another_nonce_is_no_answer_of_this_call(services, rows):
    """It may hold another customer's text."""
    services.signs = False
    foreign = json.dumps({"nonce": "0" * 16, "candidate": 1.0, "reference": 0.5, "reason": "of another"})
    services.set("judge", chat_completion(foreign))
    _, [notes], _ = score(build_reward(services.url, rows, records=True), [(0, ACTION)])
    [judge] = [each for each in notes.calls if each.service == "judge"]
    assert judge.failure
    assert judge.answer is None or b"of another" in judge.answer
