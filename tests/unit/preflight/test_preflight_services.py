"""The stages `rag` and `judge`: services with one fault each, in memory and in virtual time."""

import asyncio
import itertools
import json
import random
import runpy
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
from support import virtual_time
from support.in_memory import Network, Services
from support.loopback import ANSWER, VERDICT, chat_completion, row

from salesrl_trl.ground.fencing import read_sections
from salesrl_trl.judged.judge import Judge
from salesrl_trl.launch.checks.outcome import StageVerdict
from salesrl_trl.launch.plan import Plan
from salesrl_trl.launch.preflight.__main__ import main
from salesrl_trl.launch.preflight.services import JUDGE_STAGE, RAG_STAGE
from salesrl_trl.launch.preflight.stage import report_of
from salesrl_trl.launch.reward_config import RewardConfig
from salesrl_trl.types import Verdict as Scores

PASSED, NOTED, FAILED = StageVerdict.PASSED, StageVerdict.NOTED, StageVerdict.FAILED
SECRET = "my card number is 4111"
RIGHT = ("2,400 yuan for 24 lessons, on", "前5节内可以退还剩余课程的学费，退款")  # words of the right answers


@pytest.fixture
def services(monkeypatch):
    monkeypatch.setattr(asyncio, "run", virtual_time.run)
    services = Services(Network(monkeypatch))
    services.judge_by(by_quality)
    return services


def by_quality(system, user):
    shown = read_sections(user)["candidate_answer"]
    return {**VERDICT, "candidate": 0.9 if any(words in shown for words in RIGHT) else 0.3}


def examine(stage, services, process_index=0, generation_batch_size=32, calls=None, **given):
    """The report of a stage. No call is tried again unless `given` otherwise."""
    settings = {"rag_base_url": services.url, "judge_base_url": f"{services.url}/v1", "max_attempts": 1, **given}
    if "judge_providers" in settings or "judge" in settings:
        del settings["judge_base_url"]
    training = SimpleNamespace(
        branches=["fairness", "hallucination"], hybrid_reference_weight=0.0, process_index=process_index,
        generation_batch_size=generation_batch_size, output_dir="unused", num_generations=8,
        min_valid_reward_fraction=0.5,
    )  # fmt: skip
    config = SimpleNamespace(reward=RewardConfig(**settings), training=training, data=SimpleNamespace(own_sources=[]))
    plan = Plan(config, in_depth=True, calls=calls)
    plan.train_rows = [row("r0", tenant_id=SECRET), *(row(f"r{at}") for at in range(1, 7))]
    report = report_of(stage, plan)
    assert SECRET not in text_of(report)
    return report


def text_of(report):
    return " ".join(finding.message for finding in report.findings)


def ends_as(report, verdict, *texts):
    assert report.verdict is verdict
    for text in texts:
        assert text in text_of(report)


def nth(services, name, faulty):
    """The endpoint's call number n, from 0 on, is answered by `faulty(n)`, or well where that is `None`."""
    numbers, usual = itertools.count(), services.functions.get(name, lambda request: (200, ANSWER, {}))
    services.functions[name] = lambda request: faulty(next(numbers)) or usual(request)


def test_healthy_services_pass_with_the_times_of_a_step(services):
    services.functions["8b"] = lambda request: (200, ANSWER, {}, 2.0)
    rag, judge = examine(RAG_STAGE, services), examine(JUDGE_STAGE, services)
    assert (rag.verdict, judge.verdict) == (PASSED, PASSED)
    assert (rag.figures["rag_8b_p50_s"], rag.figures["rag_8b_p95_s"]) == pytest.approx((2.0, 2.0))
    assert (rag.figures["rag_8b_in_flight"], rag.figures["rag_32b_in_flight"]) == (32, 4)
    assert judge.figures["judge_in_flight"] == 32
    assert services.calls == {"8b": 33, "32b": 5, "judge": 33}  # one before the load
    assert judge.figures["judge_noise_share"] == judge.figures["judge_invalid_share"] == 0.0


def test_the_limits_bound_the_calls_in_flight_and_the_references_of_a_large_step_are_asked_for_at_once(services):
    services.set("judge", chat_completion(json.dumps(VERDICT)), delay_s=1.0)
    services.functions.clear()
    report = examine(JUDGE_STAGE, services, judge_max_concurrency=4)
    assert report.figures["judge_in_flight"] == 4 and report.figures["judge_p95_s"] == pytest.approx(1.0)
    report = examine(RAG_STAGE, services, generation_batch_size=512, rag_max_concurrency=64)
    # 512 completions are 64 groups of 8, each of which wants a reference
    assert (report.figures["rag_8b_in_flight"], report.figures["rag_32b_in_flight"]) == (64, 64)


