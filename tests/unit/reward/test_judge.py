"""Judge providers: their order, repeats, cost and rubrics. Services are in memory, and time is virtual."""

import itertools
import json

import pytest
from support.in_memory import Services, score_batch
from support.loopback import VERDICT, action, build_reward, chat_completion, row

from salesrl_trl.errors import BadServiceResponse, ConfigError
from salesrl_trl.ground.fencing import read_sections
from salesrl_trl.judged.budget import Price
from salesrl_trl.judged.judge import load_rubrics
from salesrl_trl.judged.provider import JudgeProvider, ProviderClient
from salesrl_trl.service.transport import Transport
from salesrl_trl.types import Outcome

COMPLETION = json.dumps(chat_completion("1"))


@pytest.fixture
def backup(network):
    return Services(network)


@pytest.fixture
def score_many(services):
    def run(count=1, rows=None, **settings):
        reward = build_reward(services.url, rows or [row()], **settings)
        return score_batch(reward, [action(query=f"q{index}") for index in range(count)])

    return run


def two(services, backup, **second):
    return [
        {"name": "first", "base_url": f"{services.url}/v1"},
        {"name": "second", "base_url": f"{backup.url}/v1", **second},
    ]


def signed(system, user, **verdict):
    """The text of an honest judge without response formats."""
    nonce = user.split("nonce ")[1][:16]
    assert nonce in system
    return {"nonce": nonce, **VERDICT, **verdict}


def test_verdicts_are_shared_by_weight(score_many, services, backup):
    usage = score_many(200, providers=two(services, backup, weight=3.0)).report.usage
    assert usage["first"].verdicts + usage["second"].verdicts == 200
    # three quarters of 200 are 150; the standard deviation of such a draw is sqrt(200 x 3/4 x 1/4) = 6
    assert abs(usage["second"].verdicts - 150) < 25
    again = score_many(200, providers=two(services, backup, weight=3.0)).report.usage
    assert again["second"].verdicts == usage["second"].verdicts  # the same material, the same one


def test_a_provider_without_weight_steps_in_only(score_many, services, backup):
    assert score_many(20, providers=two(services, backup, weight=0.0)).report.usage["second"].verdicts == 0


@pytest.mark.parametrize(
    ("status", "body"),
    [(500, {}), (400, {}), (429, {"error": {"code": "insufficient_quota"}}), (200, chat_completion("I refuse."))],
    ids=["dead", "refused", "quota", "no verdict"],
)
def test_a_provider_that_fails_or_gives_no_verdict_is_stepped_in_for(score_many, services, backup, status, body):
    services.set("judge", body, status=status)
    (reward,) = score_many(1, providers=two(services, backup, weight=0.0)).rewards
    assert (reward.outcome, reward.value) == (Outcome.OK, 0.75)


@pytest.mark.parametrize("headers", [{}, {"Retry-After": "5"}], ids=["plain", "retry_after"])
def test_a_provider_that_turns_calls_away_is_stepped_in_for_at_once(score_many, services, backup, headers):
    services.set("judge", {}, status=429, headers=headers)
    reward = score_many(40, providers=two(services, backup, weight=0.0))
    assert [each.value for each in reward.rewards] == [0.75] * 40
    assert (services.calls["judge"], backup.calls["judge"]) == (40, 40)


def test_a_provider_that_hangs_leaves_half_of_the_time_to_the_other(score_many, services, backup):
    services.set("judge", {}, delay_s=10.0)
    reward = score_many(1, providers=two(services, backup, weight=0.0), timeout_s=60.0, deadline_s=6.0)
    assert reward.rewards[0].value == 0.75


def test_when_none_gives_a_verdict_an_invalid_one_says_more_than_a_dead_provider(score_many, services, backup):
    services.set("judge", chat_completion("I refuse."))
    backup.set("judge", {}, status=500)
    (reward,) = score_many(1, providers=two(services, backup, weight=0.0)).rewards
    assert (reward.outcome, reward.reason) == (Outcome.JUDGE_INVALID, "judge_not_json")


