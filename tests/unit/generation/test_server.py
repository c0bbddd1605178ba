"""CompletionTasks and turns that a vLLM server is asked for one by one."""

import resource
import threading
import time
from concurrent.futures import CancelledError
from types import SimpleNamespace

import pytest
import requests
import torch
import trl.generation.vllm_generation as upstream_vllm
from support.seconds import check_seconds, until

from salesrl_trl.agents.tool_turns import Conversations, Episodes
from salesrl_trl.agents.tools import ToolCalls
from salesrl_trl.generation import engine_loop, vllm
from salesrl_trl.generation.engine_loop import CompletionTasks, ServerLoop
from salesrl_trl.generation.turns import NO_TURN
from salesrl_trl.generation.vllm import SalesVLLMGeneration
from salesrl_trl.ground.process import allow_files

PROMPTS = [[10], [10], [20], [20], [20], [20]]
"""Of the second process, where a group of four begins in the first one."""
ANSWERS = [[10, 7]] * 2 + [[20, 7]] * 4


class Client:
    """TRL's client of a server that answers when it is told to, with the prompt's first token and another."""

    def __init__(self):
        self.asked, self.gate, self.error = [], threading.Event(), None

    def generate(self, prompts, **request):
        self.asked.append((prompts, request))
        assert self.gate.wait(10)
        if self.error is not None:
            raise self.error
        [prompt] = prompts
        return {"prompt_ids": prompts, "completion_ids": [[prompt[0], 7]], "logprobs": [[[-0.5], [-1.5]]]}


def second_process():
    """An `Accelerator` of the second of two processes. What it waits for is in a list."""
    events = []
    return SimpleNamespace(process_index=1, num_processes=2, is_main_process=False, device=torch.device("cpu"),
                           events=events, wait_for_everyone=lambda: events.append("everyone"))  # fmt: skip


@pytest.mark.parametrize(("release", "reports"), [("0.33.0", True), ("0.31.0", False), ("dev", False), (None, False)])
def test_a_server_of_any_version_is_connected_and_labelled_from_0_33_on(monkeypatch, release, reports):
    """vLLM built without its version file reports "dev"."""
    monkeypatch.setattr(upstream_vllm.VLLMGeneration, "_init_vllm", lambda self: None)
    monkeypatch.setattr(vllm, "broadcast_object_list", lambda shared: shared)
    client = SimpleNamespace(
        base_url="http://server", session=requests.Session(), _get=lambda url: {"version": release}
    )
    accelerator = SimpleNamespace(is_main_process=True, device=torch.device("cpu"))
    generation = SalesVLLMGeneration.__new__(SalesVLLMGeneration)
    vars(generation).update(mode="server", vllm_client=client, accelerator=accelerator, enable_sleep_mode=False)
    generation._init_vllm()
    assert (generation.labels is not None) == reports


@pytest.fixture
def served(monkeypatch):
    """The generation of the second process; nothing may be gathered."""
    for name in ("gather_object", "broadcast_object_list"):
        monkeypatch.setattr(upstream_vllm, name, None)
    monkeypatch.setattr(engine_loop, "MOST_REQUESTS", 8)
    generation = SalesVLLMGeneration.__new__(SalesVLLMGeneration)
    vars(generation).update(
        mode="server", vllm_client=Client(), accelerator=second_process(), loop=ServerLoop(),
        temperature=0.7, top_p=1.0, top_k=0, min_p=None, repetition_penalty=1.0, max_completion_length=5, logprobs=0,
        generation_kwargs={"seed": 30}, structured_outputs_regex=None,
    )  # fmt: skip
    return generation


def begun(served, finished=lambda *_: None, ahead=True, batch=None, profiler=None):
    batch = batch or CompletionTasks(len(PROMPTS), served.loop, finished)
    served.batch, batch.ahead = batch, ahead
    assert served.generate(PROMPTS, None, 4, profiler) == ([], [], [], [])
    served.batch = None
    return batch


def test_each_process_asks_for_its_own_completions_as_samples_of_their_groups(served):
    told = {}
    served.vllm_client.gate.set()
    batch = begun(served, told.__setitem__, ahead=False)
    assert batch.is_over and told == dict(enumerate(ANSWERS))
    assert [turn.ids for turn in batch.results()] == ANSWERS
    assert [turn.logprobs for turn in batch.results()] == [[-0.5, -1.5]] * 6
    asked = sorted(
        (prompts[0][0], request["generation_kwargs"]["seed"]) for prompts, request in served.vllm_client.asked
    )
    assert asked == [(10, 32), (10, 33), (20, 30), (20, 31), (20, 32), (20, 33)]
    for _, request in served.vllm_client.asked:
        assert (request["n"], request["temperature"], request["max_tokens"]) == (1, 0.7, 5)
        assert request["features"] is None
    assert served.generation_kwargs == {"seed": 30}
    assert served.accelerator.process_index == 1  # all is as it was
    with pytest.raises(TypeError):  # without a batch, TRL gathers
        served.generate(PROMPTS, None, 4)


