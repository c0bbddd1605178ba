"""Both services over real HTTP on loopback: their contracts, and their refusals."""

import json

import httpx2
import openai
import pytest

from salesrl_trl.demo.services.launcher import EMBEDDED_MODEL, EmbeddedServices
from salesrl_trl.demo.services.services_app import NOTHING_FOUND
from salesrl_trl.errors import ConfigError
from salesrl_trl.ground.fencing import fence, read_sections
from salesrl_trl.launch.checks.addresses import check_models

PRICE_ZH = "Python数据分析课程的价格是3800元。"
HOURS_ZH = "Python数据分析课程在周三晚上七点半上课。"
PRICE_EN = "The watercolour course costs 1,200 yuan. Paper is included."
DOCUMENTS = [
    {"id": "zh-price", "title": "Python数据分析 价格", "text": PRICE_ZH},
    {"id": "zh-hours", "title": "Python数据分析 上课时间", "text": HOURS_ZH},
    {"id": "en-price", "title": "Watercolour price", "text": PRICE_EN},
]


@pytest.fixture(name="addresses", scope="module")
def fixture_addresses(tmp_path_factory):
    documents = tmp_path_factory.mktemp("services") / "knowledge.jsonl"
    documents.write_text("\n".join(json.dumps(document) for document in DOCUMENTS), "utf-8")
    with EmbeddedServices(documents=documents) as addresses:
        yield addresses


@pytest.fixture(name="http", scope="module")
def fixture_http():
    with httpx2.Client(trust_env=False, timeout=10) as client:
        yield client


@pytest.fixture(name="judge", scope="module")
def fixture_judge(addresses):
    given = {"api_key": "any", "max_retries": 0, "http_client": openai.DefaultHttpxClient(trust_env=False)}
    with openai.OpenAI(base_url=addresses.judge_base_url, **given) as client:
        yield client


def action_body(**changes):
    body = {"tenant_id": "t", "contact_id": "c", "account_id": "a", "message_id": "m", "context": "customer: hello"}
    action = {"user_profile": "", "rewritten_query": "watercolour price", "history_summary": ""}
    return body | action | {"score_threshold": 0.0, "top_k": 3} | changes


def context_body(**changes):
    return {"context": "customer: watercolour price?", "score_threshold": 0.0, "top_k": 3} | changes


@pytest.mark.parametrize(
    ("query", "answer"),
    [("watercolour price", PRICE_EN), ("Python数据分析 上课时间", HOURS_ZH)],
)
def test_8b_answers_from_the_action(addresses, http, query, answer):
    body = action_body(rewritten_query=query, request_id="salesrl-1")
    response = http.post(f"{addresses.rag_base_url}/v1/rag/8b", json=body)
    reply = response.json()
    assert reply.keys() == {"answer", "passages", "took_ms", "request_id"}
    assert reply["request_id"] == "salesrl-1"
    assert reply["answer"] == answer
    assert reply["passages"][0].keys() == {"id", "text", "score"}
    assert reply["passages"][0]["text"] == answer
    assert 0.0 < reply["passages"][0]["score"] < 1.0
    assert reply["took_ms"] >= 0.0


def test_8b_does_not_search_with_the_context(addresses, http):
    body = action_body(context="customer: watercolour price", rewritten_query="kayaks")
    reply = http.post(f"{addresses.rag_base_url}/v1/rag/8b", json=body).json()
    assert (reply["answer"], reply["passages"]) == (NOTHING_FOUND["en"], [])


def test_32b_answers_from_the_conversation_within_threshold_and_top_k(addresses, http):
    url = f"{addresses.rag_base_url}/v1/rag/32b"
    assert http.post(url, json=context_body()).json()["answer"] == PRICE_EN
    chinese = http.post(url, json=context_body(context="customer: 有没有皮划艇？")).json()
    assert (chinese["answer"], chinese["passages"]) == (NOTHING_FOUND["zh"], [])
    for given, many in (({}, 2), ({"top_k": 1}, 1), ({"score_threshold": 0.99}, 0)):
        body = context_body(context="customer: Python数据分析课程", **given)
        assert len(http.post(url, json=body).json()["passages"]) == many


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"top_k": 0}, id="top-k-0"),
        pytest.param({"context": None}, id="context-null"),
        pytest.param({"colour": "secret"}, id="unknown-field"),
    ],
)
@pytest.mark.parametrize("endpoint", ["8b", "32b"])
def test_bad_requests_are_refused_without_their_text(addresses, http, endpoint, changes):
    body = action_body(**changes) if endpoint == "8b" else context_body(**changes)
    reply = http.post(f"{addresses.rag_base_url}/v1/rag/{endpoint}", json=body)
    assert reply.status_code == 422
    (problem,) = reply.json()["detail"]
    assert problem.keys() == {"loc", "type", "msg"}
    assert problem["loc"][:2] == ["body", next(iter(changes))]
    assert "secret" not in reply.text


