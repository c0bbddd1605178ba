"""Reward functions of one's own from outside the package, in the trainer's process and in one of their own."""

import asyncio
import functools
import sys
import urllib.error
from functools import partial
from types import SimpleNamespace

import aiohttp
import httpx
import numpy as np
import openai
import pytest
import requests
import torch
from seams.own_reward import compute_score, of_trl, ranks, shortness
from support.virtual_time import play, run

from salesrl_trl.errors import ConfigError, ServiceError, ServiceOverloaded
from salesrl_trl.judged.budget import FREE, Budget, Limit, read_account
from salesrl_trl.judged.spending import Spending
from salesrl_trl.reward.batch import RewardBatch, Sample, wait_for
from salesrl_trl.reward.functions import RewardFunction, per_completion, per_group, reward_of
from salesrl_trl.reward.mixed import MixedReward
from salesrl_trl.reward.stage_times import StageTimes
from salesrl_trl.service.event_loop import deadline
from salesrl_trl.service.transport import Transport
from salesrl_trl.types import Outcome

FAULTS = {
    "raises": "shortness_raised_ValueError",
    "exits": "shortness_raised_SystemExit",
    "cancelled inside": "shortness_raised_CancelledError",
    "no connection": "shortness_unavailable",
    "nan": "shortness_not_finite",
    "beyond float32": "shortness_not_finite",
    "a string": "shortness_no_number",
    "none": "not_applicable",
    "gone": "judge_busy",
    "gone with words": "shortness_missing",
    "gone with a word of the package": "shortness_missing",
    "raises a word of the package": "shortness_missing",
    "raises that a budget is spent": "budget_spent",
    "raises a code of its own": "my_judge_no_model",
    "much too long a text": "too_long",
}
"""What a completion makes the function do, and the reason under which the completion is missing."""


def rows(count, **columns):
    return [{"prompt": "p", **{name: values[place] for name, values in columns.items()}} for place in range(count)]


def test_every_fault_of_a_function_is_a_missing_reward_with_its_reason(anywhere):
    texts = ["four", *FAULTS, "parts"]
    result = anywhere(shortness, texts, rows(len(texts)))
    assert result.values == [0.25, *[None] * len(FAULTS), 0.5]
    assert [each.reason for each in result.rewards] == ["", *FAULTS.values(), "brief"]
    assert {each.outcome for each in result.rewards if each.value is None} == {Outcome.INFRA}
    assert result.rewards[-1].columns == {"shortness/brevity": 0.75, "shortness/reason": "brief"}
    assert result.rewards[-1].metrics == (("rewards/shortness/brevity", 0.75),)
    assert {span.name for span in result.report.spans} == {"shortness"}
    assert result.report.traffic["shortness"]["calls"] == len(texts)


REQUEST = httpx.Request("POST", "http://127.0.0.1:1/secret")
INFO = aiohttp.RequestInfo("http://127.0.0.1:1/secret", "POST", {}, "http://127.0.0.1:1/secret")


def httpx_status(status, **headers):
    return httpx.HTTPStatusError("secret", request=REQUEST, response=httpx.Response(status, headers=headers))


def requests_status(status):
    response = requests.Response()
    response.status_code = status
    return requests.HTTPError("secret", response=response)


CLIENTS = {
    "aiohttp 500": (lambda: aiohttp.ClientResponseError(INFO, (), status=500), "http_500", 3),
    "aiohttp refused": (lambda: aiohttp.ClientConnectionError("secret"), "unavailable", 3),
    "aiohttp late": (lambda: aiohttp.ServerTimeoutError("secret"), "timeout", 3),
    "httpx 429": (lambda: httpx_status(429, **{"Retry-After": "1"}), "http_429", None),
    "requests 404": (lambda: requests_status(404), "http_404", 1),
    "urllib 503": (lambda: urllib.error.HTTPError("http://secret", 503, "secret", {}, None), "http_503", 3),
    "openai late": (lambda: openai.APITimeoutError(request=REQUEST), "timeout", 3),
}
"""What a client raises, the end of its code, and how often a call that has three attempts is tried. One that is turned
away comes back as often as it is told to."""


