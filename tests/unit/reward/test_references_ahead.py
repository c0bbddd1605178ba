"""Reference answers that are asked for before their completions are there. Time is virtual."""

import asyncio
import json

import pytest
from support.loopback import ANSWER, VERDICT, action, build_reward, examples, row

from salesrl_trl.ground.fencing import read_sections
from salesrl_trl.service.event_loop import now


@pytest.fixture
def rows():
    return [row("r1", message_id="m1"), row("r2", message_id="m2")]


def score(reward, indices):
    texts = [action(query=f"q{number}") for number in range(len(indices))]
    return reward.score_all(examples(indices), texts)


@pytest.mark.parametrize("answer", [(500, {}, {}, 0), (200, {**ANSWER, "answer": ":"}, {}, 0), (200, "<html>", {}, 0)])
async def test_a_failure_ahead_is_nobodys_and_the_completion_is_judged_alone_as_without_it(services, rows, answer):
    services.answers["32b"] = [answer]
    services.verdict(json.dumps({**VERDICT, "reference": None}))
    reward = build_reward(services.url, rows)
    await reward.prepare(examples([0]))
    result = await score(reward, [0])
    assert [(each.value, each.components["reference"]) for each in result.rewards] == [(0.75, None)]
    await reward.aclose()
    assert services.calls["32b"] == 2
    assert "reference_answer" not in read_sections(services.asked["judge"][0].json["messages"][1]["content"])


async def test_asking_ahead_ends_with_the_deadline_of_a_completion(services, rows):
    services.answers["32b"] = [(200, ANSWER, {}, 9), (200, ANSWER, {}, 0)]
    reward = build_reward(services.url, rows, deadline_s=0.5)
    began = now()
    await reward.prepare(examples([0]))
    assert now() - began == pytest.approx(0.5)
    await reward.aclose()


@pytest.mark.parametrize("ahead", ["not", "kept", "under_way", "failed"])
async def test_the_second_and_later_completions_of_a_row_are_saved_calls_whoever_asked_first(services, rows, ahead):
    """The first one is none: the call that it would have cost was made, by itself or ahead of it."""
    services.answers["32b"] = [(500, {}, {}, 0), (200, ANSWER, {}, 0)] if ahead == "failed" else [
        (200, ANSWER, {}, 0.5 if ahead == "under_way" else 0)
    ]  # fmt: skip
    reward = build_reward(services.url, rows)
    if ahead == "under_way":
        asking = asyncio.create_task(reward.prepare(examples([0])))
        await asyncio.sleep(0)
    elif ahead != "not":
        await reward.prepare(examples([0]))
    assert (await score(reward, [0, 0, 0, 1])).report.cache_hits["references"] == 2
    assert (await score(reward, [0, 1])).report.cache_hits["references"] == 2  # now both rows' are there
    assert ahead != "under_way" or asking.done()
    await reward.aclose()
    assert services.calls["32b"] == 2 + (ahead == "failed")


async def test_rows_of_branches_without_a_judgement_are_not_asked_for(services):
    rows = [row("r1", "fairness", message_id="m1"), row("r2", "hallucination", message_id="m2")]
    reward = build_reward(services.url, rows, weights={"fairness": {"retrieval": 1.0}})
    await reward.prepare(examples([0, 1]))
    assert [request.json["message_id"] for request in services.asked["32b"]] == ["m2"]
    await reward.aclose()