NONCE = "0123456789abcdef"


def judge_message(**changes):
    action = {"user_profile": "", "rewritten_query": "price", "history_summary": ""}
    return fence(
        {
            "branch": "hallucination",
            "conversation": "customer: how much is the watercolour course?",
            "documents": PRICE_EN,
            "action": json.dumps(action),
            "candidate_answer": PRICE_EN,
            "reference_answer": "Parking is free.",
        }
        | changes,
        NONCE,
    )


def ask(judge, *messages, model=EMBEDDED_MODEL, **options):
    prompts = [{"role": "user", "content": message} for message in messages]
    return judge.chat.completions.create(model=model, messages=prompts, **options)


def said_by(judge, *messages):
    return json.loads(ask(judge, *messages).choices[0].message.content)


def test_another_model_is_unknown_as_it_is_to_openai_s_api(judge, addresses):
    with pytest.raises(openai.NotFoundError) as rejected:
        ask(judge, judge_message(), model="gpt-5")
    assert (rejected.value.code, rejected.value.param) == ("model_not_found", "model")
    with pytest.raises(ConfigError, match=f"is 'gpt-5', but .* returned 404. It lists {EMBEDDED_MODEL}"):
        check_models(addresses.judge_base_url, None, "gpt-5")


def test_judge_answers_an_openai_client_with_a_verdict(judge):
    schema = {"type": "json_schema", "json_schema": {"name": "verdict", "schema": {"type": "object"}}}
    completion = ask(judge, judge_message(), response_format=schema, temperature=0.0, max_tokens=200)
    # Covered and supported: 0.6 + 0.4. The reference shares no word: 0.4.
    assert json.loads(completion.choices[0].message.content) == {
        "nonce": NONCE,
        "candidate": 1.0,
        "reference": 0.4,
        "reason": "coverage 1.00, supported 1.00",
    }
    assert (completion.model, completion.object) == (EMBEDDED_MODEL, "chat.completion")
    assert completion.choices[0].finish_reason == "stop"
    assert completion.id.startswith("chatcmpl-") and completion.created > 0
    usage = completion.usage
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    # Four bytes a token, rounded up.
    assert usage.prompt_tokens == -(-len(judge_message().encode()) // 4)


def test_judge_scores_each_of_a_group_as_it_scores_it_alone(judge):
    whole, alone = read_sections(judge_message()), {}
    del whole["action"], whole["candidate_answer"]
    for name, text in {"g": PRICE_EN, "h": "Parking is free.", "i": "It costs 9."}.items():
        query = f"price {name}"
        action = {"user_profile": f"aged {query}", "rewritten_query": query, "history_summary": ""}
        alone[name] = said_by(judge, judge_message(action=json.dumps(action), candidate_answer=text))
        whole |= {f"action_{name}": json.dumps(action), f"candidate_{name}": text}
    said = said_by(judge, fence(whole, NONCE))
    assert said["candidates"] == [{"name": name, "score": each["candidate"]} for name, each in alone.items()]
    assert said["reference"] == alone["g"]["reference"]
    assert len({each["candidate"] for each in alone.values()}) == 3


def test_judge_reads_the_last_user_message(judge):
    useless = judge_message(candidate_answer="Parking is free.")
    assert said_by(judge, useless, judge_message())["candidate"] == 1.0
    assert said_by(judge, judge_message(), useless)["candidate"] == 0.4


@pytest.mark.parametrize(
    "changes",
    [{"messages": []}, {"model": None}, {"stream": True}, {"messages": [{"role": "user", "content": ["secret"]}]}],
)
def test_judge_refuses_bad_requests_without_their_text(addresses, http, changes):
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}]} | changes
    reply = http.post(f"{addresses.judge_base_url}/chat/completions", json=body)
    assert reply.status_code == 422
    assert reply.json()["detail"][0]["loc"][1] == next(iter(changes))
    assert "secret" not in reply.text
