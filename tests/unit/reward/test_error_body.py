"""What is kept of an error's body: refused fields, a status, a delay. The bodies are those of public reports."""

import json
import time

import pytest

from salesrl_trl.errors import AccessDenied, ErrorInAnswer, ServiceOverloaded, ServiceRejected, ServiceUnavailable
from salesrl_trl.service.error_bodies import UNKNOWN_MODEL, WITHHELD_MARKS, read_error
from salesrl_trl.service.http import refuse_stated_error

SENT = ("model", "messages", "max_completion_tokens", "temperature", "response_format", "seed", "top_p")


def said(message, **more):
    return {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": None, **more}}


UPSTREAM = said("Unsupported value: 'temperature' does not support 0 with this model.")
SERDE = "Failed to deserialize the JSON body: unknown field `max_completion_tokens`, expected one of `model`, `seed`"
OPUS = "`temperature` is deprecated for this model."
REFUSED = {
    "FastAPI": ({"detail": [{"type": "extra_forbidden", "loc": ["body", "seed"], "input": {"top_p": 1}}]}, "seed"),
    "Gemini": ([said('Invalid JSON payload received. Unknown name "seed": Cannot find field.')], "seed"),
    "Groq": (said("property 'max_completion_tokens' is unsupported"), "max_completion_tokens"),
    "DeepSeek": (said("This response_format type is unavailable now"), "response_format"),
    "Kimi": (said("invalid temperature: only 1 is allowed for this model"), "temperature"),
    "Anthropic's models": (said(OPUS), "temperature"),
    "a proxy's upstream": ({"error": {"message": "Provider error", "raw": json.dumps(UPSTREAM)}}, "temperature"),
    "Rust, with what it takes": ({"error": SERDE}, "max_completion_tokens"),
    "TGI, whose temperature is above 0": ({"error": "`temperature` must be strictly positive"}, "temperature"),
    "a value out of range": ({"detail": [{"type": "greater_than", "loc": ["body", "temperature"]}]}, "temperature"),
}


@pytest.mark.parametrize(("body", "field"), REFUSED.values(), ids=REFUSED)
def test_the_field_that_a_provider_refuses_is_the_one_it_names(body, field):
    assert read_error(json.dumps(body).encode(), SENT).refused == {field}


LONG = "This model's maximum context length is 8192 tokens. However, you requested 8300 tokens (7788 in the messages, "
TOO_LARGE = "max_tokens is too large: 512. This model supports at most 256 completion tokens."
AT_MOST = [{"type": "less_than_equal", "loc": ["body", "max_completion_tokens"], "msg": "at most 256"}]
ECHO = "Could not parse: the customer asks which temperature is best, and whether seed is used. Invalid text"
OF_TEXT = (
    "[{'loc': ('body', 'messages', 1), 'msg': 'not a valid string', 'input': \"'temperature' is not supported\"}]"
)
GENERATED = "`temperature` is not supported, and the field seed is invalid"
KEPT = {
    "a limit that must be larger": said("Invalid 'max_completion_tokens': below minimum value. Expected >= 16."),
    "another model's": said("'x' is not supported, and `temperature` neither", param="model"),
    "a customer's words, by pydantic as text": said(OF_TEXT),
    "a model's words": said("Failed to validate JSON.", failed_generation=GENERATED),
    "a text that is too long": said(f"{LONG}512 in the completion).", param="messages"),
    "a limit that is too large": said(TOO_LARGE, param="max_completion_tokens", code="invalid_value"),
    "a limit that is too large, by pydantic": {"detail": AT_MOST},
    "a customer's words": said(ECHO),
    "a filter": said("unsupported 'temperature'", code="content_filter"),
}


@pytest.mark.parametrize("body", KEPT.values(), ids=KEPT)
def test_what_is_wrong_with_one_text_or_one_value_refuses_no_field(body):
    assert not read_error(json.dumps(body).encode(), SENT).refused


def test_a_filter_and_an_unknown_model_are_marked():
    assert read_error(said("filtered", param="prompt", code="content_filter")).marks & WITHHELD_MARKS
    for text in (
        "The model `x.1` does not exist.",
        'model "m" not found',
        "Invalid model: m",
        "m is not a valid model ID",
    ):
        assert UNKNOWN_MODEL in read_error(said(text)).marks


STATED = {
    "a number": ({"error": {"code": 429, "retry_after": 2}}, ServiceOverloaded, 2.0),
    "minutes in words": ({"error": {"code": "429", "message": "Please try again in 6m0s."}}, ServiceOverloaded, 360.0),
    "milliseconds": ({"error": {"code": 429, "message": "try again in 20 milliseconds"}}, ServiceOverloaded, 0.02),
    "no wait": ({"error": {"code": 429, "message": "wait, 30 messages per hour"}}, ServiceOverloaded, None),
    "OpenAI's word": (said("Please try again in 577ms.", code="rate_limit_exceeded"), ServiceOverloaded, 0.577),
    "Gemini": (
        {"error": {"status": "RESOURCE_EXHAUSTED", "details": [{"retryDelay": "1m5s"}]}},
        ServiceOverloaded,
        65,
    ),
    "OpenRouter": ({"error": {"code": 429, "metadata": {"headers": {"Retry-After": "2"}}}}, ServiceOverloaded, 2.0),
    "Anthropic": ({"type": "error", "error": {"type": "overloaded_error"}}, ServiceOverloaded, None),
    "a bare text": ({"error": "429 Too Many Requests"}, ServiceOverloaded, None),
    "a key": ({"error": {"code": 401}}, AccessDenied, None),
    "rights": ({"error": {"status": "PERMISSION_DENIED"}}, ServiceRejected, None),
    "a quota": ({"error": {"type": "insufficient_quota"}}, AccessDenied, None),
    "LiteLLM's": (said("over budget", type="budget_exceeded", code="400"), AccessDenied, None),
    "Anthropic's credit": (
        said("Your credit balance is too low to access the API.", type="invalid_request_error", code=400),
        AccessDenied,
        None,
    ),
    "a fault": ({"code": 503}, ServiceUnavailable, None),
    "a refused field": (said("x", code=400, param="seed"), ServiceRejected, None),
    "nothing known": ({"error": "boom"}, ErrorInAnswer, None),
}


@pytest.mark.parametrize(("body", "kind", "wait_s"), STATED.values(), ids=STATED)
def test_an_error_inside_of_a_200_is_that_of_its_status(body, kind, wait_s):
    with pytest.raises(kind) as caught:
        refuse_stated_error("rag_8b", body, SENT)
    assert type(caught.value) is kind
    assert getattr(caught.value, "retry_after_s", None) == wait_s


def test_a_delay_without_end_holds_nothing_up():
    began = time.process_time()
    assert read_error({"retry_after": "1" * 8000 + "x"}).wait_s is None
    assert time.process_time() - began < 1
