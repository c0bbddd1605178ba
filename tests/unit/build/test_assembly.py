"""From settings to the reward chain."""

import asyncio
import contextlib
import json
import sqlite3
from dataclasses import replace

import pytest
from support.loopback import ACTION, ANSWER, action, row, score_batch

from salesrl_trl.agents.tools import drain_traffic
from salesrl_trl.config import SalesGRPOConfig
from salesrl_trl.errors import BudgetSpent, ConfigError, ServiceUnavailable
from salesrl_trl.ground.fencing import read_sections
from salesrl_trl.judged.budget import read_account
from salesrl_trl.judged.parsing import MAX_FIELD_CHARS
from salesrl_trl.launch.assembly import NOWHERE, build_reward, open_reward
from salesrl_trl.launch.checks.reward import prepare_reward
from salesrl_trl.launch.reward_config import RewardConfig
from salesrl_trl.names import SPENT_FILE
from salesrl_trl.types import Message, Outcome

BRANCHES = ("fairness", "hallucination")
PROVIDER = {"name": "openai", "base_url": "http://127.0.0.1:9/v1", "model": "m"}
JUDGES = [PROVIDER, {**PROVIDER, "name": "other"}]
METER = {"second": "other", "on_alarm": "second_judge"}
DEAD = "http://127.0.0.1:9"


@pytest.fixture
def config(services, tmp_path, monkeypatch):
    """Settings for services on loopback. No call is hedged, so that a slow machine changes no count of calls."""
    monkeypatch.setenv("SALESRL_CACHE_DIR", str(tmp_path))

    def make(**settings):
        given = {"rag_base_url": services.url, "judge_base_url": f"{services.url}/v1", "hedge_fraction": 0.0}
        return RewardConfig(**{**given, **settings})

    return make


def score(config, tmp_path, completions, rows=None, **settings):
    return score_batch(built(config, tmp_path, rows, **settings), completions)


def built(config, tmp_path, rows=None, **settings):
    parts, urls = prepare_reward(config, BRANCHES), (config.rag_service.base_url, NOWHERE)
    return build_reward(config, parts, rows or [row()], *urls, output_dir=tmp_path, **settings)


async def warmed_up(reward):
    told = await reward.warm_up()
    await reward.aclose()
    return told


def test_an_action_of_other_fields_reaches_the_8b_endpoint_and_the_judge(config, services, tmp_path):
    settings = config(action_fields=["question", "filters"])
    reward = built(settings, tmp_path)
    scored, invalid = score_batch(reward, ['{"question": "Price?", "filters": "city=Wuhan"}', ACTION]).rewards
    assert (scored.outcome, invalid.reason) == (Outcome.OK, "missing_field")
    (asked,) = services.asked["8b"]
    assert {"question": "Price?", "filters": "city=Wuhan"}.items() <= asked.json.items()
    assert "rewritten_query" not in asked.json
    shown = read_sections(services.asked["judge"][0].json["messages"][1]["content"])
    assert json.loads(shown["action"]) == {"filters": "city=Wuhan", "question": "Price?"}
    assert asyncio.run(warmed_up(reward))["rag_8b"] > 0
    assert services.asked["8b"][-1].json["question"] == row().conversation[-1].content


async def test_requests_of_the_packaged_tool_are_held_against_the_budget(config, services, tmp_path, real_time):
    settings = config(tools=["search"], reward_funcs=["seams.own_reward.shortness"], max_calls=3)
    parts, training = prepare_reward(settings, BRANCHES), SalesGRPOConfig(output_dir=str(tmp_path), use_cpu=True)
    with open_reward(settings, training, [row()], parts) as reward:
        with pytest.raises(BudgetSpent):
            for place in range(4):
                await parts.search.function(f"yoga {place}")
        await drain_traffic([parts.search.function])
        await asyncio.to_thread(parts.search.close)
        assert (reward.budget.path, reward.budget.limits[0].most) == (tmp_path / SPENT_FILE, 3)
    assert (services.calls["8b"], read_account(tmp_path / SPENT_FILE).taken) == (3, {"max_calls": 3})
    assert reward.budget is None  # a function of a module: no other run has this budget


