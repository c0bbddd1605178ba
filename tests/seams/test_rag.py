"""A client of one's own for a RAG service of another form, by its dotted path in the settings: the example's."""

import json
import sys
from pathlib import Path

import pytest
from support.loopback import VERDICT, action, row
from werkzeug import Response

from salesrl_trl.launch.assembly import build_reward
from salesrl_trl.launch.checks.reward import prepare_reward
from salesrl_trl.launch.services_plan import NOWHERE, addresses

ADAPTER = "examples.rag_adapter.QuestionService"
CONTEXTS = [{"id": "d1", "text": "Python costs 100.", "score": 0.5}, {"id": "d2", "text": "Hours", "score": 0.01}]


@pytest.fixture
def foreign(httpserver, services, settings, monkeypatch):
    """Settings of the adapter for a service on loopback, and what the service was asked."""
    asked = []

    def respond(request):
        asked.append(json.loads(request.data))
        return Response(json.dumps({"answer": "It costs 100.", "contexts": CONTEXTS}), mimetype="application/json")

    httpserver.expect_request("/foreign/ask", method="POST").respond_with_handler(respond)
    monkeypatch.setenv("QUESTION_SERVICE", f"{services.url}/foreign")
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2]))
    judge = {"judge_base_url": f"{services.url}/v1", "judge_model": "judge"}
    yield settings(rag=ADAPTER, rag_base_url=None, **judge), asked
    sys.modules.pop("examples.rag_adapter", None)


def test_settings_name_it_by_its_dotted_path_and_need_no_address(foreign, services, anywhere, tmp_path):
    config, asked = foreign
    services.verdict(json.dumps(VERDICT))
    parts = prepare_reward(config, ["fairness"])
    with addresses(config) as (rag_base_url, judge_base_url):
        reward = build_reward(config, parts, [row()], rag_base_url, judge_base_url, output_dir=tmp_path)
        result = anywhere(reward, [action("Python price")])
    assert rag_base_url == NOWHERE
    assert result.values == [pytest.approx(VERDICT["candidate"])]
    assert result.rewards[0].components["retrieval"] == pytest.approx(0.5)  # d2 lies below the threshold of 0.03
    assert {each["question"] for each in asked} == {"Python price", row().context.splitlines()[-1]}
    assert {"rag_8b", "rag_32b"} <= set(result.report.traffic)
    assert services.calls["8b"] == services.calls["32b"] == 0


def test_its_requests_count_in_the_budget(foreign, services, tmp_path, result_of):
    config, asked = foreign
    config.max_calls = 2  # both answers; of a pair whose other half is refused, the service may never see the request
    parts = prepare_reward(config, ["fairness"])
    reward = build_reward(config, parts, [row()], NOWHERE, NOWHERE, output_dir=tmp_path)
    assert [scored.reason for scored in result_of(reward, [action()]).rewards] == ["budget_spent"]
    assert (len(asked), services.calls["judge"]) == (2, 0)


def test_a_body_of_another_form_is_the_services_failure(foreign, services, tmp_path, result_of):
    CONTEXTS.append({"id": "d3"})
    try:
        config, _ = foreign
        parts = prepare_reward(config, ["fairness"])
        reward = build_reward(config, parts, [row()], NOWHERE, NOWHERE, output_dir=tmp_path)
        assert [scored.reason for scored in result_of(reward, [action()]).rewards] == ["rag_bad_response"]
    finally:
        CONTEXTS.pop()
