"""The local vector store: a real LanceDB table, and an embedding service on loopback.

Its vectors are made of hashed pairs of neighbouring characters, so texts are the nearer the more pairs they share.
"""

import asyncio
import importlib.util
import itertools
import json
import math
import re
import runpy
import shutil
import socket
import subprocess
import sys
import threading
import zlib
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from support.loopback import ACTION, BAD, VERDICT, Services, action, row
from werkzeug import Response

from salesrl_trl.build.assembly import build_reward
from salesrl_trl.build.checks.reward import prepare_reward
from salesrl_trl.config import RewardConfig
from salesrl_trl.demo.services import rag as embedded
from salesrl_trl.errors import BadServiceResponse, ConfigError, ServiceError, ServiceUnavailable
from salesrl_trl.reward.chain import SalesReward
from salesrl_trl.reward.judge.client import JudgeClient, load_rubrics
from salesrl_trl.reward.judge.provider import JudgeProvider
from salesrl_trl.reward.rag.vector_store import (
    MODEL_KEY,
    NOTHING_FOUND,
    TABLE,
    StoredDocument,
    VectorStoreRag,
    write_table,
)
from salesrl_trl.reward.scoring import Scoring, default_weights
from salesrl_trl.reward.service.transport import Transport
from salesrl_trl.types import Action, Outcome, RequestIds

pytestmark = pytest.mark.skipif(importlib.util.find_spec("lancedb") is None, reason="needs lancedb")

SCRIPT = Path(__file__).parents[3] / "scripts" / "build_vector_store.py"
MODEL = "bigrams"
DIMENSION = 512
KEY = "sk-test-51c7e2"
HOSTILE = "x' OR '1'='1"

PYTHON_PRICE = "Python数据分析的学费是5980元，共64课时。"
PYTHON_HOURS = "Python数据分析固定在周三晚上上课，一次60分钟。"
PAINT_PRICE = "The watercolour course costs 1,200 yuan. Paper is included."
PAINT_REFUND = "Watercolour lessons are refunded in full before the second lesson."
DOCUMENTS = [
    {"id": "zh-price", "title": "Python数据分析 学费", "text": PYTHON_PRICE},
    {"id": "zh-hours", "title": "Python数据分析 课表", "text": PYTHON_HOURS},
    {"id": "en-price", "title": "Watercolour price", "text": PAINT_PRICE},
    {"id": "en-refund", "title": "Watercolour refund", "text": PAINT_REFUND},
]
TENANTS = [
    {"id": "a", "text": "The secret price of tenant a is 100 yuan.", "tenant_id": "a"},
    {"id": "b", "text": "The secret price of tenant b is 200 yuan.", "tenant_id": "b"},
    {"id": "hostile", "text": "The secret price of the hostile one is 300 yuan.", "tenant_id": HOSTILE},
    {"id": "all", "text": "Everybody may know the opening hours."},
]


def bigram_vector(text):
    """Counts of the pairs of neighbouring characters, in `DIMENSION` buckets."""
    vector = [0.0] * DIMENSION
    for pair in zip(text.lower(), text.lower()[1:], strict=False):
        vector[zlib.crc32("".join(pair).encode()) % DIMENSION] += 1.0
    return vector


def cosine(one, other):
    dot = sum(x * y for x, y in zip(one, other, strict=True))
    return dot / math.sqrt(sum(x * x for x in one) * sum(y * y for y in other))


class Embeddings:
    """An OpenAI-style embedding service. `reply`, where it is set, is the (status, body) of every answer.

    Each has a path of its own: a request that one test has cut off may reach the server in the next one.
    """

    numbers = itertools.count()

    def __init__(self, server):
        path = f"/{next(self.numbers)}/v1"
        self.url = server.url_for(path)
        self.reply = None
        self.asked = []
        self._lock = threading.Lock()
        server.expect_request(f"{path}/embeddings", method="POST").respond_with_handler(self._respond)

    @property
    def texts(self):
        """Everything that was to be embedded, in the order of the requests."""
        return [text for request in self.asked for text in request.json["input"]]

    def _respond(self, request):
        with self._lock:
            self.asked.append(request)
        data = [{"index": at, "embedding": bigram_vector(text)} for at, text in enumerate(request.json["input"])]
        # Backwards: the index says which text it is.
        status, body = self.reply or (200, {"data": data[::-1], "model": MODEL, "object": "list"})
        text = body if isinstance(body, str) else json.dumps(body)
        return Response(text, status=status, headers={"Content-Type": "application/json"})