def test_all_batches_together_have_no_more_requests_in_flight_than_may_be(served):
    served.loop._slots = threading.Semaphore(3)
    for _ in range(2):
        begun(served)
    client = served.vllm_client
    until(lambda: len(client.asked) == 3)
    time.sleep(0.1)
    assert len(client.asked) == 3
    client.gate.set()
    served.settle()
    assert len(client.asked) == 2 * len(PROMPTS)


@pytest.mark.parametrize("ends", ["by an error", "by an error of who is told", "by cancelling"])
def test_nobody_waits_for_the_others_where_a_batch_ends_early_and_the_push_raises_nothing(served, monkeypatch, ends):
    monkeypatch.setattr(upstream_vllm.VLLMGeneration, "sync_weights", lambda self: None)
    served.loop._slots = threading.Semaphore(2)
    monkeypatch.setattr(engine_loop, "MOST_REQUESTS", 2)
    client, told = served.vllm_client, []

    def finished(place, ids):
        told.append(place)
        raise ValueError("nobody listens")

    batch = begun(served, finished)
    until(lambda: len(client.asked) == 2)
    if ends == "by an error":
        client.error = ValueError("the server said no")
    if ends == "by cancelling":
        batch.cancel()
    else:
        client.gate.set()
    started = time.monotonic()
    served.loop.run(batch)
    with pytest.raises(CancelledError if ends == "by cancelling" else ValueError):
        batch.results()
    check_seconds(time.monotonic() - started, most=5)
    client.gate.set()
    served.sync_weights()
    assert len(client.asked) <= 4 < len(PROMPTS)  # what was not asked by then is not asked
    assert len(told) == (ends == "by an error of who is told")


def test_episodes_ask_for_all_their_turns_and_nothing_is_asked_before(served):
    def talk(place, first, ask):
        assert first == NO_TURN
        ids = [100 + place]
        for _ in range(2):
            turn = ask(ids)
            assert turn.logprobs == [-0.5, -1.5]
            ids = [*ids, *turn.ids]
        return ids

    served.vllm_client.gate.set()
    batch = begun(served, batch=Episodes(len(PROMPTS), served.loop, talk, ToolCalls(())))
    served.loop.run(batch)
    assert batch.results() == [[100 + place, *[100 + place, 7] * 2] for place in range(len(PROMPTS))]
    asked = sorted((prompts[0], request["temperature"]) for prompts, request in served.vllm_client.asked)
    assert asked == sorted(
        (ids, 0.7) for place in range(100, 100 + len(PROMPTS)) for ids in ([place], [place, place, 7])
    )


def test_a_conversation_that_ends_leaves_the_first_turns_of_others_alone(served):
    served.loop._slots = threading.Semaphore(1)
    served.vllm_client.gate.set()
    batch = begun(
        served, batch=Conversations(len(PROMPTS), served.loop, lambda place, first, ask: first.ids, ToolCalls(()))
    )
    served.loop.run(batch)
    assert batch.results() == ANSWERS


def test_weights_wait_for_the_turns_that_are_out_and_no_turn_is_asked_for_meanwhile(served, monkeypatch):
    pushing, pushed, client = threading.Event(), threading.Event(), served.vllm_client

    def push(self):
        served.accelerator.events.append("push")
        pushing.set()
        assert pushed.wait(10)

    monkeypatch.setattr(engine_loop, "MOST_REQUESTS", len(PROMPTS))
    served.loop._slots = threading.Semaphore(len(PROMPTS))
    monkeypatch.setattr(upstream_vllm.VLLMGeneration, "sync_weights", push)
    talk = lambda place, _, ask: [ask([1]), ask([2])]  # noqa: E731
    batch = begun(served, batch=Episodes(len(PROMPTS), served.loop, talk, ToolCalls(())))
    until(lambda: len(client.asked) == len(PROMPTS))
    thread = threading.Thread(target=served.sync_weights)
    thread.start()
    assert not pushing.wait(0.2)  # six first turns are out
    assert served.accelerator.events == []
    client.gate.set()
    assert pushing.wait(10)
    asked = len(client.asked)
    time.sleep(0.1)
    assert len(client.asked) == asked
    pushed.set()
    thread.join(10)
    assert served.accelerator.events == ["everyone", "push", "everyone"]
    served.loop.run(batch)
    assert len(client.asked) == 2 * len(PROMPTS)


@pytest.mark.parametrize(
    ("soft", "hard", "wanted"),
    [(1024, 4096, 2048), (1024, -1, 2048), (1024, 1500, 1500), (4096, 4096, None), (-1, -1, None), (2048, -1, None)],
)
def test_a_process_may_have_as_many_connections_as_the_machine_lets_it(monkeypatch, soft, hard, wanted):
    told = []
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limits: told.append((kind, limits)))
    allow_files(2048)
    assert told == ([] if wanted is None else [(resource.RLIMIT_NOFILE, (wanted, hard))])
