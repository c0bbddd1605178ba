"""The endpoint of episodes: which requests continue which, on exactly the tokens that were sampled."""

import asyncio
import logging
from itertools import pairwise

import openai
import pytest
from support.agents import ASKED, CALL, LOOK, Policy, chat_tokenizer

from salesrl_trl.agents.policy_endpoint import PolicyEndpoint
from salesrl_trl.generation.engine_loop import GivenUp


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return chat_tokenizer(tmp_path_factory.mktemp("endpoint") / "policy")


@pytest.fixture
def endpoint():
    endpoint = PolicyEndpoint()
    yield endpoint
    endpoint.close()


def test_requests_that_continue_each_other_are_one_sequence_of_sampled_ids(endpoint, tokenizer):
    policy = Policy(tokenizer, [CALL, "It is found.", "Yes!"])

    async def agent(create):
        messages, answers = list(ASKED), []
        for new in ([{"role": "tool", "content": '"7" <|im_end|> 😀'}], [{"role": "user", "content": "Sure?"}], []):
            answer = await create(model="any", messages=messages, tools=[LOOK])
            message = answer.choices[0].message
            answers.append(answer)
            if message.tool_calls:  # as a framework writes it anew
                new[0]["tool_call_id"] = message.tool_calls[0].id
            said = {**message.model_dump(), "content": [{"type": "text", "text": f" {message.content or ''}\n"}]}
            messages += [said, *new]
        return answers

    answers = policy.talk(endpoint, agent)
    assert [answer.choices[0].finish_reason for answer in answers] == ["tool_calls", "stop", "stop"]
    function = answers[0].choices[0].message.tool_calls[0].function
    assert (function.name, function.arguments) == ("look", '{"word": "找"}')
    assert [answer.choices[0].message.content for answer in answers] == [None, "It is found.", "Yes!"]
    # 1. each prompt is the one before, the sampled ids, and what came between
    for (before, after), own in zip(pairwise(policy.asked), policy.sampled, strict=False):
        assert after[: len(before) + len(own)] == before + own
    encoded = tokenizer(tokenizer.decode(policy.asked[-1]))["input_ids"]
    assert len(encoded) < len(policy.asked[-1])  # encoded again, it would be others
    # 2. one sequence: the policy's tokens with their log-probs, all else masked
    [end] = policy.calls.ends()
    assert end.prompt_ids + end.ids == policy.asked[-1] + policy.sampled[-1]
    own = [token for token, one in zip(end.ids, end.mask, strict=True) if one]
    assert own == [token for turn in policy.sampled for token in turn]
    assert all((logprob != 0.0) == bool(one) for logprob, one in zip(end.logprobs, end.mask, strict=True))
    # 3. what is between is what the template writes there
    between = tokenizer.decode([token for token, one in zip(end.ids, end.mask, strict=True) if not one])
    assert '<tool_response>\n"7" < |im_end| > 😀\n</tool_response>' in between  # a result opens and ends no turn
    assert between.count("<|im_start|>assistant\n") == 2
    assert between.count("<|im_start|>user\nSure?<|im_end|>\n") == 1


def test_a_streamed_turn_is_the_turn_in_one_event(endpoint, tokenizer):
    policy = Policy(tokenizer, [CALL, "Yes!"])

    async def agent(create):
        tokens = {"stream_options": {"include_usage": True}}
        return [
            [event async for event in await create(model="any", messages=ASKED, tools=[LOOK], stream=True, **tokens)]
            for _ in range(2)
        ]

    (called, counted), (said, _) = policy.talk(endpoint, agent)
    [call] = called.choices[0].delta.tool_calls
    assert (call.index, call.function.name, call.function.arguments) == (0, "look", '{"word": "找"}')
    assert called.choices[0].finish_reason == "tool_calls" and counted.usage.completion_tokens > 0
    assert (said.choices[0].delta.content, said.choices[0].finish_reason) == ("Yes!", "stop")


def test_a_rewritten_history_is_a_sequence_of_its_own_and_that_with_most_tokens_trains(endpoint, tokenizer):
    policy = Policy(tokenizer, ["A long answer.", "Short.", "Again.", "Other tools."], versions=[4, 5, 6, 7])

    async def agent(create):
        first = (await create(model="any", messages=ASKED)).choices[0].message.content
        said = [*ASKED, {"role": "assistant", "content": first}, {"role": "user", "content": "More."}]
        await create(model="any", messages=[*ASKED[:1], *said[2:]])  # without the question
        await create(model="any", messages=said)
        await create(model="any", messages=said, tools=[LOOK])

    policy.talk(endpoint, agent)
    ends = policy.calls.ends()
    assert [end.before is not None for end in ends] == [True, False, False]
    assert [token for token, one in zip(ends[0].ids, ends[0].mask, strict=True) if one] == [
        *policy.sampled[0], *policy.sampled[2],
    ]  # fmt: skip
    row = ends[0].followed_by(ends[1]).followed_by(ends[2])  # each of its tokens keeps its version
    assert len(row.versions) == len(row.logprobs) == len(row.ids)
    versions = [version for version, one in zip(row.versions, row.mask, strict=True) if one]
    turns = [0, 2, *(policy.sampled.index([*end.ids]) for end in ends[1:])]
    assert versions == [4 + turn for turn in turns for _ in policy.sampled[turn]]