@pytest.fixture
def embeddings(httpserver):
    return Embeddings(httpserver)


@pytest.fixture
def build(embeddings, tmp_path):
    """Run the script on documents, in this process: `build(documents, *arguments)` gives its exit code."""

    def run(documents, *arguments, out=tmp_path / "store", url=embeddings.url):
        file = tmp_path / "knowledge.jsonl"
        lines = [each if isinstance(each, str) else json.dumps(each, ensure_ascii=False) for each in documents]
        file.write_text("\n".join(lines), encoding="utf-8")
        given = ("--documents", file, "--out", out, "--embedding-base-url", url, "--embedding-model", MODEL)
        return runpy.run_path(str(SCRIPT))["main"]([str(each) for each in (*given, *arguments)])

    return run


@pytest.fixture
def store(build, embeddings, tmp_path):
    """Open a store of documents: `store(documents, **settings)`."""

    def make(documents=DOCUMENTS, **settings):
        if documents is not None:
            assert build(documents, "--overwrite") == 0
            embeddings.asked.clear()
        return open_store(tmp_path / "store", embeddings.url, **settings)

    return make


def transport(service="embedding"):
    return Transport(service, max_concurrency=8, attempt_timeout_s=5.0, max_attempts=1, hedge_fraction=0.0)


def open_store(path, url, **settings):
    given = {"embedding_base_url": url, "embedding_model": MODEL, "api_key": KEY, **settings}
    return VectorStoreRag(path, transport_8b=transport(), transport_32b=transport(), **given)


def ask(rag, query="", profile="", summary="", *, context=None, threshold=0.0, top_k=3, tenant=""):
    """One question in an event loop of its own: the action, or the conversation where it is given."""
    ids = RequestIds(tenant_id=tenant)

    async def once():
        try:
            if context is not None:
                return await rag.chat(context, threshold, top_k, ids=ids)
            texts = {"user_profile": profile, "rewritten_query": query, "history_summary": summary}
            return await rag.chat_8b("not looked at", Action(fields=texts), threshold, top_k, ids=ids)
        finally:
            await rag.aclose()

    return asyncio.run(once())


# What is found


@pytest.mark.parametrize(
    ("query", "found", "text"),
    [
        ("Python数据分析学费多少", "zh-price", PYTHON_PRICE),
        ("Python数据分析周三晚上上课吗", "zh-hours", PYTHON_HOURS),
        ("watercolour course costs how many yuan", "en-price", PAINT_PRICE),
        ("are watercolour lessons refunded", "en-refund", PAINT_REFUND),
    ],
)
def test_the_nearest_document_comes_first_and_is_the_answer(store, query, found, text):
    rag = store()
    for answer in (ask(rag, query), ask(rag, context=f"customer: {query}")):
        assert (answer.passages[0].id, answer.text) == (found, text)
        scores = [passage.score for passage in answer.passages]
        assert scores == sorted(scores, reverse=True)


def test_the_score_is_the_cosine_between_the_embedded_texts(store):
    answer = ask(store(), "Watercolour price", "nurse", "asked")
    question = "Watercolour price\nWatercolour price\nWatercolour price\nnurse\nasked"  # QUERY_WEIGHT is 3
    expected = cosine(bigram_vector(question), bigram_vector(f"Watercolour price\n{PAINT_PRICE}"))
    assert answer.passages[0].score == pytest.approx(expected, abs=1e-6)  # 32-bit figures


def test_a_document_that_points_the_other_way_scores_zero_and_the_same_one_scores_one(embeddings, tmp_path):
    own = np.array([bigram_vector("price")], dtype=np.float32)
    own /= np.linalg.norm(own)
    documents = [StoredDocument(id="same", text="same"), StoredDocument(id="opposite", text="opposite")]
    asyncio.run(write_table(tmp_path, documents, np.concatenate([own, -own]), model=MODEL))
    answer = ask(open_store(tmp_path, embeddings.url), context="price")
    assert [(passage.id, passage.score) for passage in answer.passages] == [
        ("same", pytest.approx(1.0, abs=1e-6)),
        ("opposite", 0.0),  # its cosine is -1
    ]
    assert all(0.0 <= passage.score <= 1.0 for passage in answer.passages)


