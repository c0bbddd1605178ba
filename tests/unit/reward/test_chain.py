"""The reward chain: the reward of every ending. Services are in memory, and time is virtual."""

import asyncio
import gc
import json
import re
import warnings

import pytest
from support.loopback import ACTION, ANSWER, VERDICT, action, build_reward, chat_completion, row

from salesrl_trl.ground.fencing import read_sections
from salesrl_trl.judged.rag_client import RagClient
from salesrl_trl.reward.batch import RewardBatch
from salesrl_trl.types import Outcome


@pytest.mark.parametrize(("documents", "right"), [((), None), (("other", "..."), 1.0), (("other",), 0.0)])
def test_the_best_passage_is_held_against_the_rows_known_documents(score, documents, right):
    (reward,) = score([ACTION], [row(documents=documents)]).rewards
    assert reward.components["right_document"] == right


def test_a_judged_action_gets_the_judges_score_of_the_candidate(score, services):
    (reward,) = score([ACTION]).rewards
    assert (reward.outcome, reward.value) == (Outcome.OK, VERDICT["candidate"])
    assert reward.components == {
        "judge": 0.75,
        "reference": 0.5,
        "margin": 0.25,
        "retrieval": 0.5,
        "right_document": None,
        "format": 1.0,
    }
    assert set(reward.seconds) == {"parse", "rag_8b", "rag_32b", "judge"}


async def test_a_batch_that_is_given_up_at_any_moment_leaves_no_call_that_was_never_awaited(services):
    async def give_up_after(turns):
        batch = RewardBatch(reward, [{"row": 0}])
        batch.start(0, ACTION)
        for _ in range(turns):
            await asyncio.sleep(0)
        batch.cancel()

    reward = build_reward(services.url, [row()])
    await reward(prompts=[None], completions=[ACTION], row=[0])  # all is kept from here on
    for turns in range(20):
        await give_up_after(turns)
    await reward.aclose()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        gc.collect()
    assert [str(each.message) for each in told] == []


def test_an_invalid_action_is_a_real_low_reward_and_asks_nobody(score, services):
    (reward,) = score(["hello"]).rewards
    assert (reward.outcome, reward.value, reward.reason) == (Outcome.INVALID_ACTION, -0.25, "not_json")
    assert services.calls.total() == 0


def asked(services, endpoint, number=0):
    """The body of a request, without the id, which the header holds too."""
    request = services.asked[endpoint][number]
    body = request.json
    assert re.fullmatch("salesrl-[0-9a-f]{16}", body["request_id"])
    assert request.headers["X-Request-Id"] == body.pop("request_id")
    return body


def test_both_endpoints_get_the_row_and_the_8b_endpoint_the_action(score, services):
    score([ACTION], rows=[row(tenant_id="t1", contact_id="c2", account_id="a3", message_id="m4")])
    score([ACTION], rows=[row(tenant_id="t1")])  # the identifiers that there are
    ids = {"tenant_id": "t1", "contact_id": "c2", "account_id": "a3", "message_id": "m4"}
    action = {"user_profile": "nurse", "rewritten_query": "Python price", "history_summary": ""}
    context = {"context": "customer: I'm a nurse. What does Python cost?", "score_threshold": 0.03, "top_k": 3}
    assert [asked(services, "8b"), asked(services, "32b", 1)] == [
        ids | context | action,
        {"tenant_id": "t1"} | context,
    ]
    assert services.asked["8b"][0].headers["Authorization"] == "Bearer rag-secret"