def test_of_equal_requests_the_one_that_is_continued_is_the_sequence(endpoint, tokenizer):
    policy = Policy(tokenizer, ["One.", "Two.", "Three.", "On."])

    async def agent(create):
        answers = [await create(model="any", messages=ASKED) for _ in range(3)]
        texts = sorted(answer.choices[0].message.content for answer in answers)
        second = {"role": "assistant", "content": "Two."}
        await create(model="any", messages=[*ASKED, second, {"role": "user", "content": "And?"}])
        return texts

    assert policy.talk(endpoint, agent) == ["One.", "Three.", "Two."]
    trained, *others = policy.calls.ends()
    assert [message["content"] for message in trained.messages[2:]] == ["Two.", "And?", "On."]
    assert sorted(end.messages[-1]["content"] for end in others) == ["One.", "Three."]


def test_the_key_of_an_open_episode_alone_is_answered_and_is_in_no_log(endpoint, tokenizer, caplog):
    policy, keys = Policy(tokenizer, ["Yes."]), []

    async def asked(key):
        async with openai.AsyncOpenAI(base_url=endpoint.address, api_key=key, max_retries=0) as client:
            return (await client.chat.completions.create(model="any", messages=ASKED)).model

    with caplog.at_level(logging.DEBUG):
        with endpoint.open(policy.calls) as key:
            keys.append(key)
            assert asyncio.run(asked(key)) == "policy"
            with pytest.raises(openai.AuthenticationError):
                asyncio.run(asked(key[:-1]))
        with pytest.raises(openai.AuthenticationError):
            asyncio.run(asked(key))
    assert len(key) > 40 and not any(key in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages"),
        ({"messages": [{"role": "tool", "tool_call_id": "call_1", "content": "7"}]}, "tool_call_id"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "text"),
        ({"messages": ASKED, "n": 2}, "`n`"),
        ({"messages": ASKED, "logprobs": True}, "`logprobs`"),
        ({"messages": ASKED, "stop": ["Observation:"]}, "stop"),
        ({"messages": ASKED, "max_tokens": 0}, "max_tokens"),
        ({"messages": ASKED, "max_completion_tokens": 0, "max_tokens": 5}, "max_tokens"),
        ({"messages": [{"role": "user", "content": "long " * 5000}]}, "full"),
    ],
)
def test_a_request_that_cannot_be_answered_is_refused_with_its_reason(endpoint, tokenizer, body, words):
    policy = Policy(tokenizer, ["Yes."])
    with pytest.raises(openai.BadRequestError, match=words):
        policy.talk(endpoint, lambda create: create(model="any", **{"messages": ASKED, "extra_body": body}))
    assert policy.asked == []


def test_without_tools_what_looks_like_a_call_is_text_and_trains_as_it_was_sampled(endpoint, tokenizer):
    policy = Policy(tokenizer, [CALL, "On."])

    async def agent(create):
        answer = (await create(model="any", messages=ASKED)).choices[0]
        said = [*ASKED, answer.message.model_dump(), {"role": "user", "content": "And?"}]
        await create(model="any", messages=said)
        return answer

    answer = policy.talk(endpoint, agent)
    assert (answer.finish_reason, answer.message.content, answer.message.tool_calls) == ("stop", CALL, None)
    [trained] = policy.calls.ends()
    assert trained.ids[: len(policy.sampled[0])] == policy.sampled[0]


def test_a_turn_is_cut_where_the_request_or_the_run_ends_it(endpoint, tokenizer):
    policy = Policy(tokenizer, ["Too many words.", "Too many words."], most_completion=40)

    async def agent(create):
        cut = (await create(model="any", messages=ASKED, max_tokens=3)).choices[0]
        said = [*ASKED, {"role": "assistant", "content": cut.message.content}, {"role": "user", "content": "Go on."}]
        with pytest.raises(openai.BadRequestError, match="full"):
            await create(model="any", messages=[*said[:-1], {"role": "user", "content": "Go on. " * 40}])
        return cut, said

    cut, said = policy.talk(endpoint, agent)
    assert (cut.finish_reason, cut.message.content) == ("length", "Too")
    assert policy.calls.ends()[0].ids == policy.sampled[0][:3]
    started = policy.calls.start(said, None)  # a turn that was cut gets an end that does not train
    assert started.ids[:4] == [*policy.sampled[0][:3], tokenizer.eos_token_id]
    assert started.mask == [1, 1, 1, *[0] * (len(started.ids) - 3)]


@pytest.mark.parametrize("error", [GivenUp, ZeroDivisionError])
def test_what_fails_in_the_engine_is_not_the_failure_of_the_episode(endpoint, tokenizer, error):
    policy = Policy(tokenizer, [])

    def fails(ids):
        raise error

    policy.calls._ask = fails
    with pytest.raises(openai.APIStatusError, match="no longer"):
        policy.talk(endpoint, lambda create: create(model="any", messages=ASKED))
    assert isinstance(policy.calls.error, error)