def test_passages_below_the_threshold_are_left_out_and_one_on_it_stays(store):
    rag = store()
    scores = [passage.score for passage in ask(rag, "watercolour course costs", top_k=4).passages]
    assert len(scores) == 4
    for kept in range(4):
        assert len(ask(rag, "watercolour course costs", top_k=4, threshold=scores[kept]).passages) == kept + 1


@pytest.mark.parametrize(("top_k", "passages"), [(1, 1), (3, 3), (50, 4)])
def test_at_most_top_k_passages_are_given(store, top_k, passages):
    assert len(ask(store(), "watercolour", top_k=top_k).passages) == passages


@pytest.mark.parametrize(
    ("question", "language"), [("Python数据分析多少钱", "zh"), ("What is the Python price?", "en"), ("2+2?", "en")]
)
def test_without_a_passage_the_answer_says_so_in_the_questions_language(store, question, language):
    rag = store()
    for answer in (ask(rag, question, threshold=1.0), ask(rag, context=question, threshold=1.0)):
        assert (answer.text, answer.passages) == (NOTHING_FOUND[language], ())


def test_the_embedded_service_says_the_same_where_nothing_is_found():
    assert NOTHING_FOUND == embedded.NOTHING_FOUND


# What is asked of the embedding service


def test_the_action_is_embedded_in_one_text_and_the_conversation_as_it_is(store, embeddings):
    rag = store()
    ask(rag, "Python price", "nurse", "asked for a course")
    ask(rag, "Python price", "", " ")
    ask(rag, context="customer: hello\nseller: hi")
    assert embeddings.texts == [
        "Python price\nPython price\nPython price\nnurse\nasked for a course",
        "Python price\nPython price\nPython price",
        "customer: hello\nseller: hi",
    ]
    body = embeddings.asked[0].json
    assert (body["model"], body["encoding_format"]) == (MODEL, "float")
    assert embeddings.asked[0].headers["Authorization"] == f"Bearer {KEY}"


def test_long_actions_lose_their_end_and_long_conversations_their_beginning(store, embeddings):
    rag = store(max_text_chars=6)
    ask(rag, "12345", "nurse")
    ask(rag, context="customer: 12345")
    assert embeddings.texts == ["12345\n", " 12345"]


def test_the_search_has_a_time_of_its_own_in_milliseconds(store):
    assert 0 < ask(store(), "price").took_ms < 5_000


# Tenants


@pytest.mark.parametrize(
    ("tenant", "found"),
    [
        ("a", {"a", "all"}),
        ("b", {"b", "all"}),
        ("unknown", {"all"}),
        ("", {"a", "b", "hostile", "all"}),  # nobody in particular asks
        (HOSTILE, {"hostile", "all"}),
        ("a' OR tenant_id = 'b", {"all"}),
        ("a') OR (1=1) --", {"all"}),
        ("a''", {"all"}),
        ("\\' OR 1=1 --", {"all"}),
        ('" OR ""="', {"all"}),
        ("\x00", {"all"}),
    ],
)
def test_a_tenant_sees_its_own_documents_and_everybodys(store, tenant, found):
    answer = ask(store(TENANTS), "secret price", top_k=50, tenant=tenant)
    assert {passage.id for passage in answer.passages} == found


def test_another_tenants_nearer_document_takes_no_place_among_the_top_k(store):
    query = "The secret price of tenant a is 100 yuan."
    (passage,) = ask(store(TENANTS), query, top_k=1, tenant="b").passages
    assert passage.id == "b"


def test_a_table_without_tenants_is_open_to_all(store):
    assert len(ask(store(), "price", top_k=50, tenant="a").passages) == 4


# Failures


def test_a_dead_embedding_service_is_an_error_with_a_code(store):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}/v1"
    rag = store(embedding_base_url=url)
    for question in ({"query": "price"}, {"context": "price"}):
        with pytest.raises(ServiceUnavailable) as raised:
            ask(rag, **question)
        assert raised.value.code == "embedding_unavailable"
        assert KEY not in str(raised.value)


ONE = [1.0] * DIMENSION