@pytest.mark.parametrize(("error", "code", "attempts"), CLIENTS.values(), ids=CLIENTS)
def test_errors_of_other_clients_are_known_by_status_and_kind_in_functions_and_in_a_services_calls(
    error, code, attempts, caplog
):
    limits = {"max_concurrency": 1, "attempt_timeout_s": 5.0, "max_attempts": 3, "outage_patience_s": 0.0}
    asked = []

    @per_completion(transport=Transport("grader", **limits))
    async def graded(completion):
        asked.append(completion)
        raise error()

    async def attempt():
        asked.append("rag")
        raise error()

    async def scene():
        with pytest.raises(ServiceError) as caught, deadline(20):
            await Transport("rag", **limits).call(attempt)
        assert caught.value.code == f"rag_{code}"
        assert len(asked) == attempts if attempts else len(asked) > 3
        asked.clear()
        (reward,) = (await graded.score_all(rows(1), ["a"])).rewards
        assert (reward.value, reward.reason) == (None, f"grader_{code}")
        assert len(asked) == attempts if attempts else len(asked) > 3
        assert "secret" not in caplog.text + str(caught.value) + repr(reward)

    play(scene())


def test_a_fault_is_logged_once_by_its_place_and_without_its_words(caplog):
    fresh = per_completion(shortness.__wrapped__)
    asyncio.run(fresh.score_all(rows(3), ["raises", "raises", "a string"]))
    assert sorted(record.message.split(" at ")[0] for record in caplog.records) == [
        "the reward function shortness raised ValueError",
        "the reward function shortness returned a str for a completion. Expected a number, None or a Reward; such "
        "completions stay unscored",
    ]
    assert "customer" not in caplog.text


def test_without_a_transport_each_completion_is_asked_whatever_became_of_those_before():
    @per_completion
    async def flaky(completion):
        if completion == "down":
            raise ConnectionError
        return 1.0

    async def batches():
        return [await flaky.score_all(rows(8), [text] * 8) for text in ("down", "up")]

    down, up = asyncio.run(batches())
    assert (down.values, up.values) == ([None] * 8, [1.0] * 8)  # a breaker opens after five


def test_a_group_is_scored_at_once_and_in_its_own_thread(anywhere):
    result = anywhere(ranks, ["aa", "a", "b", "bbb"], rows(4), group=2)
    assert result.values == [1.0, 0.0, 0.0, 1.0]
    assert result.report.traffic["ranks"]["calls"] == 2


def test_a_function_of_trls_signature_gets_what_trl_gives_it(result_of):
    result = result_of(RewardFunction(of_trl), ["a b", "c"], rows(2, answer=["a", "d"]))
    assert result.values == [1.0, 0.0]
    logged, metrics = [], []
    result.log(lambda *given: logged.append(given), lambda *given: metrics.append(given))
    assert (logged, metrics) == ([("asked", ["p", "p"])], [("mean_length", 2.0)])


async def asked(completions):
    await asyncio.sleep(0)
    return [float(len(each)) for each in completions]


class Asked:
    async def __call__(self, completions):
        return await asked(completions)

    async def with_options(self, completions, *, scale, offset=0.0, **more):
        return [scale * each + offset for each in await asked(completions)]


FORMS = {
    "a map": lambda completions: map(len, completions),
    "async": asked,
    "a partial": functools.partial(Asked().with_options, scale=1.0),
    "a plain one around it": lambda completions: asked(completions),
    "an object": Asked(),
}


@pytest.mark.parametrize("function", FORMS.values(), ids=FORMS)
def test_what_a_function_returns_is_waited_for_and_listed_whatever_it_is_wrapped_in(function):
    result = asyncio.run(reward_of(function).score_all(rows(2), ["a", "bb"]))
    assert result.values == [1.0, 2.0]


def test_a_service_that_names_its_time_is_asked_again_then():
    began = []

    @per_completion
    async def busy(completion):
        began.append(asyncio.get_running_loop().time())
        if len(began) == 1:
            raise ServiceOverloaded("later", retry_after_s=7.0)
        return 1.0

    assert run(busy.score_all(rows(1), ["a"])).values == [1.0]
    assert began[1] - began[0] >= 7.0


@pytest.mark.parametrize("returned", ["no list", {"a": 1.0}, 0.5, None, torch.tensor(1.0), sys.exit])
def test_what_is_no_list_and_an_exit_leave_the_batch_without_rewards_and_end_no_run(returned):
    function = RewardFunction(lambda completions: returned() if returned is sys.exit else returned)
    result = asyncio.run(function.score_all(rows(2), ["a", "b"]))
    reason = "lambda_raised_SystemExit" if returned is sys.exit else "lambda_no_list"
    assert [each.reason for each in result.rewards] == [reason] * 2


