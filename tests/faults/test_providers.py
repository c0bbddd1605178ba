"""Judges as providers have them, by the documented lines: each gives a verdict on each completion."""

import asyncio
import contextlib
import json
import logging
import re
import threading

import pytest
from support.providers import PROFILES, Profile, completion, refusal, scored_by, served, verdict_for

from salesrl_trl import judge_reward
from salesrl_trl.launch.checks.addresses import check_models

TEXTS = [f"answer {number}" for number in range(32)]


@pytest.mark.parametrize("name", PROFILES)
def test_a_provider_scores_every_completion_by_the_documented_lines(name, caplog):
    profile = PROFILES[name]
    with served(profile) as (url, asked), caplog.at_level(logging.INFO, logger="salesrl_trl"):
        assert check_models(url, None, profile.model) == []
        del asked[:]
        failed, rewards = scored_by(url, profile, TEXTS)
    assert not any(isinstance(each, Exception) for each in failed.values())
    assert [reward.value for reward in rewards] == [0.5] * 32
    learnt = [line for line in caplog.messages if line.startswith("judge judge ")]
    assert [any(words in line for line in learnt) for words in profile.learnt] == [True] * len(profile.learnt)
    assert len(learnt) == len(profile.learnt)
    refused = [body for _, body in asked if profile.answer(body, 0)[0] in (400, 422)]
    assert len(refused) == len(learnt)  # the warm-up met the refusal, and no other request did


def test_a_name_that_the_provider_does_not_have_is_refused_with_what_it_lists():
    with served(PROFILES["Ollama"]) as (url, _), pytest.raises(Exception, match=r"'llama3'.* mean 'llama3.2:latest'"):
        check_models(url, None, "llama3")


def test_a_text_that_a_filter_withholds_costs_no_other_and_no_field():
    with served(PROFILES["Azure"]) as (url, asked):
        _, rewards = scored_by(url, PROFILES["Azure"], ["fine", "WITHHELD", "fine too"])
    assert [(reward.value, reward.reason) for reward in rewards] == [(0.5, ""), (None, "judge_refused"), (0.5, "")]
    assert {path for path, _ in asked} == {"/openai/deployments/gpt-4o/chat/completions?api-version=2024-10-21"}
    assert all({"temperature", "response_format"} <= body.keys() for _, body in asked)


def only_thinks(body, _):
    return 200, completion("", reasoning_content="Hmm. " * 100)


def too_many(body, _):
    text = "max_tokens is too large: 512. This model supports at most 256 completion tokens"
    return refusal("max_completion_tokens", text, code="invalid_value")


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (only_thinks, r"`max_completion_tokens`.*enable_thinking: false"),
        (too_many, r"It rejects the request's max_completion_tokens"),
    ],
)
def test_what_no_other_form_of_a_request_can_mend_is_one_message_and_drops_no_field(answer, words):
    with served(Profile(answer)) as (url, asked):
        failed, rewards = scored_by(url, Profile(answer), TEXTS[:2], max_attempts=1)
    assert re.search(words, " ".join(str(failed["judge"]).split()))
    assert [reward.value for reward in rewards] == [None, None]
    assert all({"temperature", "max_completion_tokens"} <= body.keys() for _, body in asked)


def test_a_user_s_own_field_that_is_refused_goes_too_and_is_told_once(caplog):
    def no_seed(body, _):
        if "seed" in body:
            return 400, b"Failed to deserialize the JSON body: unknown field `seed`, expected one of `model`, `n`"
        return 200, completion(verdict_for(body))

    profile = Profile(no_seed)
    judge = {"name": "mine", "model": "judge", "extra_body": {"seed": 7}}
    with served(profile) as (url, asked), caplog.at_level(logging.INFO, logger="salesrl_trl"):
        _, rewards = scored_by(None, profile, TEXTS, judge_providers=[{**judge, "base_url": url}])
    assert [reward.value for reward in rewards] == [0.5] * 32
    refused, *others = ["seed" in body for _, body in asked]
    assert refused and not any(others) and len(others) >= 33  # a busy machine may add a hedge
    assert caplog.text.count("judge mine rejects `seed`") == 1