@pytest.mark.parametrize(("calls", "made"), [(0, 1), (16, 17), (50, 49)])
def test_an_option_bounds_the_calls(services, calls, made):
    examine(JUDGE_STAGE, services, calls=calls)
    assert services.calls["judge"] == made
    examine(RAG_STAGE, services, calls=calls)
    assert services.calls["8b"] == calls + 1


def test_a_run_only_looks(services):
    plan = Plan(SimpleNamespace(reward=RewardConfig(rag_base_url=services.url), training=None))
    plan.reward = SimpleNamespace(rag_key=None)
    assert report_of(RAG_STAGE, plan).verdict is PASSED
    assert services.calls["8b"] == 0


def test_of_several_processes_the_first_makes_the_calls_of_all(services):
    assert examine(RAG_STAGE, services, process_index=1).verdict is PASSED
    assert examine(JUDGE_STAGE, services, process_index=1).verdict is PASSED
    assert not services.calls["8b"] and not services.calls["judge"]


@pytest.mark.parametrize(
    ("status", "message"),
    [(401, "refuses access (401): check the key"), (404, "answered 404: retrying won't help"), (500, "answered 5")],
)
def test_a_service_that_refuses_every_call_fails_before_the_load(services, status, message):
    for stage, name in ((RAG_STAGE, "8b"), (JUDGE_STAGE, "judge")):
        services.functions[name] = lambda request: (status, {"error": {}})
        report = examine(stage, services)
        assert report.verdict is FAILED and message in text_of(report) and services.url in text_of(report)
        assert services.calls[name] == 1


def test_calls_that_are_turned_away_are_counted_and_the_service_is_given_its_limit(services):
    nth(services, "8b", lambda n: (429, {}, {"Retry-After": "1"}) if 9 <= n < 33 else None)
    report = examine(RAG_STAGE, services)
    assert report.verdict is NOTED
    assert (report.figures["rag_8b_http_429"], report.figures["rag_8b_retries"]) == (24, 24)
    assert report.figures["rag_8b_failed"] == 0 and report.figures["rag_8b_p95_s"] > 1
    assert "24 requests were rejected with 429" in text_of(report)


def test_a_late_call_is_not_made_twice(services):
    nth(services, "8b", lambda n: (200, ANSWER, {}, 25.0 if n == 100 else 1.0))
    assert examine(RAG_STAGE, services, calls=128).figures["rag_8b_failed"] == 0
    assert services.calls["8b"] == 129


def test_a_slow_service_fails_where_a_step_would_be_skipped(services):
    nth(services, "8b", lambda n: (200, ANSWER, {}, 1.0 if n < 10 else 60.0))
    report = examine(RAG_STAGE, services, rag_timeout_s=5.0)
    assert report.verdict is FAILED
    assert report.figures["rag_8b_failed"] == 23 and report.figures["rag_8b_p95_s"] == pytest.approx(1.0)
    assert "(rag_8b_timeout 23)" in text_of(report) and "`rag.timeout_s`" in text_of(report)


@pytest.mark.parametrize("name", ["8b", "32b"])
def test_an_answer_of_another_shape_says_what_was_got(services, name):
    services.set(name, {"answer": "It costs 5980 yuan.", "documents": []})
    report = examine(RAG_STAGE, services)
    said = (f"rag_{name} answered with a body of", "contract: passages (missing), took_ms (missing)")
    ends_as(report, FAILED if name == "8b" else NOTED, *said)  # nothing weighs the reference
    weighed = examine(RAG_STAGE, services, branch_reward_weights={"fairness": {"margin": 1.0}})
    ends_as(weighed, FAILED, *said)


def test_an_index_that_finds_nothing_is_told(services):
    services.functions["8b"] = lambda request: (200, {**ANSWER, "passages": []}, {})
    report = examine(RAG_STAGE, services)
    assert report.figures["rag_8b_without_passages"] == 32
    ends_as(report, NOTED, "Lower `rag.score_threshold`")


def test_a_judge_that_ignores_the_schema_fails_at_the_first_call(services):
    services.verdict("The first answer is better.")
    services.functions.clear()
    report = examine(JUDGE_STAGE, services)
    ends_as(report, FAILED, "do not end with a JSON object")
    assert "It responds, but without a valid verdict" in text_of(report)
    assert "The first answer" not in text_of(report)


