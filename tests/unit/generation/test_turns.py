"""Which weights sampled which token: what an engine reports, and what is unknown."""

from types import SimpleNamespace

import pytest
from support.engines import LLM, LabellingEngine, prompts
from trl.generation.vllm_client import VLLMClient

from salesrl_trl.generation.engine_loop import CompletionTasks, EngineLoop
from salesrl_trl.generation.turns import UNKNOWN, EngineLabels, ServerLabels, Turn, WeightLabels, refusal


def spans(*of):
    return [{"version": version, "start": start, "end": end} for version, start, end in of]


@pytest.mark.parametrize("is_json", [True, False], ids=["of a server", "of an engine"])
def test_each_token_has_the_step_of_the_weights_that_the_run_named(is_json):
    labels = WeightLabels("run")
    given = spans((labels.label(7), 0, 3), (labels.label(8), 3, 5))
    given = given if is_json else [SimpleNamespace(**span) for span in given]
    assert labels.versions(given, 5) == [7, 7, 7, 8, 8]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, [UNKNOWN] * 3),  # the engine was not told
        ([], [UNKNOWN] * 3),
        (spans(("default", 0, 3)), [UNKNOWN] * 3),  # the weights with which a server started
        (spans(("other-7", 0, 3)), [UNKNOWN] * 3),  # another run's
        (spans(("default", 0, 1), ("run-7", 1, 3)), [UNKNOWN, 7, 7]),
        (spans(("run-7", 0, 2)), [7, 7, UNKNOWN]),
        (spans(("run-7", 0, 4)), [UNKNOWN] * 3),  # more than there are
    ],
)
def test_all_else_is_unknown_and_excludes_the_completion(given, expected):
    versions = WeightLabels("run").versions(given, 3)
    assert versions == expected and refusal(versions) == "unknown_weights"


def test_a_completion_without_tokens_and_one_of_unreported_versions_are_no_faults():
    assert WeightLabels("run").versions(None, 0) == []
    assert refusal([]) is refusal(None) is refusal([0, 3]) is None


def test_a_turn_is_cut_as_a_whole():
    assert Turn([1, 2, 3], [0.1, 0.2, 0.3], [7, 7, 8]).cut(2) == Turn([1, 2], [0.1, 0.2], [7, 7])
    assert Turn([1, 2, 3], None).cut(2) == Turn([1, 2], None, None)


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_a_completion_over_two_pushes_has_each_token_s_own_weights(async_scheduling):
    """The fake's tokens are the number of the weights that sampled them."""
    engine = LabellingEngine(async_scheduling)
    labels = EngineLabels(engine)
    loop, batches, told = EngineLoop(LLM(engine), labels), [], []
    loop.most_unfinished = 2
    for weights in (40, 41, 43):
        engine.weights = weights
        labels.pushed(weights)
        batch = CompletionTasks(3, loop, lambda *given, **more: told.append((given, more)))
        batch.begin(prompts(30, 1, 12), ["params"] * 3)
        loop.run(batch, ahead=True)
        batches.append(batch)
    for batch in batches:
        loop.run(batch)
    turns = [turn for batch in batches for turn in batch.results()]
    assert [len(turn.ids) for turn in turns] == [30, 1, 12] * 3
    assert [turn.versions for turn in turns] == [turn.ids for turn in turns]
    assert [sorted({*turn.versions}) for turn in turns[:3]] == [[40, 41, 43], [40], [40, 41]]
    assert len(told) == 9 and all(more == {} for _, more in told)


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_a_completion_of_weights_that_no_push_named_is_told_as_failed(async_scheduling):
    engine, told = LabellingEngine(async_scheduling), {}
    loop = EngineLoop(LLM(engine), EngineLabels(engine))
    batch = CompletionTasks(2, loop, lambda place, ids, failed=None: told.update({place: failed}))
    batch.begin(prompts(2, 3), ["params"] * 2)
    loop.run(batch)
    assert told == {0: "unknown_weights", 1: "unknown_weights"}


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_weights_that_others_pushed_and_named_are_unknown_until_the_next_push(async_scheduling):
    engine, refused = LabellingEngine(async_scheduling), []
    labels = EngineLabels(engine)
    loop = EngineLoop(LLM(engine), labels)
    for engine.weights, name in ((1, None), (2, "other-2"), (3, None)):
        labels.pushed(engine.weights) if name is None else engine.set_weight_version(name)
        batch = CompletionTasks(1, loop, lambda *_, **__: None)
        batch.begin(prompts(3), ["params"])
        loop.run(batch)
        refused += [refusal(turn.versions) for turn in batch.results()]
    assert refused == [None, "unknown_weights", None]


def test_an_engine_that_reports_nothing_has_turns_without_versions():
    loop = EngineLoop(LLM())
    batch = CompletionTasks(1, loop, lambda place, ids: None)
    batch.begin(prompts(2), ["params"])
    loop.run(batch)
    assert [turn.versions for turn in batch.results()] == [None]


class Client(VLLMClient):
    """TRL's client of a server that answers two tokens, the second one by newer weights."""

    def __init__(self, labels=()):
        self.base_url, self.model, self.posted, self.labels = "http://server", "policy", [], labels

    def _post(self, url, json):
        self.posted.append((url, json))
        logprobs = {"content": [{"token": "token_id:5", "logprob": -0.5, "top_logprobs": []}] * 2}
        given = spans(*((label, place, place + 1) for place, label in enumerate(self.labels)))
        choice = {"prompt_token_ids": [1], "token_ids": [5, 5], "logprobs": logprobs}
        return {"choices": [{**choice, "weight_versions": given or None}]}


@pytest.mark.parametrize("pictured", [False, True], ids=["text", "pictures"])
def test_a_server_is_asked_for_the_labels_that_it_was_told(pictured):
    client = Client()
    labels = ServerLabels(client, "run")
    labels.pushed(3)
    assert client.posted == [("http://server/update_weight_version", {"new_version": "run-3"})]
    request = {"prompts": [[1]], "features": [{"image": 1}] if pictured else None, "max_tokens": 2}
    for given, expected in ((("run-3", "run-4"), [3, 4]), (("default", "run-4"), [UNKNOWN, 4]), ((), [UNKNOWN] * 2)):
        client.labels = given
        answer = labels.generate(**request)
        assert (answer["completion_ids"], answer["versions"]) == ([[5, 5]], expected)
        url, body = client.posted[-1]
        # TRL's request with pictures goes to an endpoint that returns the labels unasked, and refuses other fields
        assert (url.rpartition("server")[2], body.get("return_weight_versions")) == (
            ("/inference/v1/generate", None) if pictured else ("/v1/completions", True)
        )