@pytest.mark.parametrize(("given", "of_two_launches"), [({}, 1), ({"cache_answers": False}, 4)])
async def test_a_search_that_was_asked_before_is_not_asked_again(
    config, services, tmp_path, real_time, given, of_two_launches
):
    settings = config(tools=["search"], reward_funcs=["seams.own_reward.shortness"], **given)
    for _ in range(2):
        parts, training = prepare_reward(settings, BRANCHES), SalesGRPOConfig(output_dir=str(tmp_path), use_cpu=True)
        with open_reward(settings, training, [row()], parts):
            for _ in range(2):
                await asyncio.gather(*(parts.search.function("yoga") for _ in range(5)))
            await asyncio.to_thread(parts.search.close)
    assert services.calls["8b"] == of_two_launches


def test_the_reference_and_the_answers_of_an_earlier_run_are_not_asked_for_again(config, services, tmp_path):
    score(config(), tmp_path, [action()])
    assert services.calls == {"8b": 1, "32b": 1, "judge": 1}
    again = score(config(), tmp_path, [action()])  # resumed in the same folder
    assert services.calls == {"8b": 1, "32b": 1, "judge": 1}
    assert again.report.cache_hits == {"answers": 2, "references": 1}
    score(config(), tmp_path / "another_run", [action()])
    assert services.calls == {"8b": 2, "32b": 2, "judge": 2}


@pytest.mark.parametrize(
    ("kind", "stored"),
    [
        ("verdict", '{"candidate": 7.0, "reference": 0.5, "reason": ""}'),
        ("answer", '{"text": "x", "passages": [{"id": "a", "text": "", "score": 7.0}], "took_ms": 1}'),
        ("answer", '[' * 5000),
        ("reference", '{"text": "Thought process:", "passages": [], "took_ms": 1}'),
    ],
)  # fmt: skip
def test_what_comes_out_of_a_cache_is_checked_as_what_comes_off_the_wire(config, services, tmp_path, kind, stored):
    weights = {"fairness": {"judge": 0.5, "retrieval": 0.5}}
    first = score(config(branch_reward_weights=weights), tmp_path, [action()]).rewards
    path = tmp_path / ("references.sqlite" if kind == "reference" else "answers.rank0.sqlite")
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as file:
        like = "%candidate%" if kind == "verdict" else "%passages%"
        assert file.execute("UPDATE kept SET value = ? WHERE value LIKE ?", (stored, like)).rowcount == 1
    for times in (2, 2):  # asked for again, and overwritten
        again = score(config(branch_reward_weights=weights), tmp_path, [action()]).rewards
        assert [each.value for each in again] == [each.value for each in first]
        asked = {"verdict": "judge", "answer": "8b", "reference": "32b"}[kind]
        assert services.calls == {"8b": 1, "32b": 1, "judge": 1, asked: times}


@pytest.mark.parametrize(
    "change",
    [{"rag_top_k": 4}, {"rag_score_threshold": 0.2}, {"judge_model": "another"}, {"judge_repeats": 3}],
    ids=str,
)
def test_what_decides_an_answer_is_part_of_its_key(config, services, tmp_path, change):
    score(config(), tmp_path, [action()])
    before = services.calls.total()
    score(config(**change), tmp_path, [action()])
    assert services.calls.total() > before


def test_limits_are_divided_over_processes(config, services, tmp_path):
    reward = score(config(rag_max_concurrency=64, initial_concurrency=64), tmp_path, [action()], processes=8)
    assert reward.report.traffic["rag_8b"]["slots"] == 8
    few = score(config(rag_max_concurrency=4), tmp_path, [action()], processes=8)
    assert few.report.traffic["rag_8b"]["slots"] == 1


@pytest.mark.parametrize(
    ("attempts", "asked"), [(2, {"8b": 2, "judge": 2}), ({"rag": 2, "judge": 1}, {"8b": 2, "judge": 1})]
)
def test_a_judge_has_attempts_of_its_own_if_given(config, services, tmp_path, attempts, asked):
    services.answers["8b"] = [(500, {}, {}, 0), (200, ANSWER, {}, 0)]
    services.answers["judge"] = [(500, {}, {}, 0)]
    (reward,) = score(config(max_attempts=attempts), tmp_path, [action()]).rewards
    assert reward.reason == "judge_http_500"
    assert {service: services.calls[service] for service in asked} == asked