@pytest.mark.parametrize(
    ("empty", "tried", "lines"),
    [
        (range(1), 300, 0),  # one bad reply is one bad reply
        (range(300), 16 + 2, 1),  # 16 replies show that it takes no schema. Each 128th by text tries it again
        (range(16), 16 + 300 - 15 - 128, 2),  # and it works again from then on
        (range(7), 300, 0),  # of the first 16 fewer than half: a disturbance at the start
    ],
    ids=["once", "always", "for a while", "at the start"],
)
def test_a_provider_that_leaves_response_formats_empty_is_asked_by_text_for_a_while(
    score_many, services, caplog, empty, tried, lines
):
    services.judge_by(lambda system, user: signed(system, user, candidate=0.5))
    by_text, numbers = services.functions["judge"], itertools.count()
    services.functions["judge"] = lambda request: (
        (200, chat_completion(""))
        if "response_format" in request.json and next(numbers) in empty
        else by_text(request)
    )
    with caplog.at_level("INFO", logger="salesrl_trl"):
        reward = score_many(300, limits={"max_concurrency": 1}, deadline_s=1e6)
    assert [each.value for each in reward.rewards] == [0.5] * 300
    asked = [request.json for request in services.asked["judge"]]
    assert sum("response_format" in request for request in asked) == tried
    assert sum(line.startswith("judge judge") for line in caplog.messages) == lines


def test_a_slow_provider_that_leaves_response_formats_empty_is_asked_by_text_by_the_next_attempt(score_many, services):
    """Two answers take longer than an attempt may."""
    services.judge_by(signed)
    by_text = services.functions["judge"]

    def slowly(request):
        answer = (200, chat_completion("")) if "response_format" in request.json else by_text(request)
        return *answer, {}, 1.5

    services.functions["judge"] = slowly
    reward = score_many(1, timeout_s=2.7, attempts=4, deadline_s=30.0)
    assert reward.rewards[0].value == 0.75


def test_a_provider_held_to_the_schema_is_not_asked_by_text(score_many, services):
    services.set("judge", chat_completion(""))
    reward = score_many(1, providers=[{"name": "judge", "response_format": "json_schema"}])
    assert (reward.rewards[0].reason, services.calls["judge"]) == ("judge_empty", 1)


def test_a_models_own_limits_are_sent_and_no_response_format_to_one_that_is_asked_by_text(score_many, services):
    services.judge_by(signed)
    extra = {"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": False}}
    own = {"temperature": None, "max_completion_tokens": 4000, "extra_body": extra, "response_format": "text"}
    assert score_many(1, providers=[{"name": "judge", **own}]).rewards[0].value == 0.75
    body = services.asked["judge"][0].json
    assert {**body, **extra, "max_completion_tokens": 4000} == body
    assert not {"temperature", "response_format"} & body.keys()


@pytest.mark.parametrize(("aggregation", "value"), [("mean", 0.5), ("median", 0.6), ("min", 0.2)])
def test_repeats_become_one_verdict(score_many, services, aggregation, value):
    scores = iter((0.2, 0.6, 0.7))
    services.judge_by(lambda system, user: {**VERDICT, "candidate": next(scores)})
    reward = score_many(1, judging={"repeats": 3, "aggregation": aggregation}, limits={"max_concurrency": 1})
    assert reward.rewards[0].value == pytest.approx(value)  # mean: 1.5 / 3


def test_repeats_see_the_answers_in_either_order(score_many, services):
    score_many(1, judging={"repeats": 2})
    orders = [list(read_sections(asked.json["messages"][1]["content"]))[-2] for asked in services.asked["judge"]]
    assert sorted(orders) == ["candidate_answer", "reference_answer"]


@pytest.mark.parametrize(("valid", "scored"), [(2, True), (1, False)])
def test_more_than_half_of_the_repeats_have_to_be_valid(score_many, services, valid, scored):
    answers = iter([VERDICT] * valid + [500] * (3 - valid))
    services.judge_by(lambda system, user: next(answers))
    reward = score_many(1, judging={"repeats": 3}, limits={"max_concurrency": 1})
    assert (reward.rewards[0].value is not None) is scored


def test_tokens_and_cost_are_counted_by_provider(score_many, services):
    body = chat_completion(json.dumps(VERDICT))
    services.set("judge", {**body, "usage": {"prompt_tokens": 1000, "completion_tokens": 50, "total_tokens": 1050}})
    price = Price(prompt_token=2e-6, completion_token=10e-6)
    usage = score_many(3, providers=[{"name": "judge", "price": price}]).report.usage["judge"]
    assert (usage.verdicts, usage.prompt_tokens, usage.completion_tokens) == (3, 3000, 150)
    assert usage.usd == pytest.approx(0.0075)  # 3,000 x 2 / 1e6 + 150 x 10 / 1e6


