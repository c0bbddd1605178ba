"""Judges' APIs as providers have them in the wild, on loopback: what each refuses, and in which form it answers.
A profile names the reports that it is made after. `python tests/support/providers.py` prints the rewards of each.
"""

import asyncio
import contextlib
import itertools
import json
import logging
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from pytest_httpserver import HTTPServer
from werkzeug import Response


def verdict_for(body, **more):
    """An honest judge's text: the request's nonce, and a score of 0.5."""
    rubric, material = body["messages"][0]["content"], body["messages"][-1]["content"]
    reference = 0.5 if "reference_answer" in material else None
    nonce = re.search(r"holds\s+([0-9a-f]{16})", rubric)
    if nonce is None:  # a question of one token
        return "OK"
    return json.dumps({"nonce": nonce[1], "candidate": 0.5, "reference": reference, "reason": "fine", **more})


def completion(content, finish="stop", usage=(11, 7), **message):
    tokens = dict(zip(("prompt_tokens", "completion_tokens"), usage, strict=True))
    choice = {"index": 0, "message": {"role": "assistant", "content": content, **message}, "finish_reason": finish}
    return {"id": "x", "object": "chat.completion", "choices": [choice], "usage": tokens}


def refusal(field_name, message, **error):
    return 400, {"error": {"message": message, "type": "invalid_request_error", "param": field_name, **error}}


def gpt5(body, _):
    """OpenAI's gpt-5 and o families (langwatch#1975, ragas#2440, langchaingo#1355)."""
    for name in ("temperature", "top_p"):
        if body.get(name, 1) != 1:
            text = f"Unsupported value: '{name}' does not support {body[name]} with this model. Only the default (1) "
            return refusal(name, text + "value is supported.", code="unsupported_value")
    if "max_tokens" in body:
        text = "Unsupported parameter: 'max_tokens' is not supported with this model. Use "
        text += "'max_completion_tokens' instead."
        return refusal("max_tokens", text, code="unsupported_parameter")
    return 200, completion(verdict_for(body))


def mistral(body, _):
    """Mistral's API, older TGI, llama-cpp-python (eca#231, hindsight#852, void#128)."""
    if "max_completion_tokens" in body:
        place = ["body", "max_completion_tokens"]
        fault = {"type": "extra_forbidden", "loc": place, "msg": "Extra inputs are not permitted"}
        return 422, {"object": "error", "message": {"detail": [fault]}, "type": "invalid_request_error"}
    return 200, completion(verdict_for(body))


def mistral_reasoning(body, _):
    """Its reasoning models: `content` is a list of parts (spring-ai#5019, req_llm#742)."""
    status, answer = mistral(body, _)
    if status != 200:
        return status, answer
    thought = {"type": "thinking", "thinking": [{"type": "text", "text": "Let me see."}]}
    return 200, completion([thought, {"type": "text", "text": verdict_for(body)}])


def ollama(body, _):
    """Ollama, with a model whose whole answer stands beside an empty `content` now and then (ollama#15288)."""
    if "answer 7" in body["messages"][-1]["content"] and "response_format" in body:
        return 200, completion("", reasoning="Hmm, let me think about this for long.")
    return 200, completion(verdict_for(body))


def gemini(body, number):
    """Gemini's OpenAI-compatible address: an unknown field, a retry delay in the error's body (NemoClaw#6980)."""
    if "seed" in body:
        text = 'Invalid JSON payload received. Unknown name "seed": Cannot find field.'
        return 400, [{"error": {"code": 400, "message": text, "status": "INVALID_ARGUMENT"}}]
    if number % 16 == 3:
        info = {"@type": "type.googleapis.com/google.rpc.RetryInfo", "retryDelay": "0.2s"}
        return 429, [{"error": {"code": 429, "status": "RESOURCE_EXHAUSTED", "message": "Quota", "details": [info]}}]
    return 200, completion(verdict_for(body))


def openrouter(body, number):
    """OpenRouter: errors inside of a 200 (Aider#3550, litellm#9035), and in the midst of a text."""
    if number % 16 == 3:
        error = {"message": "Rate limit exceeded", "code": 429, "metadata": {"headers": {"X-RateLimit-Reset": "0.2"}}}
        return 200, {"error": error}
    if number % 16 == 9:
        broken = completion(verdict_for(body)[:20], "error")
        broken["choices"][0]["error"] = {"code": 502, "message": "Upstream"}
        return 200, broken
    return 200, completion(verdict_for(body))


def litellm(body, number):
    """A LiteLLM proxy: unsupported parameters in its own words, and another's quota (mem0#4101)."""
    if "temperature" in body:
        text = "litellm.UnsupportedParamsError: gpt-5 models (including gpt-5-codex) don't support temperature=0.0. "
        text += "Only temperature=1 is supported. To drop unsupported params set `litellm.drop_params = True`"
        return 400, {"error": {"message": text, "type": "None", "param": "None", "code": "400"}}
    if number % 10 == 5:
        return 429, {"error": {"message": "Rate limit: try again in 200ms", "type": "throttling_error", "code": "429"}}
    return 200, completion(verdict_for(body))


def azure(body, _):
    """Azure: single texts that its filter withholds (ragas#649, alpaca_eval#227)."""
    if "WITHHELD" in body["messages"][-1]["content"]:
        text = "The response was filtered due to the prompt triggering Azure OpenAI's content management policy."
        inner = {"code": "ResponsibleAIPolicyViolation"}
        return 400, {"error": {"message": text, "param": "prompt", "code": "content_filter", "innererror": inner}}
    return 200, completion(verdict_for(body))