@pytest.mark.parametrize(
    "body",
    [
        "",
        "<html>Sign in</html>",
        "[]",
        {},
        {"data": None},
        {"data": []},
        {"data": [{"index": 0}]},
        {"data": [{"embedding": ONE}]},
        {"data": [{"index": 0, "embedding": []}]},
        {"data": [{"index": 0, "embedding": ONE[1:]}]},
        {"data": [{"index": 0, "embedding": [*ONE, 1.0]}]},
        {"data": [{"index": 1, "embedding": ONE}]},
        {"data": [{"index": 0, "embedding": ONE}] * 2},
        {"data": [{"index": 0, "embedding": ["1.0", *ONE[1:]]}]},
        {"data": [{"index": 0, "embedding": [True, *ONE[1:]]}]},
        {"data": [{"index": 0, "embedding": [None, *ONE[1:]]}]},
        {"data": [{"index": 0, "embedding": [float("nan"), *ONE[1:]]}]},
        {"data": [{"index": 0, "embedding": [float("inf"), *ONE[1:]]}]},
        {"data": [{"index": 0, "embedding": [10**400, *ONE[1:]]}]},
        {"data": [{"index": 0, "embedding": [0.0] * DIMENSION}]},
        {"data": [{"index": 0, "embedding": "AACAPwAAgD8="}]},
    ],
    ids=lambda body: json.dumps(body)[:50],
)
def test_an_embedding_outside_the_contract_is_typed(store, embeddings, body):
    rag = store()
    embeddings.reply = (200, body)
    with pytest.raises(BadServiceResponse) as raised:
        ask(rag, "price")
    assert raised.value.code == "embedding_bad_response"


def test_huge_and_tiny_figures_are_a_direction_like_others(store, embeddings):
    rag = store()
    for factor in (1e300, 1e-300):
        vector = [factor * each for each in bigram_vector(f"Watercolour price\n{PAINT_PRICE}")]
        embeddings.reply = (200, {"data": [{"index": 0, "embedding": vector}]})
        passage = ask(rag, "price").passages[0]
        assert (passage.id, passage.score) == ("en-price", pytest.approx(1.0, abs=1e-6))


def test_a_store_that_vanishes_while_in_use_is_an_error_with_a_code(store, tmp_path):
    rag = store()
    shutil.rmtree(tmp_path / "store" / f"{TABLE}.lance")
    with pytest.raises(ServiceError) as raised:
        ask(rag, "price", tenant="secret-tenant")
    assert raised.value.code == "vector_store_failed"
    assert "secret-tenant" not in str(raised.value)


# What cannot be opened