def test_a_failed_call_names_its_row_and_texts_are_shown_to_those_who_ask(config, services, tmp_path, caplog):
    texts = ("my own words", ANSWER["answer"])
    services.answers["32b"] = [(500, {}, {}, 0)]
    services.set("judge", {}, status=500)
    with caplog.at_level("DEBUG", logger="salesrl_trl"):
        score(config(max_attempts=1), tmp_path, [action(query=texts[0])])
        assert "[Scoring] r1 infra judge_http_500 (retrieval 0.50, format 1.00); parse " in caplog.text
        assert "[RAG] r1 rag_32b failed: rag_32b_http_500" in caplog.text
        score(config(verbose=["scoring"]), tmp_path, ["no action"])
        assert "[Scoring] r1 invalid_action 0.00 not_json (format 0.00); parse" in caplog.text
        assert not any(text in caplog.text for text in texts)
    caplog.clear()
    with caplog.at_level("INFO", logger="salesrl_trl"):
        score(config(max_attempts=1, verbose=["completions", "rag"]), tmp_path, [action(query=texts[0])])
    assert "[Scoring]" not in caplog.text
    shown = [line for line in caplog.messages if line.startswith(("[Completion] r1: ", "[RAG] r1 rag_8b "))]
    assert [any(text in line for line in shown) for text in texts] == [True, True]


def test_several_providers_are_built_with_their_own_limits_and_keys(config, services, tmp_path, monkeypatch):
    monkeypatch.setenv("FIRST_KEY", "first-secret")
    providers = [
        {"name": "first", "base_url": f"{services.url}/v1", "model": "large", "api_key_env": "FIRST_KEY",
         "max_concurrency": 3, "timeout_s": 7},
        {"name": "second", "base_url": f"{services.url}/v1", "model": "small", "weight": 0},
    ]  # fmt: skip
    result = score(config(judge_base_url=None, judge_providers=providers), tmp_path, [action()])
    assert tuple(result.report.usage) == ("first", "second")
    assert tuple(result.report.traffic) == ("rag_8b", "rag_32b", "judge_first", "judge_second")
    asked = services.asked["judge"][0]
    assert (asked.json["model"], asked.headers["Authorization"]) == ("large", "Bearer first-secret")
    assert result.report.traffic["judge_first"]["slots"] == 3


def test_a_judge_that_is_down_is_told_and_the_other_is_enough(config, services, caplog):
    alive = {**PROVIDER, "name": "alive", "base_url": f"{services.url}/v1"}
    prepare_reward(config(judge_base_url=None, judge_providers=[PROVIDER, alive]), BRANCHES)
    assert "judge_providers[openai]" in caplog.text
    with pytest.raises(ServiceUnavailable, match=r"judge_providers\[openai\]"):
        prepare_reward(config(judge_base_url=None, judge_providers=[PROVIDER]), BRANCHES)


@pytest.mark.parametrize(
    ("weights", "hybrid", "waits"),
    [({"judge": 1.0}, False, False), ({"judge": 0.5, "margin": 0.5}, False, True), ({"judge": 1.0}, True, True)],
    ids=["judge", "margin", "hybrid baseline"],
)
async def test_an_outage_of_the_reference_is_waited_out_where_its_score_is_weighed(
    config, services, tmp_path, real_time, weights, hybrid, waits
):
    services.answers["32b"] = [(500, {}, {}, 0)] * 5 + [(200, ANSWER, {}, 0)]
    settings = config(branch_reward_weights={"fairness": weights}, max_attempts=1, outage_patience_s=5.0)
    rows = [row(f"r{index}", message_id=f"m{index}") for index in range(6)]
    parts = prepare_reward(settings, BRANCHES, hybrid)
    reward = build_reward(settings, parts, rows, services.url, f"{services.url}/v1", output_dir=tmp_path)
    completions = [action(query=f"q{index}") for index in range(6)]
    await reward(prompts=[None] * 5, completions=completions[:5], row=list(range(5)))
    result = await reward.score_all([{"row": 5}], completions[5:])  # the breaker is open by now
    await reward.aclose()
    assert (result.rewards[0].components["reference"] is not None) is waits


def test_a_hybrid_baseline_wants_a_judge_in_every_branch(config):
    settings = config(branch_reward_weights={"fairness": {"retrieval": 1.0}})
    prepare_reward(settings, BRANCHES)
    with pytest.raises(ConfigError, match=r"not every branch has a judge.*for \['fairness'\]"):
        prepare_reward(settings, BRANCHES, True)