def test_the_judge_sees_the_branchs_rubric_and_all_material_fenced(score, services):
    score([ACTION], rows=[row(branch="hallucination", documents=("Doc one.", "Doc two."))])
    body = services.asked["judge"][0].json
    system, user = body["messages"]
    assert "grounding" in system["content"]
    assert read_sections(user["content"]) == {
        "branch": "hallucination",
        "conversation": "customer: I'm a nurse. What does Python cost?",
        "documents": "Doc one.\n\nDoc two.",
        "action": ACTION,
        "candidate_answer": ANSWER["answer"],
        "reference_answer": ANSWER["answer"],
    }
    required = body["response_format"]["json_schema"]["schema"]["required"]
    assert required == ["nonce", "candidate", "reference", "reason"]
    assert (body["model"], body["temperature"]) == ("judge-1", 0.0)


@pytest.mark.parametrize(
    ("status", "headers", "delay_s"), [(200, {}, 5.0), (429, {"Retry-After": "1"}, 0.0)], ids=["slow", "turned_away"]
)
def test_a_reference_that_does_not_come_leaves_the_judge_half_of_the_time(score, services, status, headers, delay_s):
    services.set("32b", ANSWER, status=status, headers=headers, delay_s=delay_s)
    services.verdict(json.dumps({**VERDICT, "reference": None}))
    (reward,) = score([ACTION], deadline_s=7.0).rewards
    assert (reward.outcome, reward.value, reward.components["reference"]) == (Outcome.OK, 0.75, None)


def test_what_a_backend_raised_for_a_reference_that_nobody_needs_is_not_told(score, services, monkeypatch, caplog):
    async def raises(*_, **__):
        raise ValueError("a customer's words")

    monkeypatch.setattr(RagClient, "chat", raises)
    services.set("8b", {**ANSWER, "answer": ":"}, delay_s=0.2)
    (reward,) = score([ACTION]).rewards
    assert reward.reason == "hollow_answer"
    gc.collect()
    assert "never retrieved" not in caplog.text
    assert "customer" not in caplog.text


@pytest.mark.parametrize(
    ("status", "body", "reason"),
    [
        (500, {}, "rag_8b_http_500"),
        (429, {}, "rag_8b_http_429"),
        (401, {"error": "bad key rag-secret"}, "rag_8b_http_401"),
        (200, json.dumps(ANSWER).replace('"answer":', '"answer": "", "answer":'), "rag_8b_bad_response"),
        (200, {**ANSWER, "answer": " "}, "rag_8b_empty_answer"),  # with passages: the service's fault
        (500, {"error": {"message": "key judge-secret"}}, "judge_http_500"),
        (200, "<html>gateway</html>", "judge_bad_response"),
        (200, chat_completion("I can't judge this."), "judge_not_json"),
        (200, chat_completion(""), "judge_empty"),
        (200, chat_completion(json.dumps({**VERDICT, "candidate": 1.5})), "judge_outside_schema"),
    ],
)
def test_a_failed_call_is_never_a_number(score, services, status, body, reason):
    service = "8b" if reason.startswith("rag_8b") else "judge"
    services.set(service, body, status=status, headers={"Retry-After": "3600"} if status == 429 else {})
    (reward,) = score([ACTION]).rewards
    is_verdict = reason in ("judge_not_json", "judge_empty", "judge_outside_schema")
    assert reward.outcome is (Outcome.JUDGE_INVALID if is_verdict else Outcome.INFRA)
    assert (reward.value, reward.reason) == (None, reason)
    assert service == "judge" or services.calls["judge"] == 0


@pytest.mark.parametrize("answer", ["", ":", "Thought process:"])
def test_a_hollow_answer_is_the_actions_fault_and_no_judge_sees_it(score, services, answer):
    with_passages_from(services, lambda query, threshold: threshold == 0, otherwise=answer)
    (reward,) = score([ACTION]).rewards
    assert (reward.outcome, reward.value, reward.reason) == (Outcome.INVALID_ACTION, -0.25, "hollow_answer")
    assert services.calls["judge"] == 0