def test_a_field_that_is_refused_by_both_its_names_is_told_once_each(caplog):
    """Requests under way together are refused alike, and each refusal says nothing new."""
    together = threading.Barrier(8)

    def neither(body, _):
        with contextlib.suppress(threading.BrokenBarrierError):
            together.wait(2)
        for name in {"max_completion_tokens", "max_tokens"} & body.keys():
            return refusal(name, "Unsupported parameter", code="unsupported_parameter")
        return 200, completion(verdict_for(body))

    async def judged(url):
        reward = judge_reward(judge_base_url=url, judge_model="judge")
        try:
            return (await reward.score_all([{"prompt": f"{text}?"} for text in TEXTS[:8]], TEXTS[:8])).rewards
        finally:
            await reward.aclose()

    with served(Profile(neither)) as (url, _), caplog.at_level(logging.INFO, logger="salesrl_trl"):
        rewards = asyncio.run(judged(url))
    assert [reward.value for reward in rewards] == [0.5] * 8
    assert [caplog.text.count(f"rejects `{name}`") for name in ("max_completion_tokens", "max_tokens")] == [1, 1]


FULL = "max_tokens"


@pytest.mark.parametrize(
    ("refused", "sent"), [((), {FULL: 7}), ((FULL,), {"max_completion_tokens": 512})], ids=["taken", "refused"]
)
def test_the_other_name_of_the_limit_can_be_set_for_good(refused, sent):
    """`extra_body: {max_tokens: 7}` is sent in place of our name, and never beside it: OpenAI refuses both at once."""

    def answer(body, _):
        names = {"max_tokens", "max_completion_tokens"} & body.keys()
        if len(names) > 1 or names & {*refused}:
            return refusal(FULL, "Unsupported parameter: 'max_tokens' is not supported with this model.")
        return 200, completion(verdict_for(body))

    judge = {"name": "mine", "model": "judge", "extra_body": {FULL: 7}}
    with served(Profile(answer)) as (url, asked):
        _, rewards = scored_by(None, Profile(answer), TEXTS[:8], judge_providers=[{**judge, "base_url": url}])
    assert [reward.value for reward in rewards] == [0.5] * 8
    assert {name: asked[-1][1][name] for name in asked[-1][1] if name.startswith("max_")} == sent
    assert len(asked) == 9 + len(refused)


def chunked(body):
    chunks = [{"delta": {"content": verdict_for(body)}}, {"delta": None, "finish_reason": "stop"}]
    lines = [f"id: 1\nevent: chunk\ndata: {json.dumps({'choices': [chunk]})}\r\n\r\n" for chunk in chunks]
    return "".join(lines)


def one_chunk(body):
    parts = [{"type": "thinking", "thinking": "Hm."}, {"type": "text", "text": verdict_for(body)}]
    choice = {"delta": {"content": parts}, "finish_reason": "stop"}
    return f"data:\n\ndata: {json.dumps({'choices': [choice]})}\n\ndata: [DONE]\n\n"


@pytest.mark.parametrize("stream", [chunked, one_chunk], ids=["without an end mark", "one chunk of parts"])
def test_a_stream_that_was_not_asked_for_is_read_where_it_is_whole(stream):
    profile = Profile(lambda body, _: (200, stream(body).encode()))
    with served(profile) as (url, _):
        _, rewards = scored_by(url, profile, TEXTS[:4])
    assert [reward.value for reward in rewards] == [0.5] * 4


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"<!DOCTYPE html><title>Sign in</title>", r"a web page \(HTML\)"),
        (b'data: {"choices": [{"delta": {"content": "{"}}]}\n\ndata: {"choices": []}\n\n', "not JSON"),
        (b'data: {"choices": [{"delta": 5}]}\n\ndata: {"choices": [3]}\n\n', "not JSON"),
    ],
    ids=["a login page", "a stream that breaks off", "a stream of other events"],
)
def test_what_is_no_completion_is_named_and_gives_no_number(body, words):
    profile = Profile(lambda *_: (200, body))
    with served(profile) as (url, _):
        failed, rewards = scored_by(url, profile, TEXTS[:2], max_attempts=1)
    assert re.search(words, str(failed["judge"]))
    assert [(reward.value, reward.reason) for reward in rewards] == [(None, "judge_bad_response")] * 2