@pytest.mark.parametrize(("share", "verdict"), [(4, FAILED), (1, NOTED)])
def test_the_share_of_malformed_verdicts_is_told(services, share, verdict):
    malformed = (200, chat_completion(json.dumps({**VERDICT, "candidate": 7})), {})
    nth(services, "judge", lambda n: malformed if n and n % 5 < share else None)
    report = examine(JUDGE_STAGE, services)
    assert report.verdict is verdict
    assert report.figures["judge_invalid_share"] == pytest.approx(share / 5, abs=0.05)
    assert "judge_outside_schema" in text_of(report) and "less than or equal to 1" in text_of(report)


def test_a_noisy_judge_is_told_with_the_setting_that_makes_up_for_it(services):
    rng = random.Random(3)

    def judge(system, user):
        noisy = by_quality(system, user)["candidate"] + rng.uniform(-0.2, 0.2)
        return {**VERDICT, "candidate": min(max(noisy, 0), 1)}

    services.judge_by(judge)
    report = examine(JUDGE_STAGE, services, calls=128)
    assert report.figures["judge_repeat_sd"] == pytest.approx(0.4 / 12**0.5, abs=0.03)
    assert report.figures["judge_spread_sd"] == pytest.approx(0.3, abs=0.06)
    assert "judge is noisy" in text_of(report) and "Raise `judge_mode.repeats` (1)" in text_of(report)
    again = examine(JUDGE_STAGE, services, calls=128, judge_repeats=2)
    assert "noisy" not in text_of(again)


def test_a_judge_that_likes_the_first_answer_is_told(services):
    def judge(system, user):
        first = next(name for name in read_sections(user) if name.endswith("_answer"))
        loss = 0.2 if first == "reference_answer" else 0.0
        return {**VERDICT, "candidate": by_quality(system, user)["candidate"] - loss}

    services.judge_by(judge)
    report = examine(JUDGE_STAGE, services)
    assert report.figures["judge_order_gap"] == pytest.approx(0.2) and report.figures["judge_repeat_sd"] == 0
    ends_as(report, NOTED, "scores a candidate 0.20 higher before the reference. Set `judge_mode.r")


def test_of_a_judge_of_groups_the_halves_of_its_order_are_compared(services):
    def judge(system, user):
        shown = [name for name in read_sections(user) if name.startswith(("candidate_", "reference_"))]
        half = shown.index("reference_answer") if "candidate_answer" not in shown else 1
        scores = {
            name: 0.3 + 0.6 * any(words in read_sections(user)[name] for words in RIGHT) - 0.2 * (place > half)
            for place, name in enumerate(shown)
        }
        named = [{"name": name.removeprefix("candidate_"), "score": scores[name]}
                 for name in shown if name != "reference_answer"]  # fmt: skip
        return {"candidates": named, "reference": 0.5, "reason": ""}

    services.judge_by(judge)
    report = examine(JUDGE_STAGE, services, judge_mode="group", judge_orders=1)
    assert report.figures["judge_order_gap"] == pytest.approx(0.2) and report.figures["judge_repeat_sd"] == 0
    assert report.figures["judge_calls"] == 32 and report.figures["judge_in_flight"] == 4  # a step's groups
    ends_as(report, NOTED, "0.20 higher in the first half of its group. Set `judge_mode.orders: 2`")


def test_a_judge_that_can_not_tell_right_from_wrong_is_told(services):
    services.judge_by(lambda system, user: VERDICT)
    report = examine(JUDGE_STAGE, services)
    ends_as(report, NOTED, "does not distinguish the built-in set's right and wrong answers")


def test_several_providers_are_told_by_name(services, monkeypatch):
    network = Network(monkeypatch)
    mild, harsh = Services(network), Services(network)
    mild.judge_by(by_quality)
    harsh.judge_by(lambda system, user: {**VERDICT, "candidate": by_quality(system, user)["candidate"] / 3})
    urls = {"mild": mild.url, "harsh": harsh.url, "gone": "http://gone.test"}
    providers = [
        {"name": name, "base_url": f"{url}/v1", "model": "m", "weight": weight}
        for (name, url), weight in zip(urls.items(), (3, 1, 0), strict=True)
    ]
    report = examine(JUDGE_STAGE, mild, judge_providers=providers)
    assert (report.figures["judge_mild_in_flight"], report.figures["judge_harsh_in_flight"]) == (32, 32)
    assert "judge_gone is unreachable" in text_of(report)
    assert report.verdict is NOTED


class Lenient(Judge):
    async def judge(self, rubric, row, action, candidate, reference):
        return Scores(candidate=1 / len(candidate.text), reference=0.5, reason="")