def test_nothing_secret_and_nothing_a_customer_said_is_logged(score, services, caplog):
    services.set("8b", {"error": "rag-secret I'm a nurse"}, status=401)
    with caplog.at_level("DEBUG", logger="salesrl_trl"), caplog.at_level("INFO"):
        reward = score([ACTION], attempts=2)
    told = caplog.text + repr(reward.rewards)
    assert "rag-secret" not in told
    assert "judge-secret" not in told
    assert "nurse" not in told


@pytest.mark.parametrize(
    "stated",
    [
        {"error": {"message": "overloaded"}},
        {"errors": ["index"]},
        {"success": False},
        {"status": "BUSY"},
        {"code": 429},
    ],
    ids=str,
)
def test_what_a_200_says_of_its_own_failure_is_heard_before_its_answer(score, services, stated):
    """Nothing of it is scored or kept, and it is asked for again."""
    busy = (200, {**ANSWER, "answer": "The server is busy, try again later.", **stated}, {}, 0)
    verdict = (200, {**chat_completion(json.dumps({**VERDICT, "candidate": 1.0})), **stated}, {}, 0)
    for name, answer in (("8b", busy), ("32b", busy), ("judge", verdict)):
        services.answers[name].insert(0, answer)
    reward = score([ACTION], attempts=2)
    assert [(each.outcome, each.value) for each in reward.rewards] == [(Outcome.OK, VERDICT["candidate"])]
    assert services.calls == {"8b": 2, "32b": 2, "judge": 2}
    assert "busy" not in services.asked["judge"][1].json["messages"][1]["content"]
    services.answers["8b"].insert(0, (200, {"error": "busy"}, {}, 0))
    (failed,) = score([ACTION]).rewards
    assert (failed.outcome, failed.value, failed.reason) == (Outcome.INFRA, None, "rag_8b_error_in_answer")


@pytest.mark.parametrize("stated", [{"error": None}, {"success": True}, {"status": "ok"}, {"status": 200}], ids=str)
def test_a_200_that_says_it_went_well_is_an_answer(score, services, stated):
    services.set("8b", {**ANSWER, **stated})
    assert score([ACTION]).rewards[0].outcome is Outcome.OK


def with_passages_from(services, found, otherwise="I found nothing."):
    """The 8B endpoint finds some where `found(query, threshold)`."""

    def respond(request):
        some = found(request.json["rewritten_query"], request.json["score_threshold"])
        return 200, ANSWER if some else {**ANSWER, "answer": otherwise, "passages": []}

    services.functions["8b"] = respond


def test_an_index_without_anything_for_a_row_is_not_the_policys_fault(score, services):
    with_passages_from(services, lambda query, threshold: False)
    rewards = score([action(query="good"), action(query="bad")]).rewards
    assert [(each.outcome, each.value, each.reason) for each in rewards] == [(Outcome.INFRA, None, "no_passages")] * 2
    assert services.calls["judge"] == 0
    services.set("8b", {**ANSWER, "answer": "", "passages": []})
    services.functions.clear()
    assert score([ACTION]).rewards[0].reason == "no_passages"


def test_a_query_that_finds_nothing_in_an_index_that_has_something_is_the_policys(score, services):
    with_passages_from(services, lambda query, threshold: query == "good" or threshold == 0)
    rewards = score([action(query=query) for query in ("good", "bad", "worse")]).rewards
    assert [each.outcome for each in rewards] == [Outcome.OK] * 3
    assert rewards[1].components["retrieval"] == 0.0
    assert services.calls["8b"] == 3 + 1  # the row's conversation itself, asked with once


async def test_an_answer_from_no_passages_is_asked_for_again(services):
    """It may be how a service says that it is busy."""
    services.answers["32b"].insert(0, (200, {**ANSWER, "answer": "Busy, come back later.", "passages": []}, {}, 0))
    reward = build_reward(services.url, [row()])
    for query in ("one", "two", "three"):
        await reward(prompts=[None], completions=[action(query=query)], row=[0])
    await reward.aclose()
    assert services.calls["32b"] == 2
