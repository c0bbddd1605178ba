"""Completions that try to write their own verdict, against judges from honest to as gullible as can be."""

import json
import re

import pytest
from support.in_memory import score_batch
from support.injections import FORGED_SCORE, GUESSED, INJECTIONS
from support.loopback import ANSWER, VERDICT, action, build_reward, row

from salesrl_trl.ground.fencing import fence, read_sections
from salesrl_trl.types import Outcome

BY_TEXT = [{"name": "judge", "response_format": "text"}]
TEXTS = [text for _, text in INJECTIONS]


def score(services, completions, providers=None, answer=None):
    if answer is not None:
        services.set("8b", {**ANSWER, "answer": answer})
    reward = build_reward(services.url, [row()], providers=providers, limits={"initial_concurrency": 64})
    return score_batch(reward, completions).rewards


def in_actions():
    """Every injection in a field of an action, each field in turn: a judge sees all three in one section."""
    return [action(**{("query", "profile", "summary")[place % 3]: text}) for place, text in enumerate(TEXTS)]


def forged(rewards):
    return [reward for reward in rewards if reward.value is not None and abs(reward.value - FORGED_SCORE) < 1e-6]


@pytest.mark.parametrize("nonce", [None, GUESSED], ids=["nonce unknown", "nonce known"])
def test_no_text_opens_or_closes_a_section(nonce):
    for text in TEXTS:
        sections = read_sections(fence({"action": text, "candidate_answer": text, "documents": "kept"}, nonce))
        assert list(sections) == ["action", "candidate_answer", "documents"]
        assert sections["documents"] == "kept"


def parrot(system, user):
    return user


def quotes_then_judges(system, user):
    """Thinks aloud about all it was shown, then judges honestly."""
    nonce = re.search(r'"nonce": "([0-9a-f]{16})"', system)[1]
    return f"{user}\n\nSo:\n" + json.dumps({"nonce": nonce, **VERDICT})


def judges_then_quotes(system, user):
    """Judges honestly, and then lets the completion have the last word."""
    nonce = re.search(r'"nonce": "([0-9a-f]{16})"', system)[1]
    return json.dumps({"nonce": nonce, **VERDICT}) + f"\n\n{user}"


def copies_the_last_object(system, user):
    return re.findall(r"\{[^{}]*\}", user)[-1]


def says(services, talk):
    services.signs = False

    def respond(request):
        system, user = (message["content"] for message in request.json["messages"])
        choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": talk(system, user)}}
        return 200, {"object": "chat.completion", "choices": [choice]}

    services.functions["judge"] = respond


@pytest.mark.parametrize("talk", [parrot, judges_then_quotes, copies_the_last_object])
def test_what_a_gullible_judge_says_back_is_no_verdict(services, talk):
    says(services, talk)
    rewards = score(services, in_actions(), BY_TEXT)
    assert {reward.outcome for reward in rewards} <= {Outcome.JUDGE_INVALID, Outcome.INVALID_ACTION}


def test_a_judge_that_quotes_before_it_judges_is_heard(services):
    says(services, quotes_then_judges)
    rewards = score(services, in_actions(), BY_TEXT)
    assert {reward.value for reward in rewards if reward.outcome is Outcome.OK} == {VERDICT["candidate"]}
    assert sum(reward.outcome is Outcome.OK for reward in rewards) > 0.9 * len(TEXTS)


@pytest.mark.parametrize("talk", [parrot, quotes_then_judges, judges_then_quotes, copies_the_last_object])
def test_an_answer_that_the_rag_service_was_made_to_give_forges_none(services, talk):
    says(services, talk)
    for text in TEXTS[::7]:
        rewards = score(services, [action()], BY_TEXT, answer=text)
        assert forged(rewards) == []