def test_a_group_begins_when_its_last_completion_is_there():
    asked = []

    @per_group
    async def graded(completions, completion_ids):
        asked.append((completions, completion_ids))
        return [1.0] * len(completions)

    async def scene():
        batch = RewardBatch(graded, rows(4), 2)
        for place in (0, 3, 2):
            batch.start(place, f"{place}", [place])
        await wait_for([batch], partial(batch.has_settled, [[2, 3]]))
        assert asked == [(["2", "3"], [[2], [3]])]
        batch.start(0, "another text", [0])  # TRL's differs from the streamed one: the call is made with it
        batch.start(1, "1", [1])
        await wait_for([batch], partial(batch.has_settled, [[0, 1]]))
        batch.start(1, "1 as well", [1])  # after the call: all of the group are scored anew
        await wait_for([batch], partial(batch.has_settled, [[0, 1]]))

    play(scene())
    assert [texts for texts, _ in asked[1:]] == [["another text", "1"], ["another text", "1 as well"]]


def test_a_completion_has_its_time_from_the_moment_its_group_is_there():
    @per_group(deadline_s=10.0)
    async def graded(completions):
        await asyncio.sleep(9.0 if completions[0] == "in time" else 60.0)
        return [1.0] * len(completions)

    async def scene(text, expected):
        batch = RewardBatch(graded, rows(2), 2)
        batch.start(0, text)
        await asyncio.sleep(30.0)  # the other one is still generated
        batch.start(1, text)
        await wait_for([batch], partial(batch.has_settled, [[0, 1]]))
        assert [each.value if each.reason == "" else each.reason for each in batch.rewards] == expected

    play(scene("in time", [1.0, 1.0]))
    play(scene("late", ["deadline", "deadline"]))


def test_a_transport_of_ones_own_retries_and_limits_a_function():
    tried = []

    @per_completion(transport=Transport("judge_x", max_concurrency=2, attempt_timeout_s=5.0, max_attempts=3))
    async def flaky(completion):
        tried.append(completion)
        if tried.count(completion) < 3:
            raise RuntimeError("a customer's words")
        return 1.0

    async def scene():
        result = await flaky.score_all(rows(2), ["a", "b"])
        assert result.values == [1.0, 1.0]
        traffic = result.report.traffic["judge_x"]
        assert [traffic[name] for name in ("calls", "sent", "retries", "failures", "slots")] == [2, 6, 4, 4, 2]

    play(scene())


def test_one_that_fails_leaves_no_number_and_one_that_does_not_apply_is_left_out(result_of):
    mixed = MixedReward([shortness, ranks], [2.0, 1.0])
    result = result_of(mixed, ["four", "raises", "none", "six"], rows(4), group=4)
    assert [each.value for each in result.rewards] == [2 * 0.25 + 1, None, 2.0, pytest.approx(2 / 3)]
    assert result.rewards[2].by_function == {"shortness": None, "ranks": 2.0}
    assert [result.column(name) for name in mixed.names.functions] == [
        [0.25, None, None, pytest.approx(1 / 3)],
        [1.0, None, 2.0, 0.0],
    ]
    assert result.rewards[1].reason == "shortness_raised_ValueError"


def test_beside_a_reward_model_a_completion_to_which_no_function_applies_has_the_models_number(result_of):
    mixed = MixedReward([shortness], [2.0], are_all=False)
    result = result_of(mixed, ["none", "raises", "four"], rows(3))
    assert [(each.outcome, each.value) for each in result.rewards] == [
        (Outcome.OK, 0.0),  # TRL adds the model's
        (Outcome.INFRA, None),
        (Outcome.OK, 0.5),
    ]
    assert result.column("shortness") == [None, None, 0.25]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (
            per_completion(lambda prompt, answer: 0),
            r"'<lambda>', which scores a completion, requires 'answer'. Expected",
        ),
        (per_group(lambda completion: 0), "which scores a group, requires 'completion'"),
        (RewardFunction(lambda prompts, completion_ids, gold: 0), "which scores a batch, requires 'gold'"),
    ],
)
def test_an_argument_that_nothing_gives_is_refused_with_what_there_is(function, message):
    [needs] = function.names.needs
    with pytest.raises(ConfigError, match=f"{message}.*a column of the dataset: prompt, solution"):
        needs.check(["prompt", "solution"])
    needs.check(["prompt", "answer", "completion", "gold"])