def test_a_judge_of_ones_own_is_measured_too(services):
    report = examine(JUDGE_STAGE, services, judge=f"{__name__}.Lenient")
    assert report.figures["judge_repeat_sd"] == 0 and report.figures["judge_calls"] == 32
    assert report.figures["judge_order_gap"] is None  # the order is its own


class Mute(Judge):
    async def judge(self, rubric, row, action, candidate, reference):
        await asyncio.Event().wait()


def test_a_judge_that_never_answers_is_told_with_the_seconds_and_their_setting(services):
    said = "within 7 s. Check its log, or raise `judge_timeout_s`"
    report = examine(JUDGE_STAGE, services, judge=f"{__name__}.Mute", judge_timeout_s=7.0)
    ends_as(report, FAILED, f"judge did not answer {said}")
    for first in ([], [(500, {}, {}, 1.0)]):  # the attempt behind it has less than the whole time
        replies = itertools.chain(first, itertools.repeat((200, {}, {}, 1e9)))
        services.functions["judge"] = lambda request, replies=replies: next(replies)
        report = examine(JUDGE_STAGE, services, judge_timeout_s=7.0, max_attempts=3)
        ends_as(report, FAILED, f"judge did not answer {said}")


@pytest.mark.parametrize(("failing", "verdict"), [(("one", "two"), FAILED), (("two",), NOTED)])
def test_judges_fail_the_stage_if_all_of_them_fail_under_load(services, failing, verdict):
    asked, well = Counter(), services.functions["judge"]

    def judge(request):
        asked[request.json["model"]] += 1
        return (500, {}) if request.json["model"] in failing and asked[request.json["model"]] > 1 else well(request)

    services.functions["judge"] = judge
    one, two = ({"name": name, "base_url": f"{services.url}/v1", "model": name} for name in ("one", "two"))
    report = examine(JUDGE_STAGE, services, judge_providers=[one, two])
    ends_as(report, verdict, "judge_two_http_500")


RECIPES = sorted((Path(__file__).parents[3] / "recipes").glob("*.yaml"))
SCRIPT = Path(__file__).parents[3] / "scripts/test_components.py"


def test_the_command_runs_a_stage_alone_against_the_configured_services(services, capsys):
    for name in ("rag", "judge"):
        given = ["--rag_base_url", services.url, "--judge_base_url", f"{services.url}/v1", "--calls", "16"]
        assert main(["--stage", name, "--json", "--config", str(RECIPES[0]), *given]) == 0
        (stage,) = json.loads(capsys.readouterr().out)["stages"]
        assert (stage["stage"], stage["verdict"]) == (name, "passed")
    assert services.calls["8b"] == services.calls["judge"] == 17
    assert main(["--stage", "judge", "--max_step", "3"]) == 2
    assert "did you mean --max_steps?" in capsys.readouterr().out


def test_the_script_for_components_begins_with_the_machine(services, capsys, monkeypatch, tmp_path):
    given = ["--rag_base_url", services.url, "--judge_base_url", f"{services.url}/v1", "--calls", "16"]
    given += ["--config", str(RECIPES[0]), "--output_dir", str(tmp_path), "--json"]
    monkeypatch.setattr(sys, "argv", ["test_components.py", *given])
    monkeypatch.setattr("salesrl_trl.launch.process.end_tidily", lambda: None)  # it is for a whole process
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    found = json.loads(capsys.readouterr().out)
    assert (ended.value.code, [each["stage"] for each in found["stages"]]) == (
        0, ["environment", "config", "data", "rag", "judge"],
    )  # fmt: skip


def test_the_judge_of_a_task_of_ones_own_is_asked_by_the_branches_of_its_rows(capsys):
    """Its recipe names none. Without them the stage asked nobody, and had passed."""
    assert main(["--stage", "judge", "--calls", "0", "--json", "--config", str(RECIPES[0].parent / "dual.yaml")]) == 0
    (stage,) = json.loads(capsys.readouterr().out)["stages"]
    assert stage["verdict"] == "passed", stage


def test_stand_ins_score_no_rows_of_ones_own_alone_either(tmp_path, capsys):
    rows = tmp_path / "mine.jsonl"
    said = [{"branch": "fairness", "conversation": [{"role": "customer", "content": f"Hi {n}"}]} for n in range(20)]
    rows.write_text("\n".join(map(json.dumps, said)))
    assert main(["--stage", "rag", "--config", str(RECIPES[0]), "--dataset", str(rows)]) == 2
    assert "the demo's course catalogue" in " ".join(capsys.readouterr().out.split())