def test_without_lancedb_the_module_imports_and_a_store_says_what_to_install(tmp_path):
    code = (
        "import sys; sys.modules['lancedb'] = None\n"
        "from salesrl_trl.reward.rag import vector_store\n"
        "try: vector_store.VectorStoreRag('.', embedding_base_url='', embedding_model='', transport_8b=None, "
        "transport_32b=None)\n"
        "except vector_store.ConfigError as error: print(error)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert 'pip install "salesrl_trl[vector-store]"' in result.stdout


def test_lancedb_brings_none_of_what_vllm_trips_over():
    code = "import sys, lancedb; sys.exit('llvmlite' in sys.modules or 'numba' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_folder_without_a_table_is_refused_and_left_as_it_is(tmp_path):
    for folder in (tmp_path, tmp_path / "missing"):
        with pytest.raises(ConfigError, match=r"holds no vector store.*build_vector_store\.py"):
            open_store(folder, "http://127.0.0.1:9/v1")
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_table_is_refused(tmp_path):
    (tmp_path / f"{TABLE}.lance").mkdir()
    with pytest.raises(ConfigError, match="cannot be opened"):
        open_store(tmp_path, "http://127.0.0.1:9/v1")


def test_a_short_relative_path_is_a_folder_and_no_cloud(build, embeddings, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert build(DOCUMENTS, out="db") == 0  # "db" alone is what LanceDB's cloud is called
    assert ask(open_store("db", embeddings.url), context=PAINT_PRICE).passages[0].id == "en-price"


def test_another_model_than_the_tables_is_refused(store):
    with pytest.raises(ConfigError, match=r"made with the embedding model 'bigrams'\. Expected 'other'"):
        store(embedding_model="other")


def connect(folder):
    import lancedb  # two seconds, which each process that collects tests would take

    return lancedb.connect(str(folder))


def make_table(folder, columns, metadata=None):
    table = pa.table(columns)
    connect(folder).create_table(TABLE, table.replace_schema_metadata(metadata))


def test_a_table_of_other_making_is_searched_too(embeddings, tmp_path):
    vectors = [bigram_vector(each["text"]) for each in DOCUMENTS]
    columns = {name: [each[name] for each in DOCUMENTS] for name in ("id", "text")}
    make_table(tmp_path, {**columns, "vector": pa.array(vectors, pa.list_(pa.float32(), DIMENSION))})
    answer = ask(open_store(tmp_path, embeddings.url), context=PAINT_REFUND)
    assert (answer.passages[0].id, answer.passages[0].score) == ("en-refund", pytest.approx(1.0, abs=1e-6))


@pytest.mark.parametrize(
    "columns",
    [
        {"id": ["d"], "vector": pa.array([[1.0, 0.0]], pa.list_(pa.float32(), 2))},
        {"id": ["d"], "text": ["t"]},
        {"id": ["d"], "text": ["t"], "vector": ["v"]},
    ],
    ids=["no text", "no vector", "vector of another type"],
)
def test_a_table_of_another_form_is_refused_with_its_columns(tmp_path, columns):
    make_table(tmp_path, columns)
    with pytest.raises(ConfigError, match=r"has the columns id: string, .*Expected id and text"):
        open_store(tmp_path, "http://127.0.0.1:9/v1")


# Identity, event loops, the chain


def test_the_identity_changes_with_content_model_and_address_and_with_nothing_else(store, build, tmp_path):
    first = store().identity
    assert first == store(None).identity
    assert KEY not in first
    rewritten = store(DOCUMENTS).identity  # the same documents, but a new version of the table
    shutil.rmtree(tmp_path / "store")
    rebuilt = store(DOCUMENTS).identity  # its versions count from 1 again
    elsewhere = store(None, embedding_base_url="http://127.0.0.1:9/v1").identity
    shorter = store(None, max_text_chars=10).identity
    assert len({first, rewritten, rebuilt, elsewhere, shorter}) == 5
    assert str(tmp_path / "store") in first
    assert MODEL in first


def test_an_open_store_keeps_its_version_when_another_is_written(store, build):
    rag = store()
    assert ask(rag, context=PAINT_PRICE).passages[0].id == "en-price"
    assert build([{"id": "other", "text": "Something else."}], "--overwrite") == 0
    assert ask(rag, context=PAINT_PRICE).passages[0].id == "en-price"
    assert ask(store(None), context=PAINT_PRICE).passages[0].id == "other"


def test_a_store_serves_one_event_loop_after_another(store):
    rag = store()
    answers = [ask(rag, "watercolour course costs") for _ in range(2)]  # each with asyncio.run
    assert answers[0].passages == answers[1].passages


def test_searches_that_are_cut_off_leave_the_store_usable(store):
    rag = store()

    async def cut_off():
        searches = [asyncio.ensure_future(rag.chat(f"price {each}", 0.0, 3, ids=RequestIds())) for each in range(20)]
        await asyncio.wait(searches, return_when=asyncio.FIRST_COMPLETED)
        for search in searches:
            search.cancel()
        await asyncio.wait(searches)
        await rag.aclose()

    asyncio.run(cut_off())
    assert ask(rag, context=PAINT_PRICE).passages[0].id == "en-price"


def test_many_questions_at_once_get_the_answers_they_get_alone(store):
    rag = store()
    texts = [each["text"] for each in DOCUMENTS] * 10

    async def together():
        answers = await asyncio.gather(*(rag.chat(text, 0.0, 1, ids=RequestIds()) for text in texts))
        await rag.aclose()
        return [answer.text for answer in answers]

    assert asyncio.run(together()) == texts


def judged_by(services, rag, **settings):
    """A reward chain over the store and the loopback judge."""
    branches = ("fairness", "hallucination")
    judge = JudgeProvider(name="judge", base_url=f"{services.url}/v1", model="judge-1", transport=transport("judge"))
    return SalesReward(
        [row(tenant_id="t1")],
        rag,
        JudgeClient([judge], load_rubrics(branches)),
        Scoring(weights=default_weights(branches), missing="none", invalid_action=-0.25),
        score_threshold=0.03,
        top_k=3,
        deadline_s=10.0,
        **settings,
    )


def results_of(reward, completions):
    """Of a warm-up, and of a batch."""

    async def once():
        try:
            return await reward.warm_up(), await reward.score_all([{"row": 0}] * len(completions), completions)
        finally:
            await reward.aclose()

    return asyncio.run(once())


def test_the_reward_chain_gets_rewards_with_it(store, httpserver, embeddings):
    reward = judged_by(Services(httpserver), store())
    told, result = results_of(reward, [ACTION, action(query="watercolour course costs"), BAD])
    assert list(told) == ["rag_8b", "rag_32b", "judge"]
    assert all(isinstance(seconds, float) for seconds in told.values())
    assert [each.outcome for each in result.rewards] == [Outcome.OK, Outcome.OK, Outcome.INVALID_ACTION]
    assert [each.value for each in result.rewards] == [VERDICT["candidate"], VERDICT["candidate"], -0.25]
    traffic = result.report.traffic
    assert (traffic["rag_8b"]["sent"], traffic["rag_32b"]["sent"]) == (2, 1)  # the reference is asked for once a row


def test_a_dead_embedding_service_gives_the_chain_no_number(store, httpserver, embeddings):
    reward = judged_by(Services(httpserver), store())
    embeddings.reply = (500, {})
    told, result = results_of(reward, [ACTION])
    assert [error.code for error in reward.names.unusable(told)] == ["embedding_http_500"]
    (scored,) = result.rewards
    assert (scored.outcome, scored.value, scored.reason) == (Outcome.INFRA, None, "embedding_http_500")


def test_settings_lead_to_it_and_its_answers_are_kept(build, embeddings, httpserver, tmp_path, monkeypatch):
    monkeypatch.setenv("EMBEDDING_KEY", KEY)
    assert build(DOCUMENTS) == 0
    embeddings.asked.clear()
    settings = RewardConfig(
        vector_store_path=str(tmp_path / "store"),
        embedding_base_url=embeddings.url,
        embedding_model=MODEL,
        embedding_api_key_env="EMBEDDING_KEY",
        embedding_max_chars=500,
        judge_base_url=f"{Services(httpserver).url}/v1",
        reference_cache=str(tmp_path / "references.sqlite"),
    )
    httpserver.expect_request(re.compile(r"(/\d+)?/v1/models")).respond_with_json({"data": [{"id": MODEL}]})
    settings.judge_model = MODEL
    parts = prepare_reward(settings, ("fairness", "hallucination"))
    for run in ("first", "resumed"):
        reward = build_reward(settings, parts, [row()], "", settings.judge_base_url, output_dir=tmp_path / "run")
        asked = len(embeddings.asked)
        rewards = asyncio.run(_scored(reward))
        assert [each.outcome for each in rewards] == [Outcome.OK]
        # the action and the conversation, once; a later run in the same folder knows both answers
        assert len(embeddings.asked) - asked == (2 if run == "first" else 0)


async def _scored(reward):
    result = await reward.score_all([{"row": 0}], [ACTION])
    await reward.aclose()
    return result.rewards


def test_a_store_that_is_not_there_is_told_before_anything_is_built(tmp_path):
    settings = RewardConfig(
        vector_store_path=str(tmp_path / "nowhere"), embedding_base_url="http://127.0.0.1:9/v1", embedding_model=MODEL
    )
    with pytest.raises(ConfigError, match=r"`vector_store_path`.*scripts/build_vector_store\.py"):
        prepare_reward(settings, ("fairness",))


# The script that builds a store


def test_the_script_embeds_in_batches_and_says_how_many_and_how_long(build, embeddings, tmp_path, capsys):
    assert build(DOCUMENTS, "--batch-size", "3") == 0
    out, err = capsys.readouterr()
    assert out.startswith(f"4 documents of {DIMENSION} figures each: embedded in ")
    assert (str(tmp_path / "store") in out, err) == (True, "")
    assert sorted(len(request.json["input"]) for request in embeddings.asked) == [1, 3]
    assert f"Watercolour price\n{PAINT_PRICE}" in embeddings.texts
    table = connect(tmp_path / "store").open_table(TABLE)
    assert table.schema.metadata[MODEL_KEY] == MODEL.encode()
    assert table.schema.names == ["id", "text", "vector"]  # no tenant, no column


def test_the_demos_knowledge_base_can_be_built_and_found_in(embeddings, tmp_path):
    demo = Path(__file__).parents[3] / "salesrl_trl/data/demo/knowledge.jsonl"
    given = ("--documents", demo, "--out", tmp_path / "s", "--embedding-base-url", embeddings.url)
    result = subprocess.run(
        [sys.executable, str(SCRIPT), *map(str, given), "--embedding-model", MODEL, "--embedding-key-env", "THE_KEY"],
        env={"THE_KEY": KEY},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.startswith("384 documents of")
    assert embeddings.asked[0].headers["Authorization"] == f"Bearer {KEY}"
    assert len(embeddings.asked) == 6  # 384 documents, 64 in a request
    lines = [json.loads(line) for line in demo.read_text("utf-8").splitlines()]
    rag = open_store(tmp_path / "s", embeddings.url)
    for document in lines[::50]:
        query = f"{document['title']}\n{document['text']}"
        assert ask(rag, context=query).passages[0].id == document["id"]


def test_the_script_overwrites_only_when_told_to(build, embeddings, tmp_path, capsys):
    assert build(DOCUMENTS) == 0
    embeddings.asked.clear()
    assert build(DOCUMENTS[:1]) == 2
    assert "holds a vector store already; give --overwrite" in capsys.readouterr().err
    assert embeddings.asked == []
    assert build(DOCUMENTS[:1], "--overwrite") == 0
    assert connect(tmp_path / "store").open_table(TABLE).count_rows() == 1


@pytest.mark.parametrize(
    ("documents", "said"),
    [
        ([], "got no documents"),
        (["not JSON"], "line 1: got no JSON"),
        ([DOCUMENTS[0], DOCUMENTS[0]], "line 2: id 'zh-price' is used twice"),
        ([{"id": "d", "text": " "}], "got an empty text for 'text'"),
        ([{"id": "d", "text": "t", "tenant_id": 7}], "document 'd': `tenant_id` is no text"),
        (['{"id": "d", "text": "\\ud83d"}'], "document 'd': holds half a surrogate pair"),
    ],
    ids=["empty", "no JSON", "twice", "no text", "tenant", "surrogate"],
)
def test_bad_documents_end_the_script_with_2_and_one_message(build, embeddings, tmp_path, capsys, documents, said):
    assert build(documents) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n"), said in err) == ("", 1, True)
    assert (embeddings.asked, (tmp_path / "store").exists()) == ([], False)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--embedding-base-url", "127.0.0.1:8000"), "expected an address such as"),
        (("--embedding-base-url", f"http://user:{KEY}@127.0.0.1/v1"), "without a key in it"),
        (("--batch-size", "0"), "expected a whole number from 1 to 2048"),
        (("--embedding-key-env", KEY), "names a variable without a key"),
        (("--embedding-key-env", "BROKEN_KEY"), "names a variable without a key"),
        (("--out", __file__), "can't be made a folder"),
    ],
    ids=["no scheme", "password", "batch", "key for its name", "key with newline", "file"],
)
def test_wrong_usage_ends_the_script_with_2_and_shows_no_secret(build, monkeypatch, capsys, arguments, said):
    monkeypatch.setenv("BROKEN_KEY", f"{KEY}\n")
    try:
        code = build(DOCUMENTS, *arguments)
    except SystemExit as stopped:  # argparse's
        code = stopped.code
    err = capsys.readouterr().err
    assert (code, said in err, KEY in err) == (2, True, False)


def test_a_service_that_fails_ends_the_script_with_1_and_leaves_no_store(build, embeddings, tmp_path, capsys):
    embeddings.reply = (401, {"error": {"message": f"bad key {KEY}"}})
    assert build(DOCUMENTS, "--batch-size", "1") == 1
    out, err = capsys.readouterr()
    assert (out, err.count("\n"), "refuses access (401)" in err, KEY in err) == ("", 1, True, False)
    assert not (tmp_path / "store" / f"{TABLE}.lance").exists()
