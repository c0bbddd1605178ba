"""A RAG service and a judge on loopback whose answers a test sets."""

import asyncio
import json
import threading
import time
from collections import Counter

from werkzeug import Response

from salesrl_trl.ground.fencing import read_nonce
from salesrl_trl.judged.chain import SalesReward
from salesrl_trl.judged.judge import JudgeClient, load_rubrics
from salesrl_trl.judged.provider import JudgeProvider
from salesrl_trl.judged.rag_client import RagClient
from salesrl_trl.judged.scoring import Scoring
from salesrl_trl.service.transport import Transport
from salesrl_trl.types import Action, Message, SalesRow

ANSWER = {"answer": "It costs 5980 yuan.", "passages": [{"id": "d1", "text": "...", "score": 0.5}], "took_ms": 1.5}
VERDICT = {"candidate": 0.75, "reference": 0.5, "reason": "fine"}
BAD = "hello"


def action(query="Python price", profile="nurse", summary=""):
    """A completion that is a valid action."""
    return json.dumps({"user_profile": profile, "rewritten_query": query, "history_summary": summary})


ACTION = action()


def any_action(completion, _=None):
    """In the place of `parse_action`: what a policy of random weights says is an action too."""
    return Action(fields={"user_profile": "", "rewritten_query": completion, "history_summary": ""})


def chat_completion(content):
    """The body of an OpenAI chat completion whose message is `content`."""
    choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": content}}
    return {"id": "c1", "object": "chat.completion", "created": 1, "model": "judge", "choices": [choice]}


def sign(completion, request):
    """The chat completion with the nonce that the request asks its judge to return, where it is a verdict."""
    try:
        message = completion["choices"][0]["message"]
        verdict = json.loads(message["content"])
        assert isinstance(verdict, dict) and "nonce" not in verdict
    except (TypeError, KeyError, IndexError, ValueError, AssertionError):
        return completion
    nonce = read_nonce(request["messages"][-1]["content"])
    signed = {**message, "content": json.dumps({"nonce": nonce, **verdict})}
    return {**completion, "choices": [{**completion["choices"][0], "message": signed}]}


class Answers:
    """`answers[endpoint]` is a list of (status, body, headers, delay in seconds), of which the last one is repeated. A
    function in `functions[endpoint]` answers in their place: it takes the request and returns the first two, three or
    all four. The judge signs its verdicts, unless `signs` is false."""

    PATHS = {"8b": "/v1/rag/8b", "32b": "/v1/rag/32b", "judge": "/v1/chat/completions"}  # noqa: RUF012

    def __init__(self, url):
        self.url = url
        self.answers = {
            "8b": [(200, ANSWER, {}, 0)],
            "32b": [(200, ANSWER, {}, 0)],
            "judge": [(200, chat_completion(json.dumps(VERDICT)), {}, 0)],
        }
        self.asked = {name: [] for name in self.answers}
        self.functions = {}
        self.signs = True
        self._lock = threading.Lock()

    def set(self, name, body, status=200, headers=None, delay_s=0):
        self.answers[name] = [(status, body, headers or {}, delay_s)]

    def verdict(self, content):
        self.set("judge", chat_completion(content))

    def judge_by(self, judge):
        """Verdicts by a function from (system message, user message) to a verdict, or to a status for a failure."""

        def respond(request):
            system, user = (message["content"] for message in request.json["messages"])
            verdict = judge(system, user)
            return (verdict, {}) if isinstance(verdict, int) else (200, chat_completion(json.dumps(verdict)))

        self.functions["judge"] = respond

    @property
    def calls(self):
        return Counter({name: len(asked) for name, asked in self.asked.items()})

    def next_answer(self, name, request):
        """Status, body as text, headers, and the seconds until they are sent."""
        with self._lock:
            self.asked[name].append(request)
            if name in self.functions:
                given = self.functions[name](request)
                status, body, headers, delay_s = (*given, *({}, 0)[len(given) - 2 :])
            else:
                queue = self.answers[name]
                status, body, headers, delay_s = queue.pop(0) if len(queue) > 1 else queue[0]
        if name == "judge" and self.signs:
            body = sign(body, request.json)
        return status, body if isinstance(body, str) else json.dumps(body), headers, delay_s


class Services(Answers):
    """The endpoints on a server of pytest-httpserver, and the pages that are asked for before a run."""

    def __init__(self, server):
        super().__init__(server.url_for("").rstrip("/"))
        for path in ("/healthz", "/v1/models"):  # a judge that lists no model, and has the one that is asked for
            server.expect_request(path, method="GET").respond_with_data('{"data": []}')
        for name, path in self.PATHS.items():
            server.expect_request(path, method="POST").respond_with_handler(
                lambda request, name=name: self._respond(name, request)
            )

    def _respond(self, name, request):
        status, text, headers, delay_s = self.next_answer(name, request)
        time.sleep(delay_s)
        return Response(text, status=status, headers={"Content-Type": "application/json", **headers})


def row(row_id="r1", branch="fairness", **kwargs):
    conversation = (Message(role="customer", content="I'm a nurse. What does Python cost?"),)
    return SalesRow(row_id=row_id, branch=branch, conversation=conversation, **kwargs)


def build_reward(
    url,
    rows,
    *,
    attempts=1,
    timeout_s=30.0,
    deadline_s=60.0,
    invalid_action_reward=-0.25,
    weights=None,
    missing="none",
    providers=None,
    limits=None,
    judging=None,
    judge=None,
    stage_components=(),
    **chain,
):
    """A reward chain that asks the services at `url`. `limits` go to every transport, which hedges no call unless they
    say so; `providers` are settings of judge providers, `judging` of the judge client, which `judge` stands in for."""

    def transport(name):
        own = {"max_concurrency": 8, "attempt_timeout_s": timeout_s, "max_attempts": attempts, "hedge_fraction": 0.0}
        return Transport(name, **{**own, **(limits or {})})

    rag = RagClient(url, transport_8b=transport("rag_8b"), transport_32b=transport("rag_32b"), api_key="rag-secret")
    usual = {"base_url": f"{url}/v1", "model": "judge-1", "api_key": "judge-secret"}
    judges = []
    for provider in providers or [{"name": "judge"}]:
        own = transport("judge" if provider["name"] == "judge" else f"judge_{provider['name']}")
        judges.append(JudgeProvider(**{**usual, "transport": own, **provider}))
    return SalesReward(
        rows,
        rag,
        judge or JudgeClient(judges, load_rubrics(("fairness", "hallucination")), **(judging or {})),
        Scoring(
            weights={"fairness": {"judge": 1.0}, "hallucination": {"judge": 1.0}, **(weights or {})},
            missing=missing,
            invalid_action=invalid_action_reward,
            stage_components=stage_components,
        ),
        score_threshold=0.03,
        top_k=3,
        deadline_s=deadline_s,
        **chain,
    )


def examples(indices):
    """The rows of the dataset for these rows of a chain."""
    return [{"row": index, "id": f"r{index + 1}"} for index in indices]


def score_batch(reward, completions, indices=None, run=asyncio.run):
    """Score one batch in an event loop of its own and close the chain. Returns rewards and report."""

    async def once():
        try:
            return await reward.score_all(examples(indices or [0] * len(completions)), completions)
        finally:
            await reward.aclose()

    return run(once())