def test_the_warm_up_asks_every_service_once(config, services, tmp_path):
    asked = replace(row(), conversation=(Message(role="customer", content="What does it cost? " * 300),))
    reward = built(config(warm_up_services=True), tmp_path, [asked])
    told = asyncio.run(warmed_up(reward))
    assert services.calls == {"8b": 1, "32b": 1, "judge": 1}
    assert len(services.asked["8b"][0].json["rewritten_query"]) == MAX_FIELD_CHARS  # as long as an action's may be
    assert all(0 < seconds < 5 for seconds in told.values())
    assert reward.names.unusable(told) == []
    report = asyncio.run(reward.drain())
    assert report.traffic["rag_8b"]["calls"] == 0  # the first step's figures are its own


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"judge_providers": [{**PROVIDER, "api_key": "sk-1"}]}, "has an unknown 'api_key'. Did you mean 'api_key_"),
        ({"branch_reward_weights": {"tone": {"judge": True}}}, r"`branch_reward_weights\.tone\.judge` is True"),
        ({"judge_providers": [PROVIDER, PROVIDER]}, "each name once"),
        ({"judge_providers": [{**PROVIDER, "weight": 0}]}, "one with a weight"),
        ({"judge_providers": [{**PROVIDER, "base_url": "api.openai.com"}]}, "starting with http"),
        ({"judge_providers": [PROVIDER], "judge_base_url": f"{DEAD}/v1"}, "Set it inside that value"),
        ({"judge_providers": [{**PROVIDER, "weight": float("inf")}]}, "Expected a number, at least 0"),
        ({"rag_base_url": "http://"}, "with a host"),
        ({"branch_reward_weights": {"fairness": {"judge": float("inf")}}}, "a weight above 0 and up to"),
        ({"branch_reward_weights": {"tone": {"judge": 1.0}}}, r"names the branches \['tone'\]"),
        ({"branch_reward_weights": {"fairness": {"judge_tone": 1.0}}}, "rubrics not found: tone.txt"),
        ({"judge_providers": [{**PROVIDER, "api_key_env": "NO_SUCH_KEY"}]}, r"judge_providers\[openai\].api_key_env"),
        ({"judge_providers": JUDGES, "judge_meter": {"on_alarm": "second_judge"}}, "second"),
        ({"judge_providers": JUDGES[:1], "judge_meter": METER}, "Expected one of them"),
        ({"judge_providers": JUDGES[1:], "judge_meter": METER}, "another one with a weight"),
        (
            {"judge_providers": JUDGES, "judge_meter": METER, "replay": "runs/first"},
            "a record lacks a second judge's scores",
        ),
        ({"judge_providers": JUDGES, "judge_meter": {**METER, "on_alarm": "second"}}, "second_judge"),
    ],
    ids=str,
)
def test_settings_that_cannot_work_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        prepare_reward(RewardConfig(**settings), BRANCHES)


def objects_of_ours(thing, seen):
    """`thing` and all that hangs on it, as far as it is of this package."""
    if id(thing) in seen:
        return
    seen[id(thing)] = thing
    slots = [name for kind in type(thing).__mro__ for name in getattr(kind, "__slots__", ())]
    held = [*vars(thing).values()] if hasattr(thing, "__dict__") else []
    held += [getattr(thing, name) for name in slots if isinstance(name, str) and hasattr(thing, name)]
    for each in thing if isinstance(thing, list | tuple) else [*thing.values()] if isinstance(thing, dict) else held:
        if isinstance(each, list | tuple | dict) or type(each).__module__.startswith("salesrl_trl"):
            objects_of_ours(each, seen)


def test_no_part_shows_a_key(config, services, tmp_path, monkeypatch):
    monkeypatch.setenv("RAG_KEY", "hunter2-rag")
    monkeypatch.setenv("JUDGE_KEY", "hunter2-judge")
    settings = config(rag_api_key_env="RAG_KEY", judge_api_key_env="JUDGE_KEY")
    parts = prepare_reward(settings, BRANCHES)
    reward = build_reward(settings, parts, [row()], services.url, f"{services.url}/v1", output_dir=tmp_path)
    seen = {}
    objects_of_ours([parts, reward], seen)
    kinds = {type(each).__name__ for each in seen.values()}
    assert {"RewardParts", "JudgeProvider", "ProviderClient", "HttpClient", "RagClient"} <= kinds
    ours = [each for each in seen.values() if type(each).__module__.startswith("salesrl_trl")]
    assert not [type(each).__name__ for each in ours if "hunter2" in repr(each)]