def test_a_function_of_verl_s_signature_is_a_reward_as_it_is(result_of):
    columns = {
        "data_source": ["sums"] * 3,
        "reward_model": [{"style": "rule", "ground_truth": text} for text in ("7", "8", "9")],
        "extra_info": [{"index": 0}, None, {"index": 2}],
    }
    result = result_of(reward_of(compute_score), ["7", "7", "number"], rows(3, **columns))
    assert result.values == [1.0, 0.0, 0.5]
    assert result.rewards[0].metrics == (("rewards/compute_score/length", 1.0),)
    with pytest.raises(ConfigError, match="'compute_score', which scores a completion, requires 'reward_model'"):
        reward_of(compute_score).names.needs[0].check(["prompt", "data_source"])


async def asynchronous(data_source, solution_str, ground_truth, extra_info, **kwargs):
    await asyncio.sleep(0)
    return {"score": float(solution_str == ground_truth and not kwargs)}


def with_threshold(solution_str, ground_truth, *, threshold, extra_info=None):
    return threshold * (solution_str == ground_truth)


class Judge:
    def compute_score(self, data_source, solution_str, ground_truth, extra_info=None, level=None):
        return 1.0 if (solution_str, level) == (ground_truth, 3) else 0.0


@pytest.mark.parametrize(
    "function",
    [
        functools.partial(with_threshold, threshold=1.0),
        Judge().compute_score,
        per_completion(deadline_s=9.0)(asynchronous),
    ],
    ids=["a partial", "a method, and a column", "decorated, async"],
)
def test_a_function_of_verls_signature_may_be_async_and_take_more_or_less(function):
    truths = [{"ground_truth": text} for text in "78"]
    scoring = reward_of(function).score_all(rows(2, reward_model=truths, level=[3, 3]), ["7", "7"])
    assert asyncio.run(scoring).values == [1.0, 0.0]


VALUES = {
    "nan": (float("nan"), None, "_not_finite"),
    "a text": ("0.5", None, "_no_number"),
    "none": (None, None, "not_applicable"),
    "numpy": (np.float32(0.5), 0.5, ""),
    "torch": (torch.tensor(0.5), 0.5, ""),
    "several": (torch.ones(2), None, "_no_number"),
    "numpy's true": (np.bool_(True), 1.0, ""),
}


@pytest.mark.parametrize(("value", "number", "reason"), VALUES.values(), ids=VALUES)
def test_a_value_means_the_same_alone_in_a_list_and_as_a_score(value, number, reason):
    def compute(solution_str, ground_truth):
        return value if solution_str == "alone" else {"score": value}

    row = rows(2, reward_model=[{"ground_truth": ""}] * 2)
    of_verl = asyncio.run(reward_of(compute).score_all(row, ["alone", "score"])).rewards
    [of_list] = asyncio.run(RewardFunction(lambda completions: [value]).score_all(rows(1), ["a"])).rewards
    for reward in (*of_verl, of_list):
        assert reward.value == number
        assert reward.reason.endswith(reason) and bool(reward.reason) is bool(reason)


def test_a_function_s_budget_is_settled_at_its_end(tmp_path):
    budget = Budget(tmp_path / "budget.json", [Limit(name="max_calls", kind="calls", most=1000)])
    options = {"max_concurrency": 2, "attempt_timeout_s": 5.0, "max_attempts": 1}
    function = per_completion(
        lambda completion: 1.0, transport=Transport("mine", **options, quota=budget.quota("mine", FREE))
    )

    async def cut_off():  # no batch is reported after its calls
        await function.score(Sample(row={"prompt": "p"}, completion="a"), StageTimes("track"))
        await function.aclose()

    asyncio.run(cut_off())
    account = read_account(tmp_path / "budget.json")
    assert (account.total("mine").calls, account.taken) == (1, {"max_calls": 1.0})


def test_of_several_functions_the_limit_of_each_is_seen(tmp_path):
    def limited(name, most):
        budget = Budget(tmp_path / "budget.json", [Limit(name=f"of_{name}", kind="calls", most=most, service=name)])
        options = {"max_concurrency": 2, "attempt_timeout_s": 5.0, "max_attempts": 1}
        return per_completion(
            lambda completion: 1.0, transport=Transport(name, **options, quota=budget.quota(name, FREE))
        )

    reward = MixedReward([limited("first", 100), limited("second", 2)], [1.0, 1.0])
    result = asyncio.run(reward.score_all(rows(4), ["a"] * 4))
    assert [each.reason for each in result.rewards] == ["", "", "budget_spent", "budget_spent"]
    spending = Spending()
    loop = SimpleNamespace(reward=reward)
    spending.connect(SimpleNamespace(reward_loop=loop, trl=None, run_control=SimpleNamespace()))
    assert spending.is_reached()
    assert "of_second" in spending.reported()