def vllm(body, _):
    """vLLM's server with guided decoding."""
    return 200, completion(verdict_for(body), reasoning_content=None, usage=(11, None))


def vllm_thinking(body, _):
    """vLLM's server with a reasoning parser: thoughts beside the text (vllm#17609)."""
    return 200, completion(f"\n\n{verdict_for(body)}", reasoning_content="The answer is fine.")


def text_only(body, number):
    """A server that only knows text, in front of a small model (mlflow#22674, mem0#4420)."""
    if "response_format" in body:
        return 400, {"error": {"message": "response_format: unsupported field"}}
    verdict = verdict_for(body, reason="fine,\nas it is")
    forms = (
        f"```json\n{verdict}\n```",
        verdict.replace("\\n", "\n").replace("}", ",}") + "<|im_end|>",
        f"Let me think.\n{verdict}\nI hope this helps!",
    )
    return 200, completion(forms[number % len(forms)])


def gateway(body, number):
    """A gateway that streams whatever was asked (openclaw#111353), with nulls in `usage` (openai-python#3555)."""
    verdict = verdict_for(body)
    deltas = [
        {"choices": [{"delta": {"content": part}, "finish_reason": None}]} for part in (verdict[:9], verdict[9:])
    ]
    end = {"choices": [{"delta": {}, "finish_reason": "stop"}], "usage": {"prompt_tokens": None}}
    lines = [f"data: {json.dumps(chunk)}\n\n" for chunk in (*deltas, end)]
    return 200, "".join([*lines, "data: [DONE]\n\n"]).encode()


@dataclass(frozen=True)
class Profile:
    answer: Callable
    model: str = "judge"
    listed: tuple = ("judge",)  # the names in `/models`; empty: the server has no list
    path: str = "/v1"
    learnt: tuple = ()  # what the log says, once each


PROFILES = {
    "OpenAI gpt-5": Profile(gpt5, "gpt-5-mini", ("gpt-5-mini",), learnt=("rejects `temperature`",)),
    "Mistral": Profile(mistral, "m", ("m",), learnt=("rejects `max_completion_tokens`: it is sent as `max_tokens`",)),
    "Mistral reasoning": Profile(mistral_reasoning, "m", ("m",), learnt=("rejects `max_completion_tokens`",)),
    "Ollama": Profile(ollama, "llama3.2", ("llama3.2:latest",)),
    "Gemini": Profile(gemini, "gemini-2.5-flash", ("models/gemini-2.5-flash",), "/v1beta/openai"),
    "OpenRouter": Profile(openrouter, "deepseek/deepseek-chat:free", ("deepseek/deepseek-chat",), "/api/v1"),
    "LiteLLM": Profile(litellm, "openai/gpt-5-mini", ("openai/*",), learnt=("rejects `temperature`",)),
    "Azure": Profile(azure, "gpt-4o", (), "/openai/deployments/gpt-4o?api-version=2024-10-21"),
    "vLLM": Profile(vllm),
    "vLLM, thinking": Profile(vllm_thinking),
    "text only": Profile(text_only, learnt=("is asked for verdicts by text, because it rejects `response_format`",)),
    "a gateway": Profile(gateway),
}


@contextlib.contextmanager
def served(profile: Profile) -> Iterator[tuple[str, list]]:
    """The address of a server with this profile, and the fields of each request that it got."""
    asked, numbers = [], itertools.count()

    def reply(status, body):
        content = body if isinstance(body, bytes) else json.dumps(body)
        return Response(content, status, content_type="application/json")

    def answer(request):
        if request.method == "GET":
            models = {"object": "list", "data": [{"id": name} for name in profile.listed]}
            return reply(200, models) if profile.listed else reply(404, {"error": {"code": "404"}})
        asked.append((request.full_path.rstrip("?"), request.json))
        if request.json["model"] == profile.model:
            return reply(*profile.answer(request.json, next(numbers)))
        text = f"The model `{request.json['model']}` does not exist or you do not have access to it."
        return reply(404, {"error": {"message": text, "code": "model_not_found", "param": None}})

    with HTTPServer(host="127.0.0.1", port=0, threaded=True) as server:
        server.expect_request(re.compile(".*")).respond_with_handler(answer)
        yield server.url_for(profile.path), asked


def scored_by(url: str | None, profile: Profile, texts, **settings):
    """The rewards of completions by the documented lines, after a warm-up, which fails for nothing."""
    from salesrl_trl import judge_reward

    lines = {"judge_base_url": url, "judge_model": profile.model} if url else {}
    reward = judge_reward(**lines, **settings)

    async def once():
        try:
            failed = await reward.warm_up()
            rows = [{"prompt": f"Question {number}?"} for number in range(len(texts))]
            return failed, (await reward.score_all(rows, texts)).rewards
        finally:
            await reward.aclose()

    return asyncio.run(once())


def main() -> None:
    lines, learned_by = [], logging.getLogger("salesrl_trl.judged.provider")
    learned_by.setLevel(logging.INFO)
    learned_by.addFilter(lambda record: lines.append(record.getMessage()))
    print("| profile | `judge_base_url` | `judge_model` | scored of 64 | requests | learned at the warm-up |")
    print("|---|---|---|---|---|---|")
    for name, profile in PROFILES.items():
        del lines[:]
        with served(profile) as (url, asked):
            _, rewards = scored_by(url, profile, [f"answer {number}" for number in range(64)])
        scored = sum(reward.value is not None for reward in rewards)
        learned = " ".join(line.removeprefix("judge judge ") for line in lines) or "-"
        print(f"| {name} | ...{profile.path} | {profile.model} | {scored} | {len(asked)} | {learned} |", flush=True)


if __name__ == "__main__":
    main()