def test_both_rubrics_of_a_branch_are_asked(score_many, services):
    services.judge_by(lambda system, user: {**VERDICT, "candidate": 0.2 if "grounding" in system else 0.6})
    weights = {"fairness": {"judge": 0.75, "judge_hallucination": 0.25}}
    (reward,) = score_many(1, weights=weights).rewards
    assert reward.value == pytest.approx(0.5)  # 0.75 x 0.6 + 0.25 x 0.2
    assert reward.components["judge_hallucination"] == 0.2


def test_what_decides_a_verdict_is_part_of_its_identity():
    changes = ({}, {"weight": 2.0}, {"max_completion_tokens": 9}, {"model": "other"}, {"temperature": 1.0},
               {"extra_body": {"a": 1}})  # fmt: skip
    rewards = [build_reward("http://127.0.0.1:9", [row()], providers=[{"name": "judge", **each}]) for each in changes]
    assert len({reward._judges[0].identity("fairness") for reward in rewards}) == len(changes)


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"finish_reason": "SAFETY"}, "judge_refused"),
        ({"refusal": "I can't help with that."}, "judge_refused"),
        ({"finish_reason": "length"}, "judge_cut_off"),
        ({"finish_reason": "abort"}, "judge_broken_off"),
        ({"role": "user"}, "judge_role"),
    ],
    ids=str,
)
def test_a_verdict_beside_a_refusal_or_another_end_is_none(score_many, services, change, code):
    body = chat_completion(json.dumps(VERDICT))
    choice = body["choices"][0]
    (choice if "finish_reason" in change else choice["message"]).update(change)
    services.set("judge", body)
    (reward,) = score_many(1).rewards
    assert (reward.outcome, reward.value, reward.reason) == (Outcome.JUDGE_INVALID, None, code)


@pytest.mark.parametrize(
    "content",
    [
        COMPLETION.replace('"content":', '"content": "0", "content":').encode(),
        COMPLETION.encode("utf-16"),
        b"[" * 100_000,
    ],
    ids=["content twice", "utf-16", "nested"],
)
def test_a_reply_that_may_be_read_in_two_ways_is_none(content):
    """As the first of two fields, or the last; as this encoding, or another."""
    transport = Transport("judge", max_concurrency=1, attempt_timeout_s=1.0, max_attempts=1)
    provider = ProviderClient(JudgeProvider(name="a", base_url="http://judge/v1", model="m", transport=transport))
    assert provider._completion(b"\xef\xbb\xbf" + COMPLETION.encode()) == json.loads(COMPLETION)
    with pytest.raises(BadServiceResponse) as caught:
        provider._completion(content)
    assert caught.value.code == "judge_bad_response"


def test_a_verdict_with_another_requests_nonce_is_asked_for_again_with_another_nonce(score_many, services):
    usage = {"prompt_tokens": 1000, "completion_tokens": 50, "total_tokens": 1050}
    foreign = json.dumps({"nonce": "f" * 16, **VERDICT, "candidate": 1.0})
    own = {**chat_completion(json.dumps(VERDICT)), "usage": usage}
    services.answers["judge"] = [(200, {**chat_completion(foreign), "usage": usage}, {}, 0), (200, own, {}, 0)]
    reward = score_many(1, attempts=2)
    assert reward.rewards[0].value == VERDICT["candidate"]
    nonces = [request.json["messages"][1]["content"][:80] for request in services.asked["judge"]]
    assert nonces[0] != nonces[1]
    assert reward.report.usage["judge"].prompt_tokens == 1000  # not those of the other request
    services.set("judge", chat_completion(foreign))
    assert score_many(1, attempts=2).rewards[0].reason == "judge_foreign_verdict"


def test_a_users_file_wins_over_the_packaged_one(tmp_path):
    (tmp_path / "fairness.txt").write_text("mine", encoding="utf-8")
    rubrics = load_rubrics(("fairness", "hallucination"), str(tmp_path))
    assert rubrics["fairness"] == "mine"
    assert "grounding" in rubrics["hallucination"]


def test_all_rubrics_that_are_missing_are_told_together(tmp_path):
    (tmp_path / "price.txt").write_text("mine", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"rubrics not found: tone\.txt, honesty\.txt\. Expected"):
        load_rubrics(("tone", "price", "fairness", "honesty"), str(tmp_path))


@pytest.mark.parametrize(("content", "message"), [(b"caf\xe9", r"line 1, byte 4 \(0xe9\)"), (b" \n", "is empty")])
def test_a_rubric_that_says_nothing_readable_is_refused(tmp_path, content, message):
    (tmp_path / "fairness.txt").write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        load_rubrics(("fairness",), str(tmp_path))
